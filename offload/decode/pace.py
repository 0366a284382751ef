"""What a plan expects of passes and proposers: where the lookaheads of its levels start, and what winds a clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from offload.decode.adaptive import Adaptive
from offload.decode.clock import Clock
from offload.decode.estimates import PassSeconds
from offload.decode.lookahead import Fixed, Lookahead
from offload.decode.source import Source
from offload.decode.speculation import Level, Proposer
from offload.metrics import LevelStats
from offload.plan.cost import DRAFT_ACCEPTANCE
from offload.plan.planner import LevelName, Plan

_TRUST = 32.0  # in the chance of retrieved tokens: measured on three models (docs/log.md)
_DOUBTS = (*10 * (1.0,), 6.0, 2.5, 1.0, 0.3, 0.25, 0.25)  # how much oftener they are refused, by how sure the target is
_HOPE = 0.1  # that a draft is better than most: what is not tried is never known


class Priced:
    """A level whose passes wind a clock. price: seconds of a pass by its rows."""

    def __init__(self, level: Level, clock: Clock, price: Callable[[int], float]) -> None:
        self._level, self._clock, self._price = level, clock, price

    @property
    def stats(self) -> LevelStats:
        return self._level.stats

    @property
    def length(self) -> int:
        return self._level.length

    def forward(self, tokens: Sequence[int], num_logits: int) -> Tensor:
        self._clock.wind(self._price(len(tokens)))
        return self._level.forward(tokens, num_logits)

    def truncate(self, length: int) -> None:
        self._level.truncate(length)


class Pace:
    """block: rows of a block of the target's passes, where something else is known than what the plan expects."""

    def __init__(self, plan: Plan, *, block: int | None = None) -> None:
        self._plan, self._seconds = plan, plan.predicted
        self._block = block if block and plan.predicted.full_block_rows else plan.predicted.full_block_rows

    def priced(self, level: Level, clock: Clock, *, keeps_mass: Callable[[], bool]) -> Level:
        """`level` at the plan's prices. keeps_mass: whether the target's next pass does."""
        seconds, full, retrieval = self._seconds, self._full_passes(), self._retrieval_passes()

        def full_pass(rows: int) -> float:
            return full.at(rows) + seconds.full_pass_seconds * seconds.mass_share * keeps_mass()

        def draft_pass(rows: int) -> float:
            return seconds.draft_pass_seconds

        prices = {"target": full_pass, "retrieval": retrieval.at, "draft": draft_pass}
        return Priced(level, clock, prices[level.stats.name])

    def target(self, proposers: Sequence[Proposer]) -> Lookahead:
        return self._lookahead("target", self._plan.gamma, proposers, self._full_passes())

    def retrieval(self, proposers: Sequence[Proposer]) -> Lookahead:
        return self._lookahead("retrieval", self._plan.draft_gamma, proposers, self._retrieval_passes())

    def _lookahead(self, level: LevelName, most: int, proposers: Sequence[Proposer], passes: PassSeconds) -> Lookahead:
        if level not in self._plan.adaptive:
            return Fixed(most)
        return Adaptive(most, passes, [self._source(proposer.name) for proposer in proposers])

    def _full_passes(self) -> PassSeconds:
        one, row = self._seconds.full_pass_seconds, self._seconds.full_row_seconds
        return PassSeconds(one - row, row, block=self._block)

    def _retrieval_passes(self) -> PassSeconds:
        one, row = self._seconds.retrieval_pass_seconds, self._seconds.retrieval_row_seconds
        return PassSeconds(one - row, row)

    def _source(self, name: str) -> Source:
        seconds = self._seconds
        if name == "retrieval":
            return Source(
                seconds.acceptance,
                seconds.retrieval_token_seconds,
                trust=_TRUST,
                round_seconds=seconds.refresh_seconds,
                pass_share=seconds.mass_share,
                doubts=_DOUBTS,
            )
        return Source.lookup() if name == "lookup" else Source(DRAFT_ACCEPTANCE + _HOPE, seconds.draft_pass_seconds)
