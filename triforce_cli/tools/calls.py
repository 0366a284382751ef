"""Tool calls in a reply.

The marks in the chat template determine their form. A template without any marks allows all forms. A call names an
offered tool and has an object of arguments; everything else is text.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass

from offload import strict_json
from triforce_cli.tools.arguments import Tool, Tools
from triforce_cli.tools.call_forms import FORMS, OF_CHANNELS, WITHOUT_MARKS, Call, Form, Written
from triforce_cli.tools.choice import ANY, ToolChoice

MAX_DEPTH = 64  # of nested arguments
MOST_BROKEN = 64  # calls in a reply, before the rest is text
_READABLE = re.compile(r"[\w.-]+")  # names that every form's reader takes
_NAMED = re.compile(r"\bname\b")  # a form that has names outside JSON
_BROKEN = "cannot be read as one of a tool that was offered"


@dataclass(frozen=True)
class Calls:
    """Parser of calls of `tools` in replies to a chat template. choice: which calls a reply may have."""

    tools: Tools
    template: str
    choice: ToolChoice = ANY

    @property
    def allowed(self) -> list[Tool]:
        """The functions that may be called."""
        functions = (tool["function"] for tool in self.tools)
        return [each for each in functions if self.choice.names is None or each["name"] in self.choice.names]

    @property
    def have_to_follow(self) -> bool:
        """Whether only a grammar makes what was asked of them true."""
        choice = self.choice
        return choice.is_due or choice.names is not None or any(is_strict(each) for each in self.allowed)

    @property
    def follow(self) -> bool:
        """Whether a grammar makes them. One call at most can also be had by leaving out others."""
        return self.have_to_follow or (self.choice.is_one and not self.obstacle)

    @property
    def written(self) -> list[Written]:
        """The forms that the template asks for as a grammar describes them."""
        return [each for form in self.asked for each in form.written]

    @property
    def obstacle(self) -> str:
        """The reason why no grammar can describe the calls, with the remedy; "" for none."""
        if not self.written:
            return (
                "the model's chat template tells no form of calls that could be followed exactly; leave the tools, or "
                "what is demanded of their calls, out"
            )
        odd = next((each["name"] for each in self.allowed if not _READABLE.fullmatch(each["name"])), None)
        if odd is None or not any(_NAMED.search(each.call) for each in self.written):
            return ""
        return (
            f"the tool {odd!r} has characters that calls of this model cannot name; use letters, digits, _, . and - "
            "alone, or leave it out"
        )

    @property
    def marks(self) -> frozenset[str]:
        """The marks that may surround calls in a reply."""
        return frozenset(mark for form in self.forms for mark in (*form.marks, *form.around))

    @property
    def openings(self) -> frozenset[str]:
        """The marks with which calls begin."""
        return frozenset(mark for form in self.forms for mark in (*form.marks[:1], *form.around))

    @property
    def bare(self) -> frozenset[str]:
        """The forms of calls that a whole reply may be without a mark, see `Form`; empty if there is none."""
        return frozenset(form.bare for form in self.forms if form.bare)

    def read(self, reply: str) -> tuple[list[Call], str]:
        """(the calls of a reply in order, empty for a plain answer; a note for the person, "" for none)."""
        for form in self.forms:
            calls, num_broken = self._found(form, reply)
            if calls:
                calls = calls[:1] if self.choice.is_one else calls
                return calls, f"{num_broken} of {len(calls) + num_broken} tool calls {_BROKEN}" if num_broken else ""
        begins = any(mark in reply for mark in self.openings)
        return [], f"the answer begins a tool call that {_BROKEN}" if begins else ""

    def _found(self, form: Form, reply: str) -> tuple[list[Call], int]:
        """(calls, number of broken calls)."""
        calls, num_broken = list[Call](), 0
        for call in form.read.parse(reply, self.tools):
            if self._is_call(call):
                calls.append(call)
            else:
                num_broken += 1
            if num_broken == MOST_BROKEN:  # each failure of json takes time in proportion to its offset
                break
        return calls, num_broken

    def _is_call(self, call: Call) -> bool:
        """True for a call of an offered tool whose arguments are a writable JSON object."""
        if all(each["name"] != call.get("name") for each in self.allowed):
            return False
        with suppress(ValueError):
            strict_json.check_writable(call, MAX_DEPTH, "it")
            return isinstance(call["arguments"], dict)
        return False

    @property
    def asked(self) -> tuple[Form, ...]:
        """The forms whose marks the template has."""
        return tuple(form for form in (*FORMS, OF_CHANNELS) if form.is_asked_for(self.template))

    @property
    def forms(self) -> tuple[Form, ...]:
        """The forms in which calls are read."""
        followed = tuple(form for form in self.asked if form.written)  # where a grammar makes calls, no others are
        return (*(followed if self.follow else self.asked or FORMS), WITHOUT_MARKS)


def is_strict(function: Tool) -> bool:
    """Whether the arguments of a function have to follow its schema."""
    return function.get("strict") is True
