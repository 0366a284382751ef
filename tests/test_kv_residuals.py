"""What cached keys and values have beside their codes in 4 bits: that both together give every number back, and that
kernels and twins agree to the bit. The GPU's program is in kv_residuals_interpreted.py."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kit.oracles import restore_kv_with_torch, split_off_kv_with_torch
from kit.processor import before_a_guard, best, built, on_this_machine
from offload.formats.layout import PageShape
from offload.formats.quantised_kv import GROUP, KVCodes, Order, encode_with_torch
from offload.formats.residuals import KEYS, VALUES, restore_pages, split_off_pages
from offload.native.interface import Library

ALL = torch.arange(1 << 16).to(torch.int16).view(torch.bfloat16)
USUAL = ALL[ALL.abs() < 2.0**126]  # 15 steps of a group are finite
HEADS, TOKENS = 3, 2 * GROUP
DIMS: list[tuple[int, Order]] = [
    *((8, "lanes"), (40, "lanes"), (48, "lanes"), (80, "lanes"), (128, "lanes"), (256, "lanes")),
    *((16, "matrices"), (48, "matrices"), (80, "matrices"), (96, "matrices"), (128, "matrices")),
]


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int16)


def normal(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def scattered(numbers: Tensor, *size: int, seed: int = 0) -> Tensor:
    return numbers[torch.randint(len(numbers), size, generator=torch.Generator().manual_seed(seed))]


def as_cached(*size: int) -> Tensor:
    """Channels of keys have offsets and magnitudes of their own, tokens of values magnitudes."""
    kv = normal(*size)
    kv[0] = kv[0] * normal(size[-1], seed=1).exp() + 4 * normal(size[-1], seed=2)
    kv[1] *= normal(size[-2], 1, seed=3).exp()
    return kv.bfloat16()


def sorts(dim: int) -> Iterator[tuple[str, Tensor]]:
    """Keys and values of pages, [2, HEADS, TOKENS, D], with their names."""
    size = 2, HEADS, TOKENS, dim
    share = torch.rand(size, generator=torch.Generator().manual_seed(4))
    small = scattered(USUAL[USUAL.abs() < 1.0], *size)
    yield "normal", normal(*size).bfloat16()
    yield "as cached", as_cached(*size)
    yield "escapes", torch.where(share < 0.05, small, as_cached(*size))
    yield "sparse", as_cached(*size) * (share < 0.4)
    yield (
        "zeros of both signs",
        torch.where(share < 0.3, torch.where(share < 0.15, 0.0, -0.0), normal(*size)).bfloat16(),
    )
    yield "subnormal", (normal(*size) * 1e-39).bfloat16()
    yield "small and large", (normal(*size) * 10.0 ** torch.arange(-26, 38)[:, None]).bfloat16()
    yield "all one", torch.full(size, -1.5).bfloat16()
    yield "channels of one number", as_cached(2, 1, 1, dim).expand(size).contiguous()
    yield "zeros", torch.zeros(size).bfloat16()
    yield "largest", scattered(torch.tensor([3.38e38, 1e38, 3.3e38, 1.5e38, 2e38]).bfloat16(), *size)


@dataclass(frozen=True)
class Page:
    """kv: bf16 [2, H_kv, S, D], and their codes, in the middle of those of a longer sequence."""

    kv: Tensor
    codes: KVCodes

    @classmethod
    def of(cls, kv: Tensor, order: Order) -> Page:
        _, heads, tokens, dim = kv.shape
        blocks = torch.full(KVCodes.shape_of_blocks(1, heads, tokens + 3 * GROUP, dim), 0xA5, dtype=torch.uint8)
        codes = KVCodes(blocks, dim, order).groups(2, 2 + tokens // GROUP)
        encode_with_torch(kv[None], codes)
        return cls(kv.clone(), codes)

    @property
    def shape(self) -> PageShape:
        return PageShape(*self.kv.shape[1:])

    @property
    def where(self) -> tuple[int, int]:
        """Of its codes: the address, and the bytes between heads."""
        return self.codes.blocks.data_ptr(), self.codes.blocks.stride(1)

    def split(self, kernels: Library) -> tuple[Tensor, list[int]]:
        """The residuals of keys and of values, in tensors like theirs, and the bytes of these."""
        split = torch.full_like(self.kv, torch.nan)
        parts = [(self.kv[kind].data_ptr(), split[kind].data_ptr(), *self.where, kind) for kind in (KEYS, VALUES)]
        most = self.kv[KEYS].nbytes
        return split, split_off_pages(torch.tensor(parts), self.shape, self.codes.order, kernels, most=most).tolist()

    def restored(self, split: Tensor, kind: int, kernels: Library, first: int = 0, count: int | None = None) -> Tensor:
        """`count` groups of keys or values from their residual, [groups, GROUP, D]."""
        count = self.shape.num_groups if count is None else count
        out = torch.full((count + 1, GROUP, self.shape.head_dim), torch.nan).bfloat16()
        parts = torch.tensor([(split.data_ptr(), out.data_ptr(), *self.where, kind, first, count)])
        restore_pages(parts, self.shape, self.codes.order, kernels)
        assert out[count].isnan().all()
        return out[:count]

    def groups(self, kind: int) -> Tensor:
        return self.kv[kind].reshape(-1, GROUP, self.shape.head_dim)


def content_of(block: Tensor) -> Tensor:
    return block.flatten().view(torch.uint8)


@pytest.fixture(params=on_this_machine() or ["none"])
def kernels(request: pytest.FixtureRequest) -> Library:
    if request.param == "none":
        pytest.skip("there are no kernels for this machine")
    return built(request.param)


@pytest.mark.parametrize("order", ["lanes", "matrices"])
def test_numbers_of_every_size_come_back_or_stay(order: Order, kernels: Library) -> None:
    """Next to each other, so that steps are small, and scattered, so that nearly all are near zero and escape: then
    there is no room."""
    for numbers, stay in ((USUAL.sort().values, False), (USUAL[torch.arange(len(USUAL)) * 40507 % len(USUAL)], True)):
        kv = numbers[: len(numbers) // 4096 * 4096].view(-1, 2 * GROUP, 64)
        page = Page.of(torch.stack([kv, kv]), order)
        split, sizes = page.split(kernels)
        for kind, size in enumerate(sizes):
            twin = split_off_kv_with_torch(kv, page.codes, kind)
            assert (size == 0) == (twin is None) == stay
            if twin is None:
                assert split[kind].isnan().all()
            else:
                assert torch.equal(content_of(split[kind])[:size], twin)
                assert torch.equal(bits(page.restored(split[kind], kind, kernels)), bits(page.groups(kind)))


@pytest.mark.parametrize(("dim", "order"), DIMS, ids=str)
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_nothing_is_read_behind_what_there_is(dim: int, order: Order, share: float, kernels: Library) -> None:
    """Any numbers may be near zero; where all are, no group has a step, and all escape."""
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        near = torch.rand(2, 1, TOKENS, dim, generator=generator) < share
        size = torch.rand(near.shape, generator=generator) * 0.2 + 0.05
        kv = torch.where(near, torch.where(size < 0.15, -size, size), 8 + size).bfloat16()
        blocks = torch.zeros(KVCodes.shape_of_blocks(1, 1, TOKENS, dim), dtype=torch.uint8)
        encode_with_torch(torch.where(near, 0.0, 8.0).bfloat16()[None], KVCodes(blocks, dim, order))
        with before_a_guard(kv) as numbers, before_a_guard(blocks) as all_codes:
            page = Page(numbers, KVCodes(all_codes, dim, order))
            for kind in (KEYS, VALUES):
                to = torch.empty(4 * kv[kind].nbytes, dtype=torch.uint8)
                parts = torch.tensor([(numbers[kind].data_ptr(), to.data_ptr(), *page.where, kind)])
                assert split_off_pages(parts, page.shape, order, kernels, most=len(to)) > 0
                heads = to[page.shape.numbers : page.shape.fours].clone().view(torch.int32).view(-1, 2)
                used = page.shape.fours + int(heads[-1].sum())
                if share == 1:
                    assert heads[-1].tolist() == [numbers[kind].numel() // 2, numbers[kind].numel()]
                assert torch.equal(bits(restore_kv_with_torch(to[:used], page.codes, kind)), bits(kv[kind]))
                with before_a_guard(to[:used]) as content:
                    assert torch.equal(bits(page.restored(content, kind, kernels)), bits(page.groups(kind)))


def test_a_block_that_would_grow_stays_and_one_that_just_fits_does_not(kernels: Library) -> None:
    """Of numbers near zero that escape, 20 bits each."""
    kv = as_cached(2, 1, GROUP, 16)
    fits = list[bool]()
    for count in range(0, 400, 3):
        few = kv.clone()
        few[:, 0].view(2, -1)[:, torch.randperm(512)[:count]] = 3e-20
        few[:, :, 0, :1], few[:, :, 1, :1] = 9.0, -9.0
        page = Page.of(few, "lanes")
        split, sizes = page.split(kernels)
        for kind, size in enumerate(sizes):
            twin = split_off_kv_with_torch(few[kind], page.codes, kind)
            assert size == (0 if twin is None else len(twin)) <= few[kind].nbytes
            assert size or split[kind].isnan().all()
            fits.append(size > 0)
    assert any(fits)
    assert not all(fits)


def test_nothing_is_written_of_what_takes_more_than_it_may(kernels: Library) -> None:
    """Nor anything behind what it takes."""
    page = Page.of(as_cached(2, HEADS, TOKENS, 48), "lanes")
    _, sizes = page.split(kernels)
    for kind, size in enumerate(sizes):
        for most, expected in ((size, size), (size - 16, 0)):
            to = torch.full((size + 64,), 0x5A, dtype=torch.uint8)
            parts = torch.tensor([(page.kv[kind].data_ptr(), to.data_ptr(), *page.where, kind)])
            assert split_off_pages(parts, page.shape, "lanes", kernels, most=most).tolist() == [expected]
            assert (to[expected:] == 0x5A).all()


def test_codes_that_stand_for_no_numbers_are_noticed(kernels: Library) -> None:
    page = Page.of(torch.zeros(2, HEADS, TOKENS, 64).bfloat16(), "lanes")
    for low in (torch.nan, torch.inf):
        page.codes.blocks.view(torch.bfloat16)[0, 1, 1, [7, 2 * (64 + 8 * 64 // 2 // 2) + 1]] = low
        page.codes.blocks.view(torch.bfloat16)[0, 1, 1, [3, 2 * (64 + 4 * 64) + 5]] = low
        assert page.split(kernels)[1] == [0, 0]
        assert [split_off_kv_with_torch(page.kv[kind], page.codes, kind) for kind in (KEYS, VALUES)] == [None, None]


@pytest.mark.parametrize("order", ["lanes", "matrices"])
@pytest.mark.parametrize("shift", [0, 4])
def test_one_wrong_code_of_a_page_is_noticed(order: Order, shift: int, kernels: Library) -> None:
    """Where it moves a number to the other side of zero: any near zero comes back whatever its code."""
    dim = 64
    kv = torch.where(normal(2, HEADS, TOKENS, dim) < 0, -3.0, 3.0) + 0.05 * normal(2, HEADS, TOKENS, dim, seed=1)
    page = Page.of(kv.bfloat16(), order)
    whole = page.split(kernels)[1]
    assert all(whole)
    for kind, at in ((KEYS, 4 * dim + 77), (VALUES, page.codes.blocks.shape[3] - 99)):
        page.codes.blocks[0, 2, 1, at] ^= 15 << shift
        assert split_off_kv_with_torch(page.kv[kind], page.codes, kind) is None
        split, sizes = page.split(kernels)
        assert sizes[kind] == 0
        assert sizes[1 - kind] == whole[1 - kind]
        assert split[kind].isnan().all()
        page.codes.blocks[0, 2, 1, at] ^= 15 << shift


def test_a_page_s_orders_have_one_residual(kernels: Library) -> None:
    kv = as_cached(2, HEADS, TOKENS, 80)
    pages = [Page.of(kv, order) for order in ("lanes", "matrices")]
    assert not torch.equal(pages[0].codes.blocks, pages[1].codes.blocks)
    (one, sizes), (other, other_sizes) = (page.split(kernels) for page in pages)
    assert sizes == other_sizes
    assert torch.equal(bits(one[0]).flatten()[: sizes[0] // 2], bits(other[0]).flatten()[: sizes[0] // 2])


def test_ranges_of_groups_are_restored_by_themselves(kernels: Library) -> None:
    """Across the border of two heads, too, and of several blocks in one call."""
    page = Page.of(as_cached(2, HEADS, 4 * GROUP, 48), "matrices")
    split, sizes = page.split(kernels)
    assert all(sizes)
    for kind in (KEYS, VALUES):
        for first, count in ((0, 1), (3, 2), (5, 7), (11, 1), (2, 0)):
            found = page.restored(split[kind], kind, kernels, first, count)
            assert torch.equal(bits(found), bits(page.groups(kind)[first : first + count]))
    out = torch.full((5, GROUP, 48), torch.nan).bfloat16()
    ranges = [(KEYS, 7, 4), (VALUES, 0, 1)]
    to = [out[0].data_ptr(), out[4].data_ptr()]
    parts = [
        (split[kind].data_ptr(), at, *page.where, kind, *which) for at, (kind, *which) in zip(to, ranges, strict=True)
    ]
    restore_pages(torch.tensor(parts), page.shape, "matrices", kernels)
    assert torch.equal(bits(out), bits(torch.cat([page.groups(KEYS)[7:11], page.groups(VALUES)[:1]])))


def test_nothing_is_split_where_there_is_nothing() -> None:
    shape, kernels = PageShape(1, GROUP, 8), best()
    assert len(split_off_pages(torch.empty(0, 5, dtype=torch.long), shape, "lanes", kernels, most=0)) == 0
    restore_pages(torch.empty(0, 7, dtype=torch.long), shape, "lanes", kernels)


def test_a_page_takes_nine_bits() -> None:
    """Fewer where keys are far from zero."""
    kv = normal(2, 4, 512, 128)
    kv[0] += 6 * normal(128, seed=2)
    page = Page.of(kv.bfloat16(), "lanes")
    keys, values = (split_off_kv_with_torch(page.kv[kind], page.codes, kind) for kind in (KEYS, VALUES))
    assert keys is not None
    assert values is not None
    assert 8.0 < 8 * len(keys) / page.kv[KEYS].numel() < 8.3
    assert 8.3 < 8 * len(values) / page.kv[VALUES].numel() < 9.05
