"""Draft lengths: estimates that follow what is seen and fade, and lengths that are the best for given costs."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kit.enumeration import TableLevel, soft
from kit.models import CPU, changed
from offload.decode.build import build_speculator
from offload.decode.distribution import Distribution
from offload.decode.lengths import LOOKUP_CHANCES, Adaptive, Estimate, Fixed, Mean, PassSeconds
from offload.decode.proposal import Offer, grades_of
from offload.decode.random_source import SeededSource
from offload.decode.sampling import SamplingParams
from offload.decode.speculation import Draft, ModelProposer, Speculator
from offload.decode.verify import Verdict
from offload.decode.warp import Warping, warp
from offload.metrics import LevelStats
from offload.model.passes import Pass
from offload.plan import what_if
from offload.plan.planner import Options, Plan
from offload.plan.request import Request

ANY, NONE = Offer(), Offer(0)


def lookup() -> Estimate:
    return Estimate(0.5, 0.0, chances=LOOKUP_CHANCES)


def greedy(logits: torch.Tensor) -> torch.Tensor:
    return warp(logits, SamplingParams(temperature=0.0))


def test_a_mean_starts_at_its_guess_and_follows_what_it_sees() -> None:
    mean = Mean(0.9, 4.0, 0.995)
    assert mean.value == 0.9
    for _ in range(200):
        mean.add(0.2)
    assert mean.value == pytest.approx(0.2, abs=0.06)


def test_a_mean_fades_back_to_its_guess() -> None:
    mean = Mean(0.9, 4.0, 0.995)
    for _ in range(50):
        mean.add(0.1)
    low = mean.value
    for _ in range(100):
        mean.fade(0.99)
    assert low < mean.value < 0.9
    for _ in range(2000):
        mean.fade(0.99)
    assert mean.value == pytest.approx(0.9, abs=1e-3)


@given(st.floats(1e-3, 1.0), st.floats(0.0, 0.1))
def test_a_pass_takes_what_was_guessed_and_then_what_was_seen(fixed: float, slope: float) -> None:
    passes = PassSeconds(1.0, 0.5)
    assert (passes.fixed, passes.slope) == (1.0, 0.5)
    for count in range(400):
        rows = 1 + count % 9
        passes.add(rows, fixed + slope * rows)
    assert passes.at(1) == pytest.approx(fixed + slope, rel=0.2, abs=0.06)
    assert passes.at(9) == pytest.approx(fixed + 9 * slope, rel=0.2, abs=0.06)


@given(st.floats(1e-3, 1.0), st.floats(0.0, 0.1), st.integers(2, 16))
def test_a_pass_of_several_blocks_takes_the_fixed_part_for_each(fixed: float, slope: float, block: int) -> None:
    passes = PassSeconds(1.0, 0.5, block=block)
    assert (passes.fixed, passes.slope) == (1.0, 0.5)
    assert passes.at(block) == pytest.approx(1.0 + 0.5 * block)
    assert passes.at(block + 1) == pytest.approx(2.0 + 0.5 * (block + 1))
    for count in range(600):
        rows = 1 + count % 40
        passes.add(rows, fixed * math.ceil(rows / block) + slope * rows)
    for rows in (1, block, block + 1, 40):
        exact = fixed * math.ceil(rows / block) + slope * rows
        assert passes.at(rows) == pytest.approx(exact, rel=0.2, abs=0.06)


def test_more_rows_never_take_less_nor_a_pass_less_than_nothing() -> None:
    passes = PassSeconds(0.1, 0.1)
    for count in range(50):
        passes.add(1 + count % 9, 5.0 - 0.5 * (count % 9))
    assert passes.slope == 0.0
    assert passes.fixed > 0.0


def test_grades_are_tenths_of_the_largest_probability() -> None:
    rows = torch.tensor([[0.04, 0.96], [0.999, 0.001], [0.5, 0.5]])
    assert grades_of(rows.log(), rows) == [9, 9, 5]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_grades_of_point_masses_are_how_far_the_logit_is_ahead(dtype: torch.dtype) -> None:
    """At temperature 0 every distribution is one; the logits alone tell whether another cache would agree."""
    margins = [0.0, 0.05, 0.125, 0.25, 0.5, 1.0, 2.0, 60.0]
    logits = torch.tensor([[-3.0, 1.0, 1.0 + margin] for margin in margins], dtype=dtype)
    assert grades_of(logits, greedy(logits)) == [10, 10, 11, 12, 13, 14, 15, 15]
    one_left = warp(logits, SamplingParams(temperature=0.1, top_p=0.5))
    assert grades_of(logits, one_left)[1:] == [10, 11, 12, 13, 14, 15, 15]


def test_proposals_are_graded_by_the_logits_of_their_own_places() -> None:
    """By those of the level that hands them up, whoever drafted them."""
    distributions = {name: soft(5, name) for name in ("retrieval", "draft")}
    alone, draft = (
        ModelProposer(TableLevel(distributions["draft"], logarithm=True), greedy, SeededSource(0)) for _ in "12"
    )
    retrieval = TableLevel(distributions["retrieval"], logarithm=True)
    middle = Speculator(retrieval, [draft], lengths=Fixed(3), warp=greedy, random=SeededSource(0))
    sequence, seen = [1], set()
    for _ in range(12):
        for name, proposal in (("draft", alone.propose(sequence, 1)), ("retrieval", middle.propose(sequence, 4))):
            prefixes = [(*sequence, *proposal.tokens[:place]) for place in range(len(proposal.tokens))]
            logits = torch.stack([distributions[name](prefix) for prefix in prefixes]).log()
            assert proposal.grades == grades_of(logits, greedy(logits))
            seen.add((name, *proposal.grades))
        sequence += proposal.tokens
    assert len(seen) > 8


def test_a_row_of_infinite_logits_and_a_vocabulary_of_one_have_grades_too() -> None:
    """Mended or refused elsewhere: a grade only estimates."""
    logits = torch.tensor([[torch.inf, torch.inf, 0.0], [torch.inf, 0.0, 0.0], [0.0, -torch.inf, -torch.inf]])
    assert all(10 <= grade <= 15 for grade in grades_of(logits, greedy(logits)))
    assert grades_of(torch.zeros(1, 1), torch.ones(1, 1)) == [15]


# Fixed lengths


def test_a_fixed_length_is_kept_to_and_to_the_limit() -> None:
    lengths = Fixed(5)
    lengths.start(9)
    assert lengths.next([ANY]) == Draft(0, 5)
    lengths.drafted(0, [1, 2], 0.0)
    assert lengths.next([ANY]) == Draft(0, 3)
    lengths.start(2)
    assert lengths.next([ANY]) == Draft(0, 2)
    lengths.start(0)
    assert lengths.next([ANY]) is None


def test_a_fixed_length_trusts_long_lookups_only_unless_there_is_nothing_else() -> None:
    lengths = Fixed(5)
    lengths.start(9)
    assert lengths.next([Offer(3, 4), ANY]) == Draft(0, 3)
    assert lengths.next([Offer(3, 2), ANY]) == Draft(1, 5)
    assert lengths.next([Offer(3, 2)]) == Draft(0, 3)
    assert lengths.next([NONE]) is None
    assert lengths.next([]) is None


# Adaptive lengths


def play(
    lengths: Adaptive,
    chances: list[float],
    *,
    seconds: list[float],
    passes: tuple[float, float],
    num_tokens: int,
    block: int = 1000,
    offers: list[Offer] | None = None,
) -> tuple[float, float]:
    """Proposer i's tokens are kept with chances[i] and take seconds[i]: (seconds a token, drafts a round)."""
    rng, clock, emitted, rounds, total = random.Random(0), 0.0, 0, 0, 0
    while emitted < num_tokens:
        lengths.start(100)
        drafted: list[int] = []
        while (draft := lengths.next(offers or [ANY] * len(chances))) and len(drafted) < 100:
            drafted.append(draft.index)
            clock += seconds[draft.index]
            offer = (offers or [ANY] * len(chances))[draft.index]
            lengths.drafted(draft.index, [7 if offer.num_tokens is None else offer.grade], seconds[draft.index])
        accepted = next((i for i, index in enumerate(drafted) if rng.random() >= chances[index]), len(drafted))
        cost = passes[0] * math.ceil((1 + len(drafted)) / block) + passes[1] * (1 + len(drafted))
        clock += cost
        kept = [chances[index] for index in drafted[: accepted + 1]]
        lengths.verified(Verdict(accepted, 0, kept), 1 + len(drafted), cost)
        emitted, rounds, total = emitted + accepted + 1, rounds + 1, total + len(drafted)
    return clock / emitted, total / rounds


def best(chance: float, seconds: float, passes: tuple[float, float], most: int = 63, *, block: int = 1000) -> float:
    """Seconds a token with the best fixed length."""
    return min(
        (passes[0] * math.ceil((1 + n) / block) + passes[1] * (1 + n) + n * seconds)
        / sum(chance**k for k in range(n + 1))
        for n in range(most + 1)
    )


@pytest.mark.few(6)
@pytest.mark.parametrize("chance", [0.05, 0.5, 0.8, 0.95])
@pytest.mark.parametrize("seconds", [0.01, 0.2, 0.9])
@pytest.mark.parametrize("slope", [0.0, 0.1])
def test_measured_lengths_come_within_5_percent_of_the_best_fixed_one(
    chance: float, seconds: float, slope: float
) -> None:
    """From a guess that is wrong in everything: seconds by a factor of three, and how often tokens are kept."""
    passes = (1.0, slope)
    lengths = Adaptive(63, PassSeconds(0.5, 0.03), [Estimate(0.9, seconds / 3)])
    play(lengths, [chance], seconds=[seconds], passes=passes, num_tokens=600)
    reached, _ = play(lengths, [chance], seconds=[seconds], passes=passes, num_tokens=6000)
    assert reached < 1.05 * best(chance, seconds, passes)


@pytest.mark.few(3)
@pytest.mark.parametrize("chance", [0.5, 0.8, 0.95, 0.99])
@pytest.mark.parametrize("seconds", [0.01, 0.2])
@pytest.mark.parametrize("block", [4, 16])
def test_lengths_come_within_5_percent_of_the_best_fixed_one_where_blocks_cost(
    chance: float, seconds: float, block: int
) -> None:
    """Whose best length is often that of a whole block, or of several."""
    passes = (1.0, 0.05)
    lengths = Adaptive(63, PassSeconds(0.5, 0.03, block=block), [Estimate(0.9, seconds / 3)])
    play(lengths, [chance], seconds=[seconds], passes=passes, num_tokens=600, block=block)
    reached, _ = play(lengths, [chance], seconds=[seconds], passes=passes, num_tokens=6000, block=block)
    assert reached < 1.05 * best(chance, seconds, passes, block=block)


def test_a_model_drafts_to_the_end_of_a_block_once_a_token_is_cheap() -> None:
    """A row that begins a block costs more than its token is worth."""
    lengths = Adaptive(63, PassSeconds(1.0, 0.01, block=16), [Estimate(0.99, 0.001, weight=1000.0)])
    play(lengths, [0.99], seconds=[0.001], passes=(1.0, 0.01), num_tokens=500, block=16)
    lengths.start(63)
    assert lengths.next([ANY]) == Draft(0, 15)


def test_where_drafts_are_worthless_almost_none_are_made() -> None:
    """Never slower than plain decoding by more than 3 %, the trials included that would show a better text."""
    lengths = Adaptive(63, PassSeconds(1.0, 0.1), [Estimate(0.9, 0.7)])
    play(lengths, [0.1], seconds=[0.7], passes=(1.0, 0.1), num_tokens=300)
    reached, _ = play(lengths, [0.1], seconds=[0.7], passes=(1.0, 0.1), num_tokens=5000)
    assert reached < 1.03 * 1.1


def test_a_text_that_becomes_easy_is_noticed() -> None:
    lengths = Adaptive(63, PassSeconds(1.0, 0.0), [Estimate(0.9, 0.2)])
    play(lengths, [0.05], seconds=[0.2], passes=(1.0, 0.0), num_tokens=2000)
    play(lengths, [0.95], seconds=[0.2], passes=(1.0, 0.0), num_tokens=2000)
    reached, drafts = play(lengths, [0.95], seconds=[0.2], passes=(1.0, 0.0), num_tokens=2000)
    assert reached < 1.05 * best(0.95, 0.2, (1.0, 0.0))
    assert drafts > 4


def test_the_proposer_that_pays_is_the_one_that_is_asked() -> None:
    lengths = Adaptive(63, PassSeconds(1.0, 0.0), [Estimate(0.5, 0.01), Estimate(0.5, 0.3)])
    reached, _ = play(lengths, [0.2, 0.9], seconds=[0.01, 0.3], passes=(2.0, 0.0), num_tokens=8000)
    assert reached < 1.1 * best(0.9, 0.3, (2.0, 0.0))


def test_a_lookup_that_is_right_replaces_a_dear_model() -> None:
    offers = [Offer(20, 5), ANY]
    lengths = Adaptive(63, PassSeconds(1.0, 0.0), [lookup(), Estimate(0.9, 0.3)])
    reached, _ = play(lengths, [0.97, 0.9], seconds=[1e-5, 0.3], passes=(1.0, 0.0), num_tokens=4000, offers=offers)
    assert reached < 1.1 * best(0.97, 0.0, (1.0, 0.0))


def test_of_a_lookup_that_is_unsure_a_part_is_drafted() -> None:
    """All 40 tokens would cost two seconds and gain less than one."""
    lengths = Adaptive(63, PassSeconds(1.0, 0.05), [lookup()])
    lengths.start(63)
    assert lengths.next([Offer(40, 1)]) == Draft(0, 2)


def test_a_lookup_after_unsure_tokens_is_as_likely_as_all_of_them_together() -> None:
    """At first it is worth its rows, and so is a model after it; after three tokens that are seldom kept neither is."""
    offers = [Offer(40, 0), ANY]
    lengths = Adaptive(63, PassSeconds(1.0, 0.02), [lookup(), Estimate(0.6, 0.02)])
    lengths.start(63)
    assert lengths.next(offers)
    lengths.drafted(0, [0, 0, 0], 0.0)
    assert lengths.next(offers) is None


def test_what_goes_on_after_a_part_of_a_lookup_is_a_model() -> None:
    """A lookup costs no seconds: taken for one, its own rest would go on after any part of it."""
    lengths = Adaptive(63, PassSeconds(1.0, 0.02), [lookup(), Estimate(0.6, 0.1)])
    lengths.start(63)
    lengths.drafted(0, [0], 0.0)
    assert lengths.next([Offer(40, 1), ANY]) == Draft(0, 2)


def test_a_long_match_that_was_right_goes_straight_to_a_verification() -> None:
    """As long as the block may be, past a model that would check it for a little: nothing is left to check."""
    offers = [Offer(63, 7), ANY]
    lengths = Adaptive(63, PassSeconds(1.0, 0.0), [lookup(), Estimate(0.995, 0.005, weight=32.0)])
    play(lengths, [1.0, 0.995], seconds=[1e-5, 0.005], passes=(1.0, 0.0), num_tokens=300, offers=offers)
    lengths.start(63)
    assert lengths.next(offers) == Draft(0, 63)


def test_a_lookup_that_is_wrong_leaves_the_model_in_its_place() -> None:
    offers = [Offer(20, 1), ANY]
    lengths = Adaptive(63, PassSeconds(5.0, 0.0), [lookup(), Estimate(0.9, 0.1)])
    play(lengths, [0.05, 0.9], seconds=[1e-5, 0.1], passes=(5.0, 0.0), num_tokens=500, offers=offers)
    reached, _ = play(lengths, [0.05, 0.9], seconds=[1e-5, 0.1], passes=(5.0, 0.0), num_tokens=2000, offers=offers)
    assert reached < 1.1 * best(0.9, 0.1, (5.0, 0.0))


def test_drafting_stops_early_where_a_token_was_unsure() -> None:
    """Tokens of grade 2 are kept at times, those of grade 9 nearly always."""
    lengths = Adaptive(63, PassSeconds(1.0, 0.0), [Estimate(0.9, 0.01)])
    for _ in range(300):
        for grade, chance in ((2, 0.3), (9, 0.99)):
            lengths.start(1)
            lengths.drafted(0, [grade], 0.01)
            lengths.verified(Verdict(1, 0, [chance]), 2, 1.0)
    after = {}
    for grade in (2, 9):
        lengths.start(63)
        lengths.drafted(0, [grade], 0.01)
        draft = lengths.next([ANY])
        after[grade] = draft.num_tokens if draft else 0
    assert after[2] < after[9] - 2


def test_a_proposer_that_is_not_ready_is_not_asked() -> None:
    lengths = Adaptive(31, PassSeconds(1.0, 0.0), [Estimate(0.9, 0.01)])
    lengths.start(31)
    assert lengths.next([ANY])
    lengths.prepared(0, None)
    assert lengths.next([ANY]) is None
    lengths.prepared(0, 0.001)
    assert lengths.next([ANY])


def test_getting_ready_is_wanted_while_it_pays() -> None:
    cheap, dear = (Adaptive(31, PassSeconds(1.0, 0.0), [Estimate(0.9, 0.01, prepare_seconds=s)]) for s in (0.1, 50.0))
    assert cheap.wants(0)
    assert not dear.wants(0)


def test_getting_ready_is_compared_with_models_and_not_with_lookups() -> None:
    """Those come at their own times: one that was always right is no reason to let a model rest."""
    lengths = Adaptive(31, PassSeconds(1.0, 0.0), [lookup(), Estimate(0.9, 0.01, prepare_seconds=0.1)])
    for _ in range(100):
        lengths.start(31)
        lengths.drafted(0, [5], 0.0)
        lengths.verified(Verdict(1, 0, [1.0]), 2, 1.0)
    assert lengths.wants(1)
    better = Estimate(0.9, 0.001)
    assert not Adaptive(31, PassSeconds(1.0, 0.0), [better, Estimate(0.9, 0.01, prepare_seconds=0.1)]).wants(1)


def test_what_getting_ready_took_counts_from_then_on() -> None:
    lengths = Adaptive(31, PassSeconds(1.0, 0.0), [Estimate(0.9, 0.01, prepare_seconds=0.1)])
    assert lengths.wants(0)
    lengths.prepared(0, 50.0)
    assert not lengths.wants(0)
    lengths.start(31)
    lengths.verified(Verdict(30, 0), 31, 1.0)
    assert lengths.rate == 1.0  # 51 seconds for 31 tokens: plain decoding is cheaper


def rounds_ready(lengths: Adaptive, index: int, offers: list[Offer], num_rounds: int) -> list[bool]:
    """In which rounds the proposer at `index` is ready, where lookups are drafted alone and kept."""
    ready = []
    for _ in range(num_rounds):
        lengths.start(20)
        ready.append(lengths.estimates[index].ready)
        lengths.drafted(0, [5] * 10, 0.0)
        lengths.verified(Verdict(10, 0, [1.0] * 10), 11, 1.0)
        lengths.prepared(index, 0.05 if lengths.wants(index) else None)
    return ready


def test_one_block_of_lookups_does_not_send_a_dear_proposer_to_rest() -> None:
    """A retrieval level over a slow link rested for 24 rounds because the first tokens drafted were looked up."""
    lengths = Adaptive(63, PassSeconds(1.0, 0.0), [lookup(), Estimate(0.95, 0.02, prepare_seconds=0.05)])
    assert all(rounds_ready(lengths, 1, [Offer(20, 5), ANY], 3))


def test_no_more_is_asked_for_than_may_be_drafted() -> None:
    for limit in range(6):
        lengths = Adaptive(4, PassSeconds(100.0, 0.0), [Estimate(0.99, 1e-6)])
        lengths.start(limit)
        draft = lengths.next([ANY])
        assert (draft.num_tokens if draft else 0) == min(limit, 4)
        draft = lengths.next([Offer(3, 5)]) if limit else None
        assert (draft.num_tokens if draft else 0) == min(limit, 3)


# Seconds by the plan


def planned(**options: Any) -> Plan:
    request = {"num_prompt_tokens": 30_000, "max_tokens": 100}
    return Request(what_if.LLAMA2_7B, what_if.LLAMA_68M, Options(**options), CPU).plan(**request)


def built(plan: Plan, *, seed: int | None = 0, block: int | None = None, ready: bool = True) -> Speculator:
    """Over table levels whose logits are all alike, so that nothing is refused."""
    levels = {name: TableLevel(lambda tokens: torch.ones(3)) for name in plan.composition.levels}
    for name, level in levels.items():
        level.stats = LevelStats(name)
    sampling = SamplingParams(temperature=1.0, top_p=1.0, seed=seed)
    return build_speculator(
        plan,
        levels,
        sampling,
        Distribution(None, Warping(sampling)),
        device=torch.device("cpu"),
        prepare_copies=lambda num_rows, wanted: wanted and ready,
        block=block,
    )


def test_with_a_seed_a_round_is_charged_the_plans_seconds_of_all_its_steps() -> None:
    """And so is the same on a machine of any speed: one drafted token of the retrieval level, by the draft."""
    plan = changed(planned(gamma=2, draft_gamma=1, budget=4096), lookup=False)
    prices = plan.predicted
    assert min(prices.draft_pass_seconds, prices.retrieval_row_seconds, prices.full_row_seconds) > 0
    full, row, block = prices.full_pass_seconds, prices.full_row_seconds, prices.full_block_rows
    prepared = prices.refresh_seconds + prices.mass_share * full
    drafted = prices.draft_pass_seconds + prices.retrieval_pass_seconds
    for num_pending in (1, 4, block, block + 1):
        for ready in (True, False):
            sequence = [1] * num_pending
            plain = built(plan, ready=ready).round(sequence, 1)
            fixed = (full - row) * math.ceil(num_pending / block)
            assert plain.seconds == pytest.approx(fixed + row * num_pending + prepared * ready)
    two = built(plan).round([1], 3)
    assert two.num_drafted == 2
    rows = prices.retrieval_row_seconds  # of its pass: the pending token and the draft's
    assert two.seconds == pytest.approx(full + 2 * row + drafted + rows + prepared)


def test_without_a_seed_a_round_is_charged_what_it_took() -> None:
    plan = changed(planned(gamma=0), lookup=False)
    start = time.perf_counter()
    step = built(plan, seed=None).round([1], 1)
    assert 0.0 < step.seconds <= time.perf_counter() - start


def test_a_first_pass_is_charged_what_the_plan_says_of_it() -> None:
    """It compiles kernels or records a graph: taken for the price of the next ones it ended drafting."""
    plan = planned(gamma=2, draft_gamma=1, budget=4096)

    def charged(num_firsts: int) -> float:
        speculator = built(plan, seed=None)
        level = speculator._level
        run = level.run

        def counted(passes: Sequence[Pass]) -> None:
            run(passes)
            passes[0].is_first = num_firsts > 0

        level.run = counted  # type: ignore[method-assign]
        return speculator.round([1], 1).seconds

    assert charged(1) > plan.predicted.full_pass_seconds > 2 * charged(0)


@pytest.mark.parametrize(("offload", "expected"), [((), 12), (("kv",), 0)])
def test_passes_are_priced_by_the_blocks_that_the_machine_has_unless_they_wait_for_a_link(
    offload: tuple[str, ...], expected: int
) -> None:
    plan = planned(offload=frozenset(offload), link_gbps=1.0 if offload else None)
    one, row = plan.predicted.full_pass_seconds, plan.predicted.full_row_seconds
    lengths = built(plan, seed=None, block=12)._lengths
    assert isinstance(lengths, Adaptive)
    blocks = math.ceil(37 / expected) if expected else 1
    assert lengths.passes.at(37) == pytest.approx(blocks * (one - row) + 37 * row)


def test_a_pause_of_the_machine_moves_an_estimate_little_but_what_stays_is_learned() -> None:
    estimate = Estimate(0.9, 0.01)
    estimate.took(1.0, 1)
    assert estimate.seconds.value < 0.02
    for _ in range(100):
        estimate.took(1.0, 1)
    assert math.isclose(estimate.seconds.value, 1.0, rel_tol=0.1)
