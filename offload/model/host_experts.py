"""Experts that the CPU runs for a GPU: a pass's rows go to the host, and what the experts make of them comes back."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from offload.kernels.cpu import kernels
from offload.kernels.experts import ExpertHomes, Mixture, Room, RunExperts
from offload.kernels.norms import NormWeights
from offload.native.host_work import between
from offload.transfer.memory import sent

_HOST = torch.device("cpu")


class HostMixes:
    """The mixtures of experts of a model's layers, run by the CPU's kernels for rows on any device."""

    def __init__(self) -> None:
        self._copies: dict[int, Mixture] = {}  # by layer, on the host
        self._room = Room()

    def __call__(
        self,
        layer: int,
        mixture: Mixture,
        homes: ExpertHomes,
        rows: Tensor,
        beside: Tensor | None,
        real: Tensor | None,
        latents: Tensor | None = None,
    ) -> Tensor:
        """See `RunExperts`: the output for `rows`, on their device. homes: with their bank on the host. A copy to the
        host waits for the device, so what is not needed there stays."""
        if layer not in self._copies:  # weights that cross the link are overwritten by the next layer's
            self._copies[layer] = _copied_to_host(mixture)
        gated, out = mixture.experts.gates_network, self._room.take("out", rows if latents is None else latents)
        given = rows, beside if gated else None, real, latents

        def work() -> None:
            there, *others = (each if each is None else each.to(_HOST) for each in given)
            assert there is not None
            out.copy_(sent(self._run(self._copies[layer], homes, there, *others), rows.device))

        between(work)
        return out if beside is None or gated else out + beside

    @cached_property
    def _run(self) -> RunExperts:
        run = kernels().experts
        assert run is not None, "a plan has the CPU run experts only where it has kernels"
        return run


def _copied_to_host(mixture: Mixture) -> Mixture:
    router = mixture.router
    copied = replace(
        router,
        matrix=_copied(router.matrix),
        bias=_copied_if(router.bias),
        scale=_copied_if(router.scale),
        norm=_copied_norm(router.norm),
    )
    return replace(mixture, router=copied, norm=_copied_norm(mixture.norm))


def _copied(tensor: Tensor) -> Tensor:
    return tensor.to(_HOST)


def _copied_if(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else _copied(tensor)


def _copied_norm(norm: NormWeights | None) -> NormWeights | None:
    return None if norm is None else replace(norm, weight=_copied(norm.weight), bias=_copied_if(norm.bias))
