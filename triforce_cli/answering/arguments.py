"""Values of tool-call arguments that are written as texts between tags, by the JSON schemas of the offered tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from offload import strict_json

Tools = Sequence[Mapping[str, Any]]  # definitions, from `chat.tools.read_tools`

_TYPES: dict[str, tuple[type, ...]] = {
    "integer": (int,), "number": (int, float), "boolean": (bool,), "object": (dict,), "array": (list,),
    "null": (type(None),),
}  # fmt: skip


def schema_of(tools: Tools, name: str, key: str) -> Any:
    """The schema of the argument `key` of the tool `name`; None if the tool has none for it."""
    for tool in tools:
        if tool["function"]["name"] == name:
            parameters = tool["function"].get("parameters")
            properties = parameters.get("properties") if isinstance(parameters, dict) else None
            return properties.get(key) if isinstance(properties, dict) else None
    return None


def typed(text: str, schema: Any) -> Any:
    """The value of an argument's text. It is parsed as JSON (or Python's True, False, None) if the schema has a type
    other than string, and stays text if it does not fit."""
    wanted = _types(schema)
    if not wanted:
        return text
    python = {"True": True, "False": False, "None": None}
    with suppress(ValueError, RecursionError):
        value = python[text.strip()] if text.strip() in python else strict_json.parse(text)
        if int in wanted and isinstance(value, float) and value.is_integer():  # JSON Schema's integers may be 5.0
            return value if float in wanted else int(value)
        if bool in wanted if isinstance(value, bool) else isinstance(value, wanted):
            return value
    return text


def _types(schema: Any) -> tuple[type, ...]:
    """The Python types of the schema's JSON types, without strings, including those of its alternatives."""
    if not isinstance(schema, dict):
        return ()
    each = [
        schema,
        *(one for name in ("allOf", "anyOf", "oneOf") for one in listed(schema.get(name)) if isinstance(one, dict)),
    ]
    names = (name for one in each for name in listed(one.get("type")))
    return tuple(kind for name in names if isinstance(name, str) for kind in _TYPES.get(name, ()))


def listed(value: Any) -> list[Any]:
    """`value` if it is a list, else a list with `value` alone."""
    return value if isinstance(value, list) else [value]
