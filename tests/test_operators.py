"""Attention over runs by torch's operators: against fp64, the claim that a row's bits depend on nothing beside it, and
codes of keys and values by the same operators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from kit.processor import best
from offload.formats.quantised_kv import GROUP, KVCodes, encode_with_torch
from offload.kernels.operators import CODED_PAGE, PAGES, ROWS, OperatorAttention
from offload.kernels.rope import RopeTable, Scoring
from offload.kernels.runs import Rows, Run, RunAttention

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 2e-5}
KV_HEADS, GROUPED, DIM = 2, 3, 32


def normal(*size: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def still(dtype: torch.dtype, num_positions: int = 8000) -> RopeTable:
    """A rotation by nothing."""
    return RopeTable(torch.ones(num_positions, DIM, dtype=dtype), torch.zeros(num_positions, DIM, dtype=dtype))


def some_runs(dtype: torch.dtype) -> tuple[list[Run], list[Tensor]]:
    """Whole and partial pages, and one that no token reaches, more than are attended to at a time; a window whose first
    page most rows do not see; codes of more pages, too. And what each holds, [2, H_kv, tokens, D]."""
    pages = normal(2, PAGES + 3, KV_HEADS, 16, DIM, seed=1, dtype=dtype)
    windowed = normal(2, 3, KV_HEADS, 16, DIM, seed=2, dtype=dtype)
    rows = normal(1, 2, KV_HEADS, PAGES * CODED_PAGE + 2 * GROUP, DIM, seed=3, dtype=dtype)
    codes = KVCodes(torch.zeros(KVCodes.shape_of_blocks(1, KV_HEADS, rows.shape[3], DIM), dtype=torch.uint8), DIM)
    encode_with_torch(rows, codes)
    runs = [
        Run(pages, 16 * (PAGES + 1) + 5),
        Run(windowed, 45, 60, windowed=True),
        Run(codes.blocks[0], rows.shape[3]),
    ]
    flat = [run.held.transpose(1, 2).flatten(2, 3)[:, :, : run.tokens] for run in runs[:2]]
    return runs, [*flat, codes.rows(dtype)[0]]


def attending(
    attention: RunAttention,
    runs: Sequence[Run],
    q: Tensor,
    index: int,
    *,
    cap: float | None = None,
    masses: bool = False,
    sinks: Tensor | None = None,
) -> RunAttention:
    """Rows q [T, H, D] at `index` and on, with a window of 20."""
    k = torch.zeros(len(q), KV_HEADS, DIM, dtype=q.dtype)
    rows = Rows(q, k, k, Scoring(still(q.dtype), cap=cap, sink_logits=sinks), index, index, 20)
    attention.begin(rows, [run.tokens for run in runs], masses=masses)
    for run in runs:
        attention.attend(run)
    return attention


def in_fp64(
    runs: Sequence[Run],
    held: Sequence[Tensor],
    q: Tensor,
    index: int,
    cap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(out [T, H * D], weights [T, H_kv, tokens] summed over the query group, lse [T, H]). sinks: a further column of
    the scores, which has a weight and no value."""
    keys, values = torch.cat([each.double() for each in held], 2)
    row, seen = (index + torch.arange(len(q)))[:, None], list[Tensor]()
    for run in runs:
        at = run.first + torch.arange(run.tokens)
        own = (at <= row) & ((at > row - 20) | (not run.windowed))
        seen.append(torch.ones_like(own) if run.coded else own)
    scores = torch.einsum("thgd,hnd->thgn", q.double().unflatten(1, (KV_HEADS, -1)), keys) / DIM**0.5
    scores = scores if cap is None else cap * (scores / cap).tanh()
    scores = scores.masked_fill(~torch.cat(seen, 1)[:, None, None], -torch.inf)
    if sinks is not None:
        column = sinks.double().view(1, KV_HEADS, -1, 1).expand(len(q), -1, -1, 1)
        scores = torch.cat([scores, column], 3)
    weights = scores.softmax(-1)[..., : keys.shape[1]]
    out = torch.einsum("thgn,hnd->thgd", weights, values).flatten(1)
    return out, weights.sum(2), scores.logsumexp(-1).flatten(1)


@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_rows", [1, ROWS, ROWS + 3])
def test_attention_over_runs_equals_fp64(num_rows: int, dtype: torch.dtype, cap: float | None) -> None:
    runs, held = some_runs(dtype)
    q = normal(num_rows, KV_HEADS * GROUPED, DIM, seed=num_rows, dtype=dtype)
    attention, index = OperatorAttention(dtype=dtype), 105 - num_rows
    wanted, _, lse = in_fp64(runs, held, q, index, cap)
    out = attending(attention, runs, q, index, cap=cap).merge()[0]
    assert out.dtype == dtype
    assert_close(out.double(), wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    part = attending(attention, runs, q, index, cap=cap).part()
    assert torch.equal(part.out.flatten(1).to(dtype), out)
    assert_close(part.lse.double(), lse, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("chunk", [1, 4, 16])
def test_masses_are_the_softmax_mass_of_each_chunk(chunk: int) -> None:
    """Chunks of whole pages, as far as a run's tokens reach."""
    (*runs, _), (*held, _) = some_runs(torch.float32)
    q = normal(ROWS + 3, KV_HEADS * GROUPED, DIM, seed=4)
    mass = attending(OperatorAttention(dtype=q.dtype, chunk=chunk), runs, q, 86, masses=True).merge()[1]
    _, weights, _ = in_fp64(runs, held, q, 86)
    starts, at = [], 0
    for run in runs:
        starts.append(at + torch.arange(run.tokens) // chunk)
        at += -(-run.tokens // 16) * 16 // chunk
    assert mass is not None
    wanted = torch.zeros(len(q), KV_HEADS, at, dtype=torch.float64).index_add_(2, torch.cat(starts), weights)
    assert_close(mass.double(), wanted, atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_rows_attention_has_the_same_bits_beside_any_rows(dtype: torch.dtype) -> None:
    """Among 1 to 40 rows, wherever it is among them; keys that it does not see are other ones, and enormous."""
    runs, _ = some_runs(dtype)
    most, index = 40, 65
    q = normal(most, KV_HEADS * GROUPED, DIM, seed=5, dtype=dtype)
    attention = OperatorAttention(dtype=dtype)
    wanted = attending(attention, runs, q, index).merge()[0]
    for first, count in ((0, 1), (39, 1), (7, 2), (3, ROWS), (5, ROWS + 1), (1, 39)):
        out = attending(attention, runs, q[first : first + count], index + first).merge()[0]
        assert torch.equal(out, wanted[first : first + count])
    hidden = [replace(run, held=run.held.clone()) for run in runs]
    for run in hidden[:2]:
        run.held.transpose(1, 2).flatten(2, 3)[:, :, index + 1 - run.first :] = 3e4
    hidden[0].held[:, -1] = hidden[1].held[:, 1:] = 3e4
    assert torch.equal(attending(attention, hidden, q[:1], index).merge()[0], wanted[:1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_cpus_kernels_find_the_same(dtype: torch.dtype) -> None:
    """The other executor of the same runs, but for codes, whose queries it rounds."""
    *runs, _ = some_runs(dtype)[0]
    q = normal(ROWS + 3, KV_HEADS * GROUPED, DIM, seed=6, dtype=dtype)
    executors = [OperatorAttention(dtype=dtype, chunk=4), best().attention(dtype=dtype, page=16, chunk=4)]
    (out, mass), (theirs, their_mass) = (attending(each, runs, q, 86, masses=True).merge() for each in executors)
    assert_close(out, theirs, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert mass is not None
    assert their_mass is not None
    assert_close(mass, their_mass, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_rows_are_rotated_and_written_where_they_belong() -> None:
    """Across pages and past the end of a run; and by their places, to a single page."""
    rope = RopeTable(normal(60, DIM, seed=7), normal(60, DIM, seed=8))
    q, k, v = (normal(9, heads, DIM, seed=heads) for heads in (6, KV_HEADS, KV_HEADS))
    keys = Scoring(rope).rotated(q, k, 33)[1]
    for held, first, index in ((torch.zeros(2, 3, KV_HEADS, 4, DIM), 5, 10), (torch.zeros(2, KV_HEADS, 12, DIM), 0, 2)):
        attention, run = OperatorAttention(dtype=q.dtype), Run(held, 12, first)
        attention.begin(Rows(q, k, v, Scoring(rope), 33, index), [12])
        attention.append_rows(run)
        flat = run.pages.transpose(1, 2).flatten(2, 3)
        count, at = min(9, first + 12 - index), index - first
        assert torch.equal(flat[0, :, at : at + count], keys[:count].transpose(0, 1))
        assert torch.equal(flat[1, :, at : at + count], v[:count].transpose(0, 1))
        assert not flat[:, :, :at].any()


def test_queries_for_sinks_stop_at_their_last_position() -> None:
    rope, sinks = RopeTable(normal(60, DIM, seed=7), normal(60, DIM, seed=8)), normal(2, KV_HEADS, 3, DIM, seed=9)
    q, k = normal(5, 6, DIM, seed=10), normal(5, KV_HEADS, DIM, seed=11)
    attention = OperatorAttention(dtype=q.dtype)
    attention.begin(Rows(q, k, k, Scoring(rope), 40, 30), [3], lasts=(45, 12))
    attention.attend(Run(sinks, 3, query=1))
    stopped = Scoring(RopeTable(rope.cos[12:13].expand(60, -1), rope.sin[12:13].expand(60, -1)))
    wanted = in_fp64([Run(sinks, 3)], [sinks], stopped.rotated(q, k, 0)[0], 30)[0]
    assert_close(attention.merge()[0].double(), wanted, atol=2e-5, rtol=2e-5)
