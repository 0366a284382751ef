"""Where the subschemas of a JSON schema stand, and what its references mean."""

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
    """A step of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


def children(node: dict[str, Any]) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """(steps to it, subschema) of the ones right inside `node`."""
    for key, value in node.items():
        if key in MAPS and isinstance(value, dict):
            yield from (((key, name), child) for name, child in value.items())
        elif (key in LISTS or key == "items") and isinstance(value, list):
            yield from (((key, index), child) for index, child in enumerate(value))
        elif key in SINGLE:
            yield (key,), value


def target(root: Schema, reference: object) -> Any:
    """What `#/...` points to; None for other references, and where nothing is."""
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
