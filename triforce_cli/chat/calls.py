"""Calls of tools in a reply: the forms in which models write them, each read by a function of its own.

Which form a model writes its chat template says: by the marks that are in it. A template without any leaves them all
open. A call is of a tool that was offered, with an object of arguments; everything else is text.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

Tools = Sequence[Mapping[str, Any]]  # definitions, as `chat.tools.read_tools` has them
Call = dict[str, Any]  # {"name", "arguments"}

_DECODER = json.JSONDecoder()
_FENCE = re.compile(r"```(?:json)?\s*(.*?)\s*```", re.DOTALL)
_SEPARATORS = re.compile(r"[\s;,]*")
_LONGEST_EXPRESSION = 1 << 16  # characters, of calls as Python writes them
_TYPES: dict[str, tuple[type, ...]] = {
    "integer": (int,), "number": (int, float), "boolean": (bool,), "object": (dict,), "array": (list,),
    "null": (type(None),),
}  # fmt: skip


@dataclass(frozen=True)
class Form:
    """marks: each asks for this form where a template has it. read: all calls in a reply."""

    marks: tuple[str, ...]
    read: Callable[[str, Tools], Iterator[Call]]

    def is_asked_for(self, template: str) -> bool:
        return any(mark in template for mark in self.marks)


@dataclass(frozen=True)
class Calls:
    """Reads the calls of `tools` in replies to a chat template."""

    tools: Tools
    template: str

    @property
    def marks(self) -> frozenset[str]:
        """What replies may have around calls."""
        return frozenset(mark for form in self._forms for mark in form.marks)

    def of(self, reply: str) -> list[Call]:
        """Those that a reply makes, in order; none where it is an answer."""
        names = {tool["function"]["name"] for tool in self.tools}
        for form in self._forms:
            if found := [call for call in form.read(reply, self.tools) if call["name"] in names]:
                return found
        return []

    def are_broken(self, reply: str) -> bool:
        """Whether a reply begins a call by its mark, and none can be read."""
        begins = (form.marks[0] for form in self._forms if form.marks)
        return any(mark in reply for mark in begins) and not self.of(reply)

    @property
    def _forms(self) -> tuple[Form, ...]:
        return tuple(form for form in FORMS if form.is_asked_for(self.template)) or FORMS


def _call(found: Any) -> Iterator[Call]:
    """Of an object with a name and arguments, whatever the two are called; of each of a list."""
    if isinstance(found, list):
        for each in found:
            yield from _call(each)
    if not isinstance(found, dict):
        return
    if isinstance(found.get("function"), dict):
        found = found["function"]
    name = found.get("name", found.get("tool_name"))
    arguments = found.get("arguments", found.get("parameters"))
    if isinstance(arguments, str):
        arguments = _json(arguments)[0]
    if isinstance(name, str) and isinstance(arguments, dict):
        yield {"name": name, "arguments": arguments}


def _json(text: str, start: int = 0) -> tuple[Any, int]:
    """(the JSON value that begins at `start`, white space aside; its end). (None, start) where there is none."""
    start = len(text) - len(text[start:].lstrip())
    with suppress(ValueError, RecursionError):
        return _DECODER.raw_decode(text, start)
    return None, start


def _behind(mark: str) -> Callable[[str, Tools], Iterator[Call]]:
    """JSON behind each mark. What ends it tells JSON itself, so the mark at the end may be missing, or in a text."""

    def read(reply: str, tools: Tools) -> Iterator[Call]:
        at = reply.find(mark)
        while at >= 0:
            found, end = _json(reply, at + len(mark))
            yield from _call(found)
            at = reply.find(mark, end)

    return read


_NAMED = re.compile(r"\[TOOL_CALLS\]\s*([\w.-]+)(?:\[CALL_ID\][^\[]*)?(?:\[ARGS\]|(?=\s*\{))")
_DEEPSEEK = re.compile(r"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>([\w.-]+)\s*```json|([\w.-]+)<｜tool▁sep｜>)")


def _named(pattern: re.Pattern[str]) -> Callable[[str, Tools], Iterator[Call]]:
    """A name and JSON of its arguments. pattern: up to the arguments, with the name as a group."""

    def read(reply: str, tools: Tools) -> Iterator[Call]:
        end = 0
        while match := pattern.search(reply, end):
            arguments, end = _json(reply, match.end())
            yield from _call({"name": next(filter(None, match.groups())), "arguments": arguments})

    return read


def _plain(reply: str, tools: Tools) -> Iterator[Call]:
    """The whole reply is JSON: one call, a list of them, or several with something between."""
    text = reply.strip().removeprefix("<|python_tag|>").strip()
    text = fenced[1] if (fenced := _FENCE.fullmatch(text)) else text
    calls, at = list[Call](), 0
    while at < len(text):
        found, end = _json(text, at)
        if not (new := list(_call(found))):
            return
        calls += new
        separator = _SEPARATORS.match(text, end)
        at = separator.end() if separator else end
    yield from calls


def _pythonic(reply: str, tools: Tools) -> Iterator[Call]:
    """The whole reply is a list as Python writes it: [get_weather(city="Paris")]."""
    text = reply.strip().removeprefix("<|python_tag|>").removeprefix("<|python_start|>").removesuffix("<|python_end|>")
    if not text.startswith("[") or len(text) > _LONGEST_EXPRESSION:
        return
    with suppress(SyntaxError, ValueError, RecursionError, MemoryError):
        found = ast.parse(text, mode="eval").body
        calls = found.elts if isinstance(found, ast.List) else []
        yield from [_expression(call) for call in calls]


def _expression(call: ast.expr) -> Call:
    """Raises ValueError for what is no call with named arguments."""
    if not isinstance(call, ast.Call) or call.args or any(keyword.arg is None for keyword in call.keywords):
        raise ValueError("no call")
    arguments = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    return {"name": ast.unparse(call.func), "arguments": arguments}


@dataclass(frozen=True)
class _Tags:
    """Arguments as texts between tags. call: the beginning of a call, with its name; end: of a call. argument: its
    beginning, with its name; close: its end."""

    call: re.Pattern[str]
    end: str
    argument: re.Pattern[str]
    close: str

    def __call__(self, reply: str, tools: Tools) -> Iterator[Call]:
        for name, body in _parts(self.call, self.end, reply):
            arguments = _json(body)[0]
            if not isinstance(arguments, dict):
                texts = {key: _unwrapped(text) for key, text in _parts(self.argument, self.close, body)}
                arguments = {key: _typed(text, _schema(tools, name, key)) for key, text in texts.items()}
            yield {"name": name, "arguments": arguments}


def _parts(begin: re.Pattern[str], end: str, text: str) -> Iterator[tuple[str, str]]:
    """(name, what stands behind its tag) of each tag, up to `end`, where that is missing up to the next tag."""
    begins = list(begin.finditer(text))
    ends = [*(each.start() for each in begins[1:]), len(text)]
    for match, following in zip(begins, ends, strict=False):
        yield match[1], text[match.end() : following].partition(end)[0]


def _unwrapped(text: str) -> str:
    """Without the line end at either side that belongs to the tags."""
    return text.removeprefix("\n").removesuffix("\n")


def _schema(tools: Tools, name: str, key: str) -> Mapping[str, Any]:
    """Of an argument; {} where nothing is said."""
    for tool in tools:
        if tool["function"]["name"] == name:
            properties = (tool["function"].get("parameters") or {}).get("properties") or {}
            return properties.get(key) or {}
    return {}


def _typed(text: str, schema: Mapping[str, Any]) -> Any:
    """The value of a text, as JSON where the schema asks for another type than a text and it is of that type."""
    wanted = tuple(kind for name in _type_names(schema) for kind in _TYPES.get(name, ()))
    value = None
    with suppress(ValueError, RecursionError):
        value = json.loads(text) if wanted else text
        fits = isinstance(value, wanted) and (not isinstance(value, bool) or bool in wanted)
        return value if fits else text
    lowered = {"true": True, "false": False}.get(text.strip().lower())  # as Python writes it
    return lowered if bool in wanted and lowered is not None else text


def _type_names(schema: Mapping[str, Any]) -> Iterator[str]:
    kinds = schema.get("type", [])
    yield from [kinds] if isinstance(kinds, str) else kinds
    for each in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        yield from _type_names(each)


FORMS = (
    Form(
        ("<function=", "<parameter="),  # Qwen3-Coder; with JSON in place of parameters Llama 3.1 and Functionary
        _Tags(re.compile(r"<function=([\w.-]+)>"), "</function>", re.compile(r"<parameter=([^>\n]+)>"), "</parameter>"),
    ),
    Form(
        ("<arg_key>", "<arg_value>"),  # GLM-4.5
        _Tags(
            re.compile(r"<tool_call>\s*([\w.-]+)\s*(?=<arg_key>|</tool_call>|$)"), "</tool_call>",
            re.compile(r"<arg_key>\s*(.*?)\s*</arg_key>\s*<arg_value>"), "</arg_value>",
        ),
    ),
    Form(
        ("<invoke name=",),  # MiniMax
        _Tags(
            re.compile(r'<invoke name="([\w.-]+)">'), "</invoke>",
            re.compile(r'<parameter name="([^">\n]+)">'), "</parameter>",
        ),
    ),
    Form(("<tool_call>", "</tool_call>"), _behind("<tool_call>")),  # Hermes, Qwen
    Form(("[TOOL_CALLS]",), _behind("[TOOL_CALLS]")),  # Mistral, a list
    Form(("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"), _named(_NAMED)),  # Mistral, from 2025 on
    Form(("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"), _named(_DEEPSEEK)),
    Form(("<|tool_call|>", "<|/tool_call|>"), _behind("<|tool_call|>")),  # Granite, Phi-4-mini
    Form(("<|START_ACTION|>", "<|END_ACTION|>"), _behind("<|START_ACTION|>")),  # Command R7B, Command A
    Form(("<|python_tag|>",), _plain),  # Llama 3; also xLAM's list
    Form(("<|python_tag|>", "<|python_start|>"), _pythonic),  # Llama 3.2, Llama 4
)  # fmt: skip
