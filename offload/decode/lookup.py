"""Prompt lookup: what followed the last tokens when they stood in the sequence before.

Proposals are point masses: the one rule of verification holds for them as for any other distribution. The idea is
prompt lookup decoding (Saxena, 2023) with the longest match instead of a fixed n-gram.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from offload.decode.proposal import Offer, Proposal

COMPARED = 32  # longer matches than this are not preferred to later ones
LONGEST = 128  # and no match is measured further


class LookupProposer:
    """Goes on as the sequence did after the latest of its longest earlier matches of `least` tokens and more."""

    name = "lookup"

    def __init__(self, *, least: int = 2) -> None:
        self._least = least
        self._tokens: NDArray[np.int32] = np.empty(1024, np.int32)
        self._length = 0
        self._match: tuple[int, int] | None = None  # of the sequence that is held

    def offer(self, sequence: Sequence[int]) -> Offer:
        """Grade: the length of the match. A token's own continuation ends where the sequence does."""
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
        """Once for an offer and the proposal after it."""
        if self._match is None or len(sequence) != self._length:
            self._hold(sequence)
            self._match = longest_match(self._tokens[: self._length])
        return self._match

    def _hold(self, sequence: Sequence[int]) -> None:
        """The sequence as an array; what was held of it before and not truncated is the same."""
        if len(sequence) > len(self._tokens):
            self._tokens = np.resize(self._tokens, 2 * len(sequence))
        self._tokens[self._length : len(sequence)] = sequence[self._length :]
        self._length = len(sequence)


def longest_match(tokens: NDArray[np.int32]) -> tuple[int, int]:
    """(start, length): before `start` stand the last `length` tokens of `tokens` once more, up to LONGEST of them; the
    longest such, up to COMPARED, and of these the latest. length 0: the last token was never there before.
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
    """Of the match that ends before `start`, up to LONGEST."""
    most = min(LONGEST, start)
    differs = np.flatnonzero(tokens[start - most : start] != tokens[len(tokens) - most :])
    return most - 1 - int(differs[-1]) if len(differs) else most


def match_grade(length: int) -> int:
    """Matches of 1, 2 to 3, 4 to 7, ... tokens are of grade 0, 1, 2, ..."""
    return length.bit_length() - 1
