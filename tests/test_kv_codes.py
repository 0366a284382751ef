"""Keys and values in 4 bits: their making, bit for bit, and attention to them, against the rule in fp64."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from kit.processor import built, on_this_machine, threads
from offload.formats.layout import kv_code_bytes
from offload.formats.quantised_kv import CHANNELS, GROUP, KVCodes, encode, encode_with_torch
from offload.kernels.rope import RopeTable, Scoring
from offload.kernels.runs import Rows, Run
from offload.kernels.spans import SPAN, SpanAttention
from offload.native.interface import Library

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
DIMS = (8, 16, 40, 64, 80, 128, 256)  # of heads: less than a vector, no whole groups of channels, several


@pytest.fixture(params=on_this_machine() or ["none"])
def found(request: pytest.FixtureRequest) -> Library:
    if request.param == "none":
        pytest.skip("there are no kernels for this machine")
    return built(request.param)


def normal(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def held(num_layers: int, num_kv_heads: int, num_tokens: int, dim: int, dtype: torch.dtype) -> Tensor:
    """Keys and values [L, 2, H_kv, tokens, D]; channels of keys and tokens of values have magnitudes of their own."""
    kv = normal(num_layers, 2, num_kv_heads, num_tokens, dim, seed=dim)
    kv[:, 0] = kv[:, 0] * normal(dim, seed=1).exp() + normal(dim, seed=2)
    kv[:, 1] *= normal(num_tokens, 1, seed=3).exp()
    return kv.to(dtype)


def empty(rows: Tensor) -> KVCodes:
    """Memory for their codes, full of what is none."""
    num_layers, _, num_kv_heads, num_tokens, dim = rows.shape
    shape = KVCodes.shape_of_blocks(num_layers, num_kv_heads, num_tokens, dim)
    return KVCodes(torch.full(shape, 0xA5, dtype=torch.uint8), dim)


def encoded(found: Library, rows: Tensor) -> KVCodes:
    into = empty(rows)
    encode(rows, into, found)
    return into


# Making.


def test_a_part_of_the_tokens_is_encoded_where_it_belongs(found: Library) -> None:
    """From a part of longer rows, to groups in the middle."""
    rows = held(2, 2, 6 * GROUP, 40, torch.bfloat16)
    whole, into = encoded(found, rows), empty(rows)
    encode(rows[:, :, :, GROUP : 3 * GROUP], into.groups(1, 3), found)
    assert torch.equal(into.blocks[:, :, 1:3], whole.blocks[:, :, 1:3])
    assert bool((into.blocks[:, :, [0, 3, 4, 5]] == 0xA5).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_code_stands_for_a_number_half_a_step_away_at_most(dtype: torch.dtype) -> None:
    """A step is a fifteenth of the range of 32 keys of a channel, or of 64 channels of a value, rounded up to bf16."""
    for dim in DIMS:
        rows = held(1, 2, 2 * GROUP, dim, dtype)
        codes = empty(rows)
        encode_with_torch(rows, codes)
        error = (codes.rows(torch.float32) - rows.float()).abs()
        assert error.shape == rows.shape
        keys, values = rows.float().unbind(1)
        assert_within(error[:, 0].unflatten(2, (-1, GROUP)), keys.unflatten(2, (-1, GROUP)), 3)
        for first in range(0, dim, CHANNELS):
            assert_within(error[:, 1, ..., first : first + CHANNELS], values[..., first : first + CHANNELS], 3)


def assert_within(error: Tensor, numbers: Tensor, shared: int) -> None:
    """shared: the dimension along which they share a step."""
    low, high = numbers.aminmax(dim=shared, keepdim=True)
    largest = numbers.abs().amax(shared, keepdim=True)
    assert bool((error <= ((high - low) / 30 + largest / 256) * 1.02).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_in_a_gpus_order_codes_stand_for_the_same_numbers(dtype: torch.dtype) -> None:
    """Bit for bit, and of each number at its place; scales are where they are in the other order."""
    for dim in (16, 48, 64, 80, 128, 256):
        rows = held(2, 3, 3 * GROUP, dim, dtype)
        lanes = empty(rows)
        matrices = replace(empty(rows), order="matrices")
        for codes in (lanes, matrices):
            encode_with_torch(rows, codes)
        assert not torch.equal(lanes.blocks, matrices.blocks)
        assert torch.equal(lanes.rows(dtype), matrices.rows(dtype))
        block, token, channel = matrices.blocks[1, 2, 1], 21, dim - 3
        key, value = (block[at:][: dim * GROUP // 2] for at in (4 * dim, len(block) - dim * GROUP // 2))
        units = block.view(torch.bfloat16)
        step, low = units[2 * channel : 2 * channel + 2].float()
        assert (
            low + step * (key.view(-1, dim)[token - 16, channel] >> 4)
            == matrices.rows(torch.float32)[1, 0, 2, GROUP + token, channel]
        )
        first = 2 * dim + dim * GROUP // 4 + 2 * (channel // CHANNELS * GROUP + token)
        step, low = units[first : first + 2].float()
        assert (
            low + step * (value.view(dim, -1)[channel, token - 16] >> 4)
            == matrices.rows(torch.float32)[1, 1, 2, GROUP + token, channel]
        )


def test_codes_take_the_bytes_of_the_plan() -> None:
    """5 bits a key and 4.5 a value where channels fill their groups."""
    assert kv_code_bytes(128) == GROUP * 128 * (5 + 4.5) / 8
    assert KVCodes.shape_of_blocks(3, 2, 5 * GROUP + 7, 40)[1:] == (2, 5, kv_code_bytes(40))


# Attention.


def still(num_positions: int, dim: int, dtype: torch.dtype) -> RopeTable:
    """A rotation by nothing."""
    return RopeTable(torch.ones(num_positions, dim, dtype=dtype), torch.zeros(num_positions, dim, dtype=dtype))


def attend(
    found: Library,
    codes: KVCodes,
    q: Tensor,
    num_tokens: int,
    exact: Tensor | None = None,
    cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """(out [T, H, D] fp32, lse [T, H]) of queries [T, H, D] over the first tokens of layer 0 in codes, and over the
    rows `exact` [2, H_kv, n, D] where they are given."""
    num_rows, dtype, dim = len(q), q.dtype, q.shape[2]
    new = torch.zeros(num_rows, codes.blocks.shape[1], dim, dtype=dtype)
    spans = SpanAttention(found, dtype=dtype, span=SPAN)
    runs = [Run(codes.blocks[0], num_tokens)]
    position = 0 if exact is None else exact.shape[2]
    if exact is not None:
        runs.insert(0, Run(exact, position))
    scoring = Scoring(still(num_rows + 4096, dim, dtype), cap=cap)
    spans.begin(Rows(q, new, new, scoring, position, position), [run.tokens for run in runs])
    for run in runs:
        spans.attend(run)
    part = spans.part()
    return part.out, part.lse


def by_the_rule(kv: Tensor, q: Tensor, cap: float | None = None) -> tuple[Tensor, Tensor]:
    """The same in fp64. kv: [2, H_kv, tokens, D]."""
    keys, values = kv.double().repeat_interleave(q.shape[1] // kv.shape[1], 1).unbind()
    scores = torch.einsum("thd,hnd->thn", q.double(), keys) * q.shape[2] ** -0.5
    scores = scores if cap is None else cap * (scores / cap).tanh()
    return torch.einsum("thn,hnd->thd", scores.softmax(-1), values), scores.logsumexp(-1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", DIMS)
def test_attention_is_near_the_rule(found: Library, dim: int, dtype: torch.dtype) -> None:
    """Queries and weights have 8 bits each for a group: the error is a fraction of what the codes lack."""
    for num_tokens, group, num_rows in ((GROUP, 1, 1), (SPAN, 2, 3), (SPAN + GROUP, 3, 1), (5 * SPAN, 1, 9)):
        rows = held(1, 2, num_tokens, dim, dtype)
        codes = encoded(found, rows)
        q = normal(num_rows, 2 * group, dim, seed=num_rows).to(dtype)
        out, lse = attend(found, codes, q, num_tokens)
        wanted, wanted_lse = by_the_rule(codes.rows(torch.float64)[0], q)
        lacking = float((by_the_rule(rows[0], q)[0] - wanted).square().mean().sqrt())
        assert float((out - wanted).square().mean().sqrt()) < 0.75 * lacking
        assert_close(lse.double(), wanted_lse, rtol=0, atol=0.5)


def test_scores_of_codes_are_capped(found: Library) -> None:
    rows = 2 * held(1, 2, 2 * SPAN, 64, torch.float32)
    codes, q = encoded(found, rows), 2 * normal(3, 4, 64, seed=9)
    out, lse = attend(found, codes, q, 2 * SPAN, cap=1.5)
    wanted, wanted_lse = by_the_rule(codes.rows(torch.float64)[0], q, cap=1.5)
    uncapped = by_the_rule(codes.rows(torch.float64)[0], q)[0]
    assert_close(lse.double(), wanted_lse, rtol=0, atol=0.1)
    assert float((out - wanted).abs().max()) < 0.1 * float((uncapped - wanted).abs().max())


def test_codes_and_exact_rows_are_attended_to_as_one(found: Library) -> None:
    rows, exact = held(1, 2, 2 * SPAN, 64, torch.float32), normal(2, 2, 37, 64, seed=8)
    codes, q = encoded(found, rows), normal(2, 4, 64, seed=9)
    out, lse = attend(found, codes, q, 2 * SPAN, exact)
    wanted, wanted_lse = by_the_rule(torch.cat([exact, codes.rows(torch.float32)[0]], 2), q)
    assert_close(out.double(), wanted, rtol=0, atol=0.1)
    assert_close(lse.double(), wanted_lse, rtol=0, atol=0.1)


@pytest.mark.parametrize("code", [0, 15])
def test_the_largest_sums_do_not_overflow(found: Library, code: int) -> None:
    """All codes are the least or the largest; numbers of a query are 127 or -127, weights are alike: products of whole
    numbers are exact."""
    dim = 256
    codes = empty(torch.zeros(1, 1, 2, SPAN, dim).transpose(1, 2))
    codes.blocks.fill_(code * 17)
    scales = torch.tensor([1.0, -2.0]).bfloat16().view(torch.uint8)
    for first, count in ((0, dim), (dim * 4 + dim * GROUP // 2, dim // CHANNELS * GROUP)):  # of keys, of values
        codes.blocks[..., first : first + 4 * count] = scales.repeat(count)
    q = torch.full((2, 2, dim), 127.0)
    q[1] = -127.0
    out, lse = attend(found, codes, q, SPAN)
    assert_close(out, torch.full_like(out, code - 2.0), rtol=1e-6, atol=0)
    score = q[:, :, 0] * dim * (code - 2) / dim**0.5
    assert_close(lse, score + torch.tensor(SPAN).log(), rtol=1e-6, atol=0)


def test_a_row_has_the_same_bits_beside_any_rows(found: Library) -> None:
    """At every place among them, on 1 to 4 threads; one of the rows beside it is NaN."""
    rows, most = held(1, 2, 3 * SPAN + GROUP, 80, torch.bfloat16), 19
    codes, num_tokens = encoded(found, rows), rows.shape[3]
    q = normal(most, 6, 80, seed=5).bfloat16()
    q[4] = torch.nan
    alone = torch.cat([attend(found, codes, q[i : i + 1], num_tokens)[0] for i in range(most)])
    assert bool(alone[4].isnan().all())
    sound = torch.arange(most) != 4
    for count in (2, 3, 5, 8, 19):
        places = (torch.arange(count) + 7 * count) % most
        with threads(1 + count % 4):
            out = attend(found, codes, q[places], num_tokens)[0]
        assert torch.equal(out[sound[places]], alone[places][sound[places]])


def test_what_is_not_a_number_stays_so_and_infinite_queries_too(found: Library) -> None:
    codes = encoded(found, held(1, 1, SPAN, 64, torch.float32))
    q = normal(3, 1, 64)
    q[1, 0, 9] = torch.inf
    assert attend(found, codes, q, SPAN)[0].isfinite().flatten(1).all(1).tolist() == [True, False, True]


def test_a_run_of_codes_is_given_to_the_kernels_as_the_headers_say(found: Library) -> None:
    """After another run, of which nothing is left."""
    codes = KVCodes(torch.zeros(2, 3, 5, kv_code_bytes(16), dtype=torch.uint8), 16)
    spans, k = SpanAttention(found, dtype=torch.float32, span=SPAN), torch.zeros(1, 3, 16)
    spans.begin(Rows(k, k, k, Scoring(still(9, 16, k.dtype)), 0, 7), [SPAN + 1, 4 * GROUP], lasts=(1, 1))
    spans.attend(Run(torch.zeros(2, 3, SPAN + 1, 16), SPAN + 1, 3, query=1, windowed=True))
    spans._take(Run(codes.blocks[1], 4 * GROUP))
    [run] = spans._runs
    assert (run.keys, run.head_stride) == (codes.blocks[1].data_ptr(), 5 * kv_code_bytes(16))
    assert (run.tokens, run.slot, run.span, run.coded) == (4 * GROUP, 2, SPAN, 1)
    assert (run.first, run.query, run.windowed) == (0, 0, 0)
    assert ctypes.sizeof(run) == 13 * 8
