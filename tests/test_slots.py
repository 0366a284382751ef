"""Chunks and slots of the retrieval cache, over sequences of refreshes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from offload.kv.selection import assign, choose

LAYERS, KV_HEADS = 2, 3


def slowly(chosen: list[int], before: list[int]) -> list[int]:
    """The law, for one head: who stays, stays; the others go to the free slots, both in rising order."""
    held: list[int | None] = [chunk if chunk in chosen else None for chunk in before]
    held += [None] * (len(chosen) - len(held))
    new = iter(chunk for chunk in chosen if chunk not in before)
    return [next(new) if chunk is None else chunk for chunk in held]


@given(
    num_slots=st.integers(1, 9),
    lengths=st.lists(st.integers(1, 14), min_size=1, max_size=6),
    seed=st.integers(0, 999),
    data=st.data(),
)
def test_chunks_that_are_chosen_again_stay_and_the_others_take_free_slots(
    num_slots: int, lengths: list[int], seed: int, data: st.DataObject
) -> None:
    """Contexts of any number of chunks, one after the other; now and then all is dropped."""
    generator = torch.Generator().manual_seed(seed)
    held: Tensor | None = None
    longest = 0
    for length in lengths:
        if data.draw(st.booleans(), label="shorter, or dropped"):
            held, longest = None, 0
        longest = max(longest, length)
        chosen = choose(torch.rand(LAYERS, KV_HEADS, longest, generator=generator), num_slots)
        given_before = chosen.clone(), None if held is None else held.clone()
        found = assign(chosen, held)
        assert torch.equal(chosen, given_before[0])
        assert held is None or torch.equal(held, given_before[1])
        for layer in range(LAYERS):
            for head in range(KV_HEADS):
                before = [] if held is None else held[layer, head].tolist()
                slots, wanted = found.held[layer, head].tolist(), found.wanted[layer, head].tolist()
                assert slots == slowly(chosen[layer, head].tolist(), before)
                assert sorted(slots) == chosen[layer, head].tolist()
                before += [-1] * (len(slots) - len(before))
                assert wanted == [-1 if new == old else new for new, old in zip(slots, before, strict=True)]
        held = found.held


class _Counted(TorchDispatchMode):
    """Counts operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_no_operator_is_as_large_as_the_context_or_looks_at_numbers() -> None:
    """Of shapes that depend on no value: on a GPU the host would wait for it."""
    before = choose(torch.rand(1, 2, 40), 6)
    chosen = choose(torch.rand(1, 2, 4000), 6)
    with _Counted() as counted:
        assign(chosen, before)
    assert len(counted.names) <= 24, counted.names
    assert not [name for name in counted.names if "nonzero" in name or "_local_scalar" in name or "index." in name]


@pytest.mark.parametrize("num_chosen", [1, 3, 6, 9])
def test_all_chunks_are_chosen_where_they_fit(num_chosen: int) -> None:
    chosen = choose(torch.rand(LAYERS, KV_HEADS, 6), num_chosen)
    assert chosen.shape == (LAYERS, KV_HEADS, min(num_chosen, 6))
    assert (chosen[..., 0] == 0).all()
    assert (chosen.diff(dim=-1) > 0).all()
