"""The constraint on a reply with tool calls: calls alone, calls behind text, or calls instead of an answer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from offload.errors import UsageError
from offload.fields import shown
from offload.grammar.constraint import WHITESPACE, Constraint, escaped, rule_of
from triforce_cli.tools.argument_grammar import Value, values_of
from triforce_cli.tools.arguments import Tool
from triforce_cli.tools.call_forms import Written
from triforce_cli.tools.calls import Calls, is_strict

_PART = re.compile(r'"(?:[^"\\]|\\.)*"|\w+')  # a literal, or the name of a part
_SHARED = {
    "space": r"/[ \t\r\n]{0,4}/", "ws": f"/{WHITESPACE}?/", "key": r'/[^<>"\n]+/',
    "object": f"%json {json.dumps({'type': 'object', 'x-guidance': {'whitespace_pattern': WHITESPACE}})}",
}  # fmt: skip


def with_calls(
    answer: Constraint | None, calls: Calls, named: Mapping[int, str], thoughts: tuple[str, str] | None = None
) -> Constraint:
    """The constraint on a reply that is calls in the form of the chat template, or follows `answer`; None: any text
    comes before the calls, or instead of them, unless they are due. named: tokens that are marks, by id. thoughts: the
    marks that open and close thoughts before all that, the first "" where the prompt has opened them. Raises UsageError
    if no grammar can describe the calls."""
    if calls.obstacle:
        what = "tool_choice and strict functions" if answer is None else f"tools beside a {answer.name}"
        raise UsageError(f"{what} need a grammar of calls: {calls.obstacle}")
    grammar = _CallGrammar(calls, {_literal(mark): f"<[{token}]>" for token, mark in named.items()})
    if answer is not None and not calls.choice.is_due:
        return replace(answer, calls=grammar.rules())
    start = f"start: {grammar.thoughts(*thoughts) if thoughts else ''} {grammar.reply()}"
    return Constraint("grammar", f"{start}\n{grammar.rules()}")


@dataclass(frozen=True)
class _Group:
    """Functions whose calls differ in the name alone. rule: the rule of their arguments as JSON. schema: that the
    arguments follow; None: any object."""

    names: Sequence[str]
    rule: str
    schema: Mapping[str, object] | None = None


class _CallGrammar:
    """The rules of calls. ids: the tokens that marks are, by their literals."""

    def __init__(self, calls: Calls, ids: Mapping[str, str]) -> None:
        self._calls, self._ids, self._rules = calls, ids, dict(_SHARED)
        self._grouped = self._groups()
        self._ways = [self._way(number, written) for number, written in enumerate(calls.written)]
        self._rules["calls"] = " | ".join(f"{mark} {rest}" for mark, rest in self._ways)

    def rules(self) -> str:
        return "\n".join(f"{name}: {text}" for name, text in self._rules.items())

    def reply(self) -> str:
        """Calls, and text before or instead of them unless they are due."""
        if self._calls.choice.is_due:
            return "space calls"
        openings = sorted(self._calls.openings)
        self._rules["TEXT"] = f"{_text(openings)}{_UNLIKE_CALLS}"
        marked = [f"{self._up_to(mark, openings, _UNLIKE_CALLS)} {rest}" for mark, rest in self._ways if mark]
        keys = ["arguments"] if len(marked) == len(self._ways) else ["arguments", "parameters"]
        return f"(TEXT? | {' | '.join([*marked, *map(self._bare, keys)])})"

    def _bare(self, key: str) -> str:
        """Calls without a mark, as the whole reply, fenced or not. Text goes on beside the first one up to the key of
        its arguments, so that far is one token of the grammar."""
        first, more = list[str](), list[str]()
        for number, group in enumerate(self._grouped):
            names = "|".join("".join(map(escaped, json.dumps(name, ensure_ascii=False))) for name in group.names)
            begin = f"BARE_{key.upper()}_{number}"
            space = f"{WHITESPACE}?"
            self._rules[begin] = rf'/\s{{0,4}}{_FENCE}\{{{space}"name":{space}({names}){space},{space}"{key}"/'
            first.append(f'{begin} ":" ws {group.rule} ws "}}"')
            more.append(_json_call(group, key))
        self._rules[f"more_{key}"] = " | ".join(more)
        further = "" if self._calls.choice.is_one else f'(space ";"? space more_{key})*'
        return f'({" | ".join(first)}) {further} (space "```" space)?'

    def thoughts(self, opening: str, closing: str) -> str:
        """Thoughts, which may be opened if they are not."""
        thoughts = f"{self._up_to(self._mark(closing), [closing])} space"
        return thoughts if not opening else f"(space {self._mark(opening)} {thoughts})?"

    def _groups(self) -> list[_Group]:
        """The functions that may be called. The arguments of strict ones follow their schemas, and where calls are due
        those of all."""
        groups, free = list[_Group](), list[str]()
        for number, function in enumerate(self._calls.allowed):
            if not (self._calls.choice.is_due or is_strict(function)):
                free.append(function["name"])
                continue
            with _arguments_of(function["name"]):
                schema = _parameters(function)
                self._rules[f"object_{number}"] = rule_of(schema)
            groups.append(_Group([function["name"]], f"object_{number}", schema))
        return [*groups, *([_Group(free, "object")] if free else [])]

    def _way(self, number: int, written: Written) -> tuple[str, str]:
        """(mark at the beginning, "" for none; all behind it) of calls as they are `written`."""
        ways = [self._filled(written.call, **self._parts(number, written, group)) for group in self._grouped]
        self._rules[f"call_{number}"] = " | ".join(ways)
        more = "" if self._calls.choice.is_one else f"({self._filled(written.between)} call_{number})*"
        opening, closing = self._filled(written.opening), self._filled(written.closing)
        mark = self._mark(written.mark) if written.mark else ""
        first = f"call_{number}" if opening else f"({' | '.join(way.removeprefix(mark) for way in ways)})"
        return mark, f"{opening.removeprefix(mark)} {first} {more} {closing}"

    def _parts(self, number: int, written: Written, group: _Group) -> dict[str, str]:
        """The parts of one call of the functions of a group."""
        return {
            "name": f"({' | '.join(map(_literal, group.names))})",
            "object": group.rule,
            "arguments": self._arguments(f"any_text_{number}", written, group) if written.argument else "",
            "json": _json_call(group, "arguments"),
            "llama_json": _json_call(group, "parameters"),
        }

    def _arguments(self, any_text: str, written: Written, group: _Group) -> str:
        """Arguments between tags: of a schema in its order, those that are not required left out or not. any_text: the
        rule of a text with the mark behind it."""
        self._rules[f"{any_text}[suffix={_literal(written.close)}]"] = _ANY
        if group.schema is None:
            return f"({self._filled(written.argument, value=any_text)})*"
        with _arguments_of(group.names[0]):
            values = list(values_of(group.schema))
        found = ""
        for value in values:
            text = any_text if value.is_any_text else self._value(value, written)
            argument = self._filled(written.argument, key=_literal(value.name), value=text)
            found += f"({argument}){'' if value.is_required else '?'} "
        return found

    def _value(self, value: Value, written: Written) -> str:
        """A value that is one of some texts, or JSON, with the mark behind it."""
        close = _literal(written.close)
        if value.rule:
            name = f"value_{len(self._rules)}"
            self._rules[name] = value.rule
            return f"space {name} space {close}"
        texts = f"({' | '.join(map(_literal, value.texts))}) "
        line_end = _literal("\n")
        return f"({texts} | {line_end} {texts} {line_end}) {close}" if written.wraps else f"{texts} {close}"

    def _mark(self, mark: str) -> str:
        return self._ids.get(_literal(mark), _literal(mark))

    def _up_to(self, mark: str, excluded: Sequence[str], further: str = "") -> str:
        """Text without the `excluded` marks, up to one of them and with it. mark: its token, or its literal. further:
        what else limits the text."""
        number = len(self._rules)
        if mark in self._ids.values():
            self._rules[f"TEXT_{number}"] = f"{_text(excluded)}{further}"
            return f"TEXT_{number}? {mark}"
        others = [each for each in excluded if _literal(each) != mark]
        self._rules[f"text_up_to_{number}[suffix={mark}]"] = f"{_text(others)}{further}"
        return f"text_up_to_{number}"

    def _filled(self, form: str, **parts: str) -> str:
        """The form with tokens in place of marks, and with these parts."""
        return _PART.sub(lambda found: self._ids.get(found[0], parts.get(found[0], found[0])), form)


_ANY = "/(?s:.*)/"
_FENCE = r"(\x{60}{3}(json)?\s{0,4})?"
# A reply of another kind may be read as calls without marks.
_UNLIKE_CALLS = r' & ~/\s*(\x{60}{3}(json)?\s*)?\[?\s*\{(?s:.*)"(arguments|parameters|function)"(?s:.*)/'


def _json_call(group: _Group, key: str) -> str:
    """A call as an object in JSON. key: of its arguments."""
    names = " | ".join(_literal(json.dumps(name, ensure_ascii=False)) for name in group.names)
    return f'"{{" ws "\\"name\\":" ws ({names}) ws "," ws "\\"{key}\\":" ws {group.rule} ws "}}"'


def _text(excluded: Iterable[str]) -> str:
    """Any text without these marks in it."""
    marks = "|".join("".join(map(escaped, mark)) for mark in excluded)
    return f"{_ANY} & ~/(?s:.*)({marks})(?s:.*)/" if marks else _ANY


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


@contextmanager
def _arguments_of(name: str) -> Iterator[None]:
    """Name the function in a UsageError raised inside."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f"the arguments of the function {name!r}: {error}") from error


def _parameters(function: Tool) -> Mapping[str, object]:
    """The schema of a function's arguments, which are an object. Raises UsageError for other ones."""
    given = function.get("parameters")
    schema = {"type": "object", **given} if isinstance(given, dict) else {"type": "object"}
    if schema["type"] != "object":
        raise UsageError(f"the type is {shown(schema['type'])}, it can only be object")
    return schema
