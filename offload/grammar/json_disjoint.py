"""Proofs that JSON schemas are disjoint, so that `oneOf` can be replaced by `anyOf`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import combinations
from typing import Any

from offload.grammar.json_refs import Schema, target

_DEPTH = 12  # limit of nested references and properties in a proof
_TYPES = frozenset(("null", "boolean", "integer", "number", "string", "array", "object"))
_Facet = dict[str, Any]


def all_apart(options: list[Any], root: Schema) -> bool:
    """Whether it can be proved that no value fits two of `options`. root: the schema that resolves references."""
    return all(_apart(one, other, root, _DEPTH) for one, other in combinations(options, 2))


def constants(node: object, root: Schema) -> list[Any] | None:
    """A list of values that contains all that fit a schema; None where the schema does not list its values."""
    for facet in _facets(node, root, _DEPTH):
        if "const" in facet:
            return [facet["const"]]
        if isinstance(facet.get("enum"), list):
            return list(facet["enum"])
    return None


def _apart(one: object, other: object, root: Schema, depth: int) -> bool:
    if one is False or other is False:
        return True
    if depth == 0:
        return False
    ours, theirs = list(_facets(one, root, depth)), list(_facets(other, root, depth))
    required = _required(ours) | _required(theirs)
    if any(_facets_apart(mine, its, required, root, depth) for mine in ours for its in theirs):
        return True
    split = [(facets, against) for facets, against in ((ours, other), (theirs, one))]
    return any(
        all(_apart(option, against, root, depth - 1) for option in facet[key])
        for facets, against in split
        for facet in facets
        for key in ("anyOf", "oneOf")
        if isinstance(facet.get(key), list) and facet[key]
    )


def _facets(node: object, root: Schema, depth: int) -> Iterator[_Facet]:
    """The schemas that a value must fit to fit `node`: itself, targets of references, and members of `allOf`."""
    if not isinstance(node, dict) or depth == 0:
        return
    yield node
    members = node.get("allOf")
    referred = target(root, node["$ref"]) if "$ref" in node else None
    for part in [referred, *(members if isinstance(members, list) else [])]:
        yield from _facets(part, root, depth - 1)


def _required(facets: list[_Facet]) -> set[str]:
    return {name for facet in facets if isinstance(facet.get("required"), list) for name in facet["required"]}


def _facets_apart(one: _Facet, other: _Facet, required: set[str], root: Schema, depth: int) -> bool:
    common = _types(one) & _types(other)
    if not common or _above(one, other) or _above(other, one):
        return True
    if _values(one) and _values(other) and not set(_values(one)) & set(_values(other)):
        return True
    return common == {"object"} and any(
        _apart(_property(one, name), _property(other, name), root, depth - 1) for name in required
    )


def _types(facet: _Facet) -> frozenset[str]:
    given = facet.get("type")
    names = [given] if isinstance(given, str) else given if isinstance(given, list) else _TYPES
    found = frozenset(names) | ({"integer"} if "number" in names else frozenset())
    return found & frozenset(_type(json.loads(value)) for value in _values(facet)) if _values(facet) else found


def _type(value: object) -> str:
    if isinstance(value, float):
        return "integer" if value.is_integer() else "number"
    names = {type(None): "null", bool: "boolean", int: "integer", str: "string", list: "array", dict: "object"}
    return names[type(value)]


def _values(facet: _Facet) -> list[str]:
    """The values of `const` or `enum`, in a canonical form: equal values are equal texts."""
    values = [facet["const"]] if "const" in facet else facet.get("enum")
    return [json.dumps(_plain(value), sort_keys=True) for value in values] if isinstance(values, list) else []


def _plain(value: Any) -> Any:
    """The value with whole floats as integers, since 1.0 equals 1."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _above(one: _Facet, other: _Facet) -> bool:
    """Whether both schemas allow only numbers, and all of `one` are larger."""
    if not _types(one) & _types(other) <= {"integer", "number"}:
        return False
    low, high = one.get("minimum"), other.get("maximum")
    return isinstance(low, int | float) and isinstance(high, int | float) and low > high


def _property(facet: _Facet, name: str) -> Any:
    properties = facet.get("properties")
    if isinstance(properties, dict) and name in properties:
        return properties[name]
    return True if "patternProperties" in facet else facet.get("additionalProperties", True)
