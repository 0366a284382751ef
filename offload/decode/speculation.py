"""Proposers, and the speculator, which is a proposer itself: draft -> retrieval -> target is one class used twice.

All sequences are lists of token ids from the first prompt token on. A level's cache holds a prefix of the sequence; the
tokens after it are *pending* and go into the next forward. No other bookkeeping is needed: a rejection truncates the
caches, and the tokens that they lack afterwards are pending.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from offload.decode.gpu_draws import Beforehand, Draw, Judge, judged, seen, to_judge
from offload.decode.proposal import Offer, Proposal, Proposer, grades_of
from offload.decode.random_source import RandomSource
from offload.decode.sequence import Extended
from offload.decode.verify import Verdict, verify
from offload.decode.warp import Warp
from offload.model.passes import Level, Pass, Passes, result_of

# (logits [n, V] of the last n places of a sequence, its tokens) -> logits adjusted by the tokens before each place.
Adjust = Callable[[Tensor, Sequence[int]], Tensor]

# (rows of a pass, its measured seconds, whether it was the first of its kind) -> seconds to charge.
Charge = Callable[[int, float, bool], float]


def measured(num_rows: int, seconds: float, is_first: bool) -> float:
    """Charge the measured seconds."""
    return seconds


class ModelProposer:
    """A proposer that draws from a level's own distribution, one token at a time, or on a GPU all tokens of a step.
    charge: of each step. adjust: adjusts logits by earlier tokens; it needs each token on the host before the next
    pass."""

    def __init__(
        self,
        level: Level,
        warp: Warp,
        random: RandomSource | Beforehand,
        *,
        charge: Charge = measured,
        adjust: Adjust | None = None,
    ) -> None:
        self._level, self._warp, self._random, self._charge, self._adjust = level, warp, random, charge, adjust
        self.name = level.stats.name

    def offer(self, sequence: Sequence[int]) -> Offer:
        return Offer()

    def propose(self, sequence: Sequence[int], num_tokens: int) -> Proposal:
        return result_of(self.proposing(sequence, num_tokens))

    def proposing(self, sequence: Sequence[int], num_tokens: int) -> Passes[Proposal]:
        """`propose`, in passes."""
        start, pending = time.perf_counter(), sequence[self._level.length :]
        if isinstance(self._random, Beforehand):
            return (yield from self._propose_on_gpu(self._random, pending, num_tokens))
        asked = Pass(self._level, pending, 1)
        yield asked
        logits = _adjusted(asked, self._adjust, sequence)
        row = self._warp(logits)
        token, grades = self._random.draw(row[0]), grades_of(logits, row)
        seconds = time.perf_counter() - start - asked.waited
        return Proposal([token], row, grades, self._charge(len(pending), seconds, asked.is_first))

    def truncate(self, length: int) -> None:
        self._level.truncate(length)

    def prepare(self, num_rows: int, *, wanted: bool) -> float | None:
        return 0.0

    def _propose_on_gpu(self, random: Beforehand, pending: Sequence[int], num_tokens: int) -> Passes[Proposal]:
        """Draft `num_tokens` tokens; each is the input of the next pass before the host has read it."""
        start, uniforms, waited, is_first = time.perf_counter(), random.uniforms(num_tokens), 0.0, False
        tokens: Sequence[int] | Tensor = pending
        draw, rows, drawn = Draw(self._warp), list[Tensor](), list[Tensor]()
        for uniform in uniforms.split(1):
            asked = Pass(self._level, tokens, 1, draw, (uniform,))
            yield asked
            row, tokens, numbers = asked.made
            waited += asked.waited
            is_first |= asked.is_first
            rows.append(row)
            drawn.append(numbers)
        found, grades = seen(drawn)
        seconds = time.perf_counter() - start - waited
        seconds = self._charge(len(pending) + num_tokens - 1, seconds, is_first)
        return Proposal(found, torch.cat(rows), grades, seconds)


@dataclass(frozen=True)
class Draft:
    """One drafting step: at most `num_tokens` tokens from the proposer at `index`."""

    index: int
    num_tokens: int


class Lengths(Protocol):
    """Draft lengths of one level. Calls of a round: `start`; `next` and `drafted` in turns; `verified`; `wants` and
    `prepared` for each proposer. Seconds are measured, or the plan's where a seed must give the same text again."""

    def start(self, limit: int) -> None:
        """Begin a round of at most `limit` drafted tokens."""
        ...

    def next(self, offers: Sequence[Offer]) -> Draft | None:
        """The next step of drafting; None: verify now."""
        ...

    def drafted(self, index: int, grades: Sequence[int], seconds: float) -> None:
        """Count a step: the proposer at `index` drafted tokens of `grades`."""
        ...

    def verified(self, verdict: Verdict, num_rows: int, seconds: float) -> None:
        """Count a verification of `num_rows` rows, without padding."""
        ...

    def wants(self, index: int) -> bool:
        """Whether it pays to prepare the proposer at `index` for the next round."""
        ...

    def prepared(self, index: int, seconds: float | None) -> None:
        """Count the preparation of the proposer at `index`; None: it cannot be used in the next round."""
        ...


@dataclass(frozen=True)
class Round:
    """The result of one round (propose, verify, truncate): the emitted tokens, the level's distributions
    [len(tokens), V] and grades at their places, and the seconds charged. logits: the level's own at the same places, if
    they are kept; valid until its next pass."""

    tokens: list[int]
    probs: Tensor
    grades: list[int]
    num_drafted: int
    seconds: float
    logits: Tensor | None = None

    @property
    def num_accepted(self) -> int:
        return len(self.tokens) - 1


class Speculator:
    """Verification of the proposers' tokens at one level. Emitted tokens follow the level's own distribution, whichever
    proposer drafted them.

    So it is a `Proposer` for the level above: it proposes tokens with the distributions that they really follow.
    `lengths` decides step by step which proposer drafts next and how far, from what is known before the next token is
    drawn. No drawn token is dropped before it was verified.
    charge: of each verification. adjust: as in `ModelProposer`. prepare: prepares the level to propose to the one above
    (see `Proposer.prepare`); None: it is always ready. keeps_logits: whether rounds have logits.
    """

    def __init__(
        self,
        level: Level,
        proposers: Sequence[Proposer],
        *,
        lengths: Lengths,
        warp: Warp,
        random: RandomSource | Beforehand,
        charge: Charge = measured,
        adjust: Adjust | None = None,
        prepare: Callable[[int, bool], float | None] | None = None,
        keeps_logits: bool = False,
    ) -> None:
        self.name, self._level, self._proposers, self._lengths = level.stats.name, level, proposers, lengths
        self._warp, self._random, self._charge, self._prepare = warp, random, charge, prepare
        self._adjust, self._keeps_logits = adjust, keeps_logits

    def round(self, sequence: Sequence[int], limit: int) -> Round:
        """Emit 1 to `limit` tokens that follow `sequence`. Without drafted tokens this is plain decoding.

        `sequence` must be longer than the level's cache: the pass over its last token gives the next distribution.
        """
        return result_of(self.rounding(sequence, limit))

    def rounding(self, sequence: Sequence[int], limit: int) -> Passes[Round]:
        """`round`, in passes, including the proposers' passes."""
        pending = list(sequence[self._level.length :])
        proposals, names = yield from self._draft(sequence, limit - 1)
        drafted = [token for proposal in proposals for token in proposal.tokens]
        start, asked = time.perf_counter(), self._asked(pending, drafted, proposals)
        yield asked
        probs, verdict, grades = self._verify(asked, Extended(sequence, drafted), proposals)
        num_rows = len(pending) + len(drafted)
        seconds = self._charge(num_rows, time.perf_counter() - start - asked.waited, asked.is_first)
        emitted = [*drafted[: verdict.num_accepted], verdict.next_token]
        probs = probs[: len(emitted)]
        self._lengths.verified(verdict, num_rows, seconds)
        self._commit(len(sequence) + verdict.num_accepted, names, verdict)
        seconds += sum(proposal.seconds for proposal in proposals)
        seconds += self._prepare_proposers(len(pending) + verdict.num_accepted)
        logits = self._logits(asked)[: len(emitted)] if self._keeps_logits else None
        return Round(emitted, probs, grades, len(drafted), seconds, logits)

    def offer(self, sequence: Sequence[int]) -> Offer:
        return Offer()

    def propose(self, sequence: Sequence[int], num_tokens: int) -> Proposal:
        """The tokens of one round of at most `num_tokens` tokens. No drawn token is thrown away."""
        return result_of(self.proposing(sequence, num_tokens))

    def proposing(self, sequence: Sequence[int], num_tokens: int) -> Passes[Proposal]:
        """`propose`, in passes."""
        step = yield from self.rounding(sequence, num_tokens)
        return Proposal(step.tokens, step.probs, step.grades, step.seconds)

    def truncate(self, length: int) -> None:
        self._level.truncate(length)
        for proposer in self._proposers:
            proposer.truncate(length)

    def prepare(self, num_rows: int, *, wanted: bool) -> float | None:
        return 0.0 if self._prepare is None else self._prepare(num_rows, wanted)

    def _draft(self, sequence: Sequence[int], limit: int) -> Passes[tuple[list[Proposal], list[str]]]:
        """Draft at most `limit` tokens, in the steps that `lengths` asks for -> (proposals, each token's proposer)."""
        self._lengths.start(limit)
        so_far, proposals = Extended(sequence), list[Proposal]()
        names: list[str] = []
        while draft := self._lengths.next([proposer.offer(so_far) for proposer in self._proposers]):
            proposer = self._proposers[draft.index]
            proposal = yield from _proposal(proposer, so_far, draft.num_tokens)
            self._lengths.drafted(draft.index, proposal.grades, proposal.seconds)
            so_far.tail += proposal.tokens
            proposals.append(proposal)
            names += [proposer.name] * len(proposal.tokens)
        return proposals, names

    def _asked(self, pending: list[int], drafted: list[int], proposals: Sequence[Proposal]) -> Pass:
        """The verification's pass."""
        if not isinstance(self._random, Beforehand):
            return Pass(self._level, pending + drafted, len(drafted) + 1)
        given = to_judge(drafted, proposals, self._random)
        return Pass(self._level, pending + drafted, len(drafted) + 1, Judge(self._warp, self._keeps_logits), given)

    def _verify(
        self, asked: Pass, tokens: Extended, proposals: Sequence[Proposal]
    ) -> tuple[Tensor, Verdict, list[int]]:
        """The level's distributions at each place and after the last, perhaps with more rows at the end, the verdict,
        and the emitted tokens' grades. tokens: the sequence and the drafted tokens."""
        drafted = tokens.tail
        if isinstance(self._random, Beforehand):
            probs, numbers, *_ = asked.made
            return probs, *judged(numbers, len(drafted))
        logits = _adjusted(asked, self._adjust, tokens)
        probs = self._warp(logits)
        draft_probs = [row for proposal in proposals for row in proposal.rows]
        verdict = verify(drafted, draft_probs, probs, self._random)
        num_emitted = verdict.num_accepted + 1
        return probs, verdict, grades_of(logits[:num_emitted], probs[:num_emitted])

    def _logits(self, asked: Pass) -> Tensor:
        """The level's own logits at each place of a pass; call it only where they are kept."""
        return asked.made[2] if isinstance(self._random, Beforehand) else asked.made[0]

    def _commit(self, length: int, names: Sequence[str], verdict: Verdict) -> None:
        """Truncate the level and the proposers to `length` tokens, and count the round."""
        self.truncate(length)
        self._level.stats.count_round(names, verdict.num_accepted)

    def _prepare_proposers(self, num_rows: int) -> float:
        """Prepare the proposers for the next round. Returns the seconds charged."""
        total = 0.0
        for index, proposer in enumerate(self._proposers):
            seconds = proposer.prepare(num_rows, wanted=self._lengths.wants(index))
            self._lengths.prepared(index, seconds)
            total += seconds or 0.0
        return total


def _adjusted(asked: Pass, adjust: Adjust | None, tokens: Sequence[int]) -> Tensor:
    """The pass's logits, adjusted by the tokens before each place."""
    [logits] = asked.made
    return logits if adjust is None else adjust(logits, tokens)


def _proposal(proposer: Proposer, sequence: Sequence[int], num_tokens: int) -> Passes[Proposal]:
    """`proposer.propose`, in passes where it needs any."""
    if isinstance(proposer, ModelProposer | Speculator):
        return (yield from proposer.proposing(sequence, num_tokens))
    return proposer.propose(sequence, num_tokens)
