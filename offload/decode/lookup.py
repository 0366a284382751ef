"""Prompt lookup: it drafts the tokens that followed an earlier occurrence of the last tokens.

Proposals are point masses, which the acceptance rule treats as any other distribution. The idea is prompt lookup
decoding (Saxena, 2023), with the longest match instead of a fixed n-gram.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from offload.decode.proposal import Offer, Proposal

COMPARED = 32  # matches of more tokens count as equally long when one is chosen; the latest wins
LONGEST = 128  # tokens up to which a match is measured


class LookupProposer:
    """A proposer that copies what followed the longest earlier match of the last tokens, the latest one of equally long
    matches. Matches have `least` tokens or more."""

    name = "lookup"

    def __init__(self, *, least: int = 2) -> None:
        self._least = least
        self._tokens: NDArray[np.int32] = np.empty(1024, np.int32)
        self._length = 0
        self._match: tuple[int, int] | None = None  # the match of the current sequence

    def offer(self, sequence: Sequence[int]) -> Offer:
        """See `Proposer.offer`. The grade is by the length of the match; the copy ends at the end of the sequence."""
        start, length = self._find(sequence)
        if length < self._least:
            return Offer(0)
        return Offer(len(sequence) - start, match_grade(length))

    def propose(self, sequence: Sequence[int], num_tokens: int) -> Proposal:
        start, length = self._find(sequence)
        tokens = self._tokens[start : min(start + num_tokens, self._length)].tolist()
        return Proposal(tokens, None, [match_grade(length)] * len(tokens), 0.0)

    def truncate(self, length: int) -> None:
        self._length = min(self._length, length)
        self._match = None

    def prepare(self, num_rows: int, *, wanted: bool) -> float | None:
        return 0.0

    def _find(self, sequence: Sequence[int]) -> tuple[int, int]:
        """The match of `sequence`, cached between an offer and the proposal after it."""
        if self._match is None or len(sequence) != self._length:
            self._hold(sequence)
            self._match = longest_match(self._tokens[: self._length])
        return self._match

    def _hold(self, sequence: Sequence[int]) -> None:
        """Hold the sequence as an array. Tokens that are held already, and were not truncated, are not copied again."""
        if len(sequence) > len(self._tokens):
            self._tokens = np.resize(self._tokens, 2 * len(sequence))
        self._tokens[self._length : len(sequence)] = sequence[self._length :]
        self._length = len(sequence)


def longest_match(tokens: NDArray[np.int32]) -> tuple[int, int]:
    """The longest earlier match of the last tokens, as (start, length): the `length` tokens before `start` equal the
    last `length` tokens, up to LONGEST. Matches are compared up to COMPARED tokens; of equally long ones the latest is
    returned. length 0: the last token does not occur earlier.
    """
    if len(tokens) < 2:
        return 0, 0
    starts = np.flatnonzero(tokens[:-1] == tokens[-1]) + 1
    if not len(starts):
        return 0, 0
    length = 1
    while length < COMPARED:
        longer = starts[starts > length]
        longer = longer[tokens[longer - 1 - length] == tokens[-1 - length]]
        if not len(longer):
            break
        starts, length = longer, length + 1
    start = int(starts[-1])
    return start, _match_length(tokens, start) if length == COMPARED else length


def _match_length(tokens: NDArray[np.int32], start: int) -> int:
    """The length of the match that ends before `start`, up to LONGEST."""
    most = min(LONGEST, start)
    differs = np.flatnonzero(tokens[start - most : start] != tokens[len(tokens) - most :])
    return most - 1 - int(differs[-1]) if len(differs) else most


def match_grade(length: int) -> int:
    """The grade of a match: 0, 1, 2, ... for 1, 2 to 3, 4 to 7, ... tokens."""
    return length.bit_length() - 1
