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

from offload.decode.clock import Clock
from offload.decode.lookahead import Lookahead, Outlook, grades_of
from offload.decode.sampling import RandomSource
from offload.decode.verify import Verdict, verify
from offload.metrics import LevelStats

Warp = Callable[[Tensor], Tensor]  # logits [T, V] -> probabilities [T, V]


class Level(Protocol):
    """A model with a cache."""

    @property
    def stats(self) -> LevelStats: ...

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
    """Drafted tokens and, row by row, exactly the law that each was drawn from ([n, V]).

    grades: how sure the proposer was of each, known before it was drawn: what its acceptance is estimated by.
    """

    tokens: list[int]
    probs: Tensor
    grades: list[int]


class Proposer(Protocol):
    """Something that guesses how a sequence goes on, a step at a time."""

    name: str

    def outlook(self, sequence: Sequence[int]) -> Outlook:
        """What `propose` could do now."""
        ...

    def propose(self, sequence: Sequence[int], num_tokens: int) -> Proposal:
        """One step: 1 to `num_tokens` tokens to follow `sequence`, each drawn from the law given in `probs`."""
        ...

    def truncate(self, length: int) -> None:
        """The tokens after the first `length` were not kept."""
        ...


class ModelProposer:
    """Draws one token from a level's own law."""

    def __init__(self, level: Level, warp: Warp, random: RandomSource) -> None:
        self._level, self._warp, self._random = level, warp, random
        self.name = level.stats.name

    def outlook(self, sequence: Sequence[int]) -> Outlook:
        return Outlook()

    def propose(self, sequence: Sequence[int], num_tokens: int) -> Proposal:
        logits = self._level.forward(sequence[self._level.length :], 1)
        row = self._warp(logits)
        return Proposal([self._random.draw(row[0])], row, grades_of(logits, row))

    def truncate(self, length: int) -> None:
        self._level.truncate(length)


@dataclass(frozen=True)
class Round:
    """One propose, verify, truncate: the emitted tokens, and the level's laws ([len(tokens), V]) and grades of them."""

    tokens: list[int]
    probs: Tensor
    grades: list[int]
    num_drafted: int

    @property
    def num_accepted(self) -> int:
        return len(self.tokens) - 1


class Speculator:
    """Verifies the proposers' tokens at one level. Emitted tokens follow the level's own law, whoever proposed.

    That is what makes it a `Proposer` for the level above: it hands upwards the law its tokens really follow.
    `lookahead` says, step by step, which proposer goes on and how far: by what it knows before the next token is drawn,
    and no drawn token is ever dropped before it was verified.
    It hears by `clock` how long everything took.
    `on_verified(num_rows)` is called after each round, caches truncated, with the number of the forward's rows whose
    tokens stayed: what their queries looked at tells the retrieval cache what to hold.
    """

    def __init__(
        self,
        level: Level,
        proposers: Sequence[Proposer],
        *,
        lookahead: Lookahead,
        warp: Warp,
        random: RandomSource,
        clock: Clock,
        on_verified: Callable[[int], None] | None = None,
    ) -> None:
        self.name, self._clock = level.stats.name, clock
        self._level, self._proposers, self._lookahead = level, proposers, lookahead
        self._warp, self._random, self._on_verified = warp, random, on_verified

    def round(self, sequence: Sequence[int], limit: int) -> Round:
        """Emit 1 to `limit` tokens that follow `sequence`. A lookahead of nothing is plain decoding.

        `sequence` is longer than the level's cache: its last token is never in it, for the law after it is wanted.
        """
        pending = list(sequence[self._level.length :])
        drafted, draft_probs, names = self._draft(sequence, limit - 1)
        start = self._clock.now()
        logits = self._level.forward(pending + drafted, len(drafted) + 1)
        probs = self._warp(logits)
        verdict = verify(drafted, probs[:0] if draft_probs is None else draft_probs, probs, self._random)
        seconds = self._clock.now() - start
        emitted = [*drafted[: verdict.num_accepted], verdict.next_token]
        probs = probs[: len(emitted)]
        grades = grades_of(logits[: len(emitted)], probs)
        self._lookahead.verified(verdict, grades, len(pending) + len(drafted), seconds)
        self._settle(len(sequence), len(pending), names, verdict)
        return Round(emitted, probs, grades, len(drafted))

    def outlook(self, sequence: Sequence[int]) -> Outlook:
        return self._lookahead.outlook([proposer.outlook(sequence) for proposer in self._proposers])

    def propose(self, sequence: Sequence[int], num_tokens: int) -> Proposal:
        """The tokens of one round, which is as short as it has to be: no drawn token is thrown away."""
        step = self.round(sequence, num_tokens)
        return Proposal(step.tokens, step.probs, step.grades)

    def truncate(self, length: int) -> None:
        self._level.truncate(length)
        for proposer in self._proposers:
            proposer.truncate(length)

    def _draft(self, sequence: Sequence[int], limit: int) -> tuple[list[int], Tensor | None, list[str]]:
        """At most `limit` tokens, in as many steps as the lookahead asks for; their laws; who proposed each."""
        self._lookahead.start(limit)
        so_far, rows = list(sequence), []
        names: list[str] = []
        while ask := self._lookahead.ask([proposer.outlook(so_far) for proposer in self._proposers]):
            start = self._clock.now()
            proposal = self._proposers[ask.index].propose(so_far, ask.num_tokens)
            self._lookahead.drafted(ask.index, proposal.grades, self._clock.now() - start)
            so_far += proposal.tokens
            rows.append(proposal.probs)
            names += [self._proposers[ask.index].name] * len(proposal.tokens)
        return so_far[len(sequence) :], torch.cat(rows) if rows else None, names

    def _settle(self, num_tokens: int, num_pending: int, names: Sequence[str], verdict: Verdict) -> None:
        """Forget the rejected rows everywhere and count."""
        self.truncate(num_tokens + verdict.num_accepted)
        self._level.stats.count_round(names, verdict.num_accepted)
        if self._on_verified is not None:
            self._on_verified(num_pending + verdict.num_accepted)
