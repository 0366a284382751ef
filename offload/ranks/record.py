"""A record of the tokens in the target's cache. Every rank has its own, and compares it with rank 0's at intervals."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import xxhash

from offload.errors import RankFailed

_UNKNOWN = -1  # a token whose row was restored from a session


class TokenRecord:
    """The tokens that this rank has run, by position."""

    def __init__(self) -> None:
        self._tokens: list[int] = []

    def append(self, at: int, tokens: Sequence[int]) -> None:
        """Record `tokens` after the first `at`, in place of later ones. Raises RankFailed if fewer are recorded."""
        if at > len(self._tokens):
            raise RankFailed(f"{at:,} tokens were to be there, and {len(self._tokens):,} are")
        self._tokens[at:] = tokens

    def forget(self, length: int) -> None:
        """Record `length` rows whose tokens are unknown, after a restore."""
        self._tokens = [_UNKNOWN] * length

    def take(self, other: TokenRecord, num_tokens: int | None = None) -> None:
        """Take over the tokens of `other`, whose rows were copied, or the first `num_tokens` of them."""
        self._tokens = other._tokens[:num_tokens]

    def digest(self, length: int) -> str:
        """The digest of the first `length` tokens."""
        return xxhash.xxh3_128(array("q", self._tokens[:length]).tobytes()).hexdigest()

    def compare(self, length: int, digest: str) -> None:
        """Raises RankFailed where rank 0's `digest` of the first `length` tokens differs."""
        if self.digest(length) != digest:
            raise RankFailed(
                f"its first {length:,} tokens are not those of rank 0: a fault of the machine or of this program"
            )
