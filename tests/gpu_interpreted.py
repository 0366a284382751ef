"""The GPU's kernels in Triton's interpreter, on a CPU. test_gpu_kernels.py runs this with TRITON_INTERPRET=1, in a
process of its own, since Triton decides on import.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, relu, silu
from torch.testing import assert_close

from kit.interpreter import products_by_row, rounds_to_bf16, without_idle_work
from kit.models import LateLink, count_fetched
from offload.config.networks import Activation
from offload.errors import TriforceError
from offload.kernels import activation as activation_by_torch
from offload.kernels.device import NONE, DeviceKernels
from offload.kernels.gpu import kernels as gpu_kernels
from offload.kernels.gpu import programs
from offload.kernels.gpu.activation import gated
from offload.kernels.gpu.attention import GpuAttention
from offload.kernels.gpu.copies import chunks
from offload.kernels.gpu.kernels import GPU_KERNELS
from offload.kernels.gpu.tiling import ROWS
from offload.kernels.places import RowPlaces
from offload.kernels.rope import RopeTable, Scoring, rotate
from offload.kernels.runs import Rows, Run
from offload.kv import fetch, places
from offload.kv.fetch import GpuFetch
from offload.kv.full import FullCache
from offload.kv.places import Places
from offload.kv.retrieval import RetrievalCache
from offload.kv.selection import ByMass
from offload.kv.streaming import StreamingCache
from offload.native.launch import launch
from offload.pages.storage import Offload
from offload.pages.tiles import TileShape
from offload.transfer.memory import Memory

# Against fp64 with the same rounded inputs: `out` is rounded to the dtype, the weights too before they meet the values.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
GARBAGE = 3e4
KV_HEADS = 2

without_idle_work()


@pytest.fixture(autouse=True)
def _products_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    products_by_row(monkeypatch)


def normal(*size: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def unmoving(dim: int, dtype: torch.dtype) -> RopeTable:
    return RopeTable(torch.ones(4096, dim, dtype=dtype), torch.zeros(4096, dim, dtype=dtype))


def turning(dim: int, dtype: torch.dtype) -> RopeTable:
    angles = torch.arange(4096)[:, None] * torch.linspace(0.01, 1.0, dim // 2).repeat(2)
    sign = torch.where(torch.arange(dim) < dim // 2, -1.0, 1.0)
    return RopeTable(angles.cos().to(dtype), (angles.sin() * sign).to(dtype))


@dataclass(frozen=True)
class Held:
    """Tokens `first` to `first` + `tokens` in pages [2, P, H_kv, S, D]."""

    pages: Tensor
    first: int
    tokens: int
    windowed: bool = False

    def flat(self) -> Tensor:
        """[2, H_kv, tokens, D] fp64"""
        return self.pages.transpose(1, 2).flatten(2, 3)[:, :, : self.tokens].double()


def hold(
    *, page: int, pages: int, tokens: int, dim: int, dtype: torch.dtype, first: int = 0, windowed: bool = False
) -> Held:
    """Random keys and values, NaN past `tokens`, in a tile whose heads do not lie side by side."""
    room = normal(2, pages, KV_HEADS, page + 16, dim, seed=first + 7, dtype=dtype)
    tile = room[:, :, :, :page]
    tile.transpose(1, 2)[:, :, torch.arange(pages * page).view(pages, page) >= tokens] = torch.nan
    return Held(tile, first, tokens, windowed)


class Unwritten(GpuAttention):
    """Gets memory that a launch must write before it is read."""

    def _floats(self, number: int) -> Tensor:
        return super()._floats(number).fill_(torch.nan)


def attended(
    held: Sequence[Held],
    q: Tensor,
    index: int,
    *,
    span: int,
    chunk: int | None = None,
    window: int = 0,
    cap: float | None = None,
    sinks: Tensor | None = None,
    mass_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor | None]:
    """Rows q [T, H, D] at `index` and on over `held`, one launch each."""
    return attending(
        held, q, index, span=span, chunk=chunk, window=window, cap=cap, sinks=sinks, mass_dtype=mass_dtype
    ).merge()


def attending(
    held: Sequence[Held],
    q: Tensor,
    index: int,
    *,
    span: int,
    chunk: int | None = None,
    window: int = 0,
    cap: float | None = None,
    sinks: Tensor | None = None,
    mass_dtype: torch.dtype = torch.float32,
) -> GpuAttention:
    """As `attended`, before the last run is folded."""
    attention = Unwritten(dtype=q.dtype, span=span, chunk=chunk, mass_dtype=mass_dtype)
    scoring = Scoring(unmoving(q.shape[2], q.dtype), cap=cap, sink_logits=sinks)
    new = torch.zeros(len(q), KV_HEADS, q.shape[2], dtype=q.dtype)
    counts = [each.tokens for each in held]
    attention.begin(Rows(q, new, new, scoring, 0, index, window), counts, masses=chunk is not None)
    for each in held:
        attention.attend(Run(each.pages, each.tokens, each.first, windowed=each.windowed))
    return attention


def in_fp64(
    held: Sequence[Held],
    q: Tensor,
    index: int,
    window: int = 0,
    cap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(out [T, H * D], weights [T, H_kv, tokens], summed over the query group). sinks: a further column of the scores,
    which has a weight and no value."""
    keys, values = torch.cat([each.flat() for each in held], 2)
    at = torch.cat([each.first + torch.arange(each.tokens) for each in held])
    windowed = torch.cat([torch.full((each.tokens,), each.windowed) for each in held])
    row = (index + torch.arange(len(q)))[:, None]
    seen = (at <= row) & (~windowed | (at > row - window))
    scores = torch.einsum("thgd,hnd->thgn", q.double().unflatten(1, (KV_HEADS, -1)), keys) / q.shape[2] ** 0.5
    scores = scores if cap is None else cap * (scores / cap).tanh()
    logits = torch.full((q.shape[1],), -torch.inf) if sinks is None else sinks
    column = logits.double().view(1, KV_HEADS, -1, 1).expand(len(q), -1, -1, 1)
    scores = torch.cat([scores.masked_fill(~seen[:, None, None], -torch.inf), column], 3)
    weights = scores.softmax(-1)[..., :-1]
    return torch.einsum("thgn,hnd->thgd", weights, values).flatten(1), weights.sum(2)


def by_chunk(weights: Tensor, chunk: int, num_chunks: int) -> Tensor:
    padded = torch.nn.functional.pad(weights, (0, num_chunks * chunk - weights.shape[-1]))
    return padded.unflatten(-1, (-1, chunk)).sum(-1)


def assert_near(actual: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    assert_close(actual.double(), wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.few(3)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(
    ("group", "dim", "num_rows", "tokens"),
    [(3, 48, 7, 150), (2, 256, 2, 77), (1, 32, 18, 190), (4, 128, 4, 65), (1, 64, 1, 128)],
)
def test_attention_and_masses_equal_fp64(dtype: torch.dtype, group: int, dim: int, num_rows: int, tokens: int) -> None:
    """Whole and partial pages, rows that do not see the last ones, sizes that are no powers of two."""
    check_attention_and_masses(dtype, group, dim, num_rows, tokens)


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(("group", "dim", "num_rows", "tokens"), [(8, 512, 3, 77), (2, 272, 1, 150), (1, 384, 18, 65)])
def test_heads_past_256_numbers_are_attended_to_and_merged_part_by_part(
    dtype: torch.dtype, group: int, dim: int, num_rows: int, tokens: int
) -> None:
    check_attention_and_masses(dtype, group, dim, num_rows, tokens)


def check_attention_and_masses(dtype: torch.dtype, group: int, dim: int, num_rows: int, tokens: int) -> None:
    held = [hold(page=64, pages=3, tokens=tokens, dim=dim, dtype=dtype)]
    q = 2 * normal(num_rows, KV_HEADS * group, dim, seed=1)
    out, mass = attended(held, q.to(dtype), tokens - num_rows, span=64, chunk=16)
    wanted, weights = in_fp64(held, q.to(dtype), tokens - num_rows)
    assert out.dtype == dtype
    assert_near(out, wanted, dtype)
    assert mass is not None
    assert_close(mass.double(), by_chunk(weights, 16, mass.shape[-1]), atol=2e-6, rtol=2e-5)
    assert_close(mass.sum(-1), torch.full_like(mass[..., 0], group), atol=1e-5, rtol=0)


@pytest.mark.parametrize("chunk", [1, 8, 64, 128])
def test_chunks_of_other_sizes_than_a_step(chunk: int) -> None:
    """Longer ones than what a program takes at a time, too."""
    held = [hold(page=128, pages=2, tokens=200, dim=32, dtype=torch.float32)]
    q = normal(3, 6, 32, seed=2)
    out, mass = attended(held, q, 197, span=128, chunk=chunk)
    _, weights = in_fp64(held, q, 197)
    assert mass is not None
    assert mass.shape == (3, KV_HEADS, 256 // chunk)
    assert_close(mass.double(), by_chunk(weights, chunk, mass.shape[-1]), atol=2e-6, rtol=2e-5)
    assert torch.equal(out, attended(held, q, 197, span=128)[0])


@pytest.mark.parametrize("cap", [0.5, 50.0])
def test_scores_are_capped(cap: float) -> None:
    """Those far beyond the cap, too."""
    held = [hold(page=64, pages=2, tokens=100, dim=32, dtype=torch.float32)]
    for size in (1.0, 200.0):
        q = size * normal(5, 6, 32, seed=4)
        out = attended(held, q, 95, span=64, cap=cap)[0]
        assert_close(out.double(), in_fp64(held, q, 95, cap=cap)[0], atol=5e-5, rtol=5e-5)


def sink_logits(num_heads: int) -> Tensor:
    """From next to no weight to most of a row's."""
    return torch.linspace(-3.0, 7.0, num_heads)[torch.randperm(num_heads, generator=torch.Generator().manual_seed(1))]


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("counts", [(5,), (2, 1, 2), (1,) * 5])
def test_sink_logits_are_a_further_column_of_the_scores(dtype: torch.dtype, counts: tuple[int, ...]) -> None:
    """Once, of however many runs the keys are; in masses and lse, too. A row has the same bits beside any rows."""
    held = cut(hold(page=160, pages=1, tokens=150, dim=32, dtype=dtype), 32, *counts)
    q, sinks = normal(11, KV_HEADS * 3, 32, seed=8, dtype=dtype), sink_logits(KV_HEADS * 3)
    out, mass = attended(held, q, 139, span=32, chunk=16, sinks=sinks)

    def check(given: Tensor | None) -> None:
        wanted, weights = in_fp64(held, q, 139, sinks=given)
        assert_near(out, wanted, dtype)
        assert mass is not None
        assert_close(mass.double(), by_chunk(weights, 16, mass.shape[-1]), atol=2e-6, rtol=2e-5)

    check(sinks)
    for wrong in (None, sinks + math.log(2), sinks.roll(1), sinks.view(KV_HEADS, 3).T.flatten()):
        with pytest.raises(AssertionError, match="not close"):
            check(wrong)
    plain = attending(held, q, 139, span=32).part()
    part = attending(held, q, 139, span=32, sinks=sinks).part()
    assert_close(part.lse, torch.logaddexp(plain.lse, sinks.expand_as(plain.lse)), atol=1e-5, rtol=1e-5)
    for first, count in ((0, 1), (4, 3)):
        some = attended(held, q[first : first + count], 139 + first, span=32, sinks=sinks)[0]
        assert torch.equal(some, out[first : first + count])


def test_a_sink_that_weighs_nothing_changes_no_bit() -> None:
    held = [hold(page=64, pages=2, tokens=100, dim=32, dtype=torch.float32)]
    q = 3 * normal(5, 6, 32, seed=4)
    plain = attended(held, q, 95, span=64)[0]
    assert torch.equal(attended(held, q, 95, span=64, sinks=torch.full((6,), -1e5))[0], plain)
    assert not attended(held, q, 95, span=64, sinks=torch.full((6,), 1e5))[0].any()


def test_tiles_in_any_place_and_a_page_of_any_length() -> None:
    """A tile far from the start and one page that is no multiple of a span."""
    first = hold(page=64, pages=2, tokens=128, dim=32, dtype=torch.float32)
    last = hold(page=83, pages=1, tokens=70, dim=32, dtype=torch.float32, first=128)
    q = normal(5, 8, 32, seed=3)
    assert_near(attended([first, last], q, 193, span=64)[0], in_fp64([first, last], q, 193)[0], torch.float32)


def test_many_spans_are_merged() -> None:
    """With larger and larger scores; bits of rows alone and together."""
    held = hold(page=64, pages=3, tokens=180, dim=32, dtype=torch.float32)
    held.pages[0].mul_(torch.linspace(0.1, 3, 3 * 64).view(3, 1, 64, 1))
    growing = held.flat()[0].abs().mean((0, 2))
    assert growing[-20:].mean() > 5 * growing[:20].mean()
    q = normal(10, 4, 32, seed=13)
    out, mass = attended([held], q, 170, span=16, chunk=16)
    wanted, weights = in_fp64([held], q, 170)
    assert mass is not None
    assert_near(out, wanted, torch.float32)
    assert_close(mass.double(), by_chunk(weights, 16, mass.shape[-1]), atol=2e-6, rtol=2e-5)
    early = attended([Held(held.pages, 0, 171)], q[:1], 170, span=16)[0]
    assert torch.equal(early, out[:1])


def test_a_window_ends_where_it_should() -> None:
    """Beside a run without one, as sinks are."""
    sinks = hold(page=16, pages=1, tokens=5, dim=32, dtype=torch.float32)
    recent = hold(page=140, pages=1, tokens=130, dim=32, dtype=torch.float32, first=400, windowed=True)
    q = normal(9, 4, 32, seed=4)
    out, _ = attended([recent, sinks], q, 521, span=64, window=40)
    assert_near(out, in_fp64([recent, sinks], q, 521, 40)[0], torch.float32)


def test_scores_of_any_size_are_weighed_right() -> None:
    """Softmax of large scores neither overflows nor loses the largest."""
    held = [hold(page=64, pages=2, tokens=128, dim=32, dtype=torch.float32)]
    q = 100 * normal(2, 2, 32, seed=5)
    assert_near(attended(held, q, 126, span=64)[0], in_fp64(held, q, 126)[0], torch.float32)


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("group", [1, 3])
def test_a_rows_bits_are_those_of_the_row_alone(dtype: torch.dtype, group: int, pytestconfig: pytest.Config) -> None:
    """Among 1 to 24 rows, wherever it is among them, whatever is hidden from it, masses too."""
    most, tokens, dim = ROWS + 8, 140, 32
    held = hold(page=64, pages=3, tokens=tokens, dim=dim, dtype=dtype)
    q = normal(most, KV_HEADS * group, dim, seed=6, dtype=dtype)
    start = tokens - most
    out, mass = attended([held], q, start, span=64, chunk=16)
    assert mass is not None
    step = 1 if pytestconfig.getoption("deep") else 2
    for first, count in ((0, 1), (13, 1), (23, 1), (3, 2), (5, ROWS + 1), (9, 15))[::step]:
        shorter = Held(held.pages.clone(), 0, start + first + count)
        hidden = torch.arange(3 * 64).view(3, 64) >= shorter.tokens
        shorter.pages.transpose(1, 2)[:, :, hidden] = torch.nan
        some, some_mass = attended([shorter], q[first : first + count], start + first, span=64, chunk=16)
        assert torch.equal(some.view(torch.int8), out[first : first + count].view(torch.int8))
        assert some_mass is not None
        assert torch.equal(some_mass, mass[first : first + count, :, : some_mass.shape[-1]])
        assert not mass[first, :, some_mass.shape[-1] :].any()


def test_what_is_hidden_changes_no_bit() -> None:
    """Keys and values of rows behind a row, in its span and in later ones."""
    held = hold(page=64, pages=3, tokens=192, dim=32, dtype=torch.float32)
    q = normal(4, 4, 32, seed=7)
    out, _ = attended([held], q, 70, span=64)
    for value in (GARBAGE, -GARBAGE):
        changed = held.pages.clone()
        changed.transpose(1, 2)[:, :, torch.arange(192).view(3, 64) > 73] = value
        assert torch.equal(attended([Held(changed, 0, 192)], q, 70, span=64)[0], out)
        changed.transpose(1, 2)[:, :, torch.arange(192).view(3, 64) == 73] = value
        last = attended([Held(changed, 0, 192)], q, 70, span=64)[0]
        assert torch.equal(last[:3], out[:3])
        assert not torch.equal(last[3], out[3])


def cut(held: Held, page: int, *counts: int) -> list[Held]:
    """One of one page, as runs of so many pages each of `page` tokens."""
    pages = held.pages[:, 0].unflatten(2, (-1, page)).transpose(1, 2)
    runs, first = [], 0
    for part in pages.split(counts, 1):
        tokens = min(held.tokens - first, part.shape[1] * page)
        runs.append(Held(part, held.first + first, tokens))
        first += tokens
    return runs


@pytest.mark.parametrize("dim", [32, 320])
def test_where_runs_end_changes_no_bit(dim: int, pytestconfig: pytest.Config) -> None:
    """Spans are folded one after the other, whether the next is of the same run or not: for rows of several blocks,
    some of which see nothing of the last spans, and for their masses."""
    held = hold(page=160, pages=1, tokens=150, dim=dim, dtype=torch.float32)
    held.pages[0].mul_(torch.linspace(3, 0.1, 160).view(1, 1, 160, 1))  # of different weight: an order would show
    q = normal(11, 4, dim, seed=8)
    together = attended(cut(held, 32, 5), q, 115, span=32, chunk=16)
    for counts in ((2, 1, 2), (1, 4), (4, 1), (2, 3), (1,) * 5)[: None if pytestconfig.getoption("deep") else 1]:
        apart = attended(cut(held, 32, *counts), q, 115, span=32, chunk=16)
        for ours, theirs in zip(apart, together, strict=True):
            assert ours is not None
            assert theirs is not None
            assert torch.equal(ours, theirs)


@pytest.mark.deep
def test_runs_are_folded_in_the_order_in_which_they_come() -> None:
    """So another order may round otherwise: who attends has to keep to one."""
    held = hold(page=512, pages=1, tokens=512, dim=32, dtype=torch.float32)
    q = normal(8, 4, 32, seed=8)
    tiles = cut(held, 64, 2, 2, 2, 2)
    orders = [attended([tiles[at] for at in order], q, 504, span=64)[0] for order in ((0, 1, 2, 3), (2, 0, 3, 1))]
    for out in orders:
        assert_near(out, in_fp64(tiles, q, 504)[0], torch.float32)
    assert not torch.equal(*orders)


def test_masses_in_bf16_are_the_same_rounded() -> None:
    """By the interpreter downwards."""
    held = [hold(page=64, pages=3, tokens=190, dim=32, dtype=torch.float32)]
    q = normal(5, 4, 32, seed=15)
    _, exact = attended(held, q, 185, span=64, chunk=16)
    _, rounded = attended(held, q, 185, span=64, chunk=16, mass_dtype=torch.bfloat16)
    assert exact is not None
    assert rounded is not None
    assert rounded.dtype == torch.bfloat16
    assert not torch.equal(rounded.float(), exact)
    assert_close(rounded.float(), exact, atol=0, rtol=2**-7)


def test_rows_are_rotated_and_taken_in_where_they_belong() -> None:
    """Across pages and past the end of a tile; nothing else in it changes."""
    rope, q = turning(32, torch.float32), normal(9, 4, 32, seed=9)
    k, v = normal(9, KV_HEADS, 32, seed=10), normal(9, KV_HEADS, 32, seed=11)
    held = [hold(page=4, pages=2, tokens=8, dim=32, dtype=torch.float32, first=first) for first in (0, 8)]
    before = [each.pages.clone() for each in held]
    attention = GpuAttention(dtype=q.dtype, span=4)
    attention.begin(Rows(q, k, v, Scoring(rope), position=103, index=3), [8, 8])
    for each in held:
        attention.append_rows(Run(each.pages, 8, each.first))
    after = torch.cat([each.flat() for each in held], 2).float()
    wanted = torch.cat([Held(pages, 0, 8).flat() for pages in before], 2).float()
    wanted[0, :, 3:12] = rotate(k, *rope.rows(103, 112)).transpose(0, 1)
    wanted[1, :, 3:12] = v.transpose(0, 1)
    assert torch.equal(after, wanted)


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("dim", "heads", "num_rows"), [(48, 5, 3), (96, 20, 1), (32, 3, 7)])
def test_rows_of_halves_are_written_and_attended_to(
    dtype: torch.dtype, dim: int, heads: int, num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose halves are in place of keys and of values, and which are both: across pages and spans, with masses."""
    rounds_to_bf16(monkeypatch)
    page, pages, at, position, chunk = 64, 3, 128 - num_rows // 2, 30, 16
    room = normal(2, pages, 1, page, dim // 2, seed=7, dtype=dtype)
    room.transpose(1, 2).flatten(2, 3)[:, :, at:] = torch.nan
    q, row = normal(num_rows, heads, dim, seed=1, dtype=dtype), normal(num_rows, 1, dim, seed=2, dtype=dtype)
    scoring = Scoring(turning(16, dtype), 0.3, joined=True)  # the first 8 numbers of each half
    attention = Unwritten(dtype=dtype, span=64, chunk=chunk)
    attention.begin(Rows(q, row, row, scoring, position, at), [pages * page], masses=True)
    run = Run(room, pages * page)
    attention.append_rows(run)
    attention.attend(run)
    out, mass = attention.merge()
    queries, wanted = scoring.rotated(q, row, position)
    held = room.transpose(1, 2).flatten(2, 3)[:, 0, : at + num_rows]
    assert torch.equal(held[:, at:], torch.stack(wanted[:, 0].chunk(2, -1)))
    rows = torch.cat([*held], -1).double()
    scores = 0.3 * torch.einsum("thd,nd->thn", queries.double(), rows)
    hidden = torch.arange(at + num_rows) > at + torch.arange(num_rows)[:, None]
    weights = scores.masked_fill(hidden[:, None], -torch.inf).softmax(-1)
    assert_near(out, (weights @ rows).flatten(1), dtype)
    assert mass is not None
    assert_close(mass[:, 0].double(), by_chunk(weights.sum(1), chunk, mass.shape[-1]), atol=1e-5, rtol=1e-4)


def test_queries_grow_and_their_products_are_scaled_as_the_layer_says() -> None:
    rope, q = turning(32, torch.float32), normal(9, 4, 32, seed=9)
    grown = RopeTable(rope.cos, rope.sin, 1 + torch.arange(4096) / 100)
    k, v = normal(9, KV_HEADS, 32, seed=10), normal(9, KV_HEADS, 32, seed=11)
    outs = []
    for scoring, rows in ((Scoring(grown, 0.3), q), (Scoring(rope), 0.3 * 32**0.5 * q)):
        held, attention = (
            hold(page=16, pages=1, tokens=16, dim=32, dtype=torch.float32),
            GpuAttention(dtype=q.dtype, span=16),
        )
        attention.begin(Rows(rows, k, v, scoring, position=3, index=3), [12])
        run = Run(held.pages, 12)
        attention.append_rows(run)
        if scoring.rope is grown:
            assert torch.equal(attention._queries[0], grown.rotated(q, k, 3)[0])
            attention._queries[0] /= grown.growth[3:12, None, None]
        attention.attend(run)
        outs.append(attention.merge()[0])
    assert_close(outs[0], outs[1], atol=1e-5, rtol=1e-5)


def test_rotated_queries_and_keys_are_weighed_as_the_layer_says() -> None:
    rope, q = turning(32, torch.float32), normal(5, 4, 32, seed=9)
    k, v = normal(5, KV_HEADS, 32, seed=10), normal(5, KV_HEADS, 32, seed=11)
    scoring = Scoring(rope, weights=(normal(32, seed=12), normal(32, seed=13)))
    held = hold(page=16, pages=1, tokens=16, dim=32, dtype=torch.float32)
    queries = written(Rows(q, k, v, scoring, position=3, index=3), Run(held.pages, 16))
    wanted_q, wanted_k = scoring.rotated(q, k, 3)
    assert torch.equal(queries, wanted_q)
    assert torch.equal(held.pages[0, 0, :, 3:8], wanted_k.transpose(0, 1))


def written(rows: Rows, run: Run) -> Tensor:
    """The rotated queries of rows that are written to the run's places."""
    attention = GpuAttention(dtype=rows.q.dtype, span=16)
    attention.begin(rows, [run.tokens])
    attention.append_rows(run)
    return attention._queries[0]


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("dim", [48, 64])
def test_rotations_round_as_those_of_a_prefill(dtype: torch.dtype, dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, of rows that are a part of longer ones."""
    rounds_to_bf16(monkeypatch)
    rope = turning(dim, dtype)
    grown = RopeTable(rope.cos, rope.sin, (1 + torch.arange(4096) / 100).to(dtype))
    weights = tuple(normal(dim, seed=seed, dtype=dtype) for seed in (12, 13))
    both = normal(5, 6 * dim + 2 * KV_HEADS * dim, seed=9, dtype=dtype)
    parts = both.split([6 * dim, KV_HEADS * dim, KV_HEADS * dim], 1)
    q, k, v = (part.unflatten(1, (-1, dim)) for part in parts)
    for scoring in (Scoring(rope), Scoring(grown, weights=weights)):  # type: ignore[arg-type]
        held = hold(page=16, pages=2, tokens=32, dim=dim, dtype=dtype)
        queries = written(Rows(q, k, v, scoring, position=30, index=13), Run(held.pages, 32))
        wanted_q, wanted_k = scoring.rotated(q, k, 30)
        assert torch.equal(queries, wanted_q)
        found = held.pages.transpose(1, 2).flatten(2, 3)[:, :, 13:18]
        assert torch.equal(found, torch.stack([wanted_k, v]).transpose(1, 2))


@pytest.mark.parametrize("first_written", [0, 43])
def test_rows_in_a_ring_see_their_window_and_are_written_where_their_pages_come_round(first_written: int) -> None:
    """From some slot on; the page with which the first row's window begins is found on the GPU."""
    rope, page, pages, window, index = unmoving(32, torch.float32), 16, 4, 20, 40
    held = hold(page=page, pages=3, tokens=48, dim=32, dtype=torch.float32, first=0)
    ring = torch.empty(2, pages, KV_HEADS, page, 32).fill_(GARBAGE)
    ring[:, :3] = held.pages
    q, k, v = (normal(6, heads, 32, seed=heads) for heads in (6, KV_HEADS, KV_HEADS))
    moved = {}
    for turn in (0, 1, 5):  # the same page by page, some of it beyond the ring's end
        slots = torch.arange(6) + index + turn * page
        places = RowPlaces(slots, slots, torch.tensor([0, first_written + turn * page]))
        attention = Unwritten(dtype=torch.float32, span=8)
        rows = Rows(q, k, v, Scoring(rope), 0, int(slots[0]), window, places)
        run = Run(ring.roll(turn, 1).clone(), 3 * page, windowed=True, ring=True)
        attention.begin(rows, [run.tokens])
        attention.append_rows(run)
        attention.attend(run)
        moved[turn] = attention.merge()[0], run.held.roll(-turn, 1)
    for out, pages_then in moved.values():
        assert torch.equal(out, moved[0][0])
        assert torch.equal(pages_then, moved[0][1])
    after = moved[0][1].clone()
    changed = ring.clone()
    new = slice(max(first_written - index, 0), 6)
    changed[:, 2, :, index - 32 + new.start : index - 32 + 6] = torch.stack([k[new], v[new]]).transpose(1, 2)
    assert torch.equal(after, changed)
    wanted, _ = in_fp64([Held(after[:, :3], 0, 48, windowed=True)], q, index, window)
    assert_near(moved[0][0], wanted, torch.float32)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "relu_squared", "clamped_silu"])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_gates_are_activated_and_multiplied(
    activation: Activation, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those where an activation is flat, too."""
    rounds_to_bf16(monkeypatch)
    x = (normal(3, 2 * 1100, seed=5) * torch.tensor([0.1, 3, 12])[:, None]).to(dtype)
    gate, up = x.double().chunk(2, -1)
    active = {
        "silu": silu, "gelu_tanh": partial(gelu, approximate="tanh"), "relu_squared": lambda g: relu(g) ** 2,
        "clamped_silu": lambda g: g.clamp(max=7) * (1.702 * g.clamp(max=7)).sigmoid(),
    }  # fmt: skip
    wanted = active[activation](gate) * (up.clamp(-7, 7) + 1 if activation == "clamped_silu" else up)
    for found in (gated(x, activation), activation_by_torch.gated(x, activation)):
        assert found.dtype == dtype
        assert_close(found.double(), wanted, rtol=3 * torch.finfo(dtype).eps, atol=1e-5)


@pytest.mark.parametrize("first", [10, 40])
def test_queries_for_sinks_stop_at_their_last_position(first: int) -> None:
    rope, q = turning(32, torch.float32), normal(6, 4, 32, seed=12)
    attention = GpuAttention(dtype=q.dtype, span=64)
    k = q[:, :KV_HEADS]
    attention.begin(Rows(q, k, k, Scoring(rope), position=first, index=first), [64], lasts=(first + 6, 12))
    positions = (first + torch.arange(6)).clamp(max=12)
    attention.append_rows(Run(hold(page=64, pages=1, tokens=64, dim=32, dtype=torch.float32).pages, 64))
    assert torch.equal(attention._queries[0], rotate(q, *rope.rows(first, first + 6)))
    assert torch.equal(attention._queries[1], rotate(q, rope.cos[positions], rope.sin[positions]))


def caches(kernels: DeviceKernels) -> tuple[FullCache, StreamingCache]:
    """One layer; tiles of 2 pages of 16 tokens, masses of chunks of 8."""
    memory, rope = Memory(torch.device("cpu")), turning(32, torch.float32)
    shape = TileShape(KV_HEADS, 32, 16, 2, torch.float32)
    scorings = [Scoring(rope)]
    full = FullCache(memory, shape, num_layers=1, scorings=scorings, mass_chunk=8, kernels=kernels)
    streaming = StreamingCache(
        memory, shapes=[(KV_HEADS, 32)], dtype=torch.float32, scorings=scorings, sinks=3, window=9, slack=12,
        kernels=kernels,
    )  # fmt: skip
    return full, streaming


def fed(cache: FullCache | RetrievalCache | StreamingCache, first: int, count: int) -> Tensor:
    q = normal(count, 6, 32, seed=first)
    k, v = normal(2, count, KV_HEADS, 32, seed=first + 1)
    cache.begin("decode", count)
    out = cache.attend(0, q, k, v)
    cache.advance(count)
    return out


@pytest.mark.deep
def test_every_cache_attends_as_with_torchs_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over several tiles, past the window, and after a refresh, from chunks, tail and drafts."""
    launched = []
    attend = GpuAttention.attend
    monkeypatch.setattr(gpu_kernels, "MASS_DTYPE", torch.float32)
    monkeypatch.setattr(GpuAttention, "attend", lambda self, run: (launched.append(run), attend(self, run)))
    results = []
    for kernels in (GPU_KERNELS, NONE):
        assert len(launched) == 0
        found = []
        full, streaming = caches(kernels)
        for cache in (full, streaming):
            found += [fed(cache, 0, 8), *(fed(cache, first, 12) for first in range(8, 68, 12)), fed(cache, 68, 1)]
        mass = full.mass(1)
        retrieval = RetrievalCache(full, budget=24, chunk=8, selector=ByMass(reach=2), kernels=kernels)
        retrieval.refresh(1)
        found += [fed(retrieval, 69, 2), fed(retrieval, 71, 1)]
        results.append([*found, mass[..., :10]])  # of 80 tokens' spans
        assert bool(launched) == (kernels is GPU_KERNELS)
        launched.clear()
    for ours, theirs in zip(*results, strict=True):
        assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


LAYERS = 3


def tiles_of(number: int, *, dim: int, page: int, pages: int, dtype: torch.dtype) -> list[list[Tensor]]:
    """[2, P, H_kv, S, D] for each layer; bytes of all kinds, NaN among them."""
    generator = torch.Generator().manual_seed(dim + page)
    size = (2, pages, KV_HEADS, page, dim * dtype.itemsize)
    return [
        [torch.randint(256, size, generator=generator, dtype=torch.uint8).view(dtype) for _ in range(number)]
        for _ in range(LAYERS)
    ]


def copied(tiles: list[list[Tensor]], wanted: Tensor, held: Tensor, chunk: int, slot: int, tokens: range) -> Tensor:
    """By torch, token by token, as int32: NaN equals itself then."""
    out = held.clone()
    for layer, homes in enumerate(tiles):
        rows = torch.cat([home.transpose(1, 2).flatten(2, 3) for home in homes], 2)  # [2, H_kv, tokens, D]
        for head in range(KV_HEADS):
            for place, number in enumerate((wanted if wanted.dim() == 1 else wanted[layer, head]).tolist()):
                for row in range(chunk):
                    token = number * chunk + row
                    if number >= 0 and token in tokens:
                        out[layer, :, head, (slot + place) * chunk + row] = rows[:, head, token]
    return out.view(torch.int32)


@pytest.mark.few(3)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(
    ("dim", "chunk", "page", "pages"),
    [(64, 8, 16, 2), (128, 32, 32, 1), (48, 4, 16, 3), (512, 16, 16, 2), (16, 1, 4, 2)],
)
def test_chunks_are_copied_byte_for_byte(dtype: torch.dtype, dim: int, chunk: int, page: int, pages: int) -> None:
    """Of several tiles in every layer, to slots in any order; where nothing is wanted, nothing is touched. Then some
    tokens of consecutive chunks, the same of all heads."""
    tiles = tiles_of(3, dim=dim, page=page, pages=pages, dtype=dtype)
    per_layer, slots = 3 * page * pages // chunk, 5
    held = normal(LAYERS, 2, KV_HEADS, (slots + 3) * chunk, dim, seed=dim, dtype=dtype)
    generator = torch.Generator().manual_seed(chunk)
    wanted = torch.stack([torch.randperm(max(per_layer, slots), generator=generator)[:slots] for _ in range(6)])
    wanted = wanted.view(LAYERS, KV_HEADS, slots)
    wanted[(wanted >= per_layer) | (torch.rand(wanted.shape, generator=generator) < 0.3)] = -1
    homes = torch.tensor([[home.data_ptr() for home in layer] for layer in tiles])
    sizes = {"chunk": chunk, "page": page, "tile": page * pages}
    everything = range(3 * page * pages)
    expected = copied(tiles, wanted, held, chunk, 0, everything)
    chunks(homes, wanted, held, **sizes)
    assert torch.equal(held.view(torch.int32), expected)
    numbers = torch.arange(1, 3)
    tokens = range(chunk + chunk // 2, 2 * chunk + max(chunk // 2, 1))
    expected = copied(tiles, numbers, held, chunk, slots, tokens)
    chunks(homes, numbers, held, slot=slots, tokens=tokens, **sizes)
    assert torch.equal(held.view(torch.int32), expected)


@pytest.mark.few(1)
@pytest.mark.parametrize("streams", [True, False])
def test_a_refresh_by_the_kernel_holds_what_one_by_the_host_does(
    streams: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over growing contexts, some tiles on the device and some not, with copies home as late as may be; and again after
    the buffer was taken away."""
    monkeypatch.setattr(fetch, "kernels_read_host", lambda device: True)
    fetched = count_fetched(monkeypatch)
    memory, rope = Memory(torch.device("cpu")), turning(32, torch.float32)
    shape = TileShape(KV_HEADS, 32, 16, 2, torch.float32)
    caches = []
    for kernels in (GPU_KERNELS, NONE):
        offload = Offload(LateLink(late_in=True, late_out=True), num_resident=1) if streams else None
        full = FullCache(memory, shape, num_layers=1, scorings=[Scoring(rope)], mass_chunk=8, offload=offload)
        caches.append(RetrievalCache(full, budget=32, chunk=8, selector=ByMass(reach=2), kernels=kernels, tail=40))
    assert isinstance(caches[0]._chosen._fetch, GpuFetch)
    assert not isinstance(caches[1]._chosen._fetch, GpuFetch)
    for first, count in ((0, 8), (8, 12), (20, 12), (32, 12), (44, 1), (45, 12), (57, 12), (69, 8)):
        for cache in caches:
            fed(cache.full, first, count)
            cache.refresh(count)
        ours, theirs = caches
        if first == 45:
            for cache in caches:
                cache._give_up()
                cache.begin("decode", 1)
        assert ours.length == theirs.length == theirs.full.length
        assert fetched[ours._chosen] == fetched[theirs._chosen]
        used = ours._num_filled * 8 + ours.length % 8
        assert torch.equal(ours._chosen._held[:, :, :, :used], theirs._chosen._held[:, :, :, :used])
        assert ours._chosen._held[:, :, :, :used].any(-1).all()


def test_a_kernel_that_cannot_start_names_the_remedy() -> None:
    with pytest.raises(TriforceError, match=r"kernel merge_spans does not run here .*TRIFORCE_KERNELS=off"):
        launch(programs.merge_spans, (1, 1), ())


def test_a_graphs_tokens_are_those_up_to_its_rows() -> None:
    """More are said to be there than there are by now."""
    held = hold(page=192, pages=1, tokens=100, dim=32, dtype=torch.float32)
    q = normal(3, 4, 32, seed=16)
    some = attended([held], q, 97, span=64)[0]
    assert torch.equal(attended([Held(held.pages, 0, 192)], q, 97, span=64)[0], some)


def test_a_draft_sees_its_sinks_where_places_are_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots are those of the window, before which the sinks are."""
    monkeypatch.setattr(places, "sent_to", lambda out, values: out.copy_(values))
    found = []
    for there in (False, True):
        monkeypatch.setattr(Places, "in_memory", property(lambda self, there=there: there))
        _, cache = caches(GPU_KERNELS)
        rows = [fed(cache, first, count) for first, count in ((0, 2), (2, 12), (14, 12), (26, 1))]
        found.append((torch.cat(rows), cache._sink_rows[0].clone()))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    assert found[1][1].abs().sum(-1).gt(0).all()
