"""Styles of a Word document: the ones that make list items or headings, or hide text."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from triforce_cli.documents.markup import Attributes, local

_NOT_ITS_OWN = ("tblStylePr", "pPrChange", "rPrChange")  # for parts of a table; from before a tracked change
_HEADING = re.compile("heading [1-9]", re.IGNORECASE)  # Word's own styles, whatever the file says of them


@dataclass
class _Style:
    """A style. None: as in the style that it is based on."""

    based_on: str = ""
    is_list: bool | None = None
    is_hidden: bool | None = None
    is_heading: bool | None = None


class Styles:
    """A listener for the styles part."""

    def __init__(self) -> None:
        self._styles: dict[str, _Style] = {}
        self._open = _Style()
        self._default = ""  # style of paragraphs without one
        self._num_skipped = 0

    def start(self, tag: str, attributes: Attributes) -> None:
        name = local(tag)
        self._num_skipped += bool(self._num_skipped) or name in _NOT_ITS_OWN
        if self._num_skipped:
            return
        if name == "style":
            self._open = self._styles.setdefault(value(attributes, "styleId"), _Style())
            if value(attributes, "type") == "paragraph" and value(attributes, "default") in ("1", "true", "on"):
                self._default = value(attributes, "styleId")
        elif name == "basedOn":
            self._open.based_on = value(attributes, "val")
        elif name == "numPr":
            self._open.is_list = True
        elif name == "numId" and value(attributes, "val") == "0":
            self._open.is_list = False
        elif name == "name" and _HEADING.fullmatch(value(attributes, "val")) and self._open.is_heading is None:
            self._open.is_heading = True
        elif name == "outlineLvl":
            self._open.is_heading = is_outlined(attributes)
        elif name == "vanish":
            self._open.is_hidden = is_on(attributes)

    def end(self, tag: str) -> None:
        self._num_skipped = max(self._num_skipped - 1, 0)

    def text(self, text: str) -> None: ...

    def is_list(self, paragraph: str) -> bool:
        return self._says(paragraph or self._default, "is_list")

    def is_heading(self, paragraph: str) -> bool:
        return self._says(paragraph or self._default, "is_heading")

    def is_hidden(self, paragraph: str, run: str) -> bool:
        """True for hidden text, from the styles of its paragraph and run: two that hide cancel out (ECMA-376,
        17.7.3)."""
        return self._says(paragraph or self._default, "is_hidden") != self._says(run, "is_hidden")

    def _says(self, name: str, what: Literal["is_list", "is_hidden", "is_heading"]) -> bool:
        seen: set[str] = set()
        while name in self._styles and name not in seen:
            style = self._styles[name]
            said: bool | None = getattr(style, what)
            if said is not None:
                return said
            seen.add(name)
            name = style.based_on
        return False


def value(attributes: Attributes, name: str) -> str:
    """The value of an attribute in any namespace, "" for none."""
    return next((value for key, value in attributes.items() if local(key) == name), "")


def is_outlined(attributes: Attributes) -> bool:
    """True for a level of the outline; 9 is the level of text (ECMA-376, 17.3.1.20)."""
    return value(attributes, "val") in map(str, range(9))


def is_on(attributes: Attributes) -> bool:
    """True if a switch is on; without a value it is."""
    return value(attributes, "val") not in ("0", "false", "off")
