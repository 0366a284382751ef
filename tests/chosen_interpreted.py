"""A GPU's attention over chosen blocks, their choice and their copies in Triton's interpreter, on a CPU.
test_gpu_kernels.py runs this with TRITON_INTERPRET=1, in a process of its own, since Triton decides on import.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.testing import assert_close

from gpu_interpreted import TOLERANCE, Unwritten
from kit.interpreter import products_by_row, without_idle_work
from offload.kernels.block_slots import SlotTable
from offload.kernels.choosing import choose as choose_by_torch
from offload.kernels.gpu import block_slots, choosing
from offload.kernels.gpu.choosing import choose, chunking
from offload.kernels.gpu.copies import new_rows
from offload.kernels.runs import Chosen
from test_chosen import (
    DTYPES,
    HEADS,
    PAGE,
    SIZE,
    Heads,
    all_of,
    check_choice,
    check_slots,
    elsewhere,
    in_fp64,
    normal,
    over_all,
    over_chosen,
    queries,
    some_of,
    tiles_of,
)

without_idle_work()


@pytest.fixture(autouse=True)
def _products_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    products_by_row(monkeypatch)


def attention(dtype: torch.dtype, span: int = PAGE) -> Unwritten:
    return Unwritten(dtype=dtype, span=span)


@pytest.mark.few(3)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [*HEADS, Heads(20, 32)], ids=str)
def test_attention_over_chosen_blocks_equals_fp64(heads: Heads, dtype: torch.dtype) -> None:
    """Spans that are not a page; rows without a token in the last ones; groups that are no multiple of a block of rows,
    and larger ones."""
    counts = (1, 2, 33, 70)
    tiles, q, chosen = tiles_of(heads, dtype, 3), queries(heads, len(counts), dtype), some_of(counts, 3 * PAGE // SIZE)
    out = over_chosen(attention(dtype, span=64), q, tiles, chosen)
    assert_close(out.double(), in_fp64(q, tiles, chosen), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens", [PAGE + 5, 2 * PAGE + 4])
def test_all_blocks_give_the_bits_of_all_tokens(dtype: torch.dtype, num_tokens: int) -> None:
    """Wherever the blocks lie, and of rows beside each other; sums are those of the same spans."""
    tiles, q = tiles_of(HEADS[2], dtype, 3), queries(HEADS[2], 7, dtype)
    wanted = over_all(attention(dtype), q, tiles, num_tokens)
    chosen = all_of(7, num_tokens)
    assert torch.equal(over_chosen(attention(dtype), q, tiles, chosen), wanted)
    moved, places = elsewhere(tiles[0], chosen)
    assert torch.equal(over_chosen(attention(dtype), q, [moved], places), wanted)
    alone = Chosen(places.blocks[2:3], places.tokens[2:3], SIZE)
    assert torch.equal(over_chosen(attention(dtype), q[2:3], [moved], alone), wanted[2:3])


@pytest.mark.few(3)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_heads", "dim"), [(4, 128), (2, 16), (3, 6)])
def test_the_blocks_with_the_highest_scores_are_chosen_and_of_equal_ones_the_lower(
    monkeypatch: pytest.MonkeyPatch, num_heads: int, dim: int, dtype: torch.dtype
) -> None:
    """Of one chunk and of several, which are divided again and again."""
    check_choice(choose, num_heads, dim, dtype)
    monkeypatch.setattr(choosing, "CHUNK", 32)
    monkeypatch.setattr(choosing, "_SMALLEST", 32)
    assert chunking(700, 16) == (32, 22)
    check_choice(choose, num_heads, dim, dtype)


def test_a_rows_choice_depends_neither_on_rows_beside_it_nor_on_later_blocks() -> None:
    """Of more rows than are scored at a time; scores that no row may choose are not written."""
    q, pooled = normal(70, 2, 16, seed=1), normal(300, 16, seed=2)
    visible = torch.arange(70) * 2
    together = choose(q, pooled, visible, 24)
    assert torch.equal(together, choose_by_torch(q, pooled, visible, 24))
    for first, count in ((0, 1), (41, 1), (69, 1), (15, 3)):
        own = slice(first, first + count)
        assert torch.equal(choose(q[own], pooled[:140].clone(), visible[own], 24), together[own])


def test_no_blocks_may_be_chosen_of_none() -> None:
    assert choose(normal(3, 2, 16, seed=1), normal(0, 16, seed=2), torch.zeros(3), 8).shape == (3, 0)


@pytest.mark.few(4)
@pytest.mark.parametrize("chunk", [16, 4096])
@pytest.mark.parametrize(("num_slots", "num_rows", "most"), [(8, 1, 5), (32, 3, 9), (40, 8, 4), (300, 5, 11)])
def test_slots_go_to_the_same_blocks_as_by_torch(
    num_slots: int, num_rows: int, most: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a text that grows, is cut, and whose rows choose here and there; the same tables, places and fetches."""
    monkeypatch.setattr(block_slots, "CHUNK", chunk)
    check_slots(block_slots.take_slots, num_slots, num_rows, most)


def test_what_a_broken_off_call_marked_is_not_asked_for_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass begins with another time, as `BlockCache.begin` has it."""
    of_blocks, of_slots = torch.full((2, 40), -1, dtype=torch.int32), torch.full((2, 8), -1, dtype=torch.int32)
    of_blocks[1] = of_slots[1] = 0
    table = SlotTable(*of_blocks, *of_slots, torch.zeros(1, dtype=torch.int32))

    def broken(program: Any, *given: Any, **more: Any) -> None:
        if program is not block_slots.mark_asked:
            raise KeyboardInterrupt
        launch(program, *given, **more)

    launch = block_slots.launch
    monkeypatch.setattr(block_slots, "launch", broken)
    with pytest.raises(KeyboardInterrupt):
        block_slots.take_slots(table, torch.tensor([[0, 1, 2, 3]], dtype=torch.int32), torch.tensor([99]), 4)
    monkeypatch.undo()
    table.clock.add_(1)
    block_slots.take_slots(table, torch.tensor([[7, 9]], dtype=torch.int32), torch.tensor([99]), 4)
    assert sorted(table.block_in.tolist()) == [-1] * 5 + [7, 9, 24]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [16, 6])
def test_new_rows_go_home_and_to_their_blocks_slots(dim: int, dtype: torch.dtype) -> None:
    """Nothing else is written."""
    heads, page, tile, size, first = 2, 8, 16, 4, 13  # over blocks, pages and tiles
    room, positions = normal(2, heads, 9, dim, seed=1).to(dtype), torch.arange(first, first + 7)
    padded = torch.cat([positions, torch.tensor([-size])])
    homes = [torch.zeros(2, tile // page, heads, page, dim, dtype=dtype) for _ in range(2)]
    slot_of, held = torch.tensor([-1, -1, -1, 5, 0, 3], dtype=torch.int32), torch.zeros(2, heads, 24, dim, dtype=dtype)
    wanted_homes, wanted = [each.clone() for each in homes], held.clone()
    for row, token in enumerate(positions.tolist()):
        within = token % tile
        wanted_homes[token // tile][:, within // page, :, within % page] = room[:, :, row]
        wanted[:, :, int(slot_of[token // size]) * size + token % size] = room[:, :, row]
    addresses = torch.tensor([each.data_ptr() for each in homes])
    new_rows(room[:, :, :8], padded, slot_of, held, addresses, size=size, page=page, tile=tile)
    assert torch.equal(held, wanted)
    assert all(map(torch.equal, homes, wanted_homes))
