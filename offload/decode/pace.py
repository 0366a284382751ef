"""What a plan expects of passes and proposers, as the lookaheads of its levels start from it."""

from __future__ import annotations

from collections.abc import Sequence

from offload.decode.estimates import Line
from offload.decode.lookahead import Adaptive, Fixed, Lookahead, Source
from offload.decode.speculation import Proposer
from offload.plan.cost import DRAFT_ACCEPTANCE
from offload.plan.planner import LevelName, Plan

_TRUST = 16.0  # in the chance of retrieved tokens: measured on three models (docs/log.md)
_HOPE = 0.1  # that a draft is better than most: what is not tried is never known


class Pace:
    """measured: seconds are learned as they come."""

    def __init__(self, plan: Plan, *, measured: bool) -> None:
        self._plan, self._seconds, self._measured = plan, plan.predicted, measured

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
        return Adaptive(most, Line(pass_seconds - row_seconds, row_seconds), sources, measured=self._measured)

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
