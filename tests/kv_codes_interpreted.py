"""A GPU's attention to keys and values in 4 bits in Triton's interpreter, on a CPU: see gpu_interpreted.py."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from gpu_interpreted import KV_HEADS, TOLERANCE, Unwritten, assert_near, normal, turning, unmoving
from kit.interpreter import products_by_row, without_idle_work
from kit.models import LateLink
from offload.formats.quantised_kv import GROUP, KVCodes, encode_with_torch
from offload.formats.quantised_kv_gpu import encode
from offload.kernels.gpu.kernels import GPU_KERNELS
from offload.kernels.gpu.tiling import SPAN
from offload.kernels.rope import Scoring
from offload.kernels.runs import Rows, Run
from offload.kv import fetch, quantised
from offload.kv.fetch import GpuFetch
from offload.kv.full import FullCache
from offload.kv.quantised import EXACT, QuantisedCache
from offload.pages.storage import Offload
from offload.pages.tiles import TileShape
from offload.plan.sizing import KV_TAIL
from offload.transfer.memory import Memory

COUNTS = (1, 3, 16)  # rows
LAYERS = 2

without_idle_work()


@pytest.fixture(autouse=True)
def _products_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    products_by_row(monkeypatch)


def kept(num_tokens: int, dim: int, dtype: torch.dtype, *, num_layers: int = 1) -> KVCodes:
    """Codes of keys whose channels, and values whose tokens, have magnitudes of their own; beside them other bytes."""
    rows = normal(num_layers, 2, KV_HEADS, num_tokens, dim, seed=dim)
    rows[:, 0] = rows[:, 0] * normal(dim, seed=1).exp() + normal(dim, seed=2)
    rows[:, 1] *= normal(num_tokens, 1, seed=3).exp()
    shape = KVCodes.shape_of_blocks(num_layers, KV_HEADS, num_tokens + 2 * GROUP, dim)
    codes = KVCodes(torch.full(shape, 0xA5, dtype=torch.uint8), dim, "matrices")
    encode_with_torch(rows.to(dtype), codes.groups(0, num_tokens // GROUP))
    codes.blocks[:, :, num_tokens // GROUP :] = 0xFF  # steps and lows that are no numbers
    return codes


def exact_rows(codes: KVCodes, num_tokens: int, dtype: torch.dtype, layer: int = 0) -> Tensor:
    """[2, H_kv, tokens, D] fp64, as the kernel rounds them: in bf16 the interpreter cuts off."""
    coded = codes.groups(0, num_tokens // GROUP)
    rows = coded.rows(torch.float32 if dtype == torch.bfloat16 else dtype)[layer]
    return (rows.view(torch.int32) & ~0xFFFF).view(torch.float32).double() if dtype == torch.bfloat16 else rows.double()


def attended(
    codes: KVCodes, num_tokens: int, q: Tensor, *, exact: Tensor | None = None, span: int = SPAN, layer: int = 0,
    cap: float | None = None, sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out [T, H, D], lse [T, H]) of rows q [T, H, D] over codes, and before that over tokens `exact` [2, H_kv, n, D],
    more than a span, the last of which are the rows'."""
    attention = Unwritten(dtype=q.dtype, span=span)
    new = torch.zeros(len(q), KV_HEADS, q.shape[2], dtype=q.dtype)
    num_exact = 0 if exact is None else exact.shape[2]
    runs = [Run(codes.blocks[layer], num_tokens)]
    if exact is not None:  # in two runs: the launch over codes folds the second of them
        runs[:0] = [Run(exact[:, :, :span], span), Run(exact[:, :, span:], num_exact - span, span)]
    scoring = Scoring(unmoving(q.shape[2], q.dtype), cap=cap, sink_logits=sinks)
    attention.begin(Rows(q, new, new, scoring, 0, num_exact - len(q)), [run.tokens for run in runs])
    for run in runs:
        attention.attend(run)
    part = attention.part()
    return part.out, part.lse


def in_fp64(kv: Tensor, q: Tensor, num_hidden: int = 0, cap: float | None = None) -> tuple[Tensor, Tensor]:
    """Over kv [2, H_kv, n, D], of whose first tokens row t does not see those after `num_hidden` + t where that is
    given."""
    keys, values = kv.repeat_interleave(q.shape[1] // KV_HEADS, 1).unbind()
    scores = torch.einsum("thd,hnd->thn", q.double(), keys) * q.shape[2] ** -0.5
    scores = scores if cap is None else cap * (scores / cap).tanh()
    if num_hidden:
        hidden = torch.arange(num_hidden) > (num_hidden - len(q) + torch.arange(len(q)))[:, None]
        scores[..., :num_hidden].masked_fill_(hidden[:, None], -torch.inf)
    return torch.einsum("thn,hnd->thd", scores.softmax(-1), values), scores.logsumexp(-1)


def assert_rounded(actual: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor], dtype: torch.dtype) -> None:
    """Weights are rounded before they meet the values; scores are larger than of random keys."""
    scale, most = wanted[0].square().mean().sqrt(), 2 * TOLERANCE[dtype]
    assert_close(actual[0] / scale, wanted[0] / scale, rtol=most, atol=most, check_dtype=False)
    assert_close(actual[1].double(), wanted[1], rtol=0, atol=10 * TOLERANCE[dtype])


def test_sink_logits_are_beside_codes_and_exact_rows_once() -> None:
    codes, exact = kept(5 * GROUP, 64, torch.float32), normal(2, KV_HEADS, 70, 64, seed=8)
    q, sinks = normal(5, 3 * KV_HEADS, 64, seed=9), torch.tensor([9.0, -4.0, 6.0, 5.0, 8.0, 3.0])
    out, lse = attended(codes, 5 * GROUP, q, exact=exact, span=64)
    sunk, sunk_lse = attended(codes, 5 * GROUP, q, exact=exact, span=64, sinks=sinks)
    assert_close(sunk, out * (lse - sinks).sigmoid()[..., None], atol=2e-6, rtol=1e-5)
    assert_close(sunk_lse, torch.logaddexp(lse, sinks.expand_as(lse)), atol=1e-5, rtol=1e-5)
    assert (sunk - out).abs().max() > 0.1


def test_scores_of_codes_are_capped() -> None:
    codes = kept(2 * GROUP, 64, torch.float32)
    q = 2 * normal(3, KV_HEADS * 2, 64, seed=3)
    kv = exact_rows(codes, 2 * GROUP, torch.float32)
    assert_rounded(attended(codes, 2 * GROUP, q, cap=1.5), in_fp64(kv, q, cap=1.5), torch.float32)


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(
    ("dim", "group", "num_tokens"),
    [(64, 6, 3 * GROUP), (80, 2, 96), (128, 4, 5 * GROUP), (16, 3, 64), (128, 8, GROUP), (64, 1, SPAN + 3 * GROUP)],
)
def test_attention_to_codes_equals_fp64(dtype: torch.dtype, dim: int, group: int, num_tokens: int) -> None:
    """Whole and partial spans, one and two groups at a time."""
    codes = kept(num_tokens, dim, dtype)
    kv = exact_rows(codes, num_tokens, dtype)
    for num_rows in COUNTS:
        q = normal(num_rows, KV_HEADS * group, dim, seed=num_rows).to(dtype)
        assert_rounded(attended(codes, num_tokens, q), in_fp64(kv, q), dtype)


@pytest.mark.parametrize(("dim", "dtype"), [(512, torch.bfloat16), (400, torch.float32)], ids=str)
def test_codes_of_heads_past_256_numbers_are_taken_by_halves(dim: int, dtype: torch.dtype) -> None:
    """Of the second half a part may be padding, which ends within channels that share a step. Exact rows are before."""
    num_tokens, exact = 3 * GROUP, normal(2, KV_HEADS, 70, dim, seed=8).to(dtype)
    codes, q = kept(num_tokens, dim, dtype), normal(3, KV_HEADS * 2, dim, seed=3).to(dtype)
    wanted = in_fp64(torch.cat([exact.double(), exact_rows(codes, num_tokens, dtype)], 2), q, 70)
    assert_rounded(attended(codes, num_tokens, q, exact=exact, span=64), wanted, dtype)


@pytest.mark.few(1)
@pytest.mark.parametrize("layer", [1, 0])
def test_codes_and_exact_rows_are_one_attention(layer: int) -> None:
    """Several spans of both; rows see exact ones up to their own."""
    dtype, num_tokens, num_exact = torch.float32, 9 * GROUP, 150
    codes, exact = kept(num_tokens, 64, dtype, num_layers=2), normal(2, KV_HEADS, num_exact, 64, seed=8)
    q = normal(5, 4 * KV_HEADS, 64, seed=9)
    wanted = in_fp64(torch.cat([exact.double(), exact_rows(codes, num_tokens, dtype, layer)], 2), q, num_exact)
    assert_rounded(attended(codes, num_tokens, q, exact=exact, span=64, layer=layer), wanted, dtype)


@pytest.mark.deep
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_has_the_same_bits_beside_any_rows(dtype: torch.dtype) -> None:
    """At every place among up to 24 rows, one of which is not a number."""
    num_tokens, most = 5 * GROUP, 24
    codes = kept(num_tokens, 64, dtype)
    q = normal(most, 3 * KV_HEADS, 64, seed=5, dtype=dtype)
    q[4] = torch.nan
    out, lse = attended(codes, num_tokens, q, span=64)
    assert bool(out[4].isnan().all())
    assert bool(out[torch.arange(most) != 4].isfinite().all())
    for first, count in ((0, 1), (13, 1), (23, 1), (3, 2), (5, 17), (9, 15)):
        own = slice(first, first + count)
        some, some_lse = attended(codes, num_tokens, q[own], span=64)
        assert torch.equal(some.view(torch.int32), out[own].view(torch.int32))
        assert torch.equal(some_lse.view(torch.int32), lse[own].view(torch.int32))


def test_scores_of_any_size_are_weighed_right() -> None:
    codes = kept(4 * GROUP, 64, torch.float32)
    q = 100 * normal(2, KV_HEADS, 64, seed=5)
    out, _ = attended(codes, 4 * GROUP, q)
    assert_near(out, in_fp64(exact_rows(codes, 4 * GROUP, torch.float32), q)[0], torch.float32)


def fed(cache: FullCache | QuantisedCache, count: int, seed: int) -> Tensor:
    """Outputs of all layers to random rows."""
    q = normal(LAYERS, count, 3 * KV_HEADS, 32, seed=seed)
    k, v = normal(2, LAYERS, count, KV_HEADS, 32, seed=seed + 1)
    cache.begin("decode", count)
    out = torch.stack([cache.attend(layer, q[layer], k[layer], v[layer]) for layer in range(LAYERS)])
    cache.advance(count)
    return out


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("dim", [64, 80, 16, 48, 128, 256, 512])
def test_codes_are_those_that_torch_finds(dtype: torch.dtype, dim: int) -> None:
    """Bit for bit: of all groups, of those that are wanted, and of a part of longer rows."""
    rows = normal(2, 2, KV_HEADS, 3 * GROUP, dim, seed=dim)
    rows[:, 0] = rows[:, 0] * normal(dim, seed=1).exp() + normal(dim, seed=2)
    rows[:, 1] *= normal(3 * GROUP, 1, seed=3).exp()
    rows[0, :, 1, :, 3], rows[1, 1, 0, 5], rows[0, 0, 0, :, 1] = 0.25, -2.0, -0.0
    rows[0, 0, 1, :, 5] *= 1e-33  # too close to one another for a step
    rows = rows.to(dtype)
    rows[1, 0, 1, 7, 4] = torch.finfo(dtype).max
    shape = KVCodes.shape_of_blocks(2, KV_HEADS, 3 * GROUP, dim)
    wanted, ours = (KVCodes(torch.full(shape, 0xA5, dtype=torch.uint8), dim, "matrices") for _ in range(2))
    encode_with_torch(rows, wanted)
    encode(rows, ours)
    assert torch.equal(ours.blocks, wanted.blocks)
    ours.blocks.fill_(0xA5)
    encode(rows[:, :, :, GROUP : 2 * GROUP], ours.groups(2, 3))
    assert torch.equal(ours.blocks[:, :, 2], wanted.blocks[:, :, 1])
    ours.blocks.fill_(0xA5)
    some = torch.tensor([5, -1, 0]).expand(2, KV_HEADS, 3).clone()
    some[1, 1, 1] = 7
    encode(rows, ours, some)
    assert torch.equal(ours.blocks, wanted.blocks.where(some[..., None] >= 0, 0xA5))


@pytest.mark.deep
@pytest.mark.parametrize("encoded_bytes", [1, 2**20], ids=["a group at a time", "all at once"])
@pytest.mark.parametrize("streams", [False, True])
def test_the_cache_on_a_gpu_follows_the_full_one(
    streams: bool, encoded_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows come by the GPU's own kernel, with copies home as late as may be; outputs are those of torch's attention
    over the same numbers, after drafts, refusals and a text that begins otherwise, too."""
    monkeypatch.setattr(fetch, "kernels_read_host", lambda device: True)
    monkeypatch.setattr(quantised, "FETCH_BYTES", encoded_bytes)
    memory, rope = Memory(torch.device("cpu")), turning(32, torch.float32)
    full = FullCache(
        memory, TileShape(KV_HEADS, 32, 32, 2, torch.float32), num_layers=LAYERS,
        scorings=[Scoring(rope)] * LAYERS,
        offload=Offload(LateLink(late_in=True, late_out=True), num_resident=1) if streams else None,
    )  # fmt: skip
    cache = QuantisedCache(full, memory, num_tokens=400, drafted=20, kernels=GPU_KERNELS)
    assert isinstance(cache._fetch, GpuFetch)
    most = 0
    for number, (kept, count) in enumerate([(0, 5), (5, 30), (35, 80), (115, 90), (205, 1), (150, 20), (170, 70)]):
        for each in (cache, full):
            each.truncate(kept)
        fed(full, count, 7 * number)
        cache.refresh()
        length = full.length
        assert cache.length == length == kept + count
        assert cache.coded == max(EXACT, (length - KV_TAIL) // GROUP * GROUP)
        most = max(most, cache.coded)
        assert_attends(cache, drafts=3 + 17 * (number == 3), seed=100 + number)
        cache.truncate(length)
    assert most > EXACT + 3 * GROUP


def assert_attends(cache: QuantisedCache, *, drafts: int, seed: int) -> None:
    """To the full cache's rows, rounded where they are codes."""
    full, length, coded = cache.full, cache.length, cache.coded
    full.wait_home()
    rows = full.pages.reader.tokens(0, length)
    if coded > EXACT:
        codes = KVCodes(cache._codes.blocks[:, :, : coded // GROUP - 1].clone(), 32, "matrices")
        encode_with_torch(rows[..., EXACT:coded, :], codes)
        rows[..., EXACT:coded, :] = codes.rows(torch.float32)
    out = fed(cache, drafts, seed)
    exact = FullCache(
        Memory(torch.device("cpu")), TileShape(KV_HEADS, 32, 512, 1, torch.float32), num_layers=LAYERS,
        scorings=full.scorings,
    )  # fmt: skip
    exact.reserve(length + drafts)
    for layer in range(LAYERS):
        exact.pages.page(layer, 0)[..., :length, :] = rows[layer]
    exact.restored(length)
    assert_close(out, fed(exact, drafts, seed), rtol=1e-4, atol=2e-5)
