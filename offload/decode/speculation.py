"""Proposers, and the speculator that is one itself: draft -> retrieval -> target is one class used twice.

All sequences are lists of token ids from the first prompt token on. A level's cache holds a prefix of the sequence; the
tokens after it are *pending* and go into the next forward. That is all the bookkeeping there is: a rejection truncates
the caches, and whatever is missing afterwards is pending.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from offload.decode.sampling import RandomSource
from offload.decode.verify import Verdict, verify
from offload.metrics import LevelStats

Warp = Callable[[Tensor], Tensor]  # logits [T, V] -> probabilities [T, V]


class Level(Protocol):
    """A model with a cache."""

    stats: LevelStats

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        ...

    def forward(self, tokens: Sequence[int], num_logits: int) -> Tensor:
        """Append `tokens` to the cache; the logits after each of the last `num_logits` of them, [num_logits, V]."""
        ...

    def truncate(self, length: int) -> None:
        """Forget all after the first `length` tokens; nothing happens if there are fewer."""
        ...


@dataclass(frozen=True)
class Proposal:
    """Drafted tokens and, row by row, exactly the law that each was drawn from ([n, V])."""

    tokens: list[int]
    probs: Tensor


class Proposer(Protocol):
    """Something that guesses how a sequence goes on."""

    def propose(self, sequence: Sequence[int], num_tokens: int) -> Proposal:
        """At most `num_tokens` tokens to follow `sequence`, each drawn from the law given in `probs`."""
        ...

    def truncate(self, length: int) -> None:
        """The tokens after the first `length` were not kept."""
        ...


class ModelProposer:
    """Draws tokens one by one from a level's own law."""

    def __init__(self, level: Level, warp: Warp, random: RandomSource) -> None:
        self._level, self._warp, self._random = level, warp, random

    def propose(self, sequence: Sequence[int], num_tokens: int) -> Proposal:
        tokens: list[int] = []
        rows: list[Tensor] = []
        pending = list(sequence[self._level.length :])
        while len(tokens) < num_tokens:
            row = self._warp(self._level.forward(pending, 1))
            pending = [self._random.draw(row[0])]
            tokens += pending
            rows.append(row)
        return Proposal(tokens, torch.cat(rows))

    def truncate(self, length: int) -> None:
        self._level.truncate(length)


@dataclass(frozen=True)
class Round:
    """One propose, verify, truncate: the emitted tokens and the level's law for each of them ([len(tokens), V])."""

    tokens: list[int]
    probs: Tensor
    num_drafted: int

    @property
    def num_accepted(self) -> int:
        return len(self.tokens) - 1


class Speculator:
    """Verifies a proposer's tokens at one level. Emitted tokens follow the level's own law, whoever proposed.

    That is what makes it a `Proposer` for the level above: it hands upwards the law its tokens really follow.
    `on_verified(num_rows)` is called after each round, caches truncated, with the number of the forward's rows whose
    tokens stayed: what their queries looked at tells the retrieval cache what to hold.
    """

    def __init__(
        self,
        level: Level,
        proposer: Proposer | None,
        *,
        gamma: int,
        warp: Warp,
        random: RandomSource,
        on_verified: Callable[[int], None] | None = None,
    ) -> None:
        if gamma > 0 and proposer is None:
            raise ValueError(f"gamma is {gamma} and there is no proposer")
        self._level, self._proposer, self.gamma = level, proposer, gamma
        self._warp, self._random, self._on_verified = warp, random, on_verified

    def round(self, sequence: Sequence[int], limit: int) -> Round:
        """Emit 1 to min(gamma, limit - 1) + 1 tokens that follow `sequence`. gamma 0 is plain decoding.

        `sequence` is longer than the level's cache: its last token is never in it, for the law after it is wanted.
        """
        pending = list(sequence[self._level.length :])
        drafted, draft_probs = self._draft(sequence, min(self.gamma, limit - 1))
        probs = self._warp(self._level.forward(pending + drafted, len(drafted) + 1))
        if draft_probs is None:
            draft_probs = probs[:0]
        verdict = verify(drafted, draft_probs, probs, self._random)
        self._settle(len(sequence), len(pending), len(drafted), verdict)
        emitted = [*drafted[: verdict.num_accepted], verdict.next_token]
        return Round(emitted, probs[: len(emitted)], len(drafted))

    def propose(self, sequence: Sequence[int], num_tokens: int) -> Proposal:
        """Exactly `num_tokens`. The last rounds are shorter, so no drawn token is ever thrown away."""
        tokens: list[int] = []
        rows: list[Tensor] = []
        while len(tokens) < num_tokens:
            step = self.round([*sequence, *tokens], num_tokens - len(tokens))
            tokens += step.tokens
            rows.append(step.probs)
        return Proposal(tokens, torch.cat(rows))

    def truncate(self, length: int) -> None:
        self._level.truncate(length)
        if self._proposer is not None:
            self._proposer.truncate(length)

    def _draft(self, sequence: Sequence[int], num_tokens: int) -> tuple[list[int], Tensor | None]:
        if self._proposer is None or num_tokens <= 0:
            return [], None
        proposal = self._proposer.propose(sequence, num_tokens)
        return proposal.tokens, proposal.probs

    def _settle(self, num_tokens: int, num_pending: int, num_drafted: int, verdict: Verdict) -> None:
        """Forget the rejected rows everywhere and count."""
        self.truncate(num_tokens + verdict.num_accepted)
        stats = self._level.stats
        stats.rounds += 1
        stats.drafted += num_drafted
        stats.accepted += verdict.num_accepted
        if self._on_verified is not None:
            self._on_verified(num_pending + verdict.num_accepted)
