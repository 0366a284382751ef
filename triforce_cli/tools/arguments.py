"""Values of tool-call arguments that are written as texts between tags, by the JSON schemas of the offered tools."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from offload import strict_json

Tool = Mapping[str, Any]
Tools = Sequence[Tool]  # definitions, from `chat.tools.read_tools`

_TYPES: dict[str, tuple[type, ...]] = {
    "integer": (int,), "number": (int, float), "boolean": (bool,), "object": (dict,), "array": (list,),
    "null": (type(None),),
}  # fmt: skip


def parameters_of(tools: Tools, name: str) -> Mapping[str, Any]:
    """The schema of the arguments of the tool `name`; empty if the tool has none."""
    found = (tool["function"].get("parameters") for tool in tools if tool["function"]["name"] == name)
    return next((schema for schema in found if isinstance(schema, dict)), {})


def typed(text: str, key: str, parameters: Mapping[str, Any]) -> Any:
    """The value of the text of the argument `key`. It is parsed as JSON (or Python's True, False, None) if its schema
    has a type other than string, or none is written out, and stays text if it does not fit."""
    properties = parameters.get("properties")
    schema = properties.get(key) if isinstance(properties, dict) else None
    names = set(types_of(schema, parameters, set()))
    is_open = not names and isinstance(schema, dict) and "type" not in schema
    wanted = tuple(kind for name in (_TYPES if is_open else names) for kind in _TYPES.get(name, ()))
    python = {"True": True, "False": False, "None": None}
    with suppress(ValueError, RecursionError):
        value = python[text.strip()] if text.strip() in python else strict_json.parse(text)
        if int in wanted and isinstance(value, float) and value.is_integer():  # JSON Schema's integers may be 5.0
            return value if float in wanted else int(value)
        if bool in wanted if isinstance(value, bool) else isinstance(value, wanted):
            return value
    return text


def types_of(schema: Any, root: Mapping[str, Any], seen: set[int]) -> Iterator[str]:
    """The JSON types that a schema, its alternatives and the schemas that these refer to have, as far as they are
    written out. root: the schema that references begin at. seen: schemas that were walked, which may have themselves in
    them."""
    if not isinstance(schema, dict) or id(schema) in seen:
        return
    seen.add(id(schema))
    yield from (name for name in listed(schema.get("type")) if isinstance(name, str))
    values = [*schema["enum"]] if isinstance(schema.get("enum"), list) else []
    yield from (_json_type(value) for value in (*values, *([schema["const"]] if "const" in schema else ())))
    for inner in (one for name in ("allOf", "anyOf", "oneOf") for one in listed(schema.get(name))):
        yield from types_of(inner, root, seen)
    if isinstance(reference := schema.get("$ref"), str):
        yield from types_of(referred(reference, root), root, seen)


def referred(reference: str, root: Mapping[str, Any]) -> Any:
    """The schema at a reference such as #/$defs/Box; None if it is not there."""
    found: Any = root if reference.startswith("#") else None
    for name in reference.removeprefix("#").split("/")[1:]:
        found = found.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
    return found


def _json_type(value: Any) -> str:
    exact = (name for name, kinds in _TYPES.items() if type(value) in kinds)
    return next(exact, "string")


def listed(value: Any) -> list[Any]:
    """`value` if it is a list, else a list with `value` alone."""
    return value if isinstance(value, list) else [value]
