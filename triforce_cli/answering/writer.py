"""The writer of one answer: its parts as they are generated, and its end, also if it ends early."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any

from offload.interrupts import Terminated
from triforce_cli import __version__
from triforce_cli.answering.answer import Answer
from triforce_cli.answering.citations import cited
from triforce_cli.answering.ending import FAILED, INTERRUPTED, TIMEOUT, Unfinished
from triforce_cli.answering.forms import Form, Written
from triforce_cli.ground import log
from triforce_cli.ground.deadline import TimedOut
from triforce_cli.ground.errors import debugging, describe
from triforce_cli.render.stats import stats_table
from triforce_cli.screen.output import Output
from triforce_cli.setup.choice import Models

if TYPE_CHECKING:
    from offload.engine.engine import Engine
    from offload.engine.step import Step
    from offload.metrics import Stats


class Writer:
    """Writes an answer in an output form. As a context manager it writes the end, also after an interrupt, a timeout, a
    limit or an error.

    Leave the output's context first, so that JSON and tables do not mix with a progress display. remark: a note on the
    whole answer, below it. stats: of the tokens so far.
    """

    def __init__(self, output: Output, written: Written, models: Models) -> None:
        self.remark = ""
        self.stats: Stats | None = None
        self.answer: Answer | None = None
        self._output, self._written, self._models = output, written, models
        self._form: Form = written.make(output)
        self._engine: Engine | None = None
        self._echo = ""

    def begin(self, engine: Engine, answer: Answer, text: str) -> None:
        """Begin the answer; from now on there are statistics to write. text: the prompt's text."""
        self._engine, self.answer, self._echo = engine, answer, text if self._written.echo else ""
        self._form.begin(engine.plan)

    def add(self, step: Step) -> None:
        """Write the next step."""
        assert self.answer is not None
        assert self._engine is not None
        if self.stats is None:
            self.stats = self._engine.stats
            self._form.prefilled(self.stats, self._echo)
        self._form.add(self.answer.add(step))

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        is_over = kind is None or issubclass(kind, KeyboardInterrupt | Terminated | TimedOut | Unfinished)
        is_failure = not is_over and isinstance(error, Exception) and not isinstance(error, BrokenPipeError)
        early = TIMEOUT if kind is TimedOut else FAILED if is_failure else INTERRUPTED
        rest = None if self.answer is None else self.answer.end(early)
        if is_over:
            if rest is not None:
                self._form.add(rest)
            self._form.end(self._document(early if self.answer is None else self.answer.finish))
            self._show_below()
        elif isinstance(error, Exception) and is_failure:
            self._form.fail(describe(error, debug=debugging()), self._document(FAILED))

    def _document(self, finish_reason: str) -> dict[str, Any]:
        """The answer as JSON; `stats` and `plan` are null if the run was interrupted before they existed. Statistics
        are logged."""
        engine = self._engine
        stats = self.stats or (engine.stats if engine else None)
        log.event(f"ended ({finish_reason})", stats.as_dict() if stats else None)
        found: dict[str, Any] = {"text": "", "tokens": [], "finish_reason": finish_reason}
        if self.answer is not None:
            found = self.answer.as_dict(note=self._output.note) | {"finish_reason": finish_reason}
        return {
            **({"prompt": self._echo} if self._written.echo else {}),
            **found,
            "stats": stats.as_dict() if stats else None,
            "plan": engine.plan.as_dict() if engine else None,
            "model": self._models.as_dict(),
            "version": __version__,
        }

    def _show_below(self) -> None:
        self._output.note(self.remark)
        if self.answer is not None and self.answer.citations is not None:
            self._output.note(cited(self.answer.citations))
        if self._written.stats and self._engine and self.stats:
            self._output.table(stats_table(self.stats, self._engine.plan))
