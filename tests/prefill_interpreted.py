"""The GPU's attention of a prefill in Triton's interpreter, as in gpu_interpreted.py."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from gpu_interpreted import GARBAGE, KV_HEADS, TOLERANCE, normal, turning
from kit.interpreter import products_by_row, without_idle_work
from offload.kernels.gpu.prefill import TritonTiles
from offload.kernels.gpu.prefill_block import TritonBlock
from offload.kernels.prefill import PrefillAttention
from offload.kernels.rope import Scoring
from offload.kv.full import FullCache
from offload.kv.window import WindowCache
from offload.pages.tiles import TileShape
from offload.transfer.memory import Memory

PAGE = 64

without_idle_work()


@pytest.fixture(autouse=True)
def _products_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    products_by_row(monkeypatch)
    unwritten(monkeypatch)


def unwritten(patch: pytest.MonkeyPatch) -> None:
    """Blocks get memory that a launch must write before it is read."""
    gathered = TritonBlock._gathered
    patch.setattr(
        TritonBlock, "_gathered", lambda block, n: tuple(each.fill_(torch.nan) for each in gathered(block, n))
    )


def tiles_of(number: int, pages: int, *, tokens: int, dim: int, dtype: torch.dtype) -> list[Tensor]:
    """[2, P, H_kv, S, D] each, of heads that do not lie side by side; NaN past `tokens` tokens of all."""
    found = []
    for index in range(number):
        tile = normal(2, pages, KV_HEADS, PAGE + 16, dim, seed=index + 7, dtype=dtype)[:, :, :, :PAGE]
        places = torch.arange(pages * PAGE).view(pages, PAGE) + index * pages * PAGE
        tile.transpose(1, 2)[:, :, places >= tokens] = torch.nan
        found.append(tile)
    return found


def attended(
    tiles: list[Tensor],
    rows: Tensor,
    first: int,
    *,
    window: int | None = None,
    cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Rows [T, H, D] at `first` and on, over tiles from position 0 on."""
    scoring = Scoring(turning(rows.shape[2], rows.dtype), cap=cap, sink_logits=sinks)
    block = TritonTiles().block(rows, first, scoring, window)
    for index, tile in enumerate(tiles):
        block.attend(tile, index * tile.shape[1] * PAGE)
    return block.attended()


def in_fp64(
    tiles: list[Tensor],
    rows: Tensor,
    first: int,
    *,
    window: int | None = None,
    cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """sinks: a further column of the scores, which has a weight and no value."""
    tokens = first + len(rows)
    held = torch.cat([tile.transpose(1, 2).flatten(2, 3) for tile in tiles], 2)[:, :, :tokens].double()
    keys, values = held.repeat_interleave(rows.shape[1] // KV_HEADS, 1)
    scores = torch.einsum("thd,hnd->htn", rows.double(), keys) / rows.shape[2] ** 0.5
    scores = scores if cap is None else cap * (scores / cap).tanh()
    row, at = torch.arange(first, tokens)[:, None], torch.arange(tokens)
    seen = (at <= row) & (at > row - (window or tokens))
    logits = torch.full((rows.shape[1],), -torch.inf) if sinks is None else sinks
    column = logits.double()[:, None, None].expand(-1, len(rows), 1)
    weights = torch.cat([scores.masked_fill(~seen, -torch.inf), column], 2).softmax(-1)[..., :-1]
    return torch.einsum("htn,hnd->thd", weights, values).flatten(1)


@pytest.mark.few(6)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("group", "dim", "first", "count", "window", "cap"),
    [
        (3, 48, 150, 7, None, None),  # over the end of a page
        (1, 64, 100, 140, None, None),  # two blocks of rows, over the ends of tiles
        (2, 32, 0, 130, None, None),  # from the start on
        (4, 32, 60, 201, 40, None),  # tiles and steps before all windows
        (2, 32, 0, 70, 1, None),  # itself alone
        (1, 32, 127, 129, 64, None),  # the first row of a tile, and a window of a step
        (2, 32, 130, 20, 200, 50.0),
        (1, 16, 255, 1, None, 2.0),  # the last row of the second tile
    ],
)
def test_rows_see_what_they_should_over_tiles(
    group: int, dim: int, first: int, count: int, window: int | None, cap: float | None, dtype: torch.dtype
) -> None:
    check_rows(group, dim, first, count, window, cap, dtype)


@pytest.mark.few(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("group", "dim", "first", "count", "window", "cap"),
    [
        (2, 512, 100, 140, None, None),  # three blocks of rows, over the ends of tiles
        (1, 272, 0, 70, None, None),  # of the second half 16 numbers, from the start on
        (3, 320, 255, 1, None, 2.0),  # the last row of the second tile
        (1, 384, 127, 70, 64, None),  # the first row of a tile
    ],
)
def test_rows_see_what_they_should_of_heads_past_256_numbers(
    group: int, dim: int, first: int, count: int, window: int | None, cap: float | None, dtype: torch.dtype
) -> None:
    check_rows(group, dim, first, count, window, cap, dtype)


def check_rows(
    group: int, dim: int, first: int, count: int, window: int | None, cap: float | None, dtype: torch.dtype
) -> None:
    tiles = tiles_of(3, 2, tokens=first + count, dim=dim, dtype=dtype)
    rows = (2 * normal(count, KV_HEADS * group, dim, seed=1)).to(dtype)
    out = attended(tiles, rows, first, window=window, cap=cap)
    assert out.dtype == dtype
    tolerance = TOLERANCE[dtype] * (25 if cap else 1)
    assert_close(
        out.double(), in_fp64(tiles, rows, first, window=window, cap=cap), atol=tolerance, rtol=TOLERANCE[dtype]
    )


@pytest.mark.parametrize("dim", [32, 272])
@pytest.mark.parametrize(("first", "count", "window"), [(0, 60, None), (150, 130, None), (150, 130, 100), (255, 1, 1)])
def test_sink_logits_are_a_further_column_of_the_scores(first: int, count: int, window: int | None, dim: int) -> None:
    """Once, over one tile or over several, the first of which some rows do not see."""
    tiles = tiles_of(3, 2, tokens=first + count, dim=dim, dtype=torch.float32)
    rows, heads = 2 * normal(count, KV_HEADS * 3, dim, seed=2), KV_HEADS * 3
    sinks = torch.linspace(-3.0, 7.0, heads)[torch.randperm(heads, generator=torch.Generator().manual_seed(1))]
    out = attended(tiles, rows, first, window=window, sinks=sinks)

    def check(given: Tensor | None) -> None:
        wanted = in_fp64(tiles, rows, first, window=window, sinks=given)
        assert_close(out.double(), wanted, atol=TOLERANCE[torch.float32], rtol=TOLERANCE[torch.float32])

    check(sinks)
    for wrong in (None, sinks + math.log(2), sinks.roll(1), sinks * math.log(2)):
        with pytest.raises(AssertionError, match="not close"):
            check(wrong)


def test_wide_heads_are_cut_otherwise() -> None:
    """Blocks of fewer rows, and shorter steps."""
    tiles = tiles_of(2, 1, tokens=110, dim=256, dtype=torch.float16)
    rows = normal(70, KV_HEADS * 2, 256, seed=1, dtype=torch.float16)
    assert_close(attended(tiles, rows, 40).double(), in_fp64(tiles, rows, 40), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("dim", [32, 272])
@pytest.mark.parametrize("growing", [True, False])
def test_what_came_before_is_weighed_anew(growing: bool, dim: int) -> None:
    """Scores become larger from step to step and from tile to tile, or smaller."""
    tiles = tiles_of(3, 2, tokens=384, dim=dim, dtype=torch.float32)
    sizes = torch.linspace(0.1, 4, 3 * 2 * PAGE).view(3, 2, 1, PAGE, 1)
    for tile, size in zip(tiles, sizes if growing else sizes.flip(0, 1, 3), strict=True):
        tile[0].mul_(size)
    rows = 3 * normal(20, KV_HEADS * 2, dim, seed=3)
    tolerance = 5 * TOLERANCE[torch.float32]
    assert_close(attended(tiles, rows, 364).double(), in_fp64(tiles, rows, 364), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dim", [32, 272])
def test_what_is_hidden_changes_no_bit(dim: int) -> None:
    """Tokens behind a row, and before its window."""
    tiles = tiles_of(2, 2, tokens=256, dim=dim, dtype=torch.float32)
    rows = normal(100, KV_HEADS * 2, dim, seed=4)
    out = attended(tiles, rows, 100, window=50)
    for place, told in ((150, slice(50, 100)), (51, slice(0, 1)), (50, slice(0, 0)), (200, slice(0, 0))):
        changed = [tile.clone() for tile in tiles]
        tile, token = divmod(place, 2 * PAGE)
        changed[tile][:, token // PAGE, :, token % PAGE] = GARBAGE
        differs = (attended(changed, rows, 100, window=50) != out).any(1).nonzero().flatten().tolist()
        assert differs == [*range(100)][told], place


def test_a_block_whose_last_tile_did_not_come_has_no_result() -> None:
    block = TritonTiles().block(normal(4, KV_HEADS, 32, seed=5), 62, Scoring(turning(32, torch.float32)))
    block.attend(tiles_of(1, 1, tokens=64, dim=32, dtype=torch.float32)[0], 0)
    with pytest.raises(AssertionError, match="of the last row did not come"):
        block.attended()


def caches(prefill: PrefillAttention | None) -> list[FullCache | WindowCache]:
    """One layer each; tiles of two pages, and a window of 70 tokens in a ring that ends in the middle of a block."""
    memory, scorings = Memory(torch.device("cpu")), [Scoring(turning(32, torch.float32))]
    shapes = [TileShape(KV_HEADS, 32, PAGE, pages, torch.float32) for pages in (2, 1)]
    return [
        FullCache(memory, shapes[0], num_layers=1, scorings=scorings, prefill=prefill),
        WindowCache(
            memory, shapes[1], num_pages=5, windows=[70], scorings=scorings, prefill=prefill
        ),
    ]  # fmt: skip


def test_caches_attend_as_by_torchs_operators() -> None:
    """In blocks of rows that end anywhere, past the ends of tiles and of the ring."""
    for ours, theirs in zip(caches(TritonTiles()), caches(None), strict=True):
        for count in (130, 50, 200, 64):
            rows = normal(count, KV_HEADS * 4, 32, seed=count)
            q, k, v = rows.split([KV_HEADS * 2, KV_HEADS, KV_HEADS], 1)
            found = []
            for cache in (ours, theirs):
                cache.begin("prefill", count)
                found.append(cache.attend(0, q, k, v))
                cache.advance(count)
            assert_close(found[0], found[1], atol=1e-5, rtol=1e-4)
