"""The constraint on a reply that may be tool calls instead of an answer which follows a constraint."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

from offload.errors import UsageError
from offload.grammar.constraint import WHITESPACE, Constraint
from triforce_cli.tools.calls import Calls

_READABLE = re.compile(r"[\w.-]+")  # names that every form's reader takes
_NAMED = re.compile(r"\bname\b")  # a form that has names outside JSON
_LITERAL = re.compile(r'"(?:[^"\\]|\\.)*"')
# Parts of forms, see `Form.written`. A value ends with the first closing mark.
_PARTS = """
space: /[ \\t\\r\\n]{0,4}/
list: "[" space call (space "," space call)* space "]"
key: /[^<>\\n]+/
parameter[suffix="</parameter>"]: /(?s:.*)/
arg_value[suffix="</arg_value>"]: /(?s:.*)/
"""


def with_calls(answer: Constraint, calls: Calls, named: Mapping[int, str]) -> Constraint:
    """The constraint on a reply that is calls in the form of the chat template, or follows `answer`. named: tokens that
    are marks, by id. Raises UsageError if the template tells no form that a grammar can describe."""
    forms = [form.written for form in calls.asked if form.written]
    if not forms:
        raise UsageError(
            f"tools beside a {answer.name}: the reply is one of both, and the model's chat template tells no form of "
            "calls that could be followed exactly; leave the tools or the constraint out"
        )
    odd = next((name for name in _names(calls) if not _READABLE.fullmatch(name)), None)
    if odd is not None and any(_NAMED.search(form) for form in forms):
        raise UsageError(
            f"tools beside a {answer.name}: the tool {odd!r} has characters that calls of this model cannot name; use "
            "letters, digits, _, . and - alone, or leave the constraint out"
        )
    ids = {json.dumps(mark, ensure_ascii=False): f"<[{token}]>" for token, mark in named.items()}
    written = (_LITERAL.sub(lambda found: ids.get(found[0], found[0]), form) for form in forms)
    names = _names(calls)
    quoted = " | ".join(json.dumps(name, ensure_ascii=False) for name in dict.fromkeys(names))
    rules = (
        f"calls: {' | '.join(f'({form})' for form in written)}",
        f"name: {quoted}",
        f"object: {_of_json({'type': 'object'})}",
        f"call: {_of_call(names, 'arguments')}",
        f"llama_call: {_of_call(names, 'parameters')}",
    )
    return replace(answer, calls="\n".join(rules) + _PARTS)


def _names(calls: Calls) -> list[str]:
    return [tool["function"]["name"] for tool in calls.tools]


def _of_call(names: Iterable[str], arguments: str) -> str:
    properties = {"name": {"enum": list(dict.fromkeys(names))}, arguments: {"type": "object"}}
    return _of_json(
        {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    )


def _of_json(schema: Mapping[str, object]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': {'whitespace_pattern': WHITESPACE}})}"
