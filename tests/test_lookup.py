"""Lookups: the longest match, the latest of its kind, and a memory that follows the sequence."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.examples import at_most
from offload.decode.lookup import COMPARED, LONGEST, LookupProposer, longest_match, match_grade

TOKENS = st.lists(st.integers(0, 3), max_size=40)


def slow_match(tokens: Sequence[int]) -> tuple[int, int]:
    """The claim of `longest_match`, word for word."""
    best = (0, 0)
    for start in range(1, len(tokens)):
        length = 0
        while length < min(start, LONGEST) and tokens[start - 1 - length] == tokens[-1 - length]:
            length += 1
        if length and min(length, COMPARED) >= min(best[1], COMPARED):
            best = (start, length)
    return best


@at_most(400)
@given(TOKENS)
def test_the_match_is_the_latest_of_the_longest(tokens: list[int]) -> None:
    assert longest_match(np.array(tokens, np.int32)) == slow_match(tokens)


@at_most(200)
@given(st.lists(st.integers(0, 150), min_size=1, max_size=4), st.integers(0, 2**32 - 1))
def test_long_matches_are_measured_and_the_latest_of_them_is_it(lengths: list[int], seed: int) -> None:
    random = np.random.default_rng(seed)
    ending = random.integers(0, 50, 160)
    copies = [np.concatenate([random.integers(0, 50, 5), ending[len(ending) - length :]]) for length in lengths]
    tokens = np.concatenate([*copies, ending]).astype(np.int32)
    assert longest_match(tokens) == slow_match(tokens.tolist())


def test_a_match_is_measured_no_further_than_it_says() -> None:
    assert longest_match(np.zeros(200, np.int32)) == (199, LONGEST)


@at_most(200)
@given(st.lists(st.tuples(TOKENS, st.integers(0, 40)), min_size=1, max_size=6))
def test_a_proposer_told_of_every_truncation_proposes_as_a_fresh_one(
    steps: list[tuple[list[int], int]],
) -> None:
    """Remembering refused tokens would propose what follows text that is not there."""
    subject = LookupProposer(least=1)
    sequence: list[int] = []
    for more, kept in steps:
        sequence += more
        fresh = LookupProposer(least=1)
        assert subject.offer(sequence) == fresh.offer(sequence)
        if subject.offer(sequence).num_tokens:
            assert subject.propose(sequence, 5).tokens == fresh.propose(sequence, 5).tokens
        sequence = sequence[:kept]
        subject.truncate(len(sequence))


def test_what_followed_is_proposed_as_point_masses_with_the_grade_of_the_match() -> None:
    subject = LookupProposer()
    sequence = [1, 2, 3, 4, 5, 6, 9, 2, 3, 4]
    assert subject.offer(sequence).num_tokens == 6
    proposal = subject.propose(sequence, 3)
    assert proposal.tokens == [5, 6, 9]
    assert proposal.grades == [match_grade(3)] * 3
    assert proposal.rows == [None] * 3


def test_no_more_is_proposed_than_there_is() -> None:
    subject = LookupProposer()
    assert subject.propose([7, 8, 1, 7, 8], 9).tokens == [1, 7, 8]


@pytest.mark.parametrize("sequence", [[], [1], [1, 2, 3], [1, 2, 3, 1]])
def test_a_match_that_is_too_short_is_none(sequence: list[int]) -> None:
    assert LookupProposer(least=2).offer(sequence).num_tokens == 0


def test_a_long_sequence_finds_room() -> None:
    subject = LookupProposer()
    sequence = list(range(3000)) * 2
    for end in (10, 2000, 3005, 6000):
        subject.offer(sequence[:end])
    assert subject.propose(sequence[:5990], 4).tokens == [2990, 2991, 2992, 2993]


@pytest.mark.parametrize(
    ("length", "grade"), [(1, 0), (2, 1), (3, 1), (4, 2), (7, 2), (8, 3), (32, 5), (127, 6), (128, 7)]
)
def test_a_match_is_graded_by_its_length_in_powers_of_two(length: int, grade: int) -> None:
    assert match_grade(length) == grade
