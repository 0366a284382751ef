"""What a plan expects of passes and proposers: where the lookaheads of its levels start, and what winds a clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from offload.decode.adaptive import Adaptive
from offload.decode.clock import Clock
from offload.decode.estimates import Line
from offload.decode.lookahead import Fixed, Lookahead
from offload.decode.source import Source
from offload.decode.speculation import Level, Proposer
from offload.metrics import LevelStats
from offload.plan.cost import DRAFT_ACCEPTANCE
from offload.plan.planner import LevelName, Plan

_TRUST = 32.0  # in the chance of retrieved tokens: measured on three models (docs/log.md)
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
    def __init__(self, plan: Plan) -> None:
        self._plan, self._seconds = plan, plan.predicted

    def priced(self, level: Level, clock: Clock, *, keeps_mass: Callable[[], bool]) -> Level:
        """`level` at the plan's prices. keeps_mass: whether the target's next pass does."""
        seconds = self._seconds

        def full_pass(rows: int) -> float:
            share = seconds.mass_share if keeps_mass() else 0.0
            return seconds.full_pass_seconds * (1.0 + share) + (rows - 1) * seconds.full_row_seconds

        def retrieval_pass(rows: int) -> float:
            return seconds.retrieval_pass_seconds + (rows - 1) * seconds.retrieval_row_seconds

        def draft_pass(rows: int) -> float:
            return seconds.draft_pass_seconds

        prices = {"target": full_pass, "retrieval": retrieval_pass, "draft": draft_pass}
        return Priced(level, clock, prices[level.stats.name])

    def target(self, proposers: Sequence[Proposer]) -> Lookahead:
        seconds = self._seconds
        return self._lookahead(
            "target", self._plan.gamma, proposers, seconds.full_pass_seconds, seconds.full_row_seconds
        )

    def retrieval(self, proposers: Sequence[Proposer]) -> Lookahead:
        seconds = self._seconds
        return self._lookahead(
            "retrieval",
            self._plan.draft_gamma,
            proposers,
            seconds.retrieval_pass_seconds,
            seconds.retrieval_row_seconds,
        )

    def _lookahead(
        self, level: LevelName, most: int, proposers: Sequence[Proposer], pass_seconds: float, row_seconds: float
    ) -> Lookahead:
        if level not in self._plan.adaptive:
            return Fixed(most)
        sources = [self._source(proposer.name) for proposer in proposers]
        return Adaptive(most, Line(pass_seconds - row_seconds, row_seconds), sources)

    def _source(self, name: str) -> Source:
        seconds = self._seconds
        if name == "retrieval":
            return Source(
                seconds.acceptance,
                seconds.retrieval_token_seconds,
                trust=_TRUST,
                round_seconds=seconds.refresh_seconds,
                pass_share=seconds.mass_share,
            )
        return Source.lookup() if name == "lookup" else Source(DRAFT_ACCEPTANCE + _HOPE, seconds.draft_pass_seconds)
