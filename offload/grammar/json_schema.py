"""Translation of JSON schemas, as people and tools write them, to the subset that llguidance supports.

Keywords without effect are dropped, unsupported ones are rewritten where possible, and keywords that the library would
follow wrongly are refused. Every value that fits the returned schema fits the given one.
"""

from __future__ import annotations

from typing import Any, cast

from offload.grammar.json_disjoint import all_apart, constants
from offload.grammar.json_numbers import check_constant, check_multiple, with_bounds
from offload.grammar.json_patterns import without_look_ahead
from offload.grammar.json_refs import Schema, children, target, token

# Enforced formats; the others are annotations, as all formats are in the standard.
FORMATS = frozenset(("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"))
_DIALECTS = frozenset(
    (
        "https://json-schema.org/draft/2020-12/schema",
        "https://json-schema.org/draft/2019-09/schema",
        *(f"http://json-schema.org/draft-0{number}/schema" for number in (4, 6, 7)),
    )
)
_KNOWN_SITES = ("json-schema.org/", "spec.openapis.org/")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_MOST = 2**32 - 1  # the largest bound on a string's letters
_IN_PLACE = frozenset(("allOf", "anyOf", "oneOf", "$ref", "$dynamicRef", "if", "dependentSchemas", "not"))
_SAYS_NOTHING: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "not": (False,),
    "propertyNames": (True, {}, {"type": "string"}),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "dependencies": ({},),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
}
# Keywords without effect where none of the listed others is present.
_WITHOUT = {"minContains": ["contains"], "maxContains": ["contains"], "if": ["then", "else"]}
_WITHOUT |= {"then": ["if"], "else": ["if"]}


class Refused(ValueError):
    """A schema that cannot be translated. pointer: JSON pointer of the refused subschema."""

    def __init__(self, pointer: str, words: str) -> None:
        super().__init__(words)
        self.pointer = pointer


def followed(schema: Schema) -> Schema:
    """The translated schema. Raises Refused."""
    return cast(Schema, _Rewriting(schema).of(schema, ""))


class _Rewriting:
    def __init__(self, root: Schema) -> None:
        self._root = root
        self._anchored = _names(root, "$dynamicRef") or _names(root, "$recursiveRef")
        self._holders = {reference[2:].split("/")[0] for reference in _names(root, "$ref") if reference[:2] == "#/"}

    def of(self, node: Any, pointer: str) -> Any:
        """The translation of the subschema at `pointer`, with all its parts."""
        if not isinstance(node, dict):
            return node
        found = {key: value for key, value in node.items() if not self._says_nothing(node, key)}
        for (key, *name), child in children(found):
            steps = "".join(f"/{token(str(step))}" for step in (key, *name))
            self._put(found, key, name, self.of(child, pointer + steps))
        for key in self._holders.intersection(found):  # keywords under which tools keep referenced schemas
            if not pointer and not any(steps[0] == key for steps, _ in children({key: found[key]})):
                found[key] = self._held(found[key], f"/{token(key)}")
        try:
            return self._own(found)
        except ValueError as error:
            raise Refused(pointer, str(error)) from error

    def _held(self, value: Any, pointer: str) -> Any:
        """A value outside any keyword that holds schemas at some depth."""
        if not isinstance(value, dict):
            return value
        if {"type", "$ref", "properties", "enum", "const", "allOf", "anyOf", "oneOf"} & value.keys():
            return self.of(value, pointer)
        return {name: self._held(child, f"{pointer}/{token(name)}") for name, child in value.items()}

    def _put(self, node: dict[str, Any], key: Any, name: list[Any], value: Any) -> None:
        if name:
            node[key] = node[key].copy()
            node[key][name[0]] = value
        else:
            node[key] = value

    def _says_nothing(self, node: dict[str, Any], key: str) -> bool:
        value = node[key]
        if key in ("$dynamicAnchor", "$recursiveAnchor"):
            return not self._anchored
        if key == "format":
            return isinstance(value, str) and value not in FORMATS
        if key == "$schema":
            return isinstance(value, str) and value.rstrip("#") not in _DIALECTS and _is_of_known_site(value)
        if key == "uniqueItems" and _whole(node.get("maxItems")) in (0, 1):
            return True
        if key == "maxLength":
            return isinstance(value, int | float) and value > _MOST
        alone = key in _WITHOUT and not any(other in node for other in _WITHOUT[key])
        return alone or any(value == each and type(value) is type(each) for each in _SAYS_NOTHING.get(key, ()))

    def _own(self, node: dict[str, Any]) -> dict[str, Any]:
        """Translate the keywords of `node` itself. Raises ValueError."""
        check_constant([node.get("const"), node.get("enum")])
        check_multiple(node.get("multipleOf"))
        found = {key: _whole(value) if key in _COUNTS else value for key, value in node.items()}
        if isinstance(least := found.get("minLength"), int) and least > _MOST:
            raise ValueError(f"minLength is {least}, it must be at most {_MOST}")
        if isinstance(pattern := found.get("pattern"), str):
            found["pattern"] = without_look_ahead(pattern)
        found = with_bounds(found)
        found = self._with_names(_with_unevaluated(found))
        return self._with_any_of(found)

    def _with_names(self, node: dict[str, Any]) -> dict[str, Any]:
        """Rewrite `propertyNames` as `properties` or `patternProperties`, if it lists the names or is one pattern."""
        names = node.get("propertyNames")
        if not isinstance(names, dict) or "patternProperties" in node:
            return node
        rest, other = names.keys() - {"type"}, node.get("additionalProperties", True)
        found = {key: value for key, value in node.items() if key not in ("propertyNames", "additionalProperties")}
        listed = constants(names, self._root)
        if (
            listed is not None
            and rest <= {"const", "enum", "$ref", "title", "description"}
            and _is_list_alone(names, self._root)
        ):
            own = node.get("properties", {})
            kept = {name: own.get(name, other) for name in [*own, *listed] if isinstance(name, str) and name in listed}
            return found | {"properties": kept, "additionalProperties": False}
        if rest == {"pattern"} and "properties" not in node:
            return found | {"patternProperties": {names["pattern"]: other}, "additionalProperties": False}
        return node

    def _with_any_of(self, node: dict[str, Any]) -> dict[str, Any]:
        options = node.get("oneOf")
        if not isinstance(options, list) or "anyOf" in node or not all_apart(options, self._root):
            return node
        return {"anyOf" if key == "oneOf" else key: value for key, value in node.items()}


def _with_unevaluated(node: dict[str, Any]) -> dict[str, Any]:
    """Rewrite `unevaluated...` as `additional...`, where no other schema could evaluate properties or items."""
    found = dict(node)
    if not _IN_PLACE & node.keys():
        for key, same in (("unevaluatedProperties", "additionalProperties"), ("unevaluatedItems", "items")):
            if key in found and not (same == "items" and ("contains" in node or isinstance(node.get(same), list))):
                value = found.pop(key)
                found.setdefault(same, value)
    return found


def _is_list_alone(names: dict[str, Any], root: Schema) -> bool:
    """Whether the schema of names is only a list of names."""
    while "$ref" in names:
        names = target(root, names["$ref"]) if len(names) == 1 else {}
        if not isinstance(names, dict):
            return False
    return names.keys() <= {"type", "const", "enum", "title", "description"} and names.get("type", "string") == "string"


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _is_of_known_site(address: str) -> bool:
    return address.partition("://")[2].startswith(_KNOWN_SITES)


def _names(value: Any, key: str) -> set[str]:
    """All strings under `key` at any depth."""
    found, level = set[str](), [value]
    while level:
        each = level.pop()
        if isinstance(each, dict):
            found |= {each[key]} if isinstance(each.get(key), str) else set()
            level += each.values()
        elif isinstance(each, list):
            level += each
    return found
