"""Who counts as hung, by a clock that the test turns, and what is said of him."""

from __future__ import annotations

from offload.ranks.watch import SILENCE_SECONDS, START_SECONDS, Hearing

STEP = 0.25


def lost_at(hearing: Hearing, *, after: float, until: float) -> tuple[float, str]:
    """When rank 1 is missed, if it says nothing more, and the words."""
    now = after
    while not (words := hearing.silent([1, 2], now)):
        now += STEP
        assert now < until
        hearing.heard([2], now)
    assert set(words) == {1}
    return now, words[1]


def test_a_rank_that_was_never_heard_has_longer_and_the_words_say_so() -> None:
    """A rank stopped before its first beat ended the run after 121 seconds with the words "for 7 seconds"."""
    assert lost_at(Hearing([1, 2], 1000.0), after=1000.0, until=1130.0) == (
        1000.0 + START_SECONDS + STEP,
        "has not been heard of since its start, for 120 seconds",
    )


def test_a_rank_that_was_heard_once_is_missed_soon() -> None:
    hearing = Hearing([1, 2], 0.0)
    hearing.heard([1, 2], 1.0)
    assert lost_at(hearing, after=1.0, until=9.0) == (
        1.0 + SILENCE_SECONDS + STEP,
        "has not been heard of for 7 seconds",
    )


def test_silence_while_this_process_was_stopped_says_nothing() -> None:
    """Ctrl-Z stops all ranks: none of them beats, and nobody looks."""
    hearing = Hearing([1, 2], 0.0)
    hearing.heard([1, 2], 1.0)
    hearing.heard([], 500.0)
    assert hearing.silent([1, 2], 500.0) == {}
    assert lost_at(hearing, after=500.0, until=508.0)[0] == 500.0 + SILENCE_SECONDS + STEP
