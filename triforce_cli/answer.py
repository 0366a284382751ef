"""The answer to a request so far, complete or partial, and its forms: text, one JSON object, or JSON lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Protocol

from triforce_cli import __version__, log
from triforce_cli.chat.calls import Call, Calls
from triforce_cli.citations import Citation, citations
from triforce_cli.deadline import TimedOut
from triforce_cli.ending import Unfinished
from triforce_cli.errors import Failure, debugging, describe
from triforce_cli.output import Output
from triforce_cli.render.chat import cited
from triforce_cli.render.logprobs import logprobs
from triforce_cli.render.stats import answer_document, stats_table
from triforce_cli.signals import Terminated

if TYPE_CHECKING:
    from offload.decode.logprobs import TokenScore
    from offload.engine.engine import Engine, Step
    from offload.metrics import Stats
    from offload.plan.planner import Plan
    from triforce_cli.documents import Document

FormName = Literal["text", "json", "jsonl"]
INTERRUPTED, TIMEOUT, FAILED = "interrupted", "timeout", "error"


class Answer:
    """The steps of an answer so far. As a context manager it writes the answer at the end, also after an interrupt, a
    timeout, a limit or an error.

    Leave the output's context first, so that JSON and tables do not mix with a progress display.
    """

    def __init__(
        self, output: Output, form: Form, *, model: Mapping[str, str | None], echo: bool, show_stats: bool
    ) -> None:
        self._output, self._form = output, form
        self._plan: Plan | None = None
        self._engine: Engine | None = None
        self._model = model
        self._echo, self._show_stats = echo, show_stats
        self._prompt = ""
        self._pieces: list[str] = []
        self.tokens: list[int] = []
        self._scores: list[TokenScore] = []
        self._read: tuple[Sequence[int], Sequence[Document]] | None = None  # where passages are asked for
        self._citations: list[Citation] | None = None
        self._thoughts: list[str] = []
        self.calls: Calls | None = None  # reads those of tools that were offered
        self.remark = ""  # a note on the text as a whole, below it
        self.stats: Stats | None = None  # of the tokens that have come
        self.finish: str | None = None

    def __enter__(self) -> Answer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if kind is None or issubclass(kind, KeyboardInterrupt | Terminated | TimedOut | Unfinished):
            self._form.end(self._ended(self.finish or (TIMEOUT if kind is TimedOut else INTERRUPTED)))
            self._output.note(self.remark)
            self._show_citations()
            self._show_table()
        elif isinstance(error, Exception) and not isinstance(error, BrokenPipeError):
            self._form.fail(describe(error, debug=debugging()), self._ended(FAILED))

    def begin(self, plan: Plan, engine: Engine, prompt: str) -> None:
        """Tell the form that generation begins. From here on there are statistics to write."""
        self._plan, self._engine, self._prompt = plan, engine, prompt
        self._form.begin(plan, prompt)

    def cite(self, prompt: Sequence[int], documents: Sequence[Document]) -> None:
        """Find the passages of what the model reads that the answer attended to."""
        self._read = prompt, documents

    def thought(self, text: str, *, shown: bool) -> None:
        """Of what the model thinks before it says something."""
        self._thoughts.append(text)
        if shown:
            self._output.thought(text)
        else:
            self._output.wait("thinking")

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def add(self, step: Step) -> None:
        if self.stats is None and self._engine is not None:
            self.stats = self._engine.stats
            self._form.prefilled(self.stats)
        self._pieces.append(step.text)
        self.tokens += step.tokens
        self._scores += step.scores
        self.finish = step.finish
        if step.finish is not None and self._read is not None and self._engine is not None:
            self._citations = citations(step.passages, *self._read, self._engine.tokenizer)
        if step.text:
            self._output.end_thought()
        self._form.add(step, self._logprobs(step.scores))

    def _logprobs(self, scores: Sequence[TokenScore]) -> list[dict[str, Any]] | None:
        """None where nobody asked."""
        return logprobs(scores, self._engine.tokenizer) if scores and self._engine else None

    def _tool_calls(self) -> list[Call] | None:
        """None where no tools were offered."""
        if self.calls is None:
            return None
        calls, notice = self.calls.read("".join(self._pieces))
        self._output.note(notice)
        return calls

    def _ended(self, finish_reason: str) -> dict[str, Any]:
        """The answer as JSON; its statistics are logged."""
        stats = self.stats or (self._engine.stats if self._engine else None)
        log.event(f"ended ({finish_reason})", stats.as_dict() if stats else None)
        echo: dict[str, Any] = {"prompt": self._prompt} if self._echo else {}
        return echo | answer_document(
            text="".join(self._pieces),
            tokens=self.tokens,
            logprobs=self._logprobs(self._scores),
            finish_reason=finish_reason,
            tool_calls=self._tool_calls(),
            thoughts="".join(self._thoughts) if self._thoughts else None,
            citations=None if self._citations is None else [each.as_dict() for each in self._citations],
            stats=stats,
            plan=self._plan,
            model=self._model,
            version=__version__,
        )

    def _show_citations(self) -> None:
        if self._citations is not None:
            self._output.note(cited(self._citations))

    def _show_table(self) -> None:
        if self._show_stats and self._plan and self.stats:
            self._output.table(stats_table(self.stats, self._plan))


class Form(Protocol):
    """A listener to the events of an answer, called in this order. After `fail` nothing follows; `end` also follows an
    interrupt."""

    def begin(self, plan: Plan, prompt: str) -> None: ...

    def prefilled(self, stats: Stats) -> None: ...

    def add(self, step: Step, logprobs: Sequence[Mapping[str, Any]] | None) -> None: ...

    def end(self, document: Mapping[str, Any]) -> None:
        """Write the end. document: see render.stats.answer_document."""
        ...

    def fail(self, failure: Failure, document: Mapping[str, Any]) -> None:
        """Write the failure. document: the answer so far."""
        ...


def make_form(name: FormName, output: Output, *, echo: bool, ends_line: bool = False) -> Form:
    """The form called `name`. echo: text begins with the prompt. ends_line: and ends with a line break."""
    if name == "text":
        return _Text(output, echo, ends_line)
    return _Object(output) if name == "json" else _Events(output)


class _Deaf:
    """A form that ignores every event; the other forms override what they write."""

    def __init__(self, output: Output) -> None:
        self._output = output

    def begin(self, plan: Plan, prompt: str) -> None: ...

    def prefilled(self, stats: Stats) -> None: ...

    def add(self, step: Step, logprobs: Sequence[Mapping[str, Any]] | None) -> None: ...

    def end(self, document: Mapping[str, Any]) -> None: ...

    def fail(self, failure: Failure, document: Mapping[str, Any]) -> None: ...


class _Text(_Deaf):
    def __init__(self, output: Output, echo: bool, ends_line: bool) -> None:
        super().__init__(output)
        self._echo, self._ends_line, self._prompt = echo, ends_line, ""

    def begin(self, plan: Plan, prompt: str) -> None:
        self._prompt = prompt

    def prefilled(self, stats: Stats) -> None:
        """Write the prompt after prefill, not before: a progress bar on its last line would erase that line."""
        if self._echo:
            self._output.text(self._prompt)

    def add(self, step: Step, logprobs: Sequence[Mapping[str, Any]] | None) -> None:
        self._output.text(step.text)

    def end(self, document: Mapping[str, Any]) -> None:
        if self._ends_line:
            self._output.end_line()


class _Object(_Deaf):
    def end(self, document: Mapping[str, Any]) -> None:
        self._output.document(document)

    def fail(self, failure: Failure, document: Mapping[str, Any]) -> None:
        if document["tokens"]:
            self._output.document(document)


class _Events(_Deaf):
    def begin(self, plan: Plan, prompt: str) -> None:
        self._event("plan", plan=plan.as_dict())

    def prefilled(self, stats: Stats) -> None:
        self._event(
            "prefill",
            prompt_tokens=stats.prompt_tokens,
            reused_tokens=stats.reused_tokens,
            seconds=stats.first_token_seconds,
        )

    def add(self, step: Step, logprobs: Sequence[Mapping[str, Any]] | None) -> None:
        scores = {} if logprobs is None else {"logprobs": logprobs}
        self._event("token", text=step.text, tokens=step.tokens, **scores)

    def end(self, document: Mapping[str, Any]) -> None:
        apart = ("text", "tokens", "logprobs", "plan")  # they have come
        self._event("done", **{name: value for name, value in document.items() if name not in apart})

    def fail(self, failure: Failure, document: Mapping[str, Any]) -> None:
        self._event("error", **failure.as_dict()["error"])

    def _event(self, name: str, **data: Any) -> None:
        self._output.document({"event": name} | data)
