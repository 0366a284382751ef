"""Experts that the CPU runs for a GPU: a pass's rows go to the host, and what the experts make of them comes back."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from offload.kernels.cpu import kernels
from offload.kernels.experts import ExpertHomes, Mixture, RunExperts
from offload.kernels.norms import NormWeights
from offload.transfer.memory import sent

_HOST = torch.device("cpu")


class HostMixes:
    """The mixtures of experts of a model's layers, run by the CPU's kernels for rows on any device."""

    def __init__(self) -> None:
        self._copies: dict[int, Mixture] = {}  # by layer, on the host
        self._real: tuple[Tensor, Tensor] | None = None  # of the last pass, and on the host

    def __call__(
        self, layer: int, mixture: Mixture, homes: ExpertHomes, rows: Tensor, beside: Tensor | None, real: Tensor | None
    ) -> Tensor:
        """See `RunExperts`: the output for `rows`, on their device. homes: with their bank on the host. A copy to the
        host waits for the device, so what is not needed there stays."""
        if layer not in self._copies:  # weights that cross the link are overwritten by the next layer's
            self._copies[layer] = _copied_to_host(mixture)
        gated = beside is not None and mixture.experts.gates_network
        other = beside.to(_HOST) if beside is not None and gated else None
        made = self._run(self._copies[layer], homes, rows.to(_HOST), other, self._which(real))
        out = sent(made, rows.device)
        return out if beside is None or gated else out + beside

    def _which(self, real: Tensor | None) -> Tensor | None:
        """The rows of a pass that are not padding, on the host: all layers ask for the same ones."""
        if real is None:
            return None
        if self._real is None or self._real[0] is not real:
            self._real = real, real.to(_HOST)
        return self._real[1]

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
