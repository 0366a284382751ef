"""A record of the tokens in the target's cache, which every rank keeps for itself and now and then compares."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import xxhash

from offload.errors import RankFailed

_UNKNOWN = -1  # a token whose row came from elsewhere


class TokenRecord:
    """The tokens that this rank has run, by position."""

    def __init__(self) -> None:
        self._tokens: list[int] = []

    def append(self, at: int, tokens: Sequence[int]) -> None:
        """`tokens` come after the first `at`. Raises RankFailed where there are not so many."""
        if at > len(self._tokens):
            raise RankFailed(f"{at:,} tokens were to be there, and {len(self._tokens):,} are")
        self._tokens[at:] = tokens

    def forget(self, length: int) -> None:
        """`length` rows were taken over from elsewhere."""
        self._tokens = [_UNKNOWN] * length

    def take(self, other: TokenRecord, num_tokens: int | None = None) -> None:
        """The rows of `other` were copied, or the first `num_tokens` of them."""
        self._tokens = other._tokens[:num_tokens]

    def digest(self, length: int) -> str:
        """Of the first `length` tokens."""
        return xxhash.xxh3_128(array("q", self._tokens[:length]).tobytes()).hexdigest()

    def compare(self, length: int, digest: str) -> None:
        """Raises RankFailed where rank 0's `digest` of so many tokens is another."""
        if self.digest(length) != digest:
            raise RankFailed(
                f"its first {length:,} tokens are not those of rank 0: a fault of the machine or of this program"
            )
