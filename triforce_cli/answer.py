"""What a request has given so far, and how it is handed over: piece by piece, or as one JSON object at the end."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING

from triforce_cli import __version__, render
from triforce_cli.output import Output

if TYPE_CHECKING:
    from offload.engine import Engine, Step
    from offload.plan.planner import Plan

INTERRUPTED = "interrupted"


class Answer:
    """Collects steps. Leaving it as a context finishes the answer, also an interrupted one, but not a failed one.

    The output must have been left before, so that JSON and table find a clean screen.
    """

    def __init__(self, output: Output, *, model: Mapping[str, str | None], as_json: bool, show_stats: bool) -> None:
        self._output = output
        self._plan: Plan | None = None
        self._engine: Engine | None = None
        self._model = model
        self._as_json = as_json
        self._show_stats = show_stats
        self._pieces: list[str] = []
        self._tokens: list[int] = []
        self._finish = INTERRUPTED

    def __enter__(self) -> Answer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if kind is None or kind is KeyboardInterrupt:
            self._hand_over()

    def begin(self, plan: Plan, engine: Engine) -> None:
        """From here on there are numbers to hand over."""
        self._plan, self._engine = plan, engine

    def add(self, step: Step) -> None:
        self._pieces.append(step.text)
        self._tokens += step.tokens
        self._finish = step.finish or self._finish
        if not self._as_json:
            self._output.text(step.text)

    def _hand_over(self) -> None:
        stats = self._engine.stats if self._engine else None
        if self._as_json:
            document = render.answer_document(
                text="".join(self._pieces),
                tokens=self._tokens,
                finish_reason=self._finish,
                stats=stats,
                plan=self._plan,
                model=self._model,
                version=__version__,
            )
            self._output.document(document)
        if self._show_stats and self._plan and stats and stats.output_tokens:
            self._output.table(render.stats_table(stats, self._plan))
