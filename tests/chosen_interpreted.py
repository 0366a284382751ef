"""A GPU's attention over chosen blocks, their choice and their copies in Triton's interpreter, on a CPU.
test_gpu_kernels.py runs this with TRITON_INTERPRET=1, in a process of its own, since Triton decides on import.
"""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from gpu_interpreted import TOLERANCE, Unwritten
from kit.interpreter import products_by_row, without_idle_work
from offload.kernels.choosing import choose as choose_by_torch
from offload.kernels.gpu import choosing
from offload.kernels.gpu.choosing import choose, chunking
from offload.kernels.runs import Chosen
from test_chosen import (
    DTYPES,
    HEADS,
    PAGE,
    SIZE,
    Heads,
    all_of,
    check_choice,
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
