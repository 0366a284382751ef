"""Subschemas of a JSON schema with their JSON pointers, and the resolution of references."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

Schema = dict[str, Any] | bool
MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
SINGLE = (
    *("items", "additionalItems", "unevaluatedItems", "contains", "additionalProperties", "unevaluatedProperties"),
    *("propertyNames", "not", "if", "then", "else"),
)


def token(name: str) -> str:
    """A name as an escaped step of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


def children(node: dict[str, Any]) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """The direct subschemas of `node`, as (steps from `node`, subschema)."""
    for key, value in node.items():
        if key in MAPS and isinstance(value, dict):
            yield from (((key, name), child) for name, child in value.items())
        elif (key in LISTS or key == "items") and isinstance(value, list):
            yield from (((key, index), child) for index, child in enumerate(value))
        elif key in SINGLE:
            yield (key,), value


def target(root: Schema, reference: object) -> Any:
    """The target of a reference `#/...`; None for other references, and where there is none."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    found: Any = root
    for step in unquote(reference[1:]).split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict) and name in found:
            found = found[name]
        elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            return None
    return found
