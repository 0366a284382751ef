"""Faults that a rank's process has from its start, see `forked`. No tests in here."""

from __future__ import annotations

import ctypes
import os
import signal

import torch
from torch import Tensor

from offload.errors import DoesNotFit
from offload.kv.full import FullCache
from offload.plan.sizing import MAX_ROWS
from offload.ranks.sums import Sums


def in_pieces(sums: Sums, part: Tensor) -> Tensor:
    """As a library does it: each rank sums a piece of the tensor, beginning with its own, and sends that to all."""
    sums._due.popleft()
    assert sums._shared is not None
    [(_, num_bytes, slots)] = sums._shared._pieces(part)
    parts = [torch.frombuffer(bytearray(ctypes.string_at(slot, num_bytes)), dtype=part.dtype) for slot in slots]
    pieces = [each.tensor_split(sums.size) for each in parts]
    summed = []
    for number in range(sums.size):
        first, *others = [pieces[(number + i) % sums.size][number] for i in range(sums.size)]
        summed.append(sum(others, first))
    return torch.cat(summed).view(part.shape)


def sum_in_pieces(rank: int) -> None:
    Sums.total = in_pieces  # type: ignore[method-assign]


def has_less_memory(rank: int) -> None:
    """Rank 1 has none for caches of 250 tokens."""
    reserve = FullCache.reserve

    def reserve_a_little(cache: FullCache, num_tokens: int) -> None:
        if rank == 1 and num_tokens >= 250 + MAX_ROWS:
            raise DoesNotFit("this rank has no memory")
        reserve(cache, num_tokens)

    FullCache.reserve = reserve_a_little  # type: ignore[method-assign]


def fails_later(rank: int) -> None:
    attend, calls = FullCache.attend, []

    def attend_for_a_while(*args: object) -> Tensor:
        calls.append(rank)
        assert rank == 1 or len(calls) < 40
        return attend(*args)  # type: ignore[arg-type]

    if rank == 2:
        FullCache.attend = attend_for_a_while  # type: ignore[method-assign,assignment]


def stops_itself(rank: int) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)
