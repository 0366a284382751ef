"""What a plan expects of passes and proposers, as the lookaheads of its levels start from it."""

from __future__ import annotations

from collections.abc import Sequence

from offload.decode.estimates import Line
from offload.decode.lookahead import Adaptive, Fixed, Lookahead, Source
from offload.decode.speculation import Proposer
from offload.plan.cost import DRAFT_ACCEPTANCE
from offload.plan.planner import Plan


class Pace:
    """measured: seconds are learned as they come."""

    def __init__(self, plan: Plan, *, measured: bool) -> None:
        self._plan, self._seconds, self._measured = plan, plan.predicted, measured

    def target(self, proposers: Sequence[Proposer]) -> Lookahead:
        plan, seconds = self._plan, self._seconds
        if "target" not in plan.adaptive:
            return Fixed(plan.gamma)
        passes = Line(seconds.full_pass_seconds - seconds.full_row_seconds, seconds.full_row_seconds)
        return Adaptive(plan.gamma, passes, self._sources(proposers), measured=self._measured)

    def retrieval(self, proposers: Sequence[Proposer]) -> Lookahead:
        plan, seconds = self._plan, self._seconds
        if "retrieval" not in plan.adaptive:
            return Fixed(plan.draft_gamma)
        row = seconds.retrieval_row_seconds
        passes = Line(seconds.retrieval_pass_seconds - row, row)
        return Adaptive(plan.draft_gamma, passes, self._sources(proposers), measured=self._measured)

    def _sources(self, proposers: Sequence[Proposer]) -> list[Source]:
        return [self._source(proposer.name) for proposer in proposers]

    def _source(self, name: str) -> Source:
        seconds = self._seconds
        if name == "retrieval":
            return Source(
                seconds.acceptance,
                seconds.retrieval_token_seconds,
                round_seconds=seconds.refresh_seconds,
                pass_share=seconds.mass_share,
            )
        return Source.lookup() if name == "lookup" else Source(DRAFT_ACCEPTANCE, seconds.draft_pass_seconds)
