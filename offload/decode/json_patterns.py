"""Patterns with look-ahead that well-known tools write into schemas, as patterns without."""

from __future__ import annotations

import re

# zod's, of an address: no point at the beginning, and no two of them behind each other.
_ZOD_EMAIL = (
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$",
    r"^([A-Za-z0-9_'+\-]+\.)*[A-Za-z0-9_'+\-]*[A-Za-z0-9_+\-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$",
)
# Pydantic's, of a Decimal: a sign, digits before and behind a point, at least one of them; trailing zeros do not count.
_SOME = r"^(?!^[-+.]*$)[+-]?0*"
_ANY = _SOME + r"\d*\.?\d*$"
_PLACES = _SOME + r"\d*\.?\d{0,PLACES}0*$"
_DIGITS = _SOME + r"(?:\d{0,DIGITS}|(?=[\d.]{1,LENGTH}0*$)\d*\.\d*0*$)"
_BOTH = _SOME + r"(?:\d{0,WHOLE}|(?=[\d.]{1,LENGTH}0*$)\d{0,WHOLE}\.\d{0,PLACES}0*$)"
_NUMBERS = re.compile("PLACES|DIGITS|LENGTH|WHOLE")
_MOST_DIGITS = 1000  # for which alternatives are listed


def without_look_ahead(pattern: str) -> str:
    """The same texts, if the pattern is known, else the pattern.

    Of Pydantic's with a number of digits the end is not anchored, so that they match nearly all; here all of the text
    is such a number, as they mean it.
    """
    if pattern == _ZOD_EMAIL[0]:
        return _ZOD_EMAIL[1]
    if pattern == _ANY:
        return _decimal(r"\d+", r"\d*", r"\d+")
    if found := _numbers(_PLACES, pattern):
        places = found["PLACES"]
        return _decimal(r"\d+", rf"\d{{0,{places}}}0*", _some(places))
    if found := _numbers(_BOTH, pattern):
        whole, places = found["WHOLE"], min(found["PLACES"], found["LENGTH"] - 1)
        return _decimal(rf"0*\d{{1,{whole}}}" if whole else "0+", rf"\d{{0,{places}}}0*", _some(places))
    if (found := _numbers(_DIGITS, pattern)) and found["DIGITS"] <= _MOST_DIGITS:
        return _of_digits(found["DIGITS"])
    return pattern


def _numbers(form: str, pattern: str) -> dict[str, int]:
    """The numbers that stand for the names in `form`; empty where it is another pattern."""
    seen = set[str]()

    def group(found: re.Match[str]) -> str:
        name, again = found[0], found[0] in seen
        seen.add(name)
        return f"(?P={name})" if again else rf"(?P<{name}>\d{{1,4}})"

    found = re.fullmatch(_NUMBERS.sub(group, re.escape(form)), pattern)
    return {name: int(value) for name, value in found.groupdict().items()} if found else {}


def _decimal(whole: str, fraction: str, alone: str) -> str:
    """whole: digits before the point, fraction: behind it; alone: behind it where none are before it."""
    return rf"^[+-]?({whole}(\.{fraction})?|\.{alone})$"


def _some(places: int) -> str:
    return rf"\d{{1,{places}}}0*" if places else "0+"


def _of_digits(most: int) -> str:
    """So many at most, before and behind the point together."""
    if not most:
        return _decimal("0+", "0*", "0+")
    split = "|".join(rf"0*\d{{{count}}}\.\d{{0,{most - count}}}0*" for count in range(1, most + 1))
    return rf"^[+-]?(0*\d{{1,{most}}}|{split}|0+\.\d{{0,{most}}}0*|\.{_some(most)})$"
