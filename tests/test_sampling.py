"""The warp compared with a slow reference, its extremes, and the distribution of the seeded source's draws."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st

from kit.examples import at_most
from offload.decode.random_source import SeededSource
from offload.decode.sampling import SamplingParams
from offload.decode.warp import warp
from offload.errors import TriforceError, UsageError

INF, NAN = math.inf, math.nan
OFF: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
LAST = math.nextafter(1.0, 0.0)  # the largest uniform

# Eighths are exact in every dtype here and far enough apart that fp32 and fp64 order their probabilities alike.
LOGITS = st.lists(st.integers(-80, 80).map(lambda i: i / 8), min_size=1, max_size=12)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.05, 0.3, 0.6, 1.0, 1.7, 10.0, 100.0]),
    top_k=st.integers(0, 14),
    top_p=st.sampled_from([0.01, 0.3, 0.5, 0.8, 0.9, 0.99, 1.0]),
    min_p=st.sampled_from([0.0, 0.001, 0.05, 0.3, 0.9]),
)


def warp_row(logits: list[float], dtype: torch.dtype = torch.float32, **params: Any) -> list[float]:
    return warp(torch.tensor([logits], dtype=dtype), SamplingParams(**(OFF | params)))[0].tolist()


def reference(logits: list[float], params: SamplingParams) -> list[float]:
    """The definition, one token at a time, in fp64. Skips an example that hangs on a rounding at a threshold."""
    everything = range(len(logits))
    if params.temperature == 0.0:
        return [float(i == logits.index(max(logits))) for i in everything]
    kept = set(everything)
    if params.top_k:
        smallest = sorted(logits, reverse=True)[: params.top_k][-1]
        kept = {i for i in kept if logits[i] >= smallest}
    probs = normalised([math.exp((x - max(logits)) / params.temperature) for x in logits], kept)
    mass, nucleus = 0.0, set()
    for i in sorted(kept, key=lambda i: (-probs[i], i)):
        assume(params.top_p == 1.0 or abs(mass - params.top_p) > 1e-5)
        if mass < params.top_p or params.top_p == 1.0:
            nucleus.add(i)
        mass += probs[i]
    probs = normalised(probs, nucleus)
    threshold = params.min_p * max(probs)
    assume(all(i not in nucleus or abs(probs[i] - threshold) > 1e-6 * threshold for i in everything))
    return normalised(probs, {i for i in nucleus if probs[i] >= threshold})


def normalised(weights: list[float], kept: set[int]) -> list[float]:
    total = math.fsum(weights[i] for i in kept)
    return [weight / total if i in kept else 0.0 for i, weight in enumerate(weights)]


@given(LOGITS, PARAMS)
@example([3.0, 2.0, 1.0, 0.0], SamplingParams(temperature=1.0, top_k=2, top_p=1.0))
@example([2.0, 2.0, 2.0, 1.0], SamplingParams(temperature=1.0, top_k=2, top_p=1.0))  # a tie at the k-th place stays
@example([2.0, 2.0, 2.0, 2.0], SamplingParams(temperature=1.0, top_k=0, top_p=0.4))  # a tie in the nucleus: first ones
@at_most(300)
def test_warp_equals_the_definition(logits: list[float], params: SamplingParams) -> None:
    expected = reference(logits, params)
    row = warp(torch.tensor([logits]), params)[0]
    assert row.dtype == torch.float32
    torch.testing.assert_close(row.double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-5, atol=1e-6)
    assert all(got == 0.0 for got, wanted in zip(row.tolist(), expected, strict=True) if wanted == 0.0)
    assert abs(float(row.double().sum()) - 1.0) < 1e-6


@given(st.lists(LOGITS.map(lambda row: (row * 12)[:12]), min_size=2, max_size=5), PARAMS)
@at_most(50)
def test_each_row_is_warped_as_if_alone(rows: list[list[float]], params: SamplingParams) -> None:
    together = warp(torch.tensor(rows), params)
    alone = torch.cat([warp(torch.tensor([row]), params) for row in rows])
    torch.testing.assert_close(together, alone, rtol=0, atol=0)


@given(LOGITS, PARAMS)
@at_most(50)
def test_warp_leaves_its_input_as_it_was(logits: list[float], params: SamplingParams) -> None:
    given_logits = torch.tensor([logits])
    warp(given_logits, params)
    assert given_logits.tolist() == [logits]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@given(logits=st.lists(st.integers(-3, 3), min_size=1, max_size=9), top_p=st.sampled_from([0.1, 1.0]))
@at_most(50)
def test_greedy_is_exactly_one_hot_at_the_first_maximum(dtype: torch.dtype, logits: list[int], top_p: float) -> None:
    row = warp_row([float(x) for x in logits], dtype, temperature=0.0, top_p=top_p, min_p=0.5)
    assert row == [float(i == logits.index(max(logits))) for i in range(len(logits))]


@pytest.mark.parametrize("params", [{"temperature": 0.6, "top_p": 0.9}, {"temperature": 1.3, "top_k": 4, "min_p": 0.1}])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_warped_in_fp32(dtype: torch.dtype, params: dict[str, Any]) -> None:
    half = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)).to(dtype)
    probs = warp(half, SamplingParams(**params))
    assert probs.dtype == torch.float32
    torch.testing.assert_close(probs, warp(half.float(), SamplingParams(**params)), rtol=0, atol=0)


@pytest.mark.parametrize("temperature", [1e-6, 1e-38, 1e-45, 1e-50, 5e-324])
def test_a_tiny_temperature_shares_all_among_the_maxima(temperature: float) -> None:
    """1e-46 and less became 0 in fp32 and gave NaN."""
    assert warp_row([1.0, 3.0, 3.0, -INF, 2.9], temperature=temperature) == [0.0, 0.5, 0.5, 0.0, 0.0]
    assert warp_row([-3e38, 3e38], temperature=temperature) == [0.0, 1.0]


def test_a_large_temperature_is_nearly_uniform() -> None:
    assert warp_row([0.0, 1.0, -1.0], temperature=100.0) == pytest.approx([1 / 3, 1 / 3, 1 / 3], abs=0.005)


@pytest.mark.parametrize("top_p", [0.01, 1e-40, 1e-50, 5e-324])
def test_a_tiny_top_p_keeps_the_most_likely_token(top_p: float) -> None:
    """1e-46 and less became 0 in fp32, dropped all tokens and gave NaN."""
    assert warp_row([0.0, 1.0, 1.0, 0.5], temperature=1.0, top_p=top_p) == [0.0, 1.0, 0.0, 0.0]


def test_a_min_p_of_1_or_just_below_keeps_the_maxima() -> None:
    """1 was refused; transformers and llama.cpp take it."""
    for min_p in (1.0, LAST):
        assert warp_row([0.0, 1.0, 1.0, 0.5], temperature=1.0, min_p=min_p) == [0.0, 0.5, 0.5, 0.0]


def stable_top_p(probs: torch.Tensor, top_p: float) -> torch.Tensor:
    """By sorting everything; of equally likely tokens the first come first."""
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    ordered = ordered.masked_fill(ordered.double().cumsum(-1) - ordered >= top_p, 0.0)
    kept = torch.zeros_like(probs).scatter_(-1, order, ordered)
    return kept / kept.sum(-1, keepdim=True)


def test_a_flat_row_beside_a_peaked_one_has_the_nucleus_of_its_own() -> None:
    """A fault that no test noticed: 256 tokens were enough for all rows as soon as they were for one."""
    rows = torch.zeros(2, 1000)
    rows[1, 7] = 50.0
    params = SamplingParams(temperature=1.0, top_p=0.9)
    for order in (rows, rows.flip(0)):
        assert sorted((warp(order, params) > 0).sum(1).tolist()) == [1, 900]


def test_top_n_sigma_keeps_what_is_exactly_at_its_edge() -> None:
    assert warp_row([0.0, -2.0], temperature=1.0, top_n_sigma=2.0) == pytest.approx(
        warp_row([0.0, -2.0], temperature=1.0)
    )
    assert warp_row([0.0, -2.0], temperature=1.0, top_n_sigma=1.999) == [1.0, 0.0]


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("vocabulary", [200, 256, 257, 1000])
def test_top_p_of_a_large_vocabulary_is_that_of_sorting_it(vocabulary: int, top_p: float) -> None:
    """Peaked rows, whose nucleus is found among the likeliest few, flat ones, whose is not, and ties everywhere."""
    generator = torch.Generator().manual_seed(vocabulary)
    params = SamplingParams(temperature=1.0, top_p=top_p)
    for spread in (0.0, 0.3, 1.0, 8.0):
        logits = (torch.randn(6, vocabulary, generator=generator) * spread).bfloat16()  # bf16: many are equal
        whole = warp(logits, replace(params, top_p=1.0))
        assert torch.equal(warp(logits, params), stable_top_p(whole, top_p))
        assert torch.equal(warp(logits[:1], params), warp(logits, params)[:1])


@pytest.mark.parametrize("count", [1, 7, 100, 999])
def test_the_mass_of_top_p_is_summed_in_fp64(count: int) -> None:
    """1000 equally likely tokens, whose probability is no power of two: fp32 cannot tell these thresholds apart."""
    mass = count * warp_row([0.0] * 1000, temperature=1.0)[0]
    for top_p, num_kept in ((mass - 1e-12, count), (mass + 1e-12, count + 1)):
        assert sum(p > 0.0 for p in warp_row([0.0] * 1000, temperature=1.0, top_p=top_p)) == num_kept


@pytest.mark.parametrize("temperature", [0.0, 0.6, 100.0])
@pytest.mark.parametrize("off", [OFF, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}], ids=str)
def test_infinite_logits_have_the_distribution_of_their_limit(temperature: float, off: dict[str, Any]) -> None:
    """+inf gave NaN."""
    assert warp_row([5.0, INF, -INF, 1.0], temperature=temperature, **off) == [0.0, 1.0, 0.0, 0.0]
    assert warp_row([-INF, 5.0, -INF, -INF], temperature=temperature, **off) == [0.0, 1.0, 0.0, 0.0]
    assert warp_row([INF, 5.0, -INF, INF], temperature=1.0) == [0.5, 0.0, 0.0, 0.5]
    assert warp_row([65504.0, INF], torch.float16, temperature=temperature, **off) == [0.0, 1.0]


@pytest.mark.parametrize("temperature", [0.0, 0.6])
@pytest.mark.parametrize("row", [[NAN, 1.0, 2.0], [-INF, -INF, -INF]], ids=str)
def test_no_token_is_drawn_where_the_logits_are_no_numbers(row: list[float], temperature: float) -> None:
    """It was the last token, or the first, silently."""
    for off in (OFF, {"top_k": 2}, {"top_p": 0.9}, {"min_p": 0.1}):
        probs = torch.tensor(warp_row(row, temperature=temperature, **off))
        with pytest.raises(TriforceError, match="sum to nan"):
            SeededSource(0).draw(probs)


class Uniforms(SeededSource):
    """The real source over given uniforms."""

    def __init__(self, *uniforms: float) -> None:
        self._given = iter(uniforms)

    def _uniform(self) -> float:
        return next(self._given)


PROBS = st.lists(st.one_of(st.just(0.0), st.floats(2.0**-120, 1.0, width=32)), min_size=1, max_size=20).filter(any)


@given(PROBS, st.one_of(st.sampled_from([0.0, LAST]), st.floats(0.0, 1.0, exclude_max=True)))
@at_most(300)
def test_a_token_of_probability_zero_is_never_drawn(weights: list[float], uniform: float) -> None:
    probs = torch.tensor(weights) / torch.tensor(weights).sum()
    assert probs[Uniforms(uniform).draw(probs)] > 0.0


@given(PROBS, st.floats(0.0, 1.0, exclude_max=True))
@at_most(300)
def test_a_draw_is_the_inverse_of_the_distribution_function(weights: list[float], uniform: float) -> None:
    total, mass = math.fsum(weights), list(itertools.accumulate(weights))
    assume(all(abs(uniform * total - edge) > 1e-12 * total for edge in mass))
    expected = next(i for i, edge in enumerate(mass) if edge > uniform * total)
    assert Uniforms(uniform).draw(torch.tensor(weights, dtype=torch.float64)) == expected


@pytest.mark.parametrize(
    ("probability", "uniform", "accepted"),
    [(0.0, 0.0, False), (1.0, LAST, True), (1.5, LAST, True), (0.25, 0.25, False), (0.25, 0.2499, True)],
)
def test_a_uniform_accepts_below_the_probability(probability: float, uniform: float, accepted: bool) -> None:
    assert Uniforms(uniform).accepts(probability) is accepted


def test_draws_follow_their_distribution() -> None:
    """Chi-square over 6 free cells, fixed seed; chance alone passes 35 once in 200,000 seeds."""
    expected = [0.3, 0.0, 0.05, 0.2, 0.01, 0.0, 0.24, 0.1, 0.1]
    source, probs, num_draws = SeededSource(7), torch.tensor(expected), 10_000
    counts = Counter(source.draw(probs) for _ in range(num_draws))
    assert counts.keys() == {i for i, p in enumerate(expected) if p > 0.0}
    assert sum((counts[i] - p * num_draws) ** 2 / (p * num_draws) for i, p in enumerate(expected) if p > 0.0) < 35.0


def test_decisions_have_their_probability_and_tell_nothing_about_the_draw_that_follows() -> None:
    source, probs, num_pairs = SeededSource(11), torch.tensor([0.5, 0.5]), 10_000
    counts = Counter((source.accepts(0.25), source.draw(probs)) for _ in range(num_pairs))
    expected = {(True, 0): 1 / 8, (True, 1): 1 / 8, (False, 0): 3 / 8, (False, 1): 3 / 8}
    statistic = sum((counts[pair] - p * num_pairs) ** 2 / (p * num_pairs) for pair, p in expected.items())
    assert statistic < 30.0  # 3 degrees of freedom: once in 700,000 seeds


def test_a_uniform_has_the_53_bits_of_fp64() -> None:
    """Of 24 bits, a token less likely than 6e-8 would be drawn too often or never."""
    source = SeededSource(0)
    uniforms = [source._uniform() for _ in range(20)]
    assert all(0.0 <= uniform < 1.0 for uniform in uniforms)
    assert any(uniform * 2.0**53 % 2.0 == 1.0 for uniform in uniforms)


def draws(seed: int | None) -> list[int]:
    source = SeededSource(seed)
    return [source.draw(torch.full((1000,), 1e-3)) for _ in range(20)]


def test_the_same_seed_gives_the_same_draws_and_another_gives_others() -> None:
    assert draws(5) == draws(5)
    assert draws(5) != draws(6)
    assert draws(None) != draws(None)
    assert draws(2**63 - 1) == draws(2**63 - 1)
    assert len({tuple(draws(seed)) for seed in (0, *(2**bit for bit in range(32)))}) == 33


def test_a_source_neither_reads_nor_moves_the_global_generator() -> None:
    torch.manual_seed(1)
    first, before = draws(5), torch.get_rng_state()
    torch.manual_seed(2)
    assert draws(5) == first
    torch.manual_seed(1)
    draws(None)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("field", "value", "limits"),
    [
        ("temperature", -0.1, "from 0 (greedy) to 100"),
        ("temperature", 100.5, "from 0 (greedy) to 100"),
        ("temperature", NAN, "from 0 (greedy) to 100"),
        ("top_k", -1, "0 (off) or more"),
        ("top_p", 0.0, "above 0 and at most 1 (off)"),
        ("top_p", 1.01, "above 0 and at most 1 (off)"),
        ("top_p", NAN, "above 0 and at most 1 (off)"),
        ("min_p", -0.5, "from 0 (off) to 1 (only the likeliest)"),
        ("min_p", 1.01, "from 0 (off) to 1 (only the likeliest)"),
        ("min_p", NAN, "from 0 (off) to 1 (only the likeliest)"),
        ("seed", -1, "from 0 to 2^63 - 1"),
        ("seed", 2**63, "from 0 to 2^63 - 1"),
    ],
)
def test_a_bad_parameter_is_refused_by_name_value_and_limits(field: str, value: float, limits: str) -> None:
    with pytest.raises(UsageError) as caught:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert str(caught.value) == f"{field.replace('_', '-')} is {value}, it must be {limits}"


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"temperature": 100.0},
        {"top_k": 0},
        {"top_p": 1.0},
        {"min_p": LAST},
        {"seed": 0},
        {"seed": 2**63 - 1},
    ],
    ids=str,
)
def test_the_limits_themselves_are_accepted(params: dict[str, Any]) -> None:
    SamplingParams(**params)
    if "seed" in params:
        SeededSource(int(params["seed"])).draw(torch.tensor([0.5, 0.5]))
