"""When generation stops, what a run holds, what the counters mean: with drafts right always, never, or at times."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kit.enumeration import Distribution, TableLevel, Tokens, identity
from kit.examples import at_most
from offload.decode import generation
from offload.decode.generation import Run, in_passes
from offload.decode.lengths import Fixed
from offload.decode.random_source import SeededSource
from offload.decode.speculation import ModelProposer, Proposer, Speculator
from offload.metrics import LevelStats, LinkStats, Stats
from offload.model.passes import Pass, alone

VOCABULARY = 20


def certain(token: int) -> Tensor:
    return torch.eye(VOCABULARY, dtype=torch.float64)[token % VOCABULARY]


def counting(sequence: Tokens) -> Tensor:
    """After t comes t + 1: the text is known, whatever is drawn."""
    return certain(sequence[-1] + 1)


def wrong(sequence: Tokens) -> Tensor:
    return certain(sequence[-1] + 2)


def wrong_after_multiples_of_3(sequence: Tokens) -> Tensor:
    return wrong(sequence) if sequence[-1] % 3 == 0 else counting(sequence)


@dataclass
class Setup:
    """A target that counts and its proposers; the speculator over them and what it was given."""

    draft: Distribution = counting
    retrieval: Distribution | None = None
    gamma: int = 3
    draft_gamma: int = 2
    prefilled: list[int] | None = None
    stats: Stats = field(default_factory=Stats)

    def __post_init__(self) -> None:
        random = SeededSource(0)
        self.target, self.retrieval_level, self.draft_level = (
            TableLevel(distribution) for distribution in (counting, self.retrieval or counting, self.draft)
        )
        proposer: Proposer = ModelProposer(self.draft_level, identity, random)
        if self.retrieval is not None:
            proposer = Speculator(
                self.retrieval_level, [proposer], lengths=Fixed(self.draft_gamma), warp=identity, random=random
            )
        self.speculator = Speculator(self.target, [proposer], lengths=Fixed(self.gamma), warp=identity, random=random)

    def prefill(self, tokens: Sequence[int]) -> None:
        self.prefilled = list(tokens)
        self.target.tokens = list(tokens)

    def start(
        self, max_tokens: int, end: Collection[int] = (), prompt: Sequence[int] = (0,), num_pending: int = 1
    ) -> Iterator[Run]:
        return alone(
            in_passes(
                prompt,
                self.speculator,
                prefill=self.prefill,
                num_pending=num_pending,
                max_tokens=max_tokens,
                end_tokens=end,
                stats=self.stats,
            )
        )


def test_an_accepted_run_is_the_drafts_and_the_bonus() -> None:
    setup = Setup()
    assert list(setup.start(9)) == [Run([1], None), Run([2, 3, 4, 5], None), Run([6, 7, 8, 9], "length")]


def test_a_rejected_run_is_the_correction() -> None:
    setup = Setup(draft=wrong)
    assert list(setup.start(3)) == [Run([1], None), Run([2], None), Run([3], "length")]


def test_a_partly_accepted_run_ends_with_the_correction() -> None:
    setup = Setup(draft=wrong_after_multiples_of_3)
    assert [run.tokens for run in setup.start(11)] == [[1], [2, 3, 4], [5, 6, 7], [8, 9, 10], [11]]


@pytest.mark.parametrize("draft", [counting, wrong, wrong_after_multiples_of_3])
@pytest.mark.parametrize("retrieval", [None, counting, wrong, wrong_after_multiples_of_3])
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 7, 12])
def test_the_text_is_the_targets_and_exactly_as_long_as_asked(
    draft: Distribution, retrieval: Distribution | None, max_tokens: int
) -> None:
    setup = Setup(draft=draft, retrieval=retrieval)
    runs = list(setup.start(max_tokens))
    assert [token for run in runs for token in run.tokens] == list(range(1, max_tokens + 1))
    assert [run.finish for run in runs] == [None] * (len(runs) - 1) + ["length"]
    assert setup.stats.output_tokens == max_tokens


@pytest.mark.parametrize("max_tokens", [2, 3, 4, 5, 6])
def test_the_last_round_drafts_no_more_than_it_may_emit(max_tokens: int) -> None:
    """So the bonus is never cut off, and no cache holds more than the text."""
    setup = Setup()
    runs = list(setup.start(max_tokens))
    assert len(runs[-1].tokens) == (max_tokens - 1 if max_tokens <= 5 else 1)
    assert setup.target.length == max_tokens
    assert setup.target.stats.drafted == setup.target.stats.accepted == max_tokens - len(runs)


@pytest.mark.parametrize("end", [2, 3, 4, 5])
def test_an_end_token_inside_an_accepted_run_cuts_it(end: int) -> None:
    setup = Setup()
    assert list(setup.start(100, end={end, 7})) == [Run([1], None), Run(list(range(2, end + 1)), "stop")]
    assert setup.stats.output_tokens == end


def test_nothing_is_computed_after_an_end_token() -> None:
    """The generator went on when its caller did."""
    setup = Setup()
    runs = setup.start(100, end={3})
    assert [next(runs).finish, next(runs).finish] == [None, "stop"]
    rounds = setup.target.stats.rounds
    assert next(runs, None) is None
    assert setup.target.stats.rounds == rounds


def test_an_end_token_may_come_first() -> None:
    assert list(Setup().start(100, end={1})) == [Run([1], "stop")]


def test_an_end_token_as_the_last_allowed_token_is_a_stop() -> None:
    assert list(Setup().start(4, end={4})) == [Run([1], None), Run([2, 3, 4], "stop")]


def test_an_end_token_in_the_prompt_stops_nothing() -> None:
    assert list(Setup().start(2, end={0}, prompt=[0, 0])) == [Run([1], None), Run([2], "length")]


def test_one_token_is_one_round_without_drafts() -> None:
    setup = Setup()
    assert list(setup.start(1)) == [Run([1], "length")]
    assert (setup.target.stats.rounds, setup.target.stats.drafted, setup.draft_level.stats.rounds) == (1, 0, 0)


def test_a_text_without_tokens_has_its_last_run() -> None:
    """There was none, and who waited for it got StopIteration."""
    setup = Setup()
    assert list(setup.start(0, prompt=[4, 5])) == [Run([], "length")]
    assert setup.prefilled == [4]
    assert setup.stats.as_dict()["output_tokens"] == setup.target.stats.rounds == 0


def test_runs_come_as_soon_as_they_are_known() -> None:
    setup = Setup()
    runs = setup.start(100)
    assert setup.prefilled is None
    for rounds in (1, 2, 3):
        next(runs)
        assert setup.target.stats.rounds == rounds


@given(st.integers(1, 8), st.integers(1, 10))
@at_most(50)
def test_prefill_gets_all_but_what_the_first_round_takes(num_prompt: int, num_pending: int) -> None:
    setup, prompt = Setup(), list(range(num_prompt))
    first = next(setup.start(5, prompt=prompt, num_pending=num_pending))
    assert setup.prefilled == prompt[: max(num_prompt - num_pending, 0)]
    assert setup.target.tokens == prompt
    assert first.tokens == [num_prompt]


# Counters


def test_acceptance_is_accepted_over_drafted_and_tokens_per_round_counts_every_round() -> None:
    """Drafts are right but after 0, 3, 6: rounds emit 1, 3, 3, 3, 1 tokens and draft 0, 3, 3, 3, 0."""
    setup = Setup(draft=wrong_after_multiples_of_3)
    list(setup.start(11))
    stats = setup.target.stats
    assert (stats.rounds, stats.drafted, stats.accepted) == (5, 9, 6)
    assert stats.acceptance == 6 / 9
    assert stats.tokens_per_round == 11 / 5


@pytest.mark.parametrize(("draft", "acceptance", "rounds"), [(counting, 1.0, 3), (wrong, 0.0, 9)])
def test_acceptance_is_1_for_a_draft_that_is_right_and_0_for_one_that_is_not(
    draft: Distribution, acceptance: float, rounds: int
) -> None:
    setup = Setup(draft=draft)
    list(setup.start(9))
    assert setup.target.stats.acceptance == acceptance
    assert setup.target.stats.rounds == rounds
    assert setup.target.stats.tokens_per_round == 9 / rounds


def test_each_level_counts_its_own_rounds() -> None:
    """The target drafts 3 a round; below it, a retrieval round is 2 drafts and a bonus, so one makes all 3."""
    setup = Setup(draft=counting, retrieval=counting)
    list(setup.start(9))
    target, retrieval, draft = setup.target.stats, setup.retrieval_level.stats, setup.draft_level.stats
    assert (target.rounds, target.drafted, target.accepted) == (3, 6, 6)
    assert (retrieval.rounds, retrieval.drafted, retrieval.accepted) == (2, 4, 4)
    assert (draft.rounds, draft.drafted, draft.accepted) == (0, 0, 0)  # it verifies nothing


def test_plain_decoding_has_one_token_a_round_and_no_acceptance() -> None:
    setup = Setup(gamma=0)
    list(setup.start(5))
    stats = setup.target.stats
    assert (stats.rounds, stats.tokens_per_round, stats.acceptance) == (5, 1.0, None)


def test_ratios_of_nothing_are_none() -> None:
    level, stats = LevelStats("target"), Stats()
    assert (level.acceptance, level.tokens_per_round, level.seconds_per_pass) == (None, None, None)
    assert (stats.decode_tokens_per_second, stats.milliseconds_per_token, stats.link_utilisation) == (None, None, None)
    assert Stats(output_tokens=1, decode_seconds=1.0).decode_tokens_per_second is None
    assert Stats(prompt_tokens=5).prompt_tokens_per_second is None


class Clock:
    """A clock that only work moves on."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


def test_times_are_split_at_the_end_of_prefill_and_at_the_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, setup = Clock(), Setup(gamma=0)
    monkeypatch.setattr(generation, "time", clock)
    run, prefill = setup.target.run, setup.prefill

    def slow_run(passes: Sequence[Pass]) -> None:
        clock.now += 2.0
        run(passes)

    def slow_prefill(tokens: Sequence[int]) -> None:
        clock.now += 5.0
        prefill(tokens)

    monkeypatch.setattr(setup.target, "run", slow_run)
    monkeypatch.setattr(setup, "prefill", slow_prefill)
    stats = setup.stats
    for _ in setup.start(4):
        clock.now += 0.0 if stats.output_tokens == 4 else 1.0  # the caller's own time is part of decoding
    assert (stats.prefill_seconds, stats.first_token_seconds, stats.decode_seconds) == (5.0, 7.0, 9.0)
    assert stats.decode_tokens_per_second == 3 / 9
    assert stats.milliseconds_per_token == pytest.approx(3000.0)


def test_a_pass_is_counted_with_its_rows() -> None:
    level = LevelStats("draft")
    for rows in (3, 1):
        with level.measure(rows):
            pass
    assert (level.passes, level.rows) == (2, 4)
    assert level.seconds_per_pass == level.seconds / 2


def test_link_utilisation_is_what_the_full_passes_moved_over_what_the_link_could() -> None:
    stats = Stats(
        levels=[LevelStats("draft", seconds=9.0), LevelStats("target", seconds=4.0, link_bytes=60)],
        decode_link=LinkStats(bytes_per_second=20.0),
    )
    assert stats.link_utilisation == 0.75


def test_a_link_is_idle_while_nothing_crosses_it() -> None:
    stats = Stats(decode_seconds=4.0, decode_link=LinkStats(bytes_to_device=1, busy_seconds=3.0))
    assert stats.link_idle == 0.25
    assert Stats(decode_seconds=4.0).link_idle is None


def test_link_counters_subtract() -> None:
    later, earlier = LinkStats(10, 7, 3.0, 5.0), LinkStats(4, 2, 1.0, 5.0)
    assert later - earlier == LinkStats(6, 5, 2.0, 5.0)


def test_derived_numbers_are_printed_with_the_counted_ones() -> None:
    setup = Setup()
    list(setup.start(9))
    setup.stats.levels = [setup.target.stats]
    data = setup.stats.as_dict()
    assert data["output_tokens"] == 9
    assert data["decode_tokens_per_second"] == setup.stats.decode_tokens_per_second
    assert (data["levels"][0]["accepted"], data["levels"][0]["acceptance"]) == (6, 1.0)
