"""Grammars of the arguments of one function: as one JSON object, or as a text for each of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from offload.errors import UsageError
from offload.grammar.constraint import rule_of
from triforce_cli.tools.arguments import referred, types_of

_SAYS_NOTHING = {
    *("title", "description", "default", "examples", "example", "deprecated", "$comment", "$schema", "$id", "$defs"),
    *("definitions", "additionalProperties", "readOnly", "writeOnly"),
}
_REMEDY = "say the same with types and lists of values, or let the function not be strict"


@dataclass(frozen=True)
class Value:
    """The text of an argument. texts: those that it may be; rule: that it follows, of JSON; neither: any text."""

    name: str
    is_required: bool
    texts: tuple[str, ...] = ()
    rule: str = ""

    @property
    def is_any_text(self) -> bool:
        return not (self.texts or self.rule)


def values_of(schema: Mapping[str, Any]) -> Iterator[Value]:
    """The arguments of a function's schema, in its order. Raises UsageError for a schema that texts between tags cannot
    follow."""
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if more := schema.keys() - {"type", "properties", "required", *_SAYS_NOTHING}:
        raise UsageError(f"{min(more)} cannot be followed in the form in which this model writes arguments; {_REMEDY}")
    if missing := [name for name in required if name not in properties]:
        raise UsageError(f"{missing[0]} is required, and is none of the properties; describe it there")
    for name, given in properties.items():
        if name != name.strip() or any(letter in '<>\n"' for letter in name):
            raise UsageError(f"the argument {name!r} cannot be named by this model's calls; give it another name")
        yield _value(name, given, schema, is_required=name in required)


def _value(name: str, given: Any, root: Mapping[str, Any], *, is_required: bool) -> Value:
    schema = _resolved(given, root)
    types, values = (
        set(types_of(schema, root, set())),
        schema.get("enum", [schema["const"]] if "const" in schema else []),
    )
    if types and "string" not in types:
        shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
        return Value(name, is_required, rule=rule_of({**shared, **schema}))
    if values and types == {"string"} and all(isinstance(each, str) for each in values):
        if schema.keys() <= {"type", "enum", "const", *_SAYS_NOTHING}:
            return Value(name, is_required, texts=tuple(dict.fromkeys(values)))
    elif _is_plain(schema):
        return Value(name, is_required)
    raise UsageError(f"the schema of the argument {name!r} cannot be followed by a text between tags; {_REMEDY}")


def _resolved(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema that a reference leads to."""
    seen = set[str]()
    while isinstance(schema, dict) and isinstance(reference := schema.get("$ref"), str) and reference not in seen:
        seen.add(reference)
        schema = referred(reference, root)
    return schema if isinstance(schema, dict) else {}


def _is_plain(schema: Any) -> bool:
    """Whether a schema says nothing but types, so that every text is a value of one of them."""
    further = schema.get("anyOf", []) if isinstance(schema, dict) else [None]
    return (
        isinstance(schema, dict) and schema.keys() <= {"type", "anyOf", *_SAYS_NOTHING} and all(map(_is_plain, further))
    )
