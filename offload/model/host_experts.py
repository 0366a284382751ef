"""Experts that the CPU runs for a GPU: a pass's rows go to the host, and what the experts make of them comes back."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from offload.kernels.cpu import kernels
from offload.kernels.experts import ExpertHomes, RunExperts
from offload.kernels.norms import NormWeights
from offload.model.layer import Mix
from offload.transfer.memory import sent

_HOST = torch.device("cpu")


class HostMixes:
    """The mixtures of experts of a model's layers, run by the CPU's kernels for rows on any device."""

    def __init__(self) -> None:
        self._steps: dict[int, Mix] = {}  # by layer, with copies of their weights

    def __call__(
        self, layer: int, step: Mix, homes: ExpertHomes, rows: Tensor, beside: Tensor | None, real: Tensor | None
    ) -> Tensor:
        """See `RunExperts`: the output for `rows`, on their device. homes: with their bank on the host."""
        if layer not in self._steps:  # weights that cross the link are overwritten by the next layer's
            self._steps[layer] = _copied_to_host(step)
        own = self._steps[layer]
        there, other, kept = (None if each is None else each.to(_HOST).contiguous() for each in (rows, beside, real))
        assert there is not None
        return sent(self._run(own.experts, own.router, homes, own.norm, there, other, kept), rows.device)

    @cached_property
    def _run(self) -> RunExperts:
        run = kernels().experts
        assert run is not None, "a plan has the CPU run experts only where it has kernels"
        return run


def _copied_to_host(step: Mix) -> Mix:
    router = step.router
    copied = replace(
        router,
        matrix=_copied(router.matrix),
        bias=_copied_if(router.bias),
        scale=_copied_if(router.scale),
        norm=_copied_norm(router.norm),
    )
    return replace(step, router=copied, norm=_copied_norm(step.norm))


def _copied(tensor: Tensor) -> Tensor:
    return tensor.to(_HOST)


def _copied_if(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else _copied(tensor)


def _copied_norm(norm: NormWeights | None) -> NormWeights | None:
    return None if norm is None else replace(norm, weight=_copied(norm.weight), bias=_copied_if(norm.bias))
