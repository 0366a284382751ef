"""Look-ahead patterns that well-known tools write into schemas, rewritten without look-ahead."""

from __future__ import annotations

import re

# zod's pattern of an e-mail address: no point at the beginning, and no two consecutive points.
_ZOD_EMAIL = (
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$",
    r"^([A-Za-z0-9_'+\-]+\.)*[A-Za-z0-9_'+\-]*[A-Za-z0-9_+\-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$",
)
# Pydantic's patterns of a Decimal: a sign, digits before and after a point, at least one digit; trailing zeros do not
# count.
_SOME = r"^(?!^[-+.]*$)[+-]?0*"
_ANY = _SOME + r"\d*\.?\d*$"
_PLACES = _SOME + r"\d*\.?\d{0,PLACES}0*$"
_DIGITS = _SOME + r"(?:\d{0,DIGITS}|(?=[\d.]{1,LENGTH}0*$)\d*\.\d*0*$)"
_BOTH = _SOME + r"(?:\d{0,WHOLE}|(?=[\d.]{1,LENGTH}0*$)\d{0,WHOLE}\.\d{0,PLACES}0*$)"
_NUMBERS = re.compile("PLACES|DIGITS|LENGTH|WHOLE")
_MOST_DIGITS = 1000  # largest number of digits for which alternatives are listed


def without_look_ahead(pattern: str) -> str:
    """An equivalent pattern without look-ahead, if the pattern is known; otherwise the pattern itself.

    Pydantic's patterns with a number of digits do not anchor the end, so they match nearly every text. The returned
    pattern matches whole numbers of that form, as intended.
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
    """The numbers in place of the names in `form`; empty where the pattern has another form."""
    seen = set[str]()

    def group(found: re.Match[str]) -> str:
        name, again = found[0], found[0] in seen
        seen.add(name)
        return f"(?P={name})" if again else rf"(?P<{name}>\d{{1,4}})"

    found = re.fullmatch(_NUMBERS.sub(group, re.escape(form)), pattern)
    return {name: int(value) for name, value in found.groupdict().items()} if found else {}


def _decimal(whole: str, fraction: str, alone: str) -> str:
    """The pattern of a decimal number. whole: digits before the point. fraction: digits after it. alone: digits after
    it where none are before it."""
    return rf"^[+-]?({whole}(\.{fraction})?|\.{alone})$"


def _some(places: int) -> str:
    return rf"\d{{1,{places}}}0*" if places else "0+"


def _of_digits(most: int) -> str:
    """The pattern of a decimal number with at most `most` digits, before and after the point together."""
    if not most:
        return _decimal("0+", "0*", "0+")
    split = "|".join(rf"0*\d{{{count}}}\.\d{{0,{most - count}}}0*" for count in range(1, most + 1))
    return rf"^[+-]?(0*\d{{1,{most}}}|{split}|0+\.\d{{0,{most}}}0*|\.{_some(most)})$"
