"""A request on two machines, and the ratios of speed and of context between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from offload.errors import DoesNotFit
from offload.plan.planner import Plan
from offload.plan.request import Request


@dataclass(frozen=True)
class Case:
    """A request on one machine. plan: None where it does not fit. longest_context: tokens that fit in its memory, up to
    the model's limit."""

    plan: Plan | None
    longest_context: int

    @classmethod
    def of(cls, request: Request, sizes: Mapping[str, int]) -> Case:
        """sizes: num_prompt_tokens and max_tokens."""
        try:
            plan = request.plan(**sizes)
        except DoesNotFit:
            plan = None
        return cls(plan, request.longest_context())

    def as_dict(self) -> dict[str, Any]:
        return {"plan": self.plan and self.plan.as_dict(), "longest_context": self.longest_context}


@dataclass(frozen=True)
class WhatIf:
    """before: on the machine called `name`."""

    name: str
    before: Case
    after: Case

    @property
    def first_token_ratio(self) -> float | None:
        """The speed-up of the first token; None if the request did not fit before."""
        if self.before.plan is None or self.after.plan is None:
            return None
        return self.before.plan.predicted.first_token_seconds / self.after.plan.predicted.first_token_seconds

    @property
    def token_ratio(self) -> float | None:
        if self.before.plan is None or self.after.plan is None:
            return None
        return self.before.plan.predicted.seconds_per_token / self.after.plan.predicted.seconds_per_token

    @property
    def context_ratio(self) -> float | None:
        """None where not one token fitted before."""
        return self.after.longest_context / self.before.longest_context if self.before.longest_context else None

    def as_dict(self) -> dict[str, Any]:
        names = ("first_token_ratio", "token_ratio", "context_ratio")
        cases = {"name": self.name, "before": self.before.as_dict(), "after": self.after.as_dict()}
        return cases | {name: getattr(self, name) for name in names}
