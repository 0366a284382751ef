"""A clock that runs by the plan's prices: a pass takes what the planner predicts of it, everything else nothing.

What is decided on it, and what it then says, depends on the text alone: settings can be told apart that a busy machine
blurs. It says how good decisions are at these prices, not how fast the machine is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

from offload.engine import Engine


class PlanClock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def wind(self, engine: Engine) -> None:
        """Passes and refreshes of `engine` move this clock."""
        seconds, retrieval = engine.plan.predicted, engine.retrieval

        def full_pass(rows: int) -> float:
            masses = seconds.mass_share if retrieval is not None and retrieval.full.keeps_mass else 0.0
            return seconds.full_pass_seconds * (1.0 + masses) + (rows - 1) * seconds.full_row_seconds

        def retrieval_pass(rows: int) -> float:
            return seconds.retrieval_pass_seconds + (rows - 1) * seconds.retrieval_row_seconds

        def draft_pass(rows: int) -> float:
            return seconds.draft_pass_seconds

        prices = {"target": full_pass, "retrieval": retrieval_pass, "draft": draft_pass}
        for name, level in engine.levels.items():
            self._price(level, "forward", lambda tokens, num_logits, price=prices[name]: price(len(tokens)))
        if retrieval is not None:
            self._price(retrieval, "refresh", lambda num_rows: seconds.refresh_seconds)

    @contextmanager
    def running(self) -> Iterator[None]:
        """The program reads this clock instead of the machine's."""
        with mock.patch("time.perf_counter", self._read):
            yield

    def _read(self) -> float:
        return self.seconds

    def _price(self, owner: object, method: str, price: Callable[..., float]) -> None:
        run: Callable[..., Any] = getattr(owner, method)

        def priced(*args: Sequence[int] | int) -> Any:
            self.seconds += price(*args)
            return run(*args)

        setattr(owner, method, priced)
