"""Patterns that tools write with look-ahead, and what they become, match the same strings: all of some letters."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product

import pytest

from offload.grammar.json_patterns import without_look_ahead

NUMBER = r"^(?!^[-+.]*$)[+-]?0*"
ZOD_EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"


def pydantic(digits: int | None, places: int | None) -> str:
    """As Pydantic 2.11 and 2.12 write a Decimal, with an end that is anchored in all alternatives."""
    if digits is not None and places is not None:
        whole = rf"\d{{0,{max(0, digits - places)}}}"
        return NUMBER + rf"(?:{whole}|(?=[\d.]{{1,{digits + 1}}}0*$){whole}\.\d{{0,{places}}}0*$)"
    if digits is not None:
        return NUMBER + rf"(?:\d{{0,{digits}}}|(?=[\d.]{{1,{digits + 1}}}0*$)\d*\.\d*0*$)"
    return NUMBER + (r"\d*\.?\d*$" if places is None else rf"\d*\.?\d{{0,{places}}}0*$")


def strings(letters: str, most: int) -> Iterator[str]:
    for size in range(most + 1):
        yield from map("".join, product(letters, repeat=size))


@pytest.mark.parametrize("places", [None, 0, 1, 2, 3])
@pytest.mark.parametrize("digits", [None, 0, 1, 2, 3])
def test_a_decimal_of_pydantic(digits: int | None, places: int | None, pytestconfig: pytest.Config) -> None:
    pattern = pydantic(digits, places)
    found = without_look_ahead(pattern)
    assert "(?" not in found
    ours, theirs = re.compile(found.removesuffix("$")), re.compile(pattern.removesuffix("$"))
    for text in strings("-.01x", 7 if pytestconfig.getoption("deep") else 6):
        assert bool(ours.fullmatch(text)) == bool(theirs.fullmatch(text)), text


def test_an_address_of_zod(pytestconfig: pytest.Config) -> None:
    ours, theirs = re.compile(without_look_ahead(ZOD_EMAIL)), re.compile(ZOD_EMAIL)
    for local in strings("a.-'@", 6 if pytestconfig.getoption("deep") else 5):
        for domain in ("a.bc", ".bc", "a-.b.cd", "a..bc", "a", "-.bc", "a.b"):
            text = f"{local}@{domain}"
            assert bool(ours.search(text)) == bool(theirs.search(text)), text


@pytest.mark.parametrize("pattern", ["a", "^(?!a)b$", NUMBER + r"\d*\.?\d{0,2}0*", NUMBER + r"\d*\.?\d{0,12345}0*$"])
def test_any_other_pattern_stays_as_it_is(pattern: str) -> None:
    assert without_look_ahead(pattern) == pattern
