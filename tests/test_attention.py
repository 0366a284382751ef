"""Attention in parts: compared with a plain fp64 softmax, and the claims about bits that exactness depends on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from kit.examples import at_most
from offload.kernels import attention
from offload.kernels.attention import (
    Part,
    attend,
    attend_joined,
    attend_whole_pages,
    count_up,
    fold,
    merge,
    unfold,
)
from offload.kernels.prefill import OperatorBlock

DTYPES = [torch.float32, torch.bfloat16]
# Against fp64 with the same (rounded) inputs. bf16: scores, weights and the product are rounded to 8 bits of mantissa.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 5e-2}
GARBAGE = 3e4


@dataclass(frozen=True)
class Example:
    """q [H_kv, R, D], keys and values [P, H_kv, S, D], and the tokens [first, num) that each row sees."""

    q: Tensor
    keys: Tensor
    values: Tensor
    num_visible: Tensor
    first_visible: Tensor

    @property
    def seen(self) -> Tensor:
        """The keys that each row sees: bool [R, P * S]."""
        index = torch.arange(self.keys.shape[0] * self.keys.shape[2])
        return (index < self.num_visible[:, None]) & (index >= self.first_visible[:, None])


def assert_near(case: Example, actual: Tensor, wanted: Tensor) -> None:
    tolerance = TOLERANCE[case.q.dtype]
    assert_close(actual, wanted, atol=tolerance, rtol=tolerance)


@st.composite
def examples(draw: st.DrawFn) -> Example:
    pages, heads, page, rows = (draw(st.integers(1, most)) for most in (4, 3, 8, 9))
    dim = draw(st.sampled_from([2, 8, 16]))
    dtype = draw(st.sampled_from(DTYPES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    tokens = pages * page
    visible = [draw(st.integers(0, tokens)) for _ in range(rows)]
    return Example(
        (2 * torch.randn(heads, rows, dim, generator=generator)).to(dtype),
        torch.randn(pages, heads, page, dim, generator=generator).to(dtype),
        torch.randn(pages, heads, page, dim, generator=generator).to(dtype),
        torch.tensor(visible),
        torch.tensor([draw(st.integers(0, max(num, 1))) for num in visible]),
    )


def reference(case: Example) -> tuple[Tensor, Tensor, Tensor]:
    """(out [H_kv, R, D], lse [H_kv, R], weights [H_kv, R, P * S]) in fp64; 0, -inf and 0 for a row that sees no key."""
    keys, values = (tensor.double().transpose(0, 1).flatten(1, 2) for tensor in (case.keys, case.values))
    scores = case.q.double() @ keys.transpose(1, 2) / case.q.shape[-1] ** 0.5
    scores = scores.masked_fill(~case.seen, -torch.inf)
    weights = scores.softmax(-1).nan_to_num()
    return weights @ values, scores.logsumexp(-1), weights


def run(case: Example, *, chunk: int | None = None) -> Part:
    return attend(case.q, case.keys, case.values, case.num_visible, first_visible=case.first_visible, chunk=chunk)


@given(examples())
@at_most(80)
def test_attend_equals_a_plain_softmax(case: Example) -> None:
    part, (out, lse, _) = run(case), reference(case)
    assert part.out.dtype == part.lse.dtype == torch.float32
    assert_near(case, part.out.double(), out)
    assert_near(case, part.lse.double(), lse)
    assert part.mass is None


@given(examples())
@at_most(40)
def test_a_row_that_sees_nothing_has_out_zero_and_lse_minus_infinity(case: Example) -> None:
    part, blind = run(case), ~case.seen.any(1)
    assert (part.out[:, blind] == 0).all()
    assert (part.lse[:, blind] == -torch.inf).all()
    assert part.out.isfinite().all()
    assert part.lse[:, ~blind].isfinite().all()


@given(examples())
@at_most(40)
def test_visibility_none_means_everything(case: Example) -> None:
    whole = Example(
        case.q,
        case.keys,
        case.values,
        torch.full_like(case.num_visible, case.keys.shape[0] * case.keys.shape[2]),
        torch.zeros_like(case.first_visible),
    )
    part, masked = attend(case.q, case.keys, case.values, None), run(whole)
    assert torch.equal(part.out, masked.out)
    assert torch.equal(part.lse, masked.lse)


@given(examples(), st.data())
@at_most(60)
def test_mass_is_the_share_of_each_chunk(case: Example, data: st.DataObject) -> None:
    page = case.keys.shape[2]
    chunk = data.draw(st.sampled_from([size for size in range(1, page + 1) if page % size == 0]))
    part, plain, (_, _, weights) = run(case, chunk=chunk), run(case), reference(case)
    assert part.mass is not None
    assert_near(case, part.mass.double(), weights.unflatten(-1, (-1, chunk)).sum(-1))
    assert torch.equal(part.out, plain.out)
    assert torch.equal(part.lse, plain.lse)


@given(examples(), st.data())
@at_most(60)
def test_merged_tiles_equal_attention_over_all_keys_and_their_masses_sum_to_one(
    case: Example, data: st.DataObject
) -> None:
    """Tiles are pages here. Each tile's mass, scaled by its share exp(lse of the tile - lse of all)."""
    pages = case.keys.shape[0]
    parts = [tile(case, index, chunk=1) for index in range(pages)]
    merged = parts[0]
    for part in parts[1:]:
        merged = merge(merged, part)
    out, lse, weights = reference(case)
    assert_near(case, merged.out.double(), out)
    assert_near(case, merged.lse.double(), lse)
    masses = [part.mass * (part.lse - merged.lse).exp()[..., None] for part in parts if part.mass is not None]
    total = torch.cat(masses, -1)
    sighted = case.seen.any(1)
    assert_close(total.sum(-1)[:, sighted], torch.ones_like(total.sum(-1)[:, sighted]), atol=1e-5, rtol=0)
    assert_near(case, total.double()[:, sighted], weights[:, sighted])


def tile(case: Example, index: int, *, chunk: int | None = None) -> Part:
    """Attention over one page, with each row's visible tokens counted from the start of the page."""
    page = case.keys.shape[2]
    visible = [(bound - index * page).clamp(0, page) for bound in (case.num_visible, case.first_visible)]
    keys, values = case.keys[index : index + 1], case.values[index : index + 1]
    return attend(case.q, keys, values, visible[0], first_visible=visible[1], chunk=chunk)


@given(examples())
@at_most(80)
def test_what_hidden_keys_hold_changes_no_bit(case: Example) -> None:
    hidden = ~case.seen.any(0).view(case.keys.shape[0], 1, case.keys.shape[2], 1)
    other = Example(
        case.q,
        torch.where(hidden, GARBAGE * case.keys.sign(), case.keys.float()).to(case.q.dtype),
        torch.where(hidden, -GARBAGE, case.values.float()).to(case.q.dtype),
        case.num_visible,
        case.first_visible,
    )
    chunk = case.keys.shape[2]
    assert_same_bits(run(case, chunk=chunk), run(other, chunk=chunk))


@given(examples(), st.data())
@at_most(80)
def test_a_rows_bits_do_not_depend_on_the_rows_beside_it(case: Example, data: st.DataObject) -> None:
    """Nor on where it stands among them: at a fixed number of rows only its own query and visibility matter. The other
    rows see all keys, with enormous scores."""
    rows = case.q.shape[1]
    old, new = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, rows - 1))
    q = GARBAGE * torch.ones_like(case.q)
    q[:, new] = case.q[:, old]
    tokens = case.keys.shape[0] * case.keys.shape[2]
    num, first = torch.full_like(case.num_visible, tokens), torch.zeros_like(case.first_visible)
    num[new], first[new] = case.num_visible[old], case.first_visible[old]
    chunk = case.keys.shape[2]
    here = run(case, chunk=chunk)
    there = run(Example(q, case.keys, case.values, num, first), chunk=chunk)
    assert_same_bits(row_of(here, old), row_of(there, new))


def row_of(part: Part, row: int) -> Part:
    assert part.mass is not None
    return Part(part.out[:, row], part.lse[:, row], part.mass[:, row])


def assert_same_bits(first: Part, second: Part) -> None:
    assert torch.equal(first.out, second.out)
    assert torch.equal(first.lse, second.lse)
    assert first.mass is not None
    assert second.mass is not None
    assert torch.equal(first.mass, second.mass)


@given(examples(), st.booleans())
@at_most(60)
def test_merging_a_part_that_a_row_does_not_see_changes_none_of_its_bits(case: Example, comes_first: bool) -> None:
    part = run(case)
    blind = attend(case.q, case.keys, case.values, torch.zeros_like(case.num_visible))
    merged = merge(blind, part) if comes_first else merge(part, blind)
    assert torch.equal(merged.out, part.out)
    assert torch.equal(merged.lse, part.lse)


@pytest.mark.parametrize("comes_first", [False, True])
def test_merging_a_part_that_weighs_nothing_changes_no_bit(comes_first: bool) -> None:
    """The contents of such a part must not change the result, not even by a millionth."""
    part, light = (
        Part(torch.full((1, 2, 3), out), torch.full((1, 2), lse)) for out, lse in ((1.5, 1.0), (1e4, -200.0))
    )
    merged = merge(light, part) if comes_first else merge(part, light)
    assert torch.equal(merged.out, part.out)
    assert torch.equal(merged.lse, part.lse)


@pytest.mark.parametrize("rows", [2, 3, 8, 16, 31, 64])
def test_a_rows_pages_are_summed_in_one_order_however_many_rows_there_are(rows: int) -> None:
    """Pages of one token, and queries of one number that is not 0: every product is exact, sums over pages are not."""
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(40, 2, 1, 64, generator=generator) for _ in range(2))
    q = torch.zeros(2, 1, 64)
    q[..., 0] = 8.0
    alone = attend(q, keys, values, None, chunk=1)
    among = attend(q.expand(-1, rows, -1).contiguous(), keys, values, None, chunk=1)
    for row in range(rows):
        assert_same_bits(row_of(among, row), row_of(alone, 0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 4, 16, 64])
def test_the_bit_claims_hold_at_the_sizes_of_real_models(rows: int, dtype: torch.dtype) -> None:
    """Other kernels run than on tiny shapes: head_dim 64 and 128, pages of 512, two query heads per KV head."""
    generator = torch.Generator().manual_seed(0)
    for dim in (64, 128):
        q = torch.randn(2, 2 * rows, dim, generator=generator).to(dtype)
        keys, values = (torch.randn(2, 2, 512, dim, generator=generator).to(dtype) for _ in range(2))
        visible = torch.full((2 * rows,), 700)
        here = attend(q, keys, values, visible, chunk=16)
        roll = rows // 2 + 1
        keys[1, :, 700 - 512 :], values[1, :, 700 - 512 :] = GARBAGE, -GARBAGE
        there = attend(q.roll(roll, 1), keys, values, visible, chunk=16)
        assert here.mass is not None
        assert there.mass is not None
        assert_same_bits(here, Part(there.out.roll(-roll, 1), there.lse.roll(-roll, 1), there.mass.roll(-roll, 1)))


@given(rows=st.integers(1, 6), kv_heads=st.integers(1, 3), group=st.integers(1, 3), dim=st.sampled_from([2, 4, 8]))
@example(rows=3, kv_heads=2, group=2, dim=4)
@at_most(30)
def test_folding_puts_the_query_heads_of_a_kv_head_side_by_side(rows: int, kv_heads: int, group: int, dim: int) -> None:
    q = torch.randn(rows, kv_heads * group, dim)
    folded = fold(q, kv_heads)
    for row in range(rows):
        for head in range(kv_heads * group):
            assert torch.equal(folded[head // group, head % group * rows + row], q[row, head])
    assert torch.equal(unfold(folded, rows), q.flatten(1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pages", [1, 3])
def test_the_fused_kernel_over_whole_pages_gives_the_same_part(pages: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(pages)
    q = torch.randn(2, 20, 16, generator=generator).to(dtype)
    keys, values = (torch.randn(pages, 2, 24, 16, generator=generator).to(dtype) for _ in range(2))
    fused, plain = attend_whole_pages(q, keys, values), attend(q, keys, values, None)
    tolerance = TOLERANCE[dtype]
    assert_close(fused.out, plain.out, atol=tolerance, rtol=tolerance)
    assert_close(fused.lse, plain.lse, atol=tolerance, rtol=tolerance)


@pytest.fixture
def limited_amx(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A CPU with matrix units, and torch kept from AVX-512: its fused kernel as it is there."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

    def packing(q: Tensor, *args: Any, **more: Any) -> Any:
        if q.dtype != torch.float32:
            raise RuntimeError("pack_vnni2 is only supported when avx512 is supported")
        return kernel(q, *args, **more)

    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", packing)
    monkeypatch.setattr(attention, "cpu_features", lambda: ("avx2", "avx512f", "avx512_bf16", "amx_bf16"))
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    attention._orders_for_matrix_units.cache_clear()
    yield
    attention._orders_for_matrix_units.cache_clear()


@pytest.mark.usefixtures("limited_amx")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_prefill_attends_where_torch_is_kept_from_avx512_on_a_cpu_with_amx(dtype: torch.dtype) -> None:
    """Bug: ATEN_CPU_CAPABILITY=avx2 ended each bf16 prefill there."""
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(2, 80, 16, generator=generator).to(dtype)
    tile = torch.randn(2, 3, 2, 24, 16, generator=generator).to(dtype)
    block = OperatorBlock(q, first=30, count=40, fused=True)
    block.attend(tile, 0)
    plain = OperatorBlock(q, first=30, count=40)
    plain.attend(tile, 0)
    assert_close(block.attended(), plain.attended(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("first", [-70, -3, 0, 5, 60])
def test_the_fused_kernel_over_pages_seen_in_part_gives_the_same_part(first: int, dtype: torch.dtype) -> None:
    """Rows that see nothing, too: they weigh nothing in a merge. What is hidden is not seen, whatever it is."""
    generator = torch.Generator().manual_seed(first + 100)
    q = torch.randn(2, 2 * 40, 16, generator=generator).to(dtype)
    keys, values = (torch.randn(3, 2, 24, 16, generator=generator).to(dtype) for _ in range(2))
    visible = count_up(first + 1, 40, q).clamp_(0, 72)
    last = int(visible.max())
    for tensor in (keys, values):
        hidden = torch.arange(72).view(3, 1, 24, 1) >= last
        tensor.copy_(torch.where(hidden, GARBAGE, tensor))
    fused, plain = attend_joined(q, keys, values, visible), attend(q, keys, values, visible)
    tolerance = TOLERANCE[dtype]
    assert torch.equal(fused.lse == -torch.inf, (visible == 0).expand(2, -1))
    assert (fused.out[:, visible == 0] == 0).all()
    assert_close(fused.out, plain.out, atol=tolerance, rtol=tolerance)
    assert_close(fused.lse, plain.lse, atol=tolerance, rtol=tolerance)
