"""JSON schemas of the shapes that APIs have, all of which the program follows."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def record(required: list[str] | None = None, **properties: Any) -> Schema:
    """An object with these fields and no others; all are required unless a list says which."""
    needed = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": needed, "additionalProperties": False}


STRING: Schema = {"type": "string"}
INTEGER: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
BOOLEAN: Schema = {"type": "boolean"}
SHORT: Schema = {"type": "string", "maxLength": 8}
COLOUR: Schema = {"enum": ["red", "green", "dark \u00e9bony"]}
POINT = record(x=NUMBER, y=NUMBER)


def listed(items: Any, **bounds: int) -> Schema:
    return {"type": "array", "items": items, **bounds}


TREE: Schema = {
    "$defs": {"node": record(["value"], value=INTEGER, children=listed({"$ref": "#/$defs/node"}, maxItems=2))},
    "$ref": "#/$defs/node",
}
LINKED: Schema = record(["value"], value=SHORT, next={"anyOf": [{"type": "null"}, {"$ref": "#"}]})
SCHEMAS: dict[str, Schema] = {
    "anything": {},
    "object": {"type": "object"},
    "string": STRING,
    "short": SHORT,
    "exact length": {"type": "string", "minLength": 3, "maxLength": 3},
    "integer": INTEGER,
    "number": NUMBER,
    "null": {"type": "null"},
    "types": {"type": ["string", "null", "integer"]},
    "between": {"type": "integer", "minimum": -3, "maximum": 120},
    "open interval": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1.5},
    "at least": {"type": "integer", "minimum": 18},
    "multiple": {"type": "integer", "multipleOf": 5},
    "enum": COLOUR,
    "mixed enum": {"enum": [1, "1", None, True, {"a": [1.5, "x"]}]},
    "const": {"const": {"kind": "user", "tags": []}},
    "pair": record(name=STRING, age={"type": "integer", "minimum": 0, "maximum": 150}),
    "all optional": record([], a=SHORT, b=BOOLEAN, c=INTEGER),
    "one of two needed": record(["b"], a=SHORT, b=BOOLEAN, c=INTEGER),
    "nested": record(user=record(id=INTEGER, home=record(city=SHORT, at=POINT)), ok=BOOLEAN),
    "strange names": record(**{"a b": BOOLEAN, 'q"q': BOOLEAN, "\u00e9/~": BOOLEAN, "new\nline": BOOLEAN}),
    "array": listed(INTEGER),
    "bounded array": listed(BOOLEAN, minItems=2, maxItems=4),
    "empty array": listed(INTEGER, maxItems=0),
    "matrix": listed(listed(INTEGER, minItems=2, maxItems=2), minItems=2, maxItems=2),
    "tuple": {"type": "array", "prefixItems": [INTEGER, SHORT], "items": False, "minItems": 2},
    "records": listed(record(["id"], id=INTEGER, colour=COLOUR), minItems=1, maxItems=3),
    "union": {"anyOf": [INTEGER, record(error=SHORT)]},
    "tagged union": {"anyOf": [record(kind={"const": "point"}, at=POINT), record(kind={"const": "tag"}, tag=COLOUR)]},
    "provable oneOf": {"oneOf": [record(kind={"const": "a"}, n=INTEGER), record(kind={"const": "b"}, s=SHORT)]},
    "all of": {"allOf": [{"type": "object", "properties": {"a": INTEGER}, "required": ["a"]},
                         {"properties": {"b": BOOLEAN}, "required": ["b"]}]},
    "definitions": {"$defs": {"point": POINT}, **record(a={"$ref": "#/$defs/point"}, b={"$ref": "#/$defs/point"})},
    "tree": TREE,
    "linked list": LINKED,
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3,5}$"},
    "part of a string": {"type": "string", "pattern": "[0-9]x", "maxLength": 12},
    "date": {"type": "string", "format": "date"},
    "date and time": {"type": "string", "format": "date-time"},
    "uuid": {"type": "string", "format": "uuid"},
    "email": {"type": "string", "format": "email"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "map": {"type": "object", "additionalProperties": INTEGER},
    "map with a field": {"type": "object", "properties": {"id": INTEGER}, "required": ["id"],
                         "additionalProperties": SHORT},
    "keys by pattern": {"type": "object", "patternProperties": {"^x-[a-z]{1,4}$": BOOLEAN},
                        "additionalProperties": False},
    "weather": record(["city"], city={"type": "string", "minLength": 1, "maxLength": 20, "description": "a town"},
                      unit={"type": "string", "enum": ["celsius", "fahrenheit"], "default": "celsius"}),
}  # fmt: skip
