"""How far to draft: estimates that follow what is seen and fade, and lengths that are the best for given costs."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from enumeration import TableLevel, soft
from models import CPU
from offload.decode.adaptive import Adaptive
from offload.decode.clock import PlanClock
from offload.decode.estimates import Mean, PassSeconds
from offload.decode.lookahead import Ask, Fixed, Outlook, grades_of
from offload.decode.pace import Pace
from offload.decode.sampling import SamplingParams, SeededSource, warp
from offload.decode.source import Source
from offload.decode.speculation import ModelProposer, Speculator
from offload.decode.verify import Verdict
from offload.metrics import LevelStats
from offload.plan import expectations
from offload.plan.planner import Options, make_plan

ANY, NONE = Outlook(), Outlook(0)


def greedy(logits: torch.Tensor) -> torch.Tensor:
    return warp(logits, SamplingParams(temperature=0.0))


def test_a_mean_starts_at_its_guess_and_follows_what_it_sees() -> None:
    mean = Mean(0.9, weight=4.0)
    assert mean.value == 0.9
    for _ in range(200):
        mean.add(0.2)
    assert mean.value == pytest.approx(0.2, abs=0.06)


def test_a_mean_fades_back_to_its_guess() -> None:
    mean = Mean(0.9)
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
    assert passes.coefficients() == pytest.approx((1.0, 0.5))
    for count in range(400):
        rows = 1 + count % 9
        passes.add(rows, fixed + slope * rows)
    assert passes.at(1) == pytest.approx(fixed + slope, rel=0.2, abs=0.06)
    assert passes.at(9) == pytest.approx(fixed + 9 * slope, rel=0.2, abs=0.06)


@given(st.floats(1e-3, 1.0), st.floats(0.0, 0.1), st.integers(2, 16))
def test_a_pass_of_several_blocks_takes_the_fixed_part_for_each(fixed: float, slope: float, block: int) -> None:
    passes = PassSeconds(1.0, 0.5, block=block)
    assert passes.coefficients() == pytest.approx((1.0, 0.5))
    assert passes.at(block) == pytest.approx(1.0 + 0.5 * block)
    assert passes.at(block + 1) == pytest.approx(2.0 + 0.5 * (block + 1))
    for count in range(600):
        rows = 1 + count % 40
        passes.add(rows, fixed * math.ceil(rows / block) + slope * rows)
    for rows in (1, block, block + 1, 40):
        exact = fixed * math.ceil(rows / block) + slope * rows
        assert passes.at(rows) == pytest.approx(exact, rel=0.2, abs=0.06)


@pytest.mark.parametrize("block", [0, 4, 16])
def test_steps_add_up_to_longer_passes(block: int) -> None:
    passes = PassSeconds(1.0, 0.5, block=block)
    for rows in range(1, 20):
        steps = passes.steps(rows)
        for more in range(1, 20):
            assert passes.at(rows) + sum(next(steps) for _ in range(more)) == pytest.approx(passes.at(rows + more))
            steps = passes.steps(rows)


def test_whole_blocks_are_where_a_pass_may_end_best() -> None:
    assert list(PassSeconds(1.0, 0.5, block=16).full_blocks(1, 63)) == [15, 31, 47, 63]
    assert list(PassSeconds(1.0, 0.5, block=16).full_blocks(14, 17)) == [2]
    assert list(PassSeconds(1.0, 0.5, block=16).full_blocks(16, 17)) == [0, 16]
    assert list(PassSeconds(1.0, 0.5).full_blocks(1, 63)) == []


def test_more_rows_never_take_less_nor_a_pass_less_than_nothing() -> None:
    passes = PassSeconds(0.1, 0.1)
    for count in range(50):
        passes.add(1 + count % 9, 5.0 - 0.5 * (count % 9))
    fixed, slope = passes.coefficients()
    assert slope == 0.0
    assert fixed > 0.0


def test_grades_are_tenths_of_the_largest_probability() -> None:
    rows = torch.tensor([[0.04, 0.96], [0.999, 0.001], [0.5, 0.5]])
    assert grades_of(rows.log(), rows) == [9, 9, 5]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_grades_of_point_masses_are_how_far_the_logit_is_ahead(dtype: torch.dtype) -> None:
    """At temperature 0 every law is one: whether another cache would say the same shows in the logits alone."""
    margins = [0.0, 0.05, 0.125, 0.25, 0.5, 1.0, 2.0, 60.0]
    logits = torch.tensor([[-3.0, 1.0, 1.0 + margin] for margin in margins], dtype=dtype)
    assert grades_of(logits, greedy(logits)) == [10, 10, 11, 12, 13, 14, 15, 15]
    one_left = warp(logits, SamplingParams(temperature=0.1, top_p=0.5))
    assert grades_of(logits, one_left)[1:] == [10, 11, 12, 13, 14, 15, 15]


def test_proposals_are_graded_by_the_logits_of_their_own_places() -> None:
    """By those of the level that hands them up, whoever drafted them."""
    laws = {name: soft(5, name) for name in ("retrieval", "draft")}
    alone, draft = (ModelProposer(TableLevel(laws["draft"], logarithm=True), greedy, SeededSource(0)) for _ in "12")
    retrieval = TableLevel(laws["retrieval"], logarithm=True)
    middle = Speculator(retrieval, [draft], lookahead=Fixed(3), warp=greedy, random=SeededSource(0), clock=PlanClock())
    sequence, seen = [1], set()
    for _ in range(12):
        for name, proposal in (("draft", alone.propose(sequence, 1)), ("retrieval", middle.propose(sequence, 4))):
            prefixes = [(*sequence, *proposal.tokens[:place]) for place in range(len(proposal.tokens))]
            logits = torch.stack([laws[name](prefix) for prefix in prefixes]).log()
            assert proposal.grades == grades_of(logits, greedy(logits))
            seen.add((name, *proposal.grades))
        sequence += proposal.tokens
    assert len(seen) > 8


def test_a_level_hears_how_sure_it_was_of_what_it_emitted() -> None:
    """Of each kept token and of the correction or bonus, by its own law there: not of what it rejected."""
    laws = {name: soft(5, name) for name in ("target", "draft")}
    heard: list[tuple[int, list[int]]] = []

    class Hears(Fixed):
        def verified(self, verdict: Verdict, grades: Sequence[int], num_rows: int, seconds: float) -> None:
            heard.append((verdict.num_accepted, list(grades)))

    draft = ModelProposer(TableLevel(laws["draft"]), lambda rows: rows, SeededSource(1))
    level = TableLevel(laws["target"], logarithm=True)
    top = Speculator(level, [draft], lookahead=Hears(3), warp=greedy, random=SeededSource(0), clock=PlanClock())
    sequence = [1]
    for _ in range(12):
        emitted = top.round(sequence, 4).tokens
        logits = torch.stack([laws["target"]((*sequence, *emitted[:place])) for place in range(len(emitted))]).log()
        assert heard[-1] == (len(emitted) - 1, grades_of(logits, greedy(logits)))
        sequence += emitted
    assert len({num_accepted for num_accepted, _ in heard}) > 1


def test_a_row_of_infinite_logits_and_a_vocabulary_of_one_have_grades_too() -> None:
    """Mended or refused elsewhere: a grade only estimates."""
    logits = torch.tensor([[torch.inf, torch.inf, 0.0], [torch.inf, 0.0, 0.0], [0.0, -torch.inf, -torch.inf]])
    assert all(10 <= grade <= 15 for grade in grades_of(logits, greedy(logits)))
    assert grades_of(torch.zeros(1, 1), torch.ones(1, 1)) == [15]


# Fixed lengths


def test_a_fixed_length_is_kept_to_and_to_the_limit() -> None:
    ahead = Fixed(5)
    ahead.start(9)
    assert ahead.ask([ANY]) == Ask(0, 5)
    ahead.drafted(0, [1, 2], 0.0)
    assert ahead.ask([ANY]) == Ask(0, 3)
    ahead.start(2)
    assert ahead.ask([ANY]) == Ask(0, 2)
    ahead.start(0)
    assert ahead.ask([ANY]) is None


def test_a_fixed_length_trusts_long_lookups_only_unless_there_is_nothing_else() -> None:
    ahead = Fixed(5)
    ahead.start(9)
    assert ahead.ask([Outlook(3, 4), ANY]) == Ask(0, 3)
    assert ahead.ask([Outlook(3, 2), ANY]) == Ask(1, 5)
    assert ahead.ask([Outlook(3, 2)]) == Ask(0, 3)
    assert ahead.ask([NONE]) is None
    assert ahead.ask([]) is None


# Adaptive lengths


def play(
    ahead: Adaptive,
    chances: list[float],
    *,
    seconds: list[float],
    passes: tuple[float, float],
    num_tokens: int,
    block: int = 1000,
    outlooks: list[Outlook] | None = None,
) -> tuple[float, float]:
    """Proposer i's tokens are kept with chances[i] and take seconds[i]: (seconds a token, drafts a round)."""
    rng, clock, emitted, rounds, total = random.Random(0), 0.0, 0, 0, 0
    while emitted < num_tokens:
        ahead.start(100)
        drafted: list[int] = []
        while (ask := ahead.ask(outlooks or [ANY] * len(chances))) and len(drafted) < 100:
            drafted.append(ask.index)
            clock += seconds[ask.index]
            grade = (outlooks or [ANY] * len(chances))[ask.index].grade
            ahead.drafted(ask.index, [7 if grade is None else grade], seconds[ask.index])
        accepted = next((i for i, index in enumerate(drafted) if rng.random() >= chances[index]), len(drafted))
        cost = passes[0] * math.ceil((1 + len(drafted)) / block) + passes[1] * (1 + len(drafted))
        clock += cost
        kept = [chances[index] for index in drafted[: accepted + 1]]
        ahead.verified(Verdict(accepted, 0, kept), [9] * (accepted + 1), 1 + len(drafted), cost)
        emitted, rounds, total = emitted + accepted + 1, rounds + 1, total + len(drafted)
    return clock / emitted, total / rounds


def best(chance: float, seconds: float, passes: tuple[float, float], most: int = 63, *, block: int = 1000) -> float:
    """Seconds a token with the best fixed length."""
    return min(
        (passes[0] * math.ceil((1 + n) / block) + passes[1] * (1 + n) + n * seconds)
        / sum(chance**k for k in range(n + 1))
        for n in range(most + 1)
    )


@pytest.mark.parametrize("chance", [0.05, 0.5, 0.8, 0.95])
@pytest.mark.parametrize("seconds", [0.01, 0.2, 0.9])
@pytest.mark.parametrize("slope", [0.0, 0.1])
def test_measured_lengths_come_within_5_percent_of_the_best_fixed_one(
    chance: float, seconds: float, slope: float
) -> None:
    """From a guess that is wrong in everything: seconds by a factor of three, and how often tokens are kept."""
    passes = (1.0, slope)
    ahead = Adaptive(63, PassSeconds(0.5, 0.03), [Source(0.9, seconds / 3)])
    play(ahead, [chance], seconds=[seconds], passes=passes, num_tokens=600)
    reached, _ = play(ahead, [chance], seconds=[seconds], passes=passes, num_tokens=6000)
    assert reached < 1.05 * best(chance, seconds, passes)


@pytest.mark.parametrize("chance", [0.5, 0.8, 0.95, 0.99])
@pytest.mark.parametrize("seconds", [0.01, 0.2])
@pytest.mark.parametrize("block", [4, 16])
def test_lengths_come_within_5_percent_of_the_best_fixed_one_where_blocks_cost(
    chance: float, seconds: float, block: int
) -> None:
    """Whose best length is often that of a whole block, or of several."""
    passes = (1.0, 0.05)
    ahead = Adaptive(63, PassSeconds(0.5, 0.03, block=block), [Source(0.9, seconds / 3)])
    play(ahead, [chance], seconds=[seconds], passes=passes, num_tokens=600, block=block)
    reached, _ = play(ahead, [chance], seconds=[seconds], passes=passes, num_tokens=6000, block=block)
    assert reached < 1.05 * best(chance, seconds, passes, block=block)


def test_a_model_drafts_to_the_end_of_a_block_unless_the_next_one_pays_as_a_whole() -> None:
    """A row that begins a block costs more than its token is worth; the rows after it make up for that where a round
    costs more than its pass."""
    for round_seconds, expected in ((0.0, 15), (3.0, 63)):
        model = Source(0.999, 0.001, trust=1000.0, round_seconds=round_seconds)
        ahead = Adaptive(63, PassSeconds(1.0, 0.01, block=16), [model])
        ahead.start(63)
        assert ahead.ask([ANY]) == Ask(0, expected)


def test_of_a_lookup_as_much_is_drafted_as_ends_a_block() -> None:
    ahead = Adaptive(63, PassSeconds(1.0, 0.01, block=16), [Source.lookup()])
    ahead.start(63)
    assert ahead.ask([Outlook(40, 3)]) == Ask(0, 15)
    ahead.drafted(0, [3] * 4, 0.0)
    assert ahead.ask([Outlook(40, 4)]) == Ask(0, 11)


def test_where_drafts_are_worthless_almost_none_are_made() -> None:
    """Never slower than plain decoding by more than 3 %, the trials included that would show a better text."""
    ahead = Adaptive(63, PassSeconds(1.0, 0.1), [Source(0.9, 0.7)])
    play(ahead, [0.1], seconds=[0.7], passes=(1.0, 0.1), num_tokens=300)
    reached, _ = play(ahead, [0.1], seconds=[0.7], passes=(1.0, 0.1), num_tokens=5000)
    assert reached < 1.03 * 1.1


def test_a_text_that_becomes_easy_is_noticed() -> None:
    ahead = Adaptive(63, PassSeconds(1.0, 0.0), [Source(0.9, 0.2)])
    play(ahead, [0.05], seconds=[0.2], passes=(1.0, 0.0), num_tokens=2000)
    play(ahead, [0.95], seconds=[0.2], passes=(1.0, 0.0), num_tokens=2000)
    reached, drafts = play(ahead, [0.95], seconds=[0.2], passes=(1.0, 0.0), num_tokens=2000)
    assert reached < 1.05 * best(0.95, 0.2, (1.0, 0.0))
    assert drafts > 4


def test_the_proposer_that_pays_is_the_one_that_is_asked() -> None:
    ahead = Adaptive(63, PassSeconds(1.0, 0.0), [Source(0.5, 0.01), Source(0.5, 0.3)])
    reached, _ = play(ahead, [0.2, 0.9], seconds=[0.01, 0.3], passes=(2.0, 0.0), num_tokens=8000)
    assert reached < 1.1 * best(0.9, 0.3, (2.0, 0.0))


def test_a_lookup_that_is_right_replaces_a_dear_model() -> None:
    outlooks = [Outlook(20, 5), ANY]
    ahead = Adaptive(63, PassSeconds(1.0, 0.0), [Source.lookup(), Source(0.9, 0.3)])
    reached, _ = play(ahead, [0.97, 0.9], seconds=[1e-5, 0.3], passes=(1.0, 0.0), num_tokens=4000, outlooks=outlooks)
    assert reached < 1.1 * best(0.97, 0.0, (1.0, 0.0))


def test_a_long_match_that_was_right_goes_straight_to_a_verification() -> None:
    """As long as the block may be, past a model that would check it for a little: nothing is left to check."""
    outlooks = [Outlook(63, 7), ANY]
    ahead = Adaptive(63, PassSeconds(1.0, 0.0), [Source.lookup(), Source(0.995, 0.005, trust=32.0)])
    play(ahead, [1.0, 0.995], seconds=[1e-5, 0.005], passes=(1.0, 0.0), num_tokens=300, outlooks=outlooks)
    ahead.start(63)
    assert ahead.ask(outlooks) == Ask(0, 63)


def test_after_text_that_was_copied_a_model_is_worth_what_it_always_was() -> None:
    """Cheap tokens of rounds with a match do not make cheap the tokens of rounds without one."""
    ahead = Adaptive(63, PassSeconds(0.9, 0.1), [Source.lookup(), Source(0.6, 0.2)])
    copied = [Outlook(60, 7), ANY]
    play(ahead, [1.0, 0.6], seconds=[1e-5, 0.2], passes=(0.9, 0.1), num_tokens=1000, outlooks=copied)
    ahead.start(63)
    assert ahead.ask([NONE, ANY]) == Ask(1, 1)


def test_a_lookup_that_is_wrong_leaves_the_model_in_its_place() -> None:
    outlooks = [Outlook(20, 1), ANY]
    ahead = Adaptive(63, PassSeconds(5.0, 0.0), [Source.lookup(), Source(0.9, 0.1)])
    play(ahead, [0.05, 0.9], seconds=[1e-5, 0.1], passes=(5.0, 0.0), num_tokens=500, outlooks=outlooks)
    reached, _ = play(ahead, [0.05, 0.9], seconds=[1e-5, 0.1], passes=(5.0, 0.0), num_tokens=4000, outlooks=outlooks)
    assert reached < 1.1 * best(0.9, 0.1, (5.0, 0.0))


def test_drafting_stops_early_where_a_token_was_unsure() -> None:
    """Tokens of grade 2 are kept at times, those of grade 9 nearly always."""
    ahead = Adaptive(63, PassSeconds(1.0, 0.0), [Source(0.9, 0.01)])
    for _ in range(300):
        for grade, chance in ((2, 0.3), (9, 0.99)):
            ahead.start(1)
            ahead.drafted(0, [grade], 0.01)
            ahead.verified(Verdict(1, 0, [chance]), [9] * 2, 2, 1.0)
    lengths = {}
    for grade in (2, 9):
        ahead.start(63)
        ahead.drafted(0, [grade], 0.01)
        ask = ahead.ask([ANY])
        lengths[grade] = ask.num_tokens if ask else 0
    assert lengths[2] < lengths[9] - 2


def test_a_proposer_that_is_not_ready_is_not_asked() -> None:
    ahead = Adaptive(31, PassSeconds(1.0, 0.0), [Source(0.9, 0.01)])
    ahead.start(31)
    assert ahead.ask([ANY])
    ahead.readied(0, None)
    assert ahead.ask([ANY]) is None
    ahead.readied(0, 0.001)
    assert ahead.ask([ANY])


def test_getting_ready_is_wanted_while_it_pays() -> None:
    cheap, dear = (Adaptive(31, PassSeconds(1.0, 0.0), [Source(0.9, 0.01, round_seconds=s)]) for s in (0.1, 50.0))
    assert cheap.wants(0)
    assert not dear.wants(0)
    assert not Adaptive(31, PassSeconds(1.0, 0.0), [Source(0.9, 0.01, pass_share=20.0)]).wants(0)


def resting(*, pass_seconds: float) -> Adaptive:
    """A token of the second source was to take .7 of a pass; lookups make one take half a pass."""
    ahead = Adaptive(31, PassSeconds(1.0, 0.0), [Source.lookup(), Source(0.95, 0.7, trust=32.0, round_seconds=0.01)])
    assert ahead.wants(1)
    for _ in range(50):
        ahead.readied(1, None)
        ahead.start(31)
        ahead.ask([Outlook(1, 5), ANY])
        ahead.drafted(0, [5], 0.0)
        ahead.verified(Verdict(1, 0, [1.0]), [9] * 2, 2, pass_seconds)
    return ahead


def test_what_lookups_save_is_guessed_of_a_proposer_that_rests_too() -> None:
    """A retrieval level rested for a whole text of lookups, for they had made a token cheaper than its pass."""
    ahead = resting(pass_seconds=1.0)
    assert ahead.rate() < 0.7
    assert ahead.wants(1)
    assert ahead.sources[1].seconds.value < 0.5


def test_no_more_than_three_fifths_of_the_seconds_given_are_taken_off() -> None:
    source = Source(0.95, 0.7, trust=32.0)
    source.cheapen(0.01)
    assert source.seconds.value == pytest.approx(0.28)


def test_a_machine_that_is_slower_than_planned_makes_up_for_what_lookups_save() -> None:
    """Its retrieved tokens are dearer too: guessed at a fifth of what they took, they were readied for nothing."""
    ahead = resting(pass_seconds=2.5)
    assert ahead.wants(1)
    assert ahead.sources[1].seconds.value == pytest.approx(0.7)


def test_how_sure_the_target_is_tells_of_a_proposer_that_is_never_asked() -> None:
    """Twice as often not kept among tokens of grade 1, a quarter as often among those of grade 2."""
    source = Source(0.9, 0.7, trust=32.0, doubts=(1.0, 2.0, 0.25))
    source.foresee([0] * 20)
    assert source.chance.value == pytest.approx(0.9)
    source.foresee([1] * 300)
    assert source.chance.value == pytest.approx(0.8, abs=0.02)
    source.foresee([2] * 300)
    assert source.chance.value == pytest.approx(0.97, abs=0.01)
    assert source.chance_of(2) == source.chance_at(0) == source.chance.value


def test_no_chance_is_foreseen_to_be_less_than_none() -> None:
    """A small budget on a hard text: six times as often as half of the time."""
    source = Source(0.5, 0.7, trust=32.0, doubts=(6.0,))
    source.foresee([0] * 300)
    assert source.chance.value == pytest.approx(0.07, abs=0.01)


def test_a_proposer_that_rests_is_tried_where_the_target_is_sure() -> None:
    """Editing with SmolLM2: all retrieved tokens would have been kept, and none was tried."""
    tried = {}
    for grade in (0, 1):
        model = Source(0.9, 0.7, trust=32.0, round_seconds=0.5, doubts=(1.0, 0.1))
        ahead = Adaptive(31, PassSeconds(0.9, 0.1), [model])
        ahead.readied(0, None)
        for _ in range(60):
            ahead.start(31)
            ahead.verified(Verdict(0, 0), [grade], 1, 1.0)
        tried[grade] = ahead.wants(0)
    assert tried == {0: False, 1: True}


def test_what_getting_ready_took_counts_from_then_on() -> None:
    ahead = Adaptive(31, PassSeconds(1.0, 0.0), [Source(0.9, 0.01, round_seconds=0.1)])
    cheap = ahead.rate()
    ahead.readied(0, 5.0)
    assert ahead.rate() > 2.0 * cheap


def rounds_ready(ahead: Adaptive, index: int, outlooks: list[Outlook], num_rounds: int) -> list[bool]:
    """In which rounds the proposer at `index` is ready, where lookups are drafted alone and kept."""
    ready = []
    for _ in range(num_rounds):
        ahead.start(20)
        ready.append(ahead.sources[index].ready)
        ahead.drafted(0, [5] * 10, 0.0)
        ahead.verified(Verdict(10, 0, [1.0] * 10), [9] * 11, 11, 1.0)
        ahead.readied(index, 0.05 if ahead.wants(index) else None)
    return ready


def test_one_block_of_lookups_does_not_send_a_dear_proposer_to_rest() -> None:
    """A retrieval level over a slow link rested for 24 rounds because the first tokens drafted were looked up."""
    ahead = Adaptive(63, PassSeconds(1.0, 0.0), [Source.lookup(), Source(0.95, 0.02, round_seconds=0.05)])
    assert all(rounds_ready(ahead, 1, [Outlook(20, 5), ANY], 3))


def test_a_proposer_that_is_never_asked_rests_and_is_tried_again_now_and_then() -> None:
    """Being ready has a price in every round, whether it is asked or not."""
    ahead = Adaptive(63, PassSeconds(1.0, 0.0), [Source.lookup(), Source(0.95, 0.02, round_seconds=0.05)])
    ready = rounds_ready(ahead, 1, [Outlook(20, 5), ANY], 400)
    assert 0.02 < sum(ready[100:]) / 300 < 0.3
    assert any(ready[-100:])


def test_a_round_that_has_a_lookup_promises_more_tokens_for_its_pass() -> None:
    ahead = Adaptive(15, PassSeconds(1.0, 0.1), [Source.lookup(), Source(0.6, 0.5)])
    assert ahead.outlook([NONE, ANY]) == Outlook()
    tokens, seconds = ahead.outlook([Outlook(8, 5), ANY]).expected or (0.0, 0.0)
    assert 5.0 < tokens <= 9.0
    assert seconds == pytest.approx(1.9)  # of nine rows


def test_a_looked_up_run_goes_through_a_cheap_model_before_a_dear_verification() -> None:
    """Over a slow link 63 looked up tokens went straight to a full pass, and none was kept."""
    sources = [Source.lookup(), Source(0.97, 0.05, trust=32.0)]
    ahead = Adaptive(63, PassSeconds(1.0, 0.0), sources)
    ahead.start(63)
    lookup = Outlook(40, 4)
    assert ahead.ask([lookup, ANY]) == Ask(0, 40)
    ask = ahead.ask([lookup, Outlook(expected=(9.0, 0.1))])
    assert ask is not None
    assert ask.index == 1


def test_no_more_is_asked_for_than_may_be_drafted() -> None:
    for limit in range(6):
        ahead = Adaptive(4, PassSeconds(100.0, 0.0), [Source(0.99, 1e-6)])
        ahead.start(limit)
        ask = ahead.ask([ANY])
        assert (ask.num_tokens if ask else 0) == min(limit, 4)
        ask = ahead.ask([Outlook(3, 5)]) if limit else None
        assert (ask.num_tokens if ask else 0) == min(limit, 3)


# Seconds by the plan


def test_the_plans_clock_runs_where_a_level_runs_and_only_there() -> None:
    request = {"num_prompt_tokens": 30_000, "max_tokens": 100}
    plan = make_plan(expectations.LLAMA2_7B, expectations.LLAMA_68M, Options(), CPU, **request)
    prices, clock, pace, masses = plan.predicted, PlanClock(), Pace(plan), []
    assert min(prices.draft_pass_seconds, prices.retrieval_row_seconds, prices.full_row_seconds) > 0

    def seconds_of(name: str, rows: int) -> float:
        level = TableLevel(soft(3, name))
        level.stats = LevelStats(name)
        priced, before = pace.priced(level, clock, keeps_mass=lambda: bool(masses)), clock.now()
        priced.forward([1] * rows, 1)
        assert level.length == priced.length == rows
        return clock.now() - before

    assert seconds_of("draft", 5) == prices.draft_pass_seconds
    assert seconds_of("retrieval", 3) == pytest.approx(prices.retrieval_pass_seconds + 2 * prices.retrieval_row_seconds)
    assert seconds_of("target", 3) == pytest.approx(prices.full_pass_seconds + 2 * prices.full_row_seconds)
    block, fixed = prices.full_block_rows, prices.full_pass_seconds - prices.full_row_seconds
    assert seconds_of("target", block) == pytest.approx(fixed + block * prices.full_row_seconds)
    assert seconds_of("target", block + 1) == pytest.approx(2 * fixed + (block + 1) * prices.full_row_seconds)
    masses.append(True)
    assert seconds_of("target", 1) == pytest.approx(prices.full_pass_seconds * (1.0 + prices.mass_share))


@pytest.mark.parametrize(("offload", "expected"), [((), 12), (("kv",), 0)])
def test_passes_are_priced_by_the_blocks_that_the_machine_has_unless_they_wait_for_a_link(
    offload: tuple[str, ...], expected: int
) -> None:
    options = Options(offload=frozenset(offload), link_gbps=1.0 if offload else None)
    plan = make_plan(
        expectations.LLAMA2_7B, expectations.LLAMA_68M, options, CPU, num_prompt_tokens=30_000, max_tokens=100
    )
    one, row = plan.predicted.full_pass_seconds, plan.predicted.full_row_seconds
    ahead = Pace(plan, block=12).target([])
    assert isinstance(ahead, Adaptive)
    blocks = math.ceil(37 / expected) if expected else 1
    assert ahead.passes.at(37) == pytest.approx(blocks * (one - row) + 37 * row)


def test_what_is_guessed_of_retrieved_tokens_follows_the_text_and_of_the_drafts_does_not() -> None:
    """Grades 10 and 15: two tokens that are level, and one far ahead of the next. Drawn tokens say nothing."""
    request = {"num_prompt_tokens": 30_000, "max_tokens": 100}
    plan = make_plan(expectations.LLAMA2_7B, expectations.LLAMA_68M, Options(), CPU, **request)
    law = soft(3, "any")
    proposers = [ModelProposer(TableLevel(law), greedy, SeededSource(0)) for _ in "12"]
    proposers[1].name, proposers[0].name = "retrieval", "draft"
    chances = {}
    for grade in (5, 10, 15):
        ahead = Pace(plan).target(proposers)
        assert isinstance(ahead, Adaptive)
        before = [source.chance.value for source in ahead.sources]
        for _ in range(100):
            ahead.start(0)
            ahead.verified(Verdict(0, 0), [grade], 1, 0.1)
        assert ahead.sources[0].chance.value == before[0]
        chances[grade] = ahead.sources[1].chance.value - before[1]
    assert chances[5] == pytest.approx(0.0)
    assert chances[10] < -0.1
    assert chances[15] > 0.02


def test_a_pause_of_the_machine_moves_an_estimate_little_but_what_stays_is_learned() -> None:
    source = Source(0.9, 0.01)
    source.took(1.0, 1)  # not asked before: its cache had to catch up
    assert source.seconds.value < 0.012
    source.idle_rounds = 0
    source.took(1.0, 1)
    assert source.seconds.value < 0.02
    for _ in range(100):
        source.took(1.0, 1)
    assert math.isclose(source.seconds.value, 1.0, rel_tol=0.1)
