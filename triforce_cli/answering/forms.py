"""Output forms of an answer, written part by part: text, its last code block, one JSON object, or JSON lines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from triforce_cli.answering.answer import Part
from triforce_cli.answering.code import last_block
from triforce_cli.ground.errors import Failure
from triforce_cli.screen.output import Output

if TYPE_CHECKING:
    from offload.metrics import Stats
    from offload.plan.planner import Plan

FormName = Literal["text", "code", "json", "jsonl"]


class Form:
    """A listener to the events of an answer; each form writes some of them. Its methods are called in their order here.
    `fail` is the last call; `end` is also called after an interrupt. Thoughts go to standard error in all forms."""

    def __init__(self, output: Output, *, shows_thoughts: bool = True) -> None:
        self._output, self._shows_thoughts = output, shows_thoughts

    def begin(self, plan: Plan) -> None: ...

    def prefilled(self, stats: Stats, echo: str) -> None:
        """echo: the prompt's text, if the answer is to begin with it."""

    def add(self, part: Part) -> None:
        if part.thoughts and self._shows_thoughts:
            self._output.thought(part.thoughts)
        elif part.thoughts:
            self._output.wait("thinking")
        if part.text:
            self._output.end_thought()

    def end(self, document: Mapping[str, Any]) -> None:
        """document: the answer, complete or cut short, as JSON."""

    def fail(self, failure: Failure, document: Mapping[str, Any]) -> None:
        """document: the answer so far."""


class TextForm(Form):
    """The text alone. ends_line: add a line end after it."""

    def __init__(self, output: Output, *, shows_thoughts: bool = True, ends_line: bool) -> None:
        super().__init__(output, shows_thoughts=shows_thoughts)
        self._ends_line = ends_line

    def prefilled(self, stats: Stats, echo: str) -> None:
        """Write the echo after prefill, not before: a progress bar on its last line would erase that line."""
        if echo:
            self._output.answer(echo)

    def add(self, part: Part) -> None:
        super().add(part)
        if part.text:
            self._output.answer(part.text)

    def end(self, document: Mapping[str, Any]) -> None:
        if self._ends_line:
            self._output.end_line()


class CodeForm(Form):
    """The last code block alone. An answer without a whole one goes to standard error, so that nothing is lost."""

    def end(self, document: Mapping[str, Any]) -> None:
        code = last_block(document["text"], document["finish_reason"])
        if code is None:
            self._show(document)
        else:
            self._output.text(code)

    def fail(self, failure: Failure, document: Mapping[str, Any]) -> None:
        self._show(document)

    def _show(self, document: Mapping[str, Any]) -> None:
        if text := document["text"].rstrip():
            self._output.table(text)


class ObjectForm(Form):
    """One JSON object at the end."""

    def end(self, document: Mapping[str, Any]) -> None:
        self._output.document(document)

    def fail(self, failure: Failure, document: Mapping[str, Any]) -> None:
        if document["tokens"]:
            self._output.document(document)


class EventForm(Form):
    """A JSON line for each event."""

    def begin(self, plan: Plan) -> None:
        self._event("plan", plan=plan.as_dict())

    def prefilled(self, stats: Stats, echo: str) -> None:
        self._event(
            "prefill",
            prompt_tokens=stats.prompt_tokens,
            reused_tokens=stats.reused_tokens,
            seconds=stats.first_token_seconds,
        )

    def add(self, part: Part) -> None:
        super().add(part)
        scores = {"logprobs": part.scores} if part.scores else {}
        self._event("token", text=part.text, tokens=list(part.tokens), **scores)

    def end(self, document: Mapping[str, Any]) -> None:
        apart = ("text", "tokens", "logprobs", "plan")  # in earlier events
        self._event("done", **{name: value for name, value in document.items() if name not in apart})

    def fail(self, failure: Failure, document: Mapping[str, Any]) -> None:
        self._event("error", **failure.as_dict()["error"])

    def _event(self, name: str, **data: Any) -> None:
        self._output.document({"event": name} | data)


@dataclass(frozen=True, kw_only=True)
class Written:
    """The output settings of an answer. name: its name in messages. ends_line: a text ends with a line end. echo: it
    begins with the prompt. shows_thoughts: to the person. stats: a table of statistics below it."""

    form: FormName = "text"
    name: str = "answer"
    ends_line: bool = True
    echo: bool = False
    shows_thoughts: bool = True
    stats: bool = False

    @property
    def as_json(self) -> bool:
        return self.form in ("json", "jsonl")

    @property
    def streams(self) -> bool:
        """True if text appears as it is accepted."""
        return self.form == "text"

    def make(self, output: Output) -> Form:
        if self.form == "text":
            return TextForm(output, shows_thoughts=self.shows_thoughts, ends_line=self.ends_line)
        kinds = {"code": CodeForm, "json": ObjectForm, "jsonl": EventForm}
        return kinds[self.form](output, shows_thoughts=self.shows_thoughts)
