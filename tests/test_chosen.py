"""Attention over chosen blocks and their choice, against fp64 and exact scores, and the claim that a row's bits depend
on nothing beside it.

By torch's operators and by every instruction set of this machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.testing import assert_close

from kit.processor import built, on_this_machine, threads
from offload.kernels.block_slots import SlotTable, TakeSlots, take_slots
from offload.kernels.choosing import choose as choose_by_torch
from offload.kernels.operators import OperatorAttention
from offload.kernels.rope import RopeTable, Scoring
from offload.kernels.runs import Chosen, Rows, Run, RunAttention
from offload.kernels.spans import SPAN, SpanAttention

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
EXECUTORS = ["torch", *on_this_machine()]
SIZE, KV_HEADS = 4, 2
PAGE = 128
Choose = Callable[[Tensor, Tensor, Tensor, int], Tensor]


@dataclass(frozen=True)
class Heads:
    group: int
    dim: int


HEADS = [Heads(12, 256), Heads(2, 32), Heads(3, 48)]


@pytest.fixture(params=EXECUTORS)
def executor(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if name != "torch":
        built(name)
    return name


def normal(*size: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def attention_of(executor: str, dtype: torch.dtype) -> RunAttention:
    return (
        OperatorAttention(dtype=dtype)
        if executor == "torch"
        else SpanAttention(built(executor), dtype=dtype, span=SPAN)
    )


def choice_of(executor: str) -> Choose:
    return choose_by_torch if executor == "torch" else built(executor).choose


def begin(attention: RunAttention, q: Tensor, index: int, most: int) -> None:
    dim, dtype = q.shape[2], q.dtype
    unmoving = RopeTable(torch.ones(4096, dim, dtype=dtype), torch.zeros(4096, dim, dtype=dtype))
    new = torch.zeros(len(q), KV_HEADS, dim, dtype=dtype)
    attention.begin(Rows(q, new, new, Scoring(unmoving), 0, index), [most])


def over_chosen(attention: RunAttention, q: Tensor, tiles: Sequence[Tensor], chosen: Chosen) -> Tensor:
    """Attention [T, H * D] over the chosen blocks of `tiles`, each [2, P, H_kv, S, D]."""
    begin(attention, q, 0, int(chosen.tokens.max()))
    tokens = [tile.shape[1] * tile.shape[3] for tile in tiles]
    attention.attend_chosen([Run(tile, count) for tile, count in zip(tiles, tokens, strict=True)], chosen)
    return attention.merge()[0]


def over_all(attention: RunAttention, q: Tensor, tiles: Sequence[Tensor], num_tokens: int) -> Tensor:
    """The same over all tokens up to each row's own, of which the last row's is the last."""
    begin(attention, q, num_tokens - len(q), num_tokens)
    first = 0
    for tile in tiles:
        tokens = min(num_tokens - first, tile.shape[1] * tile.shape[3])
        if tokens > 0:
            attention.attend(Run(tile, tokens, first))
        first += tokens
    return attention.merge()[0]


def lists(rows: Sequence[Sequence[int]], tokens: Sequence[int], size: int = SIZE) -> Chosen:
    blocks = torch.full((len(rows), max(map(len, rows)) + 1), -1, dtype=torch.int32)
    for row, own in zip(blocks, rows, strict=True):
        row[: len(own)] = torch.tensor(own, dtype=torch.int32)
    return Chosen(blocks, torch.tensor(tokens, dtype=torch.int32), size)


def some_of(counts: Sequence[int], num_blocks: int, size: int = SIZE, seed: int = 0) -> Chosen:
    """For each row so many random blocks of `num_blocks`, the last of them of any number of tokens."""
    generator = torch.Generator().manual_seed(seed)
    rows = [sorted(torch.randperm(num_blocks, generator=generator)[:count].tolist()) for count in counts]
    tokens = [count * size - number % size for number, count in enumerate(counts)]
    return lists(rows, tokens, size)


def all_of(num_rows: int, num_tokens: int) -> Chosen:
    """All blocks up to each row's own token, of which the last row's is the last."""
    tokens = range(num_tokens - num_rows + 1, num_tokens + 1)
    return lists([range(-(-count // SIZE)) for count in tokens], tokens)


def elsewhere(tile: Tensor, chosen: Chosen) -> tuple[Tensor, Chosen]:
    """The same blocks at other places of a tile, and the lists of their places."""

    number, moved = tile.shape[3] // SIZE, tile.clone()
    slots = torch.randperm(tile.shape[1] * number, generator=torch.Generator().manual_seed(3))
    for slot, block in zip(slots.tolist(), by_block(tile), strict=True):
        moved.unflatten(3, (-1, SIZE))[:, slot // number, :, slot % number] = block
    places = torch.where(chosen.blocks < 0, -1, slots[chosen.blocks.clamp(min=0).long()]).int()
    return moved, Chosen(places, chosen.tokens, chosen.size)


def in_fp64(q: Tensor, tiles: Sequence[Tensor], chosen: Chosen) -> Tensor:
    keys, values = torch.cat([tile.transpose(1, 2).flatten(2, 3) for tile in tiles], 2).double()
    rows = []
    for query, blocks, count in zip(q.double(), chosen.blocks.long(), chosen.tokens, strict=True):
        at = (blocks[:, None] * chosen.size + torch.arange(chosen.size)).flatten()[:count]
        assert (at >= 0).all()
        scores = torch.einsum("hgd,hnd->hgn", query.unflatten(0, (KV_HEADS, -1)), keys[:, at]) * q.shape[2] ** -0.5
        rows.append(torch.einsum("hgn,hnd->hgd", scores.softmax(-1), values[:, at]).flatten())
    return torch.stack(rows)


def tiles_of(heads: Heads, dtype: torch.dtype, *pages: int, seed: int = 1) -> list[Tensor]:
    """Tiles of so many pages, whose heads and pages do not lie side by side."""
    return [
        normal(2, count, KV_HEADS, PAGE + 16, heads.dim, seed=seed + at, dtype=dtype)[:, :, :, :PAGE]
        for at, count in enumerate(pages)
    ]


def queries(heads: Heads, num_rows: int, dtype: torch.dtype, seed: int = 9) -> Tensor:
    return normal(num_rows, KV_HEADS * heads.group, heads.dim, seed=seed, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_attention_over_chosen_blocks_equals_fp64(executor: str, heads: Heads, dtype: torch.dtype) -> None:
    """One tile and several, the last of fewer pages; rows with few and with many blocks, the last ones incomplete."""
    for pages in ((3,), (2, 2, 1)):
        tiles, counts = tiles_of(heads, dtype, *pages), (1, 2, 31, 32, 33, 70, 95)
        q, chosen = queries(heads, len(counts), dtype), some_of(counts, sum(pages) * PAGE // SIZE)
        # Torch's operators round weights to the dtype before they meet the values.
        rtol = (3 if executor == "torch" else 0.51) * torch.finfo(dtype).eps + 2e-6
        out = over_chosen(attention_of(executor, dtype), q, tiles, chosen)
        assert_close(out.double(), in_fp64(q, tiles, chosen), rtol=rtol, atol=rtol if executor == "torch" else 2e-6)


@pytest.mark.parametrize("size", [1, 8, 64])
def test_blocks_may_have_other_sizes(executor: str, size: int) -> None:
    dtype = torch.float32
    tiles, q = tiles_of(HEADS[1], dtype, 2, 1), queries(HEADS[1], 3, dtype)
    chosen = some_of((1, 2, 5), 3 * PAGE // size, size)
    assert_close(
        over_chosen(attention_of(executor, dtype), q, tiles, chosen).double(),
        in_fp64(q, tiles, chosen),
        rtol=3e-6,
        atol=2e-6,
    )


@pytest.mark.few(4)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", HEADS[:2], ids=str)
@pytest.mark.parametrize("pages", [(4,), (2, 2), (1, 1, 1)], ids=str)
def test_all_blocks_give_the_bits_of_all_tokens(
    executor: str, heads: Heads, dtype: torch.dtype, pages: tuple[int, ...]
) -> None:
    """Of 1 to 64 rows, whose own tokens complete a block or do not; below a span, and beyond two."""
    tiles = tiles_of(heads, dtype, *pages)
    for num_rows, num_tokens in [(1, 1), (1, 2), (1, 3), (1, 4), (5, 9), (64, 130), (64, 255), (1, 257), (3, 320)]:
        q = queries(heads, num_rows, dtype)
        wanted = over_all(attention_of(executor, dtype), q, tiles, num_tokens)
        assert torch.equal(over_chosen(attention_of(executor, dtype), q, tiles, all_of(num_rows, num_tokens)), wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_blocks_that_lie_anywhere_give_the_same_bits(executor: str, dtype: torch.dtype) -> None:
    """A block's place is not its number where slots hold some blocks; lists then have the order of the blocks."""
    heads, num_tokens = HEADS[1], 3 * PAGE - 3
    tiles, q = tiles_of(heads, dtype, 3), queries(heads, 9, dtype)
    wanted = over_all(attention_of(executor, dtype), q, tiles, num_tokens)
    moved, chosen = elsewhere(tiles[0], all_of(9, num_tokens))
    assert torch.equal(over_chosen(attention_of(executor, dtype), q, [moved], chosen), wanted)


@pytest.mark.few(3)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_rows_attention_has_the_same_bits_beside_any_rows(executor: str, dtype: torch.dtype) -> None:
    heads = HEADS[1]
    tiles, q = tiles_of(heads, dtype, 2, 2), queries(heads, 64, dtype)
    chosen = some_of([1 + 7 * row % 90 for row in range(64)], 4 * PAGE // SIZE)
    together = over_chosen(attention_of(executor, dtype), q, tiles, chosen)
    for first, count in ((0, 1), (17, 1), (63, 1), (5, 2), (31, 8), (2, 33)):
        own = slice(first, first + count)
        part = Chosen(chosen.blocks[own].contiguous(), chosen.tokens[own].contiguous(), SIZE)
        for number in (1, 2):
            with threads(number):
                assert torch.equal(
                    over_chosen(attention_of(executor, dtype), q[own].contiguous(), tiles, part), together[own]
                )


def test_a_prefills_rows_attend_to_what_they_chose(executor: str) -> None:
    """512 rows at once, each to eight blocks of its own."""
    heads, dtype = HEADS[1], torch.float32
    tiles, q = tiles_of(heads, dtype, 4), queries(heads, 512, dtype)
    index, pooled = normal(512, 4, 16, seed=4), normal(128, 16, seed=5)
    visible = torch.arange(512) // SIZE + 1
    blocks = choice_of(executor)(index, pooled, visible, 8)
    chosen = Chosen(blocks, ((blocks >= 0).sum(1) * SIZE).int(), SIZE)
    assert_close(
        over_chosen(attention_of(executor, dtype), q, tiles, chosen).double(),
        in_fp64(q, tiles, chosen),
        rtol=3e-6,
        atol=2e-6,
    )
    assert torch.equal(blocks[300:301], choice_of(executor)(index[300:301], pooled, visible[300:301], 8))


def by_block(tile: Tensor) -> Tensor:
    """[blocks, 2, H_kv, size, D] of [2, P, H_kv, S, D]."""
    return tile.unflatten(3, (-1, SIZE)).permute(1, 3, 0, 2, 4, 5).flatten(0, 1)


# The choice.


def whole_numbers(*size: int, most: int, seed: int, dtype: torch.dtype) -> Tensor:
    """Whose products and sums are exact in any order."""
    return torch.randint(-most, most + 1, size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def exact_choice(q: Tensor, pooled: Tensor, visible: Tensor, most: int) -> list[list[int]]:
    """By score, the highest first, then by number; in the order of numbers, filled up with -1."""
    scores = torch.einsum("thd,nd->thn", q.double(), pooled.double()).relu().sum(1)
    rows = []
    for own, count in zip(scores.tolist(), visible.tolist(), strict=True):
        ranked = sorted(range(count), key=lambda block: (-own[block], block))[:most]
        rows.append(sorted(ranked) + [-1] * (min(most, len(pooled)) - len(ranked)))
    return rows


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_heads", "dim"), [(4, 128), (2, 16), (3, 6)])
def test_the_blocks_with_the_highest_scores_are_chosen_and_of_equal_ones_the_lower(
    executor: str, num_heads: int, dim: int, dtype: torch.dtype
) -> None:
    check_choice(choice_of(executor), num_heads, dim, dtype)


def check_choice(choose: Choose, num_heads: int, dim: int, dtype: torch.dtype) -> None:
    """Small whole numbers, so that many scores are equal, and many 0; budgets about the number of visible blocks, and
    far below it."""
    for num_blocks, most in ((0, 3), (1, 3), (40, 40), (40, 41), (257, 16), (700, 200)):
        visible = torch.tensor([0, 1, 2, num_blocks // 2, num_blocks - 1, num_blocks, most - 1, most, most + 1])
        visible = visible.clamp(max=num_blocks)
        q = whole_numbers(len(visible), num_heads, dim, most=1, seed=most, dtype=dtype)
        pooled = whole_numbers(num_blocks, dim, most=1, seed=num_blocks, dtype=dtype)
        q[-1] = 0  # all scores are equal
        chosen = choose(q, pooled, visible, most)
        assert chosen.dtype == torch.int32
        assert chosen.tolist() == exact_choice(q, pooled, visible, most)
        assert torch.equal(choose(q, pooled, visible.int(), most), chosen)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_chosen_scores_are_the_highest_in_fp64(executor: str, dtype: torch.dtype) -> None:
    """As far as fp32 tells them apart: whether they are divided by sqrt(D_i) or not."""
    q, pooled, visible = normal(9, 4, 128, seed=1, dtype=dtype), normal(3000, 128, seed=2, dtype=dtype), 2900
    chosen = choice_of(executor)(q, pooled, torch.full((9,), visible), 512).long()
    assert (chosen.diff(dim=1) > 0).all()
    scores = torch.einsum("thd,nd->thn", q.double(), pooled[:visible].double()).relu().sum(1)
    least = scores.gather(1, chosen).amin(1)
    rest = scores.scatter(1, chosen, -1.0).amax(1)
    assert (least >= rest - 1e-5 * rest).all()


def equal_but_for_rounding(num_rows: int, num_blocks: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(q, pooled) whose scores are exactly equal, of terms of many magnitudes: other orders of sums choose others."""
    powers = torch.randint(-16, 9, (128,), generator=torch.Generator().manual_seed(1))
    numbers = normal(128, seed=2).abs().ldexp(powers).to(dtype)
    order = torch.stack(
        [torch.randperm(128, generator=torch.Generator().manual_seed(block)) for block in range(num_blocks)]
    )
    return torch.ones(num_rows, 4, 128, dtype=dtype), numbers[order]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_rows_choice_depends_neither_on_rows_beside_it_nor_on_later_blocks(executor: str, dtype: torch.dtype) -> None:
    """Where rounding alone decides."""
    q, pooled = equal_but_for_rounding(64, 900, dtype)
    choose, visible = choice_of(executor), torch.full((64,), 700)
    together = choose(q, pooled, visible, 100)
    assert together[0].tolist() != list(range(100))
    assert torch.equal(together, together[:1].expand(64, -1))
    for count in (1, 2, 3, 7, 16, 33):
        assert torch.equal(choose(q[:count], pooled, visible[:count], 100), together[:count])
    assert torch.equal(choose(q, pooled[:700].clone(), visible, 100), together)
    for number in (1, 2):
        with threads(number):
            assert torch.equal(choose(q[:5], pooled, visible[:5], 100), together[:5])


def test_what_is_not_a_number_is_not_preferred(executor: str) -> None:
    q, pooled = normal(2, 4, 16, seed=1), normal(50, 16, seed=2)
    pooled[[3, 40]] = torch.nan
    chosen = choice_of(executor)(q, pooled, torch.tensor([50, 30]), 8)
    pooled[[3, 40]] = 0.0
    assert torch.equal(chosen, choice_of(executor)(q, pooled, torch.tensor([50, 30]), 8))


def check_slots(take: TakeSlots, num_slots: int, num_rows: int, most: int) -> None:
    """Beside a plain account of which block is in which slot, and when it was wanted."""
    random, num_blocks = torch.Generator().manual_seed(num_slots), 170
    block_in, used, brought = [-1] * num_slots, [0] * num_slots, 0
    of_slots, clock = torch.zeros(2, num_slots, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    of_blocks = torch.zeros(2, num_blocks, dtype=torch.int32)
    of_slots[0] = of_blocks[0] = -1
    table = SlotTable(of_blocks[0], of_blocks[1], of_slots[0], of_slots[1], clock)
    for turn in range(30):
        start = 3 * turn + (60 if turn > 20 else 0)
        positions = torch.arange(start, start + num_rows)
        own = {at // SIZE for at in range(start, start + num_rows)}
        blocks = torch.full((num_rows, most), -1, dtype=torch.int32)
        for row, position in zip(blocks, positions.tolist(), strict=True):
            there = torch.randperm(position // SIZE + 1, generator=random)[: num_slots // num_rows - 2][:most]
            row[: len(there)] = there.sort().values
        asked = {each for each in blocks.flatten().tolist() if each >= 0} | own
        used = [turn + 1 if block in asked else when for block, when in zip(block_in, used, strict=True)]
        missing = sorted(asked - set(block_in))
        free = sorted(sorted(range(num_slots), key=lambda slot: (used[slot], slot))[: len(missing)])
        for slot, block in zip(free, missing, strict=True):
            block_in[slot], used[slot] = block, turn + 1
        padded = pad(blocks, (0, 0, 0, 2), value=-1), pad(positions, (0, 2), value=-SIZE)
        found, wanted = take(table, *padded, SIZE)
        assert found[num_rows:].eq(-1).all()
        slot_of = {block: slot for slot, block in enumerate(block_in) if block >= 0}
        fetched = {slot: block for slot, block in zip(free, missing, strict=True) if block * SIZE < start}
        assert found[:num_rows].tolist() == [[slot_of.get(block, -1) for block in row] for row in blocks.tolist()]
        assert wanted.tolist() == [fetched.get(slot, -1) for slot in range(num_slots)]
        assert table.block_in.tolist() == block_in
        assert table.used.tolist() == used
        assert table.slot_of.tolist() == [slot_of.get(block, -1) for block in range(num_blocks)]
        assert (found.dtype, wanted.dtype) == (torch.int32, torch.int64)
        brought += len(fetched)
    assert brought > 10


@pytest.mark.parametrize(("num_slots", "num_rows", "most"), [(8, 1, 5), (32, 3, 9), (40, 8, 4), (300, 5, 11)])
def test_slots_go_to_the_missing_blocks_and_from_those_that_were_used_longest_ago(
    num_slots: int, num_rows: int, most: int
) -> None:
    check_slots(take_slots, num_slots, num_rows, most)
