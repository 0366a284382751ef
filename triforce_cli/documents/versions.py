"""Versions of one content in a page, of which one is read: a formula as MathML, as TeX and as it is drawn, and the
cases of an EPUB's switch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

MATHML = "http://www.w3.org/1998/Math/MathML"
_FIRST_ALONE = ("semantics", "maction")  # a browser shows their first child (MathML Core, 3.6 and A)
_ELEMENTS = frozenset((*_FIRST_ALONE, "annotation", "annotation-xml", "math", "mphantom", "switch", "case", "default"))
_ASSISTIVE = frozenset(("mjx_assistive_mathml",))  # MathJax's MathML behind what it draws


@dataclass
class _Open:
    """An open element. num_children: elements in it so far. has_text: outside of formulas. is_drawn: for the eye alone,
    as scripts draw formulas. last: "formula" or "drawn" directly behind one. is_chosen: a switch of which a case was
    read."""

    name: str = ""
    num_children: int = 0
    has_text: bool = False
    is_drawn: bool = False
    last: str = ""
    is_chosen: bool = False


class Versions:
    """A listener that tells which elements of a page say again what another one says."""

    def __init__(self) -> None:
        self._open = [_Open()]

    def is_again(self, tag: str, attributes: Mapping[str, str]) -> bool:
        """Open an element. True if it is another version of what is read."""
        outer, name = self._open[-1], unprefixed(tag)
        outer.num_children += 1
        is_drawn = attributes.get("aria-hidden", "").lower() == "true"
        self._open.append(_Open(name, is_drawn=is_drawn))
        if outer.name in _FIRST_ALONE:
            return outer.num_children > 1
        if outer.name == "switch" and name in ("case", "default"):
            return self._is_other_case(outer, name, attributes)
        if outer.last == "drawn":
            return name == "mjx-assistive-mml" or bool(_ASSISTIVE & set(attributes.get("class", "").lower().split()))
        return (outer.last == "formula" and is_drawn) or name.startswith("annotation")

    def text(self, text: str) -> None:
        if text.strip():
            self._open[-1].has_text, self._open[-1].last = True, ""

    def end(self) -> None:
        ended, outer = self._open.pop(), self._open[-1]
        if ended.name == "math":
            outer.last = "formula"
        elif ended.has_text:
            outer.has_text, outer.last = True, "drawn" if ended.is_drawn else ""
        elif ended.last:  # an element around a formula alone
            outer.last = ended.last

    def _is_other_case(self, switch: _Open, name: str, attributes: Mapping[str, str]) -> bool:
        is_read = name == "default" or attributes.get("required-namespace") == MATHML
        is_other = switch.is_chosen or not is_read
        switch.is_chosen = switch.is_chosen or is_read
        return is_other


def unprefixed(tag: str) -> str:
    """The tag without its prefix, such as "m:math", where it is one that has versions."""
    name = tag.rpartition(":")[2]
    return name if name in _ELEMENTS else tag
