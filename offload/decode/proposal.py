"""Proposals: drafted tokens with the distributions that they were drawn from, and what gives them."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

MARGINS = (0.1, 0.2, 0.4, 0.8, 1.6)  # nats between the grades of point masses: half of all errors lie below the first
_FAR = 1e30  # more than any logit


def grades_of(logits: Tensor, probs: Tensor) -> list[int]:
    """Grade how sure each distribution is: 0 to 9 by tenths of its largest probability; 10 to 15 for point masses, by
    how far the best logit is ahead of the next.

    logits [n, V], probs [n, V] made of them -> n grades.
    """
    return [grade(*pair) for pair in sureness(logits, probs).tolist()]


def sureness(logits: Tensor, probs: Tensor) -> Tensor:
    """What a grade is made of, where the distributions are: the largest probability, and the nats by which the best
    logit is ahead of the next, [n, 2] fp32."""
    logits = logits.float()
    next_best = torch.sub(logits, probs, alpha=_FAR).amax(-1)
    return torch.stack([probs.amax(-1), logits.amax(-1) - next_best], -1)


def grade(share: float, margin: float) -> int:
    """See `grades_of`."""
    return int(10.0 * share) if share < 1.0 else 10 + bisect(MARGINS, margin)


@dataclass(frozen=True)
class Offer:
    """The number of tokens a proposer could draft now (None: any), and their grade where it is known beforehand."""

    num_tokens: int | None = None
    grade: int = 0


@dataclass(frozen=True)
class Proposal:
    """Drafted tokens and, row by row, exactly the distribution that each was drawn from: [n, V], or None for point
    masses, of which the tokens say all.

    grades: how sure each distribution was, known before the draw: acceptance is estimated by grade. seconds: charged
    for the step.
    """

    tokens: list[int]
    probs: Tensor | None
    grades: list[int]
    seconds: float

    @property
    def rows(self) -> Sequence[Tensor | None]:
        """The distribution of each token, [V]; None: its point mass."""
        return [None] * len(self.tokens) if self.probs is None else self.probs.unbind()


class Proposer(Protocol):
    """Something that guesses how a sequence goes on, a step at a time."""

    name: str

    def offer(self, sequence: Sequence[int]) -> Offer:
        """What `propose` could draft now."""
        ...

    def propose(self, sequence: Sequence[int], num_tokens: int) -> Proposal:
        """One step: 1 to `num_tokens` tokens to follow `sequence`, each drawn from the distribution in `probs`."""
        ...

    def truncate(self, length: int) -> None:
        """The tokens after the first `length` were not kept."""
        ...

    def prepare(self, num_rows: int, *, wanted: bool) -> float | None:
        """A verification ended, and the first `num_rows` of its rows stay: get ready to propose, where that is wanted.
        Returns the seconds charged; None: not ready, `propose` must not be called before the next `prepare`."""
        ...
