"""How far to draft, and by whom: what a level asks, and the answer that is the same in every round."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from offload.decode.verify import Verdict

_MARGINS = (0.1, 0.2, 0.4, 0.8, 1.6)  # between the grades of point masses, in nats (docs/log.md)
_FAR = 1e30  # more than any logit: what a point mass is on is not the next one
SURE_MATCH = 3  # the grade of a lookup that fixed lengths trust: 8 tokens and more


def grades_of(logits: Tensor, probs: Tensor) -> list[int]:
    """Grades of tokens drawn from the laws `probs` [n, V] that were made of `logits` [n, V]: tenths of the largest
    probability, 0 to 9; of a point mass 10 to 15, by how far its logit is ahead of the next one.
    """
    logits = logits.float()
    next_best = torch.sub(logits, probs, alpha=_FAR).amax(-1)
    pairs = torch.stack([probs.amax(-1), logits.amax(-1) - next_best], -1).tolist()
    return [int(10.0 * share) if share < 1.0 else 10 + bisect(_MARGINS, margin) for share, margin in pairs]


@dataclass(frozen=True)
class Outlook:
    """What a proposer could do now: at most `num_tokens` tokens (None: any number), of `grade` where it is known.

    expected: (tokens, seconds) of its next step, where more is known of it than of steps in general.
    """

    num_tokens: int | None = None
    grade: int | None = None
    expected: tuple[float, float] | None = None


@dataclass(frozen=True)
class Ask:
    """One step of the proposer at `index`."""

    index: int
    num_tokens: int


class Lookahead(Protocol):
    """One level's. Calls come in this order: start, then ask and drafted in turns, then verified; between rounds
    outlook, wants and readied."""

    def start(self, limit: int) -> None:
        """A round begins, with at most `limit` drafted tokens."""
        ...

    def ask(self, outlooks: Sequence[Outlook]) -> Ask | None:
        """The next step of drafting; None: verify now."""
        ...

    def drafted(self, index: int, grades: Sequence[int], seconds: float) -> None:
        """The proposer at `index` gave tokens of these grades."""
        ...

    def verified(self, verdict: Verdict, grades: Sequence[int], num_rows: int, seconds: float) -> None:
        """How it came out; grades: of the emitted tokens, by the level itself; the pass had `num_rows` real rows."""
        ...

    def outlook(self, outlooks: Sequence[Outlook]) -> Outlook:
        """What a round that began now would give to the level above."""
        ...

    def wants(self, index: int) -> bool:
        """Whether it pays to get the proposer at `index` ready for the next."""
        ...

    def readied(self, index: int, seconds: float | None) -> None:
        """It took so long; None: it is not ready, and must not be asked."""
        ...


class Fixed:
    """`gamma` tokens a round: by lookup where it is sure, by the last proposer where that always can."""

    def __init__(self, gamma: int) -> None:
        self.gamma = gamma
        self._left = 0

    def start(self, limit: int) -> None:
        self._left = min(self.gamma, limit)

    def ask(self, outlooks: Sequence[Outlook]) -> Ask | None:
        if self._left <= 0:
            return None
        always = [index for index, outlook in enumerate(outlooks) if outlook.num_tokens is None]
        for index, outlook in enumerate(outlooks):
            if outlook.num_tokens and (not always or (outlook.grade or 0) >= SURE_MATCH):
                return Ask(index, min(self._left, outlook.num_tokens))
        return Ask(always[-1], self._left) if always else None

    def drafted(self, index: int, grades: Sequence[int], seconds: float) -> None:
        self._left -= len(grades)

    def verified(self, verdict: Verdict, grades: Sequence[int], num_rows: int, seconds: float) -> None: ...

    def outlook(self, outlooks: Sequence[Outlook]) -> Outlook:
        return Outlook()

    def wants(self, index: int) -> bool:
        return True

    def readied(self, index: int, seconds: float | None) -> None: ...
