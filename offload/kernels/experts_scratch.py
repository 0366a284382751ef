"""Scratch of the CPU's kernels for mixtures of experts: its pieces, and the memory that calls use in turns."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from offload.config.networks import Experts, FeedForward
from offload.formats.layout import EXPERT_ALIGNMENT
from offload.kernels.experts import Room
from offload.kernels.products import widened_floats

_LINE = 64  # bytes
_COLUMNS = 32  # outputs of a panel, at most
Parts = dict[str, tuple[tuple[int, ...], torch.dtype]]  # the shape and dtype of each piece of scratch, in their order
_spare: list[Tensor] = []  # scratch, kept for the next call, which takes it out meanwhile


def scratch_bytes(experts: Experts, num_rows: int, hidden_size: int, dtype: torch.dtype, *, threads: int = 0) -> int:
    """Bytes of temporary memory for `num_rows` rows of a pass, or of a prefill on so many threads."""
    return total_bytes(parts_of(experts, num_rows, hidden_size, dtype, threads))


def total_bytes(parts: Parts) -> int:
    """Bytes of a block of scratch."""
    return sum(_padded(math.prod(shape) * dtype.itemsize) for shape, dtype in parts.values())


def share_parts(network: FeedForward, pairs: int, count: int, row: int, dtype: torch.dtype, *, widens: bool) -> Parts:
    """The shapes and dtypes of scratch for `pairs` pairs of a row of `row` numbers and one of `count` experts. widens:
    whether products widen rows."""
    lines, size = pairs + min(pairs, count) * (EXPERT_ALIGNMENT - 1), network.size
    floats, integers = torch.float32, torch.int32
    parts: Parts = {"inner": ((lines, size), dtype), "made": ((lines, row), dtype)}
    if widens:
        widened = (("first", row), ("second", row), ("third", size))
        parts |= {name: ((widened_floats(lines, inputs),), floats) for name, inputs in widened}
    lists = {"line_of": (pairs,), "row_of": (lines,), "expert_of": (lines,), "starts": (3, count)}
    return parts | {name: (shape, integers) for name, shape in lists.items()}


def parts_of(experts: Experts, num_rows: int, hidden: int, dtype: torch.dtype, threads: int = 0) -> Parts:
    """The shapes and dtypes of scratch for `MixtureCalls`, with what routes rows. threads: of a prefill."""
    row, pairs = experts.row_size(hidden), num_rows * experts.used
    parts = share_parts(experts.network, pairs, experts.count, row, dtype, widens=not threads)
    if threads:
        parts["laid"] = (num_rows, row), dtype
        parts["decoded"] = (threads, 2, _COLUMNS, max(row, experts.network.size)), dtype
    return parts | {
        "normed": ((num_rows, hidden), torch.float32),
        "scores": ((num_rows, experts.num_scores), torch.float32),
        "chosen": ((num_rows, experts.used), torch.int32),
        "weights": ((pairs,), torch.float32),
    }


@contextmanager
def borrowed(need: int, room: Room | None = None) -> Iterator[Tensor]:
    """Scratch of at least `need` bytes for a call, uint8 [n], which the next one gets, too: in `room` if it is lent."""
    if room is not None and room.is_lent:
        yield room.take("scratch", (need,), torch.uint8, torch.device("cpu"))
        return
    block = _spare.pop() if _spare else torch.empty(0, dtype=torch.uint8)
    if len(block) < need:
        block = torch.empty(need, dtype=torch.uint8)
    yield block
    _spare[:] = [block]


def views_of(parts: Parts, block: Tensor) -> Mapping[str, Tensor]:
    """The pieces of a block of scratch, by name."""
    views, start = {}, 0
    for name, (shape, dtype) in parts.items():
        num_bytes = math.prod(shape) * dtype.itemsize
        views[name] = block[start : start + num_bytes].view(dtype).view(shape)
        start += _padded(num_bytes)
    return views


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _LINE) * _LINE


def widened_of(scratch: Mapping[str, Tensor]) -> Sequence[Tensor]:
    """Scratch for widened rows of gate, of up and of down; any where nothing is widened."""
    return [scratch.get(name, scratch["made"]) for name in ("first", "second", "third")]
