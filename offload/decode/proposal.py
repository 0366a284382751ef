"""Proposals: drafted tokens with the distributions that they were drawn from, and the protocol of proposers."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

MARGINS = (0.1, 0.2, 0.4, 0.8, 1.6)  # nats between the grades of point masses: half of all errors are below the first
_FAR = 1e30  # more than any logit


def grades_of(logits: Tensor, probs: Tensor) -> list[int]:
    """Grades of how sure each distribution is: 0 to 9 by tenths of its largest probability; 10 to 15 for point masses,
    by the margin of the best logit over the next.

    logits [n, V] and their distributions probs [n, V] -> n grades.
    """
    return [grade(*pair) for pair in sureness(logits, probs).tolist()]


def sureness(logits: Tensor, probs: Tensor) -> Tensor:
    """The inputs of `grade` on the distributions' device: the largest probability, and the margin of the best logit
    over the next in nats, [n, 2] fp32."""
    logits = logits.float()
    next_best = torch.sub(logits, probs, alpha=_FAR).amax(-1)
    return torch.stack([probs.amax(-1), logits.amax(-1) - next_best], -1)


def grade(share: float, margin: float) -> int:
    """The grade of one distribution, see `grades_of`."""
    return int(10.0 * share) if share < 1.0 else 10 + bisect(MARGINS, margin)


@dataclass(frozen=True)
class Offer:
    """The number of tokens a proposer could draft now (None: any), and their grade if it is known beforehand."""

    num_tokens: int | None = None
    grade: int = 0


@dataclass(frozen=True)
class Proposal:
    """Drafted tokens and the exact distribution that each was drawn from: probs [n, V], or None for point masses at the
    tokens.

    grades: of the distributions, known before the draw; acceptance is estimated by grade. seconds: charged for the
    step.
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
    """A source of drafted tokens for a sequence, one step at a time."""

    name: str

    def offer(self, sequence: Sequence[int]) -> Offer:
        """The tokens that `propose` could draft now."""
        ...

    def propose(self, sequence: Sequence[int], num_tokens: int) -> Proposal:
        """One step: 1 to `num_tokens` tokens to follow `sequence`, each drawn from the distribution in `probs`."""
        ...

    def truncate(self, length: int) -> None:
        """Drop the tokens after the first `length`, which were rejected."""
        ...

    def prepare(self, num_rows: int, *, wanted: bool) -> float | None:
        """Prepare to propose, if `wanted`, after a verification of which the first `num_rows` rows were accepted.
        Returns the seconds charged; None: not ready, `propose` must not be called before the next `prepare`."""
        ...
