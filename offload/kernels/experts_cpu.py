"""Mixtures of experts by the CPU's kernels (native/experts.h), see `kernels.experts`. A row's bits depend on the row
alone."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from offload.config.block import FeedForward
from offload.formats.stored import StoredMatrix
from offload.kernels.experts import ExpertWeights, Matrix
from offload.kernels.norms import NormWeights
from offload.kernels.products import Step, structure_of, widened_floats
from offload.native.interface import DTYPES, Experts, Library

MOST_ROWS = 512  # at a time
ALIGNMENT = 16  # a row has whole multiples of so many numbers
_LINE = 64  # bytes
_spare: list[Tensor] = []  # scratch, kept for the next call, which takes it out meanwhile


def run_experts(
    network: FeedForward, weights: ExpertWeights, norm: NormWeights | None, rows: Tensor, *, kernels: Library
) -> Tensor:
    """See `kernels.experts.RunExperts`. rows and matrices are contiguous. Temporary memory: `scratch_bytes` of at most
    MOST_ROWS rows."""
    out = torch.empty_like(rows)
    for some, to in zip(rows.split(MOST_ROWS), out.split(MOST_ROWS), strict=True):
        parts = _parts(network, len(some), rows.shape[1], rows.dtype)
        need = scratch_bytes(network, len(some), rows.shape[1], rows.dtype)
        scratch = _spare.pop() if _spare else torch.empty(0, dtype=torch.uint8)
        if len(scratch) < need:
            scratch = torch.empty(need, dtype=torch.uint8)
        _run(network, weights, norm, some, to, list(_views(scratch, parts)), kernels)
        _spare[:] = [scratch]
    return out


def scratch_bytes(network: FeedForward, num_rows: int, hidden_size: int, dtype: torch.dtype) -> int:
    """Bytes of temporary memory for `num_rows` rows."""
    parts = _parts(network, num_rows, hidden_size, dtype)
    return sum(_padded(math.prod(shape) * dtype.itemsize) for shape, dtype in parts)


def _parts(
    network: FeedForward, num_rows: int, hidden: int, dtype: torch.dtype
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """The shapes and dtypes of scratch, ordered as `_run` takes them."""
    experts = network.experts
    assert experts is not None
    pairs = num_rows * experts.used
    places = pairs + min(pairs, experts.count) * (ALIGNMENT - 1)
    floats, integers = torch.float32, torch.int32
    return [
        ((places, network.size), dtype), ((places, hidden), dtype),
        *(((widened_floats(places, inputs),), floats) for inputs in (hidden, hidden, network.size)),
        ((num_rows, hidden), floats), ((num_rows, experts.count), floats), ((pairs,), integers), ((places,), integers),
        ((2, experts.count), integers), ((pairs,), integers), ((pairs,), floats),
    ]  # fmt: skip


def _views(scratch: Tensor, parts: list[tuple[tuple[int, ...], torch.dtype]]) -> Iterator[Tensor]:
    start = 0
    for shape, dtype in parts:
        num_bytes = math.prod(shape) * dtype.itemsize
        yield scratch[start : start + num_bytes].view(dtype).view(shape)
        start += _padded(num_bytes)


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _LINE) * _LINE


def _run(
    network: FeedForward,
    weights: ExpertWeights,
    norm: NormWeights | None,
    rows: Tensor,
    out: Tensor,
    scratch: list[Tensor],
    kernels: Library,
) -> None:
    experts, (num_rows, hidden), size = network.experts, rows.shape, network.size
    assert experts is not None
    assert hidden % ALIGNMENT == 0
    assert rows.is_contiguous()
    assert weights.router.is_contiguous()
    assert weights.router.dtype == torch.float32
    inner, made, first_widened, second_widened, inner_widened, *others = scratch
    up = weights.up[:size]
    gate, ending = (up, "activate") if weights.gate is None else (weights.gate[:size], "gate")
    through = Step(
        rows, gate, None, inner, norm, ending,  # type: ignore[arg-type]
        activation=network.activation, up=None if weights.gate is None else up,
    )  # fmt: skip
    structure = Experts(
        structure_of(through, (first_widened, second_widened)),
        structure_of(Step(inner, weights.down[:hidden], None, made), (inner_widened, inner_widened)),
        *(_row_bytes(matrix) * outputs for matrix, outputs in ((gate, size), (up, size), (weights.down, hidden))),
        weights.router.data_ptr(),
        *(each.data_ptr() for each in others),
        out.data_ptr(),
        experts.count,
        experts.used,
        len(made),
        experts.renormalised,
    )
    given = DTYPES[rows.dtype], ctypes.byref(structure), num_rows, torch.get_num_threads()
    kernels.library.route(*given)
    kernels.library.run_experts(*given)


def _row_bytes(matrix: Matrix) -> int:
    rows = matrix.rows if isinstance(matrix, StoredMatrix) else matrix
    return rows.stride(0) * rows.itemsize
