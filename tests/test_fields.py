"""The strict reader of values from outside: what is refused, by which name, and what comes out as a dataclass."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest

from offload import strict_json
from offload.errors import ModelError, UsageError
from offload.fields import (
    INTEGER,
    LIST,
    NUMBER,
    OBJECT,
    TEXT,
    TRUTH,
    Fields,
    Kind,
    checked,
    fields_of,
    list_of,
    number,
    one_of,
    record,
    shown,
    versioned,
    whole,
)

HALF = "a\ud800"
VALUES = [None, True, False, 0, 1, -1, 7.0, 7.5, math.nan, math.inf, 10**30, 10**400, "", "text", HALF, [], [1], {}]


@pytest.mark.parametrize(
    ("kind", "fitting"),
    [
        (whole(), [0, 1, 2**63 - 1]),
        (whole(1, 10**30), [1, 10**30]),
        (INTEGER, [0, 1, -1, 10**30, 10**400]),
        (number(0, 7), [0, 1, 7.0]),
        (number(0, 8, over=0), [1, 7.0, 7.5]),
        (NUMBER, [0, 1, -1, 7.0, 7.5, 10**30]),
        (TRUTH, [True, False]),
        (TEXT, ["", "text"]),
        (one_of("text", 1), ["text", 1]),
        (LIST, [[], [1]]),
        (list_of(whole()), [[], [1]]),
        (list_of(TRUTH), [[]]),
        (list_of(whole(), length=1), [[1]]),
        (OBJECT, [{}]),
        (whole().or_null, [None, 0, 1]),
    ],
    ids=lambda kind: kind.wanted if isinstance(kind, Kind) else "",
)
def test_a_value_is_of_a_kind_or_it_is_not(kind: Kind, fitting: list[Any]) -> None:
    """true is no number, 7.0 is no whole number, what is infinite or no number is none of either, and half a surrogate
    pair is no text."""
    assert all(map(kind.fits, fitting))
    apart = {(type(each), str(each)) for each in fitting}  # 1 equals true and 1.0
    for value in VALUES:
        assert kind.fits(value) == ((type(value), str(value)) in apart), value
        assert (kind.problem(value, "here") == "") == kind.fits(value)


@pytest.mark.parametrize(
    ("kind", "value", "said"),
    [
        (whole(1, 5), True, "here is true; it must be a whole number from 1 to 5"),
        (whole(), -1, "here is -1; it must be a whole number from 0"),
        (number(0, 9, over=0), None, "here is null; it must be a number over 0, from 0 to 9"),
        (one_of("a", "b"), "c", 'here is "c"; it must be a or b'),
        (one_of("a", "b", "c"), 1, "here is 1; it must be one of a, b, c"),
        (list_of(whole(0, 5)), 3, "here is 3; it must be a list"),
        (list_of(whole(0, 5)), [1, 6, "x"], "here[1] is 6; it must be a whole number from 0 to 5"),
        (list_of(list_of(TRUTH)), [[True], [False, 0]], "here[1][1] is 0; it must be true or false"),
        (list_of(TRUTH, "two of these", length=2), [True], "here is [true]; it must be two of these"),
        (TEXT, HALF, "here has half of a surrogate pair"),
        (list_of(TEXT), ["a", HALF], "here[1] has half of a surrogate pair"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(kind: Kind, value: object, said: str) -> None:
    with pytest.raises(UsageError) as error:
        checked(value, "here", kind, UsageError)
    assert str(error.value) == said


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"a": [None, True, "x"]}, '{"a": [null, true, "x"]}'),
        ("\x1b\n", '"\\u001b\\n"'),
        ("x" * 10**6, '"' + "x" * 36 + "..."),
        (10**39, "1" + "0" * 39),
        (10**400, "1" + "0" * 36 + "..."),
    ],
)
def test_values_in_messages_are_short_and_as_json_has_them(value: object, text: str) -> None:
    assert shown(value) == text


def test_a_number_that_python_does_not_write_is_huge() -> None:
    assert shown(10**5000) == "a huge number"


def test_deep_values_in_messages_do_not_recurse() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    assert len(shown(deep)) < 40


DATA = {"size": 3, "rate": 2, "on": False, "name": "a", "null": None, "inner": {"size": "x"}}
SOURCE = Fields(DATA, "config.json")


class TestFields:
    def test_fields_are_read_by_their_types(self) -> None:
        assert (SOURCE.integer("size", 3), SOURCE.number("rate"), SOURCE.flag("on", True)) == (3, 2.0, False)
        assert type(SOURCE.number("rate")) is float
        assert SOURCE.choice("name", ("a", "b")) == "a"
        assert SOURCE.get("size", whole()) == 3

    def test_null_is_absent_to_a_config_and_a_value_to_others(self) -> None:
        assert SOURCE.integer("null", 9, default=5) == SOURCE.integer("no", 9, default=5) == 5
        assert SOURCE.optional_number("null") is None
        assert SOURCE.get("no", whole(), 5) == 5
        with pytest.raises(ModelError, match=r"^config.json: null is null; it must be a whole number from 0$"):
            SOURCE.get("null", whole(), 5)

    @pytest.mark.parametrize(
        ("read", "said"),
        [
            (lambda source: source.integer("size", 2), "size is 3; it must be a whole number from 1 to 2"),
            (lambda source: source.integer("no", 2), "no is missing; it must be a whole number from 1 to 2"),
            (lambda source: source.integer("on", 2), "on is false; it must be a whole number from 1 to 2"),
            (lambda source: source.number("name"), 'name is "a"; it must be a number over 0, from 0 to 1e+12'),
            (lambda source: source.flag("size", True), "size is 3; it must be true or false"),
            (lambda source: source.choice("name", ("x", "y")), 'name is "a"; it must be x or y'),
            (lambda source: source.get("no", TEXT), "no is missing; it must be a text"),
            (lambda source: source.refuse("size", "even"), "size is 3; it must be even"),
            (lambda source: source.present("no"), "no is missing"),
            (lambda source: source.inner("size"), "size is 3; it must be an object"),
            (lambda source: source.inner("inner").integer("size"), 'inner: size is "x"; it must be a whole number'),
            (lambda source: source.only(["size"]), "inner is not known"),
            (lambda source: source.only([*source.data, "no"]), "no is missing"),
        ],
    )
    def test_a_refusal_names_file_field_value_and_limit(self, read: Any, said: str) -> None:
        with pytest.raises(ModelError) as error:
            read(SOURCE)
        assert str(error.value).startswith(f"config.json: {said}")

    def test_the_error_is_the_readers_own_also_inside(self) -> None:
        source = Fields(DATA, "line 3", UsageError)
        with pytest.raises(UsageError, match=r"^line 3: inner: size is"):
            source.inner("inner").get("size", whole())

    def test_a_name_that_a_terminal_cannot_show_is_escaped(self) -> None:
        with pytest.raises(ModelError, match=r"^config.json: a\\u001b\[2J\\n\\ud800 is not known$"):
            Fields({"a\x1b[2J\n\ud800": 1}, "config.json").only([])

    def test_a_long_name_is_cut(self) -> None:
        with pytest.raises(ModelError, match=r"^config.json: x{37}\.\.\. is not known$"):
            Fields({"x" * 10**5: 1}, "config.json").only([])


@dataclass(frozen=True)
class Part:
    size: int
    share: float


@dataclass(frozen=True)
class Whole:
    parts: tuple[Part, ...]
    rates: tuple[float, ...]
    name: str | None
    kind: Literal["a", "b"]
    on: bool
    token: Annotated[int, Kind("a token id", whole(0, 9).fits)]
    by_name: dict[str, int]


GOOD: dict[str, Any] = {
    "parts": [{"size": 1, "share": 2}], "rates": [1, 2.5], "name": None, "kind": "a", "on": True, "token": 9,
    "by_name": {"x": 1},
}  # fmt: skip


class TestRecords:
    def test_a_dataclass_is_made_of_its_own_json(self) -> None:
        found = record(Whole, json.loads(json.dumps(GOOD)), "it")
        assert found == Whole((Part(1, 2.0),), (1.0, 2.5), None, "a", True, 9, {"x": 1})
        assert all(type(each) is float for each in (*found.rates, found.parts[0].share))

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ({"parts": [{"size": 1}]}, "it.parts[0].share is missing"),
            ({"parts": [{"size": 1, "share": 1, "z": 0, "y": 0}]}, "it.parts[0].y is not known"),
            ({"parts": [{"size": True, "share": 1}]}, "it.parts[0].size is true; it must be a whole number from 0"),
            ({"parts": [[]]}, "it.parts[0] is []; it must be an object"),
            ({"parts": {}}, "it.parts is {}; it must be a list"),
            ({"rates": [1, math.nan]}, "it.rates[1] is nan; it must be a number"),
            ({"rates": [2**63]}, "it.rates[0] is 9223372036854775808; it must be a number"),
            ({"name": 1}, "it.name is 1; it must be a text"),
            ({"kind": "c"}, 'it.kind is "c"; it must be a or b'),
            ({"on": 1}, "it.on is 1; it must be true or false"),
            ({"token": 10}, "it.token is 10; it must be a token id"),
            ({"by_name": {"x": -1}}, "it.by_name.x is -1; it must be a whole number from 0"),
            ({"more": 1}, "it.more is not known"),
        ],
    )
    def test_what_is_wrong_inside_is_named(self, change: dict[str, Any], said: str) -> None:
        with pytest.raises(ValueError, match="it") as error:
            record(Whole, GOOD | change, "it")
        assert str(error.value) == said

    @pytest.mark.parametrize("data", [None, [], "x", 3])
    def test_what_is_no_object_has_no_fields(self, data: object) -> None:
        with pytest.raises(ValueError, match=r"^it is .*; it must be an object$"):
            fields_of(data, "")

    def test_another_version_is_refused(self) -> None:
        assert versioned({"version": 1, "a": 2}, 1, "") == {"a": 2}
        for wrong, said in ({"version": 2}, "2"), ({"version": True}, "true"), ({"version": 1.0}, "1.0"):
            with pytest.raises(ValueError, match=rf"^plan.version is {said}; this program reads version 1$"):
                versioned(wrong, 1, "plan")
        with pytest.raises(ValueError, match=r"^version is missing$"):
            versioned({}, 1, "")


class TestText:
    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ('{"a": 1, "a": 1}', "a field occurs twice: 'a'"),
            ('[{"b": {"c": 1, "c": 2}}]', "a field occurs twice: 'c'"),
            ("NaN", "NaN is not a JSON number"),
            ("[-Infinity]", "-Infinity is not a JSON number"),
            ("1e999", "1e999 is not a JSON number"),
            ("1" * 5000, "a number has 5000 digits"),
            ("{} 1", "Extra data"),
            ("", "Expecting value"),
        ],
    )
    def test_json_that_means_another_thing_elsewhere_is_refused(self, text: str, said: str) -> None:
        with pytest.raises(ValueError, match=said):
            strict_json.parse(text)

    def test_depth_and_what_utf8_cannot_encode_are_limited(self) -> None:
        strict_json.check_depth([[]], 2, "it")
        with pytest.raises(ValueError, match="it is nested deeper than 2"):
            strict_json.check_depth([[1]], 2, "it")
        with pytest.raises(ValueError, match="it has half of a surrogate pair"):
            strict_json.check_writable({"a": [HALF]}, 9, "it")

    def test_a_models_file_has_a_limit_and_keeps_the_last_of_a_repeated_key(self, tmp_path) -> None:
        """As transformers reads it."""
        path = tmp_path / "config.json"
        path.write_text('{"a": 1, "a": 2}')
        assert strict_json.read_json(path) == {"a": 2}
        with pytest.raises(ModelError, match="is over the limit of 8 bytes"):
            strict_json.read_json(path, max_bytes=8)
        for text, said in ("[]", "holds a JSON list"), ('{"a": NaN}', "NaN is not a JSON number"), ("{", "download it"):
            path.write_text(text)
            with pytest.raises(ModelError, match=said):
                strict_json.read_json(path)
