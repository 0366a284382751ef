"""The GPU's attention of a prefill to latents in Triton's interpreter, as in prefill_interpreted.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from gpu_interpreted import GARBAGE, TOLERANCE, normal, turning
from kit.interpreter import products_by_row, without_idle_work
from offload.kernels.gpu.halves import HalvesTiling, LatentTiles
from offload.kernels.gpu.kernels import JOINED_KERNELS
from offload.kernels.prefill import PrefillAttention
from offload.kernels.rope import Scoring
from offload.kv.full import FullCache
from offload.pages.tiles import TileShape
from offload.transfer.memory import Memory
from prefill_interpreted import unwritten

PAGE, HEADS = 64, 3

without_idle_work()


@pytest.fixture(autouse=True)
def _products_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    products_by_row(monkeypatch)
    unwritten(monkeypatch)


def tiles_of(number: int, pages: int, *, tokens: int, half: int, dtype: torch.dtype) -> list[Tensor]:
    """[2, P, 1, S, D / 2] each, of pages that do not lie side by side; NaN past `tokens` tokens of all."""
    found = []
    for index in range(number):
        tile = normal(2, pages, 1, PAGE + 16, half, seed=index + 7, dtype=dtype)[:, :, :, :PAGE]
        places = torch.arange(pages * PAGE).view(pages, PAGE) + index * pages * PAGE
        tile.transpose(1, 2)[:, :, places >= tokens] = torch.nan
        found.append(tile)
    return found


def scoring_of(rows: Tensor, turned: int) -> Scoring:
    return Scoring(turning(2 * turned, rows.dtype), 0.2, joined=True)


def attended(tiles: list[Tensor], rows: Tensor, first: int, turned: int) -> Tensor:
    """Rows [T, H, D] at `first` and on, over tiles from position 0 on."""
    block = LatentTiles().block(rows, first, scoring_of(rows, turned))
    for index, tile in enumerate(tiles):
        block.attend(tile, index * tile.shape[1] * PAGE)
    return block.attended()


def values_of(out: Tensor, half: int, turned: int) -> Tensor:
    """Attended rows [T, H * D] -> their values [T, H, 2, D / 2 - R]."""
    return out.unflatten(1, (HEADS, 2, half))[..., turned:]


def in_fp64(tiles: list[Tensor], rows: Tensor, first: int) -> Tensor:
    """[T, H * D]"""
    tokens = first + len(rows)
    held = torch.cat([tile.transpose(1, 2).flatten(2, 3) for tile in tiles], 2)[:, 0, :tokens].double()
    keys = torch.cat([*held], -1)
    scores = 0.2 * torch.einsum("thd,nd->thn", rows.double(), keys)
    hidden = torch.arange(tokens) > torch.arange(first, tokens)[:, None]
    return (scores.masked_fill(hidden[:, None], -torch.inf).softmax(-1) @ keys).flatten(1)


@pytest.mark.few(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("half", "turned", "first", "count"),
    [
        (48, 16, 150, 7),  # over the end of a page
        (80, 16, 100, 140),  # three blocks of rows, over the ends of tiles
        (64, 16, 0, 130),  # from the start on; values that no power of 2 has
        (40, 8, 255, 1),  # the last row of the second tile; fewer rotated numbers than a product takes
    ],
)
def test_rows_see_what_they_should_over_tiles_of_latents(
    half: int, turned: int, first: int, count: int, dtype: torch.dtype
) -> None:
    tiles = tiles_of(3, 2, tokens=first + count, half=half, dtype=dtype)
    rows = normal(count, HEADS, 2 * half, seed=1).to(dtype)
    out = attended(tiles, rows, first, turned)
    assert out.dtype == dtype
    assert not out.unflatten(1, (HEADS, 2, half))[..., :turned].any()
    tolerance = 2 * TOLERANCE[dtype]
    wanted = values_of(in_fp64(tiles, rows, first), half, turned)
    assert_close(values_of(out.double(), half, turned), wanted, atol=tolerance, rtol=tolerance)


def test_prompts_and_tiles_that_are_divided_otherwise_give_the_same_bits() -> None:
    """Rows in whole blocks of the program; tiles of any number of pages, which may lie anywhere."""
    half, turned, rows = 48, 16, normal(140, HEADS, 96, seed=2)
    tiles = tiles_of(2, 2, tokens=200, half=half, dtype=torch.float32)
    wanted, size = attended(tiles, rows, 60, turned), HalvesTiling.of_latents(half, turned).rows
    parts = [attended(tiles, part, 60 + at * size, turned) for at, part in enumerate(rows.split(size))]
    assert torch.equal(torch.cat(parts), wanted)
    pages = [page[:, None].clone() for tile in tiles for page in tile.unbind(1)]
    assert torch.equal(attended(pages, rows, 60, turned), wanted)


def test_latents_behind_a_row_change_no_bit() -> None:
    half, turned, rows = 48, 16, normal(100, HEADS, 96, seed=4)
    tiles = tiles_of(2, 2, tokens=256, half=half, dtype=torch.float32)
    out = attended(tiles, rows, 100, turned)
    for place, told in ((150, slice(50, 100)), (99, slice(0, 100)), (200, slice(0, 0))):
        changed = [tile.clone() for tile in tiles]
        tile, token = divmod(place, 2 * PAGE)
        changed[tile][:, token // PAGE, :, token % PAGE] = GARBAGE
        differs = (attended(changed, rows, 100, turned) != out).any(1).nonzero().flatten().tolist()
        assert differs == [*range(100)][told], place


def test_caches_attend_to_latents_as_by_torchs_operators() -> None:
    """In blocks of rows that end anywhere, past the ends of tiles."""
    half, turned = 48, 16

    def cache(prefill: PrefillAttention | None) -> FullCache:
        scoring = replace(scoring_of(torch.empty(0), turned), scale=None)
        shape = TileShape(1, half, PAGE, 2, torch.float32)
        return FullCache(Memory(torch.device("cpu")), shape, num_layers=1, scorings=[scoring], prefill=prefill)

    ours, theirs = cache(JOINED_KERNELS.prefill(PAGE)), cache(None)
    assert isinstance(JOINED_KERNELS.prefill(PAGE), LatentTiles)
    assert JOINED_KERNELS.prefill(HalvesTiling.of_latents(half, turned).step) is None
    for count in (130, 50, 200, 64):
        q, row = normal(count, HEADS, 2 * half, seed=count), normal(count, 1, 2 * half, seed=count + 1)
        found = []
        for each in (ours, theirs):
            each.begin("prefill", count)
            found.append(values_of(each.attend(0, q, row, row), half, turned))
            each.advance(count)
        assert_close(found[0], found[1], atol=1e-5, rtol=1e-4)
