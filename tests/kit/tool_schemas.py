"""JSON schemas as tools write them: Pydantic 2, zod, OpenAPI, TypeScript's generators, OpenAI's strict form."""

from __future__ import annotations

from kit.api_schemas import INTEGER, SHORT, STRING, Schema, listed, record

DECIMAL = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"
DECIMAL_4_2 = r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,2}|(?=[\d.]{1,5}0*$)\d{0,2}\.\d{0,2}0*$)"
ZOD_UUID = "^([0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[1-8][0-9a-fA-F]{3}-[89abAB][0-9a-fA-F]{3}-[0-9a-fA-F]{12})$"
ZOD_BASE64 = "^$|^(?:[0-9a-zA-Z+/]{4})*(?:(?:[0-9a-zA-Z+/]{2}==)|(?:[0-9a-zA-Z+/]{3}=))?$"
SAFE = 2**53 - 1
CAT = record(k={"const": "c", "type": "string"}, n={"type": "integer", "minimum": 0, "maximum": 9})
DOG = record(k={"enum": ["d", "wolf"]}, g={"type": "boolean"})
FIRST, SECOND = record(version={"const": 1}, n=INTEGER), record(version={"const": 2}, s=SHORT)
TAGGED = {"discriminator": {"propertyName": "k"}, "oneOf": [{"$ref": "#/$defs/C"}, {"$ref": "#/$defs/D"}]}
NODE = record([], v=INTEGER, next={"anyOf": [{"$ref": "#/$defs/N"}, {"type": "null"}], "default": None})
WRITTEN: dict[str, Schema] = {
    "Decimal": record(price={"anyOf": [{"type": "number"}, {"type": "string", "pattern": DECIMAL}]}),
    "Decimal alone": {"type": "string", "pattern": DECIMAL, "maxLength": 6},
    "Decimal of 4 digits": {"type": "string", "pattern": DECIMAL_4_2, "maxLength": 9},
    "formats of no standard": record(
        **{name: {"type": "string", "format": name, "maxLength": 3} for name in ("path", "password", "binary", "color")}
    ),
    "formats of numbers": record(a={"type": "integer", "format": "int32"}, b={"format": "double", "maxLength": 2}),
    "union of models": {"$defs": {"C": CAT, "D": DOG}, **record(p=TAGGED)},
    "union told apart by numbers": {"oneOf": [FIRST, SECOND]},
    "union told apart by a reference": {"$defs": {"T": {"const": "t"}},
                                        "oneOf": [record(k={"$ref": "#/$defs/T"}), record(k={"const": "u"})]},
    "union of ranges": {"oneOf": [{"type": "integer", "maximum": 3}, {"type": "integer", "minimum": 5}]},
    "union of fields": {"oneOf": [record(a=INTEGER), record(b=INTEGER)]},
    "union of lists": {"oneOf": [{"enum": [1, 2.0, True]}, {"enum": ["1", 3, None]}]},
    "recursive": {"$defs": {"N": NODE}, "$ref": "#/$defs/N"},
    "map by an enum": {"$defs": {"E": {"enum": ["x", "y"], "title": "E", "type": "string"}},
                       "type": "object", "propertyNames": {"$ref": "#/$defs/E"}, "additionalProperties": INTEGER},
    "map by a list": {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": INTEGER,
                      "properties": {"b": SHORT, "c": INTEGER}, "required": ["a"]},
    "map by a pattern": {"type": "object", "propertyNames": {"pattern": "^[a-z]{1,2}$"}, "minProperties": 1},
    "record of zod": {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": INTEGER},
    "numbers of zod": record(a={"type": "integer", "minimum": -SAFE, "maximum": SAFE},
                             b={"type": "number", "minimum": -1.7976931348623157e308, "maximum": 1.7e308}),
    "strings of zod": record(a={"type": "string", "format": "uuid", "pattern": ZOD_UUID},
                             b={"type": "string", "format": "base64", "pattern": ZOD_BASE64, "maxLength": 8}),
    "int64": {"type": "integer", "format": "int64", "minimum": -(2**63), "maximum": 2**63 - 1},
    "uint64": {"type": "integer", "minimum": 0, "maximum": 2**64 - 1},
    "components": {"components": {"schemas": {"A": record(p={"type": "string", "format": "byte", "maxLength": 3})}},
                   "$ref": "#/components/schemas/A"},
    "nullable": {"type": "string", "nullable": True, "maxLength": 3},
    "what only describes": {"type": "integer", "title": "t", "description": "d", "default": "x", "examples": ["y"],
                            "deprecated": True, "readOnly": True, "writeOnly": False, "$comment": "c", "x-own": {},
                            "example": {"minimum": 2**80}, "contentMediaType": "a/b", "contentEncoding": "base64",
                            "externalDocs": {}, "xml": {}},
    "what says nothing": {"type": "array", "items": INTEGER, "uniqueItems": False, "not": False, "minContains": 2,
                          "unevaluatedItems": True, "then": False, "else": False},
    "what says nothing of objects": {"type": "object", "dependencies": {}, "dependentRequired": {}, "if": {},
                                     "dependentSchemas": {}, "unevaluatedProperties": True, "$dynamicAnchor": "n"},
    "unevaluated": {"type": "object", "properties": {"a": INTEGER}, "unevaluatedProperties": False},
    "a set of one": {"type": "array", "items": INTEGER, "uniqueItems": True, "maxItems": 1.0},
    "lengths without a limit": {"type": "string", "minLength": 1.0, "maxLength": 2**53 - 1},
    "pointers": {"definitions": {"a/b": {"type": "boolean"}, "c~d": {"type": "null"}, "E<f>": SHORT},
                 "prefixItems": [{"$ref": "#/definitions/a~1b"}, {"$ref": "#/definitions/c~0d"},
                                 {"$ref": "#/definitions/E%3Cf%3E"}], "minItems": 3, "maxItems": 3, "type": "array"},
    "another address of a draft": {"$schema": "https://json-schema.org/draft-07/schema#", "type": "integer"},
    "strict": record(steps=listed(record(text=SHORT, note={"type": ["string", "null"]}), maxItems=1), done=STRING),
}  # fmt: skip
OLD: dict[str, Schema] = {
    "draft-04": {"$schema": "http://json-schema.org/draft-04/schema#", "id": "http://x/y", "type": "integer",
                 "minimum": 3, "exclusiveMinimum": True},
    "draft-07": {"$schema": "http://json-schema.org/draft-07/schema#", "definitions": {"x": INTEGER}, "type": "array",
                 "items": [{"$ref": "#/definitions/x"}, SHORT], "additionalItems": False, "minItems": 2},
}  # fmt: skip
