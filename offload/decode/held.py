"""Whose rows the full cache holds, and which of them the next request may go on from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace


@dataclass
class Held:
    """tokens: one per row. num_own: the first so many have the bits that one prefill of just these tokens would give.
    num_settled: the first so many were run before the prompt that begins with them was known, and the levels below are
    ready for it; 0: they are not. num_saved: the first so many are on the disk, bit for bit, as a session has them.
    """

    tokens: list[int] = field(default_factory=list)
    num_own: int = 0
    num_settled: int = 0
    num_saved: int = 0

    def reusable(self, prompt: Sequence[int], num_last: int) -> int:
        """Rows of the longest common prefix with `prompt`; its last `num_last` rows are for the first pass, but those
        that were settled, and at least one is."""
        settled = min(self.num_settled, len(prompt) - 1)
        return min(num_common(self.tokens, prompt), max(len(prompt) - num_last, settled))

    def own(self, prompt: Sequence[int], num_last: int, block: int) -> int:
        """Rows that a prefill of `prompt`, which leaves out its last `num_last` tokens and runs `block` rows at a time,
        would give bit for bit: all of it, or the whole blocks that both begin with."""
        wanted = max(len(prompt) - num_last, 0)
        common = min(num_common(self.tokens, prompt), self.num_own, wanted)
        return common if common == wanted == self.num_own else common // block * block

    def copy(self) -> Held:
        return replace(self, tokens=list(self.tokens))

    def truncate(self, length: int) -> None:
        """Only the first `length` rows are left."""
        self.tokens = self.tokens[:length]
        self.num_own = min(self.num_own, length)
        self.num_saved = min(self.num_saved, length)
        if length < self.num_settled:
            self.num_settled = 0

    def prefilled(self, tokens: Sequence[int], block: int) -> None:
        """A prefill, `block` rows at a time, added what was missing of `tokens`."""
        if len(self.tokens) == self.num_own and self.num_own % block == 0:
            self.num_own = len(tokens)
        self.tokens = list(tokens)

    def generated(self, tokens: Sequence[int]) -> None:
        """These are held now: what was held, and what was said after it."""
        self.tokens, self.num_settled = list(tokens), 0


def num_common(first: Sequence[int], second: Sequence[int]) -> int:
    """Tokens that both begin with."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))
