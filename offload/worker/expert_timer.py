"""Measurement of the seconds in which this CPU runs the experts of a layer, over made-up ones of a model's shapes: see
`ExpertTimes`. It takes about a second."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from offload.config.model import ModelConfig
from offload.kernels.cpu import kernels
from offload.kernels.experts import Mixture, Router
from offload.model.loading import DTYPES
from offload.speed.curves import ROWS
from offload.speed.expert_times import ExpertTimes, with_experts
from offload.speed.routing import independent_rows
from offload.weights.experts import ResidentExperts, bank_of, layout_of
from offload.weights.layout import LayerLayout
from offload.worker.timed_runs import least_seconds

BANK_BYTES = 512 * 2**20  # of experts, or all of a smaller layer's: more than the CPU's caches hold
LIMIT_SECONDS = 5.0  # beyond which the CPU is too busy
VALUE = 0.01  # of all weights: a product's time does not depend on it


@torch.inference_mode()
def time_experts(config: ModelConfig, dtype: str) -> ExpertTimes | None:
    """The seconds of a model's experts by this CPU's kernels: the least of some runs; None where the CPU is too busy.
    dtype: bf16, fp16 or fp32. Temporary memory: BANK_BYTES."""
    layer, run = with_experts(config), kernels().experts
    experts = layer.block.experts
    assert experts is not None
    assert run is not None
    homes, random = _homes(layer, DTYPES[dtype]), torch.Generator().manual_seed(0)
    bias = None if experts.bias == "none" else torch.zeros(experts.count)
    router = Router(torch.randn(experts.num_scores, layer.hidden_size, generator=random), bias)
    mixture = Mixture(experts, router)
    blocks = {num_rows: _rows(layer.hidden_size, num_rows, random).to(DTYPES[dtype]) for num_rows in ROWS}
    points = {("experts", num_rows): partial(run, mixture, homes, rows) for num_rows, rows in blocks.items()}
    if (taken := least_seconds(points, LIMIT_SECONDS)) is None:
        return None
    return ExpertTimes(tuple(taken["experts", num_rows] for num_rows in ROWS), kernels().name)


def _rows(size: int, count: int, random: torch.Generator) -> Tensor:
    """Random rows [count, size] fp32, of which round(independent_rows(count)) are distinct, taken in turn: the rows of
    a text choose experts like so many independent ones."""
    different = torch.randn(round(independent_rows(count)), size, generator=random)
    return different[torch.arange(count) % len(different)]


def made_up_experts(layer: ModelConfig, dtype: torch.dtype, count: int) -> ResidentExperts:
    """`count` experts of `layer.block`, which has some, with equal weights."""
    layout = layout_of(layer, dtype)
    content = torch.empty(count, layout.num_bytes, dtype=torch.uint8)
    for buffer in content:
        fill(layout, buffer)
    return ResidentExperts(bank_of(layout, content))


def fill(layout: LayerLayout, buffer: Tensor) -> None:
    """Set all weights in `buffer`, uint8 [layout.num_bytes], to VALUE."""
    for view in layout.views.values():
        view.of(buffer).fill_(VALUE)


class _SharedPlaces(ResidentExperts):
    """Experts of which several are in each place of a smaller bank."""

    def __init__(self, homes: ResidentExperts, count: int) -> None:
        super().__init__(homes.bank)
        self._shared = torch.arange(count, dtype=torch.int32) % len(homes.bank.places)

    def batches(self, chosen: Tensor) -> Iterator[Tensor]:
        yield self._shared


def _homes(layer: ModelConfig, dtype: torch.dtype) -> ResidentExperts:
    assert layer.block.experts is not None
    count = layer.block.experts.count
    places = min(max(BANK_BYTES // layer.expert_bytes(dtype.itemsize), 1), count)
    return _SharedPlaces(made_up_experts(layer, dtype, places), count)
