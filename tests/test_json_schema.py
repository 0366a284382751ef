"""Schemas as tools write them: every text fits, numbers are exact, and the rest is refused by name."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.api_schemas import record
from kit.constrained import demo, of_schema, spelled, text_of, walk
from kit.tool_schemas import OLD, WRITTEN
from offload.grammar.json_disjoint import all_apart
from offload.grammar.json_numbers import LIMIT, with_bounds
from offload.grammar.json_schema import followed
from test_grammar_refused import refused

WALKS = 6


def texts(schema: object) -> list[Any]:
    walks = [walk(of_schema(demo, schema), demo(), seed) for seed in range(WALKS)]
    return [json.loads(text_of(demo(), tokens)) for tokens in walks if tokens is not None]


@pytest.mark.parametrize("name", [*WRITTEN, *OLD])
def test_whatever_is_drawn_fits_the_schema_that_a_tool_wrote(name: str) -> None:
    schema = (WRITTEN | OLD)[name]
    validator = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    found = texts(schema)
    assert found
    for value in found:
        validator(schema).validate(value)


REFUSED = [
    ({"type": "integer", "minimum": 18446744073709551610, "maximum": 18446744073709551615},
     f"minimum is 18446744073709551610, and the limit is {LIMIT}"),
    (record(a={"maximum": -1e30}), f"at /properties/a: maximum is -1e+30, and the limit is {-LIMIT}"),
    ({"type": "number", "minimum": 2**53 + 1, "maximum": 2**53 + 1},
     "no number between minimum 9007199254740993 and maximum 9007199254740993 can be written exactly"),
    ({"enum": ["a", {"b": 2**53 + 1}]},
     "9007199254740993 cannot be written exactly; integers up to 9007199254740992 can"),
    ({"const": -(2**63)},
     "-9223372036854775808 cannot be written exactly; integers up to 9007199254740992 can"),
    ({"multipleOf": 0.07}, "multipleOf is 0.07, of which multiples cannot be told exactly"),
    ({"multipleOf": 0}, "multipleOf is 0, it must be above 0"),
    ({"multipleOf": 2**32}, "multipleOf is 4294967296, it must be at most 4294967295"),
    ({"minLength": 2**32}, "minLength is 4294967296, it must be at most 4294967295"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "said"), REFUSED)
def test_numbers_that_would_not_be_followed_are_refused_with_their_limit(schema: object, said: str) -> None:
    """Bounds over 2^63 gave 9223372036854775807, constants their nearest float, and -2^63 a stack overflow."""
    assert (
        refused("json-schema", json.dumps(schema)) == f"the JSON schema cannot be followed: {said}; take another value"
    )


@pytest.mark.parametrize(
    ("name", "beside"),
    [("uniqueItems", {}), ("propertyNames", {"type": "object"}), ("contains", {}), ("not", {}), ("if", {"then": {}}),
     ("dependentRequired", {}), ("unevaluatedProperties", {"allOf": [{}]}), ("$dynamicAnchor", {"$dynamicRef": "#n"})],
)  # fmt: skip
def test_assertions_that_are_not_supported_are_refused_by_name(name: str, beside: dict[str, object]) -> None:
    values: dict[str, object] = {"uniqueItems": True, "dependentRequired": {"a": ["b"]}, "unevaluatedProperties": False}
    values |= {"propertyNames": {"minLength": 2}, "$dynamicAnchor": "n"}
    assert f'"{name}"' in refused("json-schema", json.dumps({name: values.get(name, {})} | beside))


BOUNDS = st.one_of(
    st.integers(-(2**70), 2**70),
    st.builds(
        lambda near, by: near + by, st.sampled_from([2**53, -(2**53), 2**60, 2**63, -(2**63)]), st.integers(-9, 9)
    ),
    st.floats(-1e25, 1e25),
)


@given(st.dictionaries(st.sampled_from(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"]), BOUNDS))
def test_bounds_only_ever_become_narrower(node: dict[str, Any]) -> None:
    given_node = node | {"type": "integer"}
    try:
        found = with_bounds(given_node)
    except ValueError:
        return
    before, after = (jsonschema.Draft202012Validator(each) for each in (given_node, found))
    draw = random.Random(0)
    near = [int(value) for each in (given_node, found) for value in each.values() if not isinstance(value, str)]
    for value in [*near, *(each + draw.randint(-3, 3) for each in near), 0, 2**53, -(2**53)]:
        if abs(value) <= 2**53 - 3:
            assert after.is_valid(value) == before.is_valid(value)
        else:
            assert before.is_valid(value) or not after.is_valid(value)


def test_numbers_near_2_to_the_53_fit_as_the_library_writes_them() -> None:
    for kind in ("integer", "number"):
        for bounds in (
            *({"exclusiveMinimum": 2**53, "maximum": 2**53 + 3}, {"minimum": 2**53 + 1}, {"minimum": 5 * 10**18}),
            *({"maximum": -(10**18)}, {"minimum": -(2**63)}),
        ):
            schema = {"type": kind} | bounds
            for value in texts(schema):
                jsonschema.Draft202012Validator(schema).validate(value)


VALUES = [
    None,
    True,
    False,
    0,
    1,
    1.5,
    -2,
    "a",
    "b",
    "",
    [],
    [1],
    {},
    {"a": 1},
    {"a": "a"},
    {"b": 1},
    {"a": 1, "b": "a"},
]
PARTS = st.one_of(
    st.booleans(),
    st.builds(
        lambda kinds: {"type": kinds}, st.lists(st.sampled_from(["null", "integer", "number", "string", "object"]))
    ),
    st.builds(lambda value: {"const": value}, st.sampled_from(VALUES)),
    st.builds(lambda values: {"enum": values}, st.lists(st.sampled_from(VALUES), max_size=3)),
    st.builds(lambda low: {"type": "number", "minimum": low}, st.integers(-2, 2)),
    st.builds(lambda high: {"type": "integer", "maximum": high}, st.integers(-2, 2)),
    st.sampled_from([{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}, {"required": ["a"]}, {"$ref": "#/nothing"}]),
)


def objects(parts: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    properties = st.dictionaries(st.sampled_from(["a", "b"]), parts)
    return st.one_of(
        st.fixed_dictionaries(
            {"type": st.just("object"), "properties": properties, "required": st.lists(st.sampled_from(["a", "b"]))},
            optional={"additionalProperties": st.booleans()},
        ),
        st.builds(lambda keys, options: {keys: options}, st.sampled_from(["anyOf", "allOf", "oneOf"]),
                  st.lists(parts, min_size=1, max_size=2)),
    )  # fmt: skip


@given(st.recursive(PARTS, objects, max_leaves=6), st.recursive(PARTS, objects, max_leaves=6))
def test_no_value_fits_two_schemas_of_which_that_is_proved(one: Any, other: Any) -> None:
    root = {"$defs": {"a": {"const": "a"}, "b": {"type": "object", "required": ["b"]}}}
    if all_apart([one, other], root):
        ours, theirs = (
            {"$ref": "#/$defs/one"} | root | {"$defs": root["$defs"] | {"one": each}} for each in (one, other)
        )
        for value in VALUES:
            try:
                both = all(jsonschema.Draft202012Validator(each).is_valid(value) for each in (ours, theirs))
            except Exception:  # a reference to nothing, or one that never ends
                return
            assert not both


def test_a_oneof_that_overlaps_stays_one() -> None:
    for options in ([{"type": "integer"}, {"type": "number"}], [{"minLength": 1}, {"type": "string"}], [True, {}],
                    [{"properties": {"k": {"const": number}}, "required": ["k"]} for number in (1, 2)]):  # fmt: skip
        assert followed({"oneOf": options}) == {"oneOf": options}


def test_compact_json_where_the_schema_asks_for_it() -> None:
    """It did nothing: a pattern of our own won."""
    schema = {"type": "array", "x-guidance": {"whitespace_flexible": False}}
    assert of_schema(demo, schema).state().advance(spelled(demo(), "[1, 2]")) == 3
    assert of_schema(demo, schema).state().advance(spelled(demo(), "[1,2]")) == 5
    flexible = {"type": "array", "x-guidance": {"whitespace_flexible": True}}
    assert of_schema(demo, flexible).state().advance(spelled(demo(), "[    1")) == 6


@pytest.mark.parametrize("depth", [150, 400, 900, 20_000])
def test_a_schema_that_is_nested_too_deep_is_refused(depth: int) -> None:
    said = refused("json-schema", '{"items":' * depth + "{}" + "}" * depth)
    assert "recursion limit exceeded" in said or "it is nested too deep" in said
