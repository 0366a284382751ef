"""The white space that a text's own style would put next."""

from __future__ import annotations

import json

import pytest

from offload.grammar.json_style import bare, gap


@pytest.mark.parametrize(("text", "following", "wanted"), [
    ("", "{", ""),
    ("{", '"', "\n  "),
    ("{\n", '"', "  "),
    ("{\n\t", '"', ""),
    ("{", "}", ""),
    ('{"a"', ":", ""),
    ('{"a":', '"', " "),
    ('{"a": ', '"', ""),
    ('{"a": "x"', ",", ""),
    ('{"a": "x",', '"', " "),
    ('{"a": "x"', "}", ""),
    ('{\n    "a": 1,', '"', "\n    "),
    ('{\n    "a": 1,\n', '"', "    "),
    ('{\n    "a": {', '"', "\n        "),
    ('{\n    "a": {\n        "b": true', "}", "\n    "),
    ('{\n    "a": {\n        "b": true\n    }', "}", "\n"),
    ('{\n  "a": {\n    "b": true\n  },', '"', "\n  "),
    ('{\n  "a": {"b": 1},\n  "c": {', '"', ""),
    ('{\n  "a": [', "1", ""),
    ('{\n  "a": [', "{", "\n    "),
    ('{\n  "a": [1, 2,', "", " "),
    ('{"a":1,', '"', ""),
    ('{"a":1,"b":', '"', ""),
    ('{"a": 1,"b":', "", " "),
    ('{"a": 1,"b": 2,', '"', ""),
    ("[", "[", "\n  "),
    ("[\n  [1],\n  [", "1", ""),
    ('{\n  "{[,": "}",', '"', "\n  "),
    ('{\n  "\\"{": "}",', '"', "\n  "),
])  # fmt: skip
def test_a_gap_is_as_those_before_it(text: str, following: str, wanted: str) -> None:
    written = bare(text)
    assert written is not None
    assert gap(written, following) == wanted


@pytest.mark.parametrize("indent", [1, 2, 4, "\t"])
def test_all_of_a_printed_text_is_foreseen_behind_its_first_line(indent: int | str) -> None:
    """But for a list in a list, of which nothing was seen."""
    whole = json.dumps({"a": {"b": "x, y", "c": {"d": 1}}, "e": {"f": None}, "g": True}, indent=indent)
    places = [place for place in range(whole.index(":"), len(whole)) if not whole[place].isspace()]
    for place in places:
        before = whole[:place].rstrip()
        written = bare(before)
        if written is not None and before[-1] not in "0123456789eulr":
            assert before + gap(written, whole[place]) == whole[:place]


def test_inside_a_string_there_is_no_structure() -> None:
    assert bare('{"a, b') is None
    assert bare('{"a\\"') is None
    assert bare('{"a\\\\"') == '{""'
