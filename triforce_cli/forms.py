"""Forms of an answer: text, one JSON object, or a JSON line for each event."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol

from triforce_cli.errors import Failure
from triforce_cli.output import Output

if TYPE_CHECKING:
    from offload.engine import Step
    from offload.metrics import Stats
    from offload.plan.planner import Plan

FormName = Literal["text", "json", "jsonl"]


class Form(Protocol):
    """Hears what happens, in this order. After `fail` nothing comes; `end` also comes after an interrupt."""

    def begin(self, plan: Plan, prompt: str) -> None: ...

    def prefilled(self, stats: Stats) -> None: ...

    def add(self, step: Step) -> None: ...

    def end(self, document: Mapping[str, Any]) -> None:
        """document: see render.stats.answer_document."""
        ...

    def fail(self, failure: Failure, document: Mapping[str, Any]) -> None:
        """document: what had come."""
        ...


def make_form(name: FormName, output: Output, *, echo: bool) -> Form:
    """echo: text begins with the prompt."""
    if name == "text":
        return _Text(output, echo)
    return _Object(output) if name == "json" else _Events(output)


class _Deaf:
    """A form that heeds nothing; the others heed what they write."""

    def __init__(self, output: Output) -> None:
        self._output = output

    def begin(self, plan: Plan, prompt: str) -> None: ...

    def prefilled(self, stats: Stats) -> None: ...

    def add(self, step: Step) -> None: ...

    def end(self, document: Mapping[str, Any]) -> None: ...

    def fail(self, failure: Failure, document: Mapping[str, Any]) -> None: ...


class _Text(_Deaf):
    def __init__(self, output: Output, echo: bool) -> None:
        super().__init__(output)
        self._echo, self._prompt = echo, ""

    def begin(self, plan: Plan, prompt: str) -> None:
        self._prompt = prompt

    def prefilled(self, stats: Stats) -> None:
        """Not sooner: a bar that is drawn on the prompt's last line takes the line away with it."""
        if self._echo:
            self._output.text(self._prompt)

    def add(self, step: Step) -> None:
        self._output.text(step.text)


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

    def add(self, step: Step) -> None:
        self._event("token", text=step.text, tokens=step.tokens)

    def end(self, document: Mapping[str, Any]) -> None:
        apart = ("text", "tokens", "plan")  # they have come
        self._event("done", **{name: value for name, value in document.items() if name not in apart})

    def fail(self, failure: Failure, document: Mapping[str, Any]) -> None:
        self._event("error", **failure.as_dict()["error"])

    def _event(self, name: str, **data: Any) -> None:
        self._output.document({"event": name} | data)
