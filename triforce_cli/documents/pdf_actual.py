"""The ActualText of a PDF's marked content, read in place of what the content draws (ISO 32000-2, 14.9.4).

It stands in the content stream, in a property list that the stream names, or in the structure tree.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from triforce_cli.documents.limits import library

_SHOWS = {"Tj": 0, "TJ": 0, "'": 0, '"': 2}  # operators that show text: the operand with it
_LANGUAGE = re.compile("\x1b[^\x1b]*\x1b")  # of what follows
_MOST_LEVELS = 64  # of the structure tree
_FAULTS = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)  # of a damaged object


class ActualTexts:
    """The reader of ActualText in the pages of a PDF."""

    def __init__(self, reader: Any, name: str) -> None:
        self._tree = entry(reader.trailer.get("/Root"), "/StructTreeRoot")
        self._generic = library("pypdf.generic", name)
        self._shown = set[int]()  # elements whose text has been read; they may be of several pieces of content

    def visitors(self, owner: Any, check: Callable[[], None]) -> dict[str, Callable[..., None]]:
        """Arguments of the library's extraction from `owner`, a page or a form. check: called for each operator."""
        content = _Content(self, owner)

        def before(operator: bytes, operands: Any, *_: object) -> None:
            check()
            content.before(operator.decode("latin-1"), operands)

        def after(operator: bytes, *_: object) -> None:
            if operator == b"Do":
                content.leave()

        return {"visitor_operand_before": before, "visitor_operand_after": after}

    def of(self, owner: Any, properties: Any) -> str | None:
        """The text of marked content in `owner` with these properties; None where it is what it draws."""
        with suppress(*_FAULTS):
            text = self._of_element(owner, entry(properties, "/MCID"))
            return self._decoded(entry(properties, "/ActualText")) if text is None else text
        return None

    def shows(self, text: str, operator: str, operands: Any) -> None:
        """Let a text-showing operator show `text`."""
        shown = self._generic.TextStringObject(text)
        operands[_SHOWS[operator]] = self._generic.ArrayObject([shown]) if operator == "TJ" else shown

    def _decoded(self, value: Any) -> str | None:
        text = self._generic.create_string_object(bytes(value)) if isinstance(value, bytes) else value
        return _LANGUAGE.sub("", text) if isinstance(text, str) else None

    def _of_element(self, owner: Any, number: Any) -> str | None:
        """The text of the outermost structure element that has one, for the first of its pieces of content."""
        key = entry(owner, "/StructParents")
        if self._tree is None or number is None or key is None:
            return None
        element = _in_tree(entry(self._tree, "/ParentTree"), int(key))[int(number)].get_object()
        replaced = [each for each in _with_parents(element) if entry(each, "/ActualText") is not None]
        if not replaced:
            return None
        text = self._decoded(entry(replaced[-1], "/ActualText"))
        is_first = id(replaced[-1]) not in self._shown
        self._shown.add(id(replaced[-1]))
        return text if is_first or text is None else ""


class _Content:
    """The state of marked content while a page's operators are visited: inside content with an ActualText, the first
    operator that shows text shows that one, and the others show nothing."""

    def __init__(self, texts: ActualTexts, owner: Any) -> None:
        self._texts = texts
        self._owners = [owner]  # the page and the forms that are being drawn
        self._depth = 0  # of nested marked content
        self._replaced = 0  # the depth from which on text is replaced; 0: it is as drawn
        self._text = ""  # still to be shown

    def before(self, operator: str, operands: Any) -> None:
        if operator == "Do":
            self._owners.append(self._resource("/XObject", operands[0] if operands else None))
        elif operator in ("BMC", "BDC"):
            self._depth += 1
            text = self._actual(operands) if operator == "BDC" and not self._replaced else None
            if text is not None:
                self._replaced, self._text = self._depth, text
        elif operator == "EMC" and self._depth:
            self._replaced = 0 if self._depth == self._replaced else self._replaced
            self._depth -= 1
        elif self._replaced and operator in _SHOWS and len(operands) > _SHOWS[operator]:
            self._texts.shows(self._text, operator, operands)
            self._text = ""

    def leave(self) -> None:
        """Leave a form, or what else `Do` has drawn."""
        self._owners.pop()

    def _actual(self, operands: Any) -> str | None:
        named = operands[1] if len(operands) > 1 else None
        return self._texts.of(
            self._owners[-1], self._resource("/Properties", named) if isinstance(named, str) else named
        )

    def _resource(self, kind: str, name: Any) -> Any:
        """A resource of the page or form that is being drawn; a form without resources has the page's."""
        for owner in reversed(self._owners):
            if (resources := entry(owner, "/Resources")) is not None:
                return entry(entry(resources, kind), name)
        return None


def entry(dictionary: Any, key: Any) -> Any:
    """The entry of a dictionary; None if it is missing or `dictionary` is none."""
    if not hasattr(dictionary, "get"):
        return None
    found = dictionary.get(key)
    return None if found is None else found.get_object()


def _in_tree(tree: Any, key: int) -> Any:
    """The value of a number tree (7.9.7). Raises LookupError."""
    for _ in range(_MOST_LEVELS):
        if (numbers := entry(tree, "/Nums")) is not None:
            return dict(zip(map(int, numbers[::2]), numbers[1::2], strict=False))[key].get_object()
        tree = next(each for each in _kids(tree) if _reaches(each, key))
    raise LookupError(key)


def _kids(tree: Any) -> Iterator[Any]:
    return (each.get_object() for each in entry(tree, "/Kids") or ())


def _reaches(tree: Any, key: int) -> bool:
    least, most = entry(tree, "/Limits")
    return bool(least <= key <= most)


def _with_parents(element: Any) -> Iterator[Any]:
    for _ in range(_MOST_LEVELS):
        if element is None:
            return
        yield element
        element = entry(element, "/P")
