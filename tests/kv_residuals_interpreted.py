"""A GPU's program of pages that are residuals in Triton's interpreter, on a CPU: see packed_interpreted.py."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kit.interpreter import without_idle_work
from kit.oracles import split_off_kv_with_torch
from offload.formats.layout import RESIDUAL, PageShape
from offload.formats.quantised_kv import GROUP, KVCodes, encode_with_torch
from offload.formats.residuals_gpu import restore_tile

HEADS, PAGE, PAGES = 3, 2 * GROUP, 3
DIMS = [64, 80, 16, 32, 48, 128, 256, 512]

without_idle_work()


def normal(*size: int, seed: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def bits(rows: Tensor) -> Tensor:
    return rows.contiguous().view(torch.int16)


def all_sorts(dim: int, share: float) -> Tensor:
    """Keys and values [2, PAGES, HEADS, PAGE, D], a share of them any smaller number, which escape."""
    size = 2, PAGES, HEADS, PAGE, dim
    kv = normal(*size, seed=dim)
    kv[0] = kv[0] * normal(dim, seed=1).exp() + 3 * normal(dim, seed=2)
    every = torch.arange(1 << 16).to(torch.int16).view(torch.bfloat16)
    small = every[every.abs() < 1.0]
    generator = torch.Generator().manual_seed(dim)
    some = small[torch.randint(len(small), size, generator=generator)]
    found = torch.where(torch.rand(size, generator=generator) < share, some, kv.bfloat16())
    found[0, ..., 5], found[1, :, 1, 40] = -1.5, 0.0
    found[:, :, 2, 33, :8] = torch.tensor([0.0, -0.0, 1e-40, -1e-40, 1e-20, -1e-20, 1e5, -1e5])
    found[:, 2, 0, 3] = torch.tensor([1e30, -1e30]).repeat(dim // 2)
    return found


@dataclass(frozen=True)
class Tile:
    """exact: bf16 [2, PAGES, HEADS, PAGE, D]. codes: uint8 [HEADS, groups, bytes] of tokens that begin `first` groups
    before the tile's, or after them."""

    exact: Tensor
    first: int
    codes: Tensor

    @classmethod
    def of(cls, exact: Tensor, first: int) -> Tile:
        """With other bytes before and behind the codes of a head, and in other layers."""
        num_tokens, dim = PAGES * exact.shape[3], exact.shape[4]
        num_groups = first + num_tokens // GROUP
        shape = KVCodes.shape_of_blocks(2, HEADS, (num_groups + 2) * GROUP, dim)
        codes = KVCodes(torch.full(shape, 0xA5, dtype=torch.uint8), dim, "matrices")
        rows = exact.transpose(1, 2).reshape(2, HEADS, num_tokens, dim)[:, :, max(-first, 0) * GROUP :]
        into = KVCodes(codes.blocks[1:], dim, "matrices")
        encode_with_torch(rows[None], into.groups(max(first, 0), num_groups))
        return cls(exact, first, codes.blocks[1])

    @property
    def shape(self) -> PageShape:
        return PageShape(*self.exact.shape[2:])

    def page(self, number: int) -> KVCodes:
        of_page = self.shape.page_tokens // GROUP
        first = self.first + number * of_page
        return KVCodes(self.codes[None], self.shape.head_dim, "matrices").groups(first, first + of_page)

    def crossed(self, flags: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The residuals of those pages as they come, one after the other, and other bytes before each; and where each
        begins, int64 [2, pages]."""
        found, starts, at = list[Tensor](), torch.full((2, len(flags)), 10**9), 0
        for number in (flags == RESIDUAL).nonzero().flatten().tolist():
            for kind in range(2):
                content = split_off_kv_with_torch(self.exact[kind, number], self.page(number), kind)
                assert content is not None
                found += [torch.full((16,), 0xA5, dtype=torch.uint8), content]
                starts[kind, number] = at + 16
                at += 16 + len(content)
        slot = torch.full_like(self.exact, torch.nan)
        slot.view(-1).view(torch.uint8)[:at] = torch.cat(found)
        return slot, flags, part_of_more(starts)


def part_of_more(entries: Tensor) -> Tensor:
    """The same, in rows that are those of a larger tensor."""
    return torch.nn.functional.pad(entries, (2, 3), value=2)[..., 2:-3]


def flags_of(flags: list[int]) -> Tensor:
    return part_of_more(torch.tensor(flags, dtype=torch.uint8))


@pytest.mark.few(1)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("share", [0.1, 0.0])
@pytest.mark.parametrize("first", [5, 0])
def test_pages_are_restored_bit_for_bit_and_others_left_alone(dim: int, share: float, first: int) -> None:
    tile = Tile.of(all_sorts(dim, share), first)
    for flags in (flags_of([2, 0, 2]), flags_of([1, 2, 2])):
        out = torch.full_like(tile.exact, 7.0)
        restore_tile(out, *tile.crossed(flags), tile.codes, first, tile.shape)
        of_pages = flags == RESIDUAL
        assert torch.equal(bits(out[:, of_pages]), bits(tile.exact[:, of_pages]))
        assert (out[:, ~of_pages] == 7.0).all()


def test_a_tile_s_first_tokens_may_have_no_codes() -> None:
    """Nor a page that they are in; and of pages behind the last one nothing is looked at."""
    tile, flags = Tile.of(all_sorts(48, 0.02), -1), flags_of([0, 2])
    out = torch.full_like(tile.exact, 7.0)
    restore_tile(out, *tile.crossed(flags), tile.codes, -1, tile.shape)
    assert torch.equal(bits(out[:, 1]), bits(tile.exact[:, 1]))
    assert (out[:, [0, 2]] == 7.0).all()


def test_pages_of_one_group_are_restored() -> None:
    tile, flags = Tile.of(all_sorts(32, 0.02)[:, :, :, :GROUP].contiguous(), 1), flags_of([2, 2, 2])
    out = torch.full_like(tile.exact, 7.0)
    restore_tile(out, *tile.crossed(flags), tile.codes, 1, tile.shape)
    assert torch.equal(bits(out), bits(tile.exact))
