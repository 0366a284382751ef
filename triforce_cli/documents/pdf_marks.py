"""A PDF page's text outside its content stream: values of form fields, check boxes, text of annotations.

A field's value follows its name. An annotation's text is read from its appearance (ISO 32000-2, 12.5).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from triforce_cli.documents.limits import Meter
from triforce_cli.documents.pdf_actual import ActualTexts, entry

_UNSEEN = 1 << 1 | 1 << 5  # flags of an annotation: hidden, no view
_PASSWORD, _RADIO, _BUTTON = 1 << 13, 1 << 15, 1 << 16  # flags of a field
_IN_A_WINDOW = ("/Text", "/Highlight", "/Underline", "/StrikeOut", "/Squiggly", "/Caret", "/Ink")  # text in a pop-up
_NO_TEXT = ("/Link", "/Popup", "/FileAttachment", "/Sound", "/Movie", "/Screen")
_MOST_PARENTS = 32  # of nested fields


class Marks:
    """The reader of pages' form fields and annotations. remarks: the kinds of content that were not read."""

    def __init__(self, reader: Any, texts: ActualTexts, meter: Meter) -> None:
        self._reader, self._texts, self._meter = reader, texts, meter
        self._unread: Counter[str] = Counter()

    @property
    def remarks(self) -> Iterator[str]:
        for what, number in self._unread.items():
            yield f"{number:,} {what}{'' if number == 1 else 's'} not read"
        root = self._reader.trailer["/Root"]
        if "/EmbeddedFiles" in _dictionary(root, "/Names"):
            yield "it has attached files, which are not read"
        if "/XFA" in _dictionary(root, "/AcroForm"):
            yield "its form is an XFA form, of which only the pages' own text and fields are read"
        off = entry(entry(_dictionary(root, "/OCProperties"), "/D"), "/OFF")
        if names := ", ".join(str(entry(layer.get_object(), "/Name")) for layer in off or ()):
            yield f"layers that are not shown are read as well ({names[:80]})"

    def text(self, page: Any) -> str:
        """The text as lines, in the order of the annotations; "" for none."""
        found = entry(page, "/Annots")
        lines: list[str] = []
        for each in found or ():
            self._meter.check()
            annotation = each.get_object()
            if annotation is not None and not int(entry(annotation, "/F") or 0) & _UNSEEN:
                lines.append(self._line(page, annotation))
        return "\n".join(filter(None, lines))

    def damaged(self) -> None:
        """Count a page whose annotations cannot be read."""
        self._unread["page with damaged annotations"] += 1

    def _line(self, page: Any, annotation: Any) -> str:
        kind = entry(annotation, "/Subtype")
        contents = str(entry(annotation, "/Contents") or "")
        if kind in _IN_A_WINDOW:
            self._unread["comment"] += bool(contents.strip())
            return ""
        if kind in _NO_TEXT:
            return ""
        if kind == "/Widget":
            return _field(annotation) or self._shown(page, annotation)
        return self._shown(page, annotation) or (contents if kind == "/FreeText" else "")

    def _shown(self, page: Any, annotation: Any) -> str:
        """The text that the annotation's appearance draws."""
        drawn = entry(entry(annotation, "/AP"), "/N")
        if drawn is not None and not hasattr(drawn, "get_data"):  # one appearance for each state
            drawn = entry(drawn, str(entry(annotation, "/AS")))
        if drawn is None or not hasattr(drawn, "get_data"):
            return ""
        return str(page.extract_xform_text(drawn, **self._texts.visitors(drawn, self._meter.check))).strip()


def _field(widget: Any) -> str:
    """The field as "name: value" or "☒ name"; "" if its appearance has the text."""
    kind, flags, value = _of_field(widget, "/FT"), int(_of_field(widget, "/Ff") or 0), _of_field(widget, "/V")
    name = str(_of_field(widget, "/TU") or _full_name(widget))
    if kind == "/Btn":
        return "" if flags & _BUTTON else _box(widget, name, value, is_radio=bool(flags & _RADIO))
    if kind not in ("/Tx", "/Ch") or value is None or flags & _PASSWORD:
        return ""
    values = value if isinstance(value, list) else [value]
    shown = {str(option[0]): str(option[1]) for option in _options(widget) if isinstance(option, list)}
    text = ", ".join(shown.get(_plain(each), _plain(each)) for each in values).strip()
    return f"{name}: {text}" if name and text else text


def _box(widget: Any, name: str, value: Any, *, is_radio: bool) -> str:
    states = [str(state) for state in _dictionary(_dictionary(widget, "/AP"), "/N") if state != "/Off"]
    state = entry(widget, "/AS") or (value if str(value) in states else "/Off")
    of_these = f" {states[0].lstrip('/')}" if is_radio and states else ""
    return f"{'☐' if state == '/Off' else '☒'} {name}{of_these}".strip()


def _of_field(widget: Any, key: str) -> Any:
    """The entry `key` of a field or of its nearest parent that has it."""
    for field in _with_parents(widget):
        if (found := entry(field, key)) is not None:
            return found
    return None


def _full_name(widget: Any) -> str:
    names = [str(entry(field, "/T")) for field in _with_parents(widget) if entry(field, "/T")]
    return ".".join(reversed(names))


def _with_parents(widget: Any) -> Iterator[Any]:
    for _ in range(_MOST_PARENTS):
        if widget is None:
            return
        yield widget
        widget = entry(widget, "/Parent")


def _options(widget: Any) -> list[Any]:
    return [option.get_object() for option in _of_field(widget, "/Opt") or ()]


def _plain(value: Any) -> str:
    """A string, or a stream with a long text, as text."""
    value = value.get_object()
    text = value.get_data().decode("utf-8", "replace") if hasattr(value, "get_data") else str(value)
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _dictionary(dictionary: Any, key: str) -> Any:
    found = entry(dictionary, key)
    return found if hasattr(found, "keys") else {}
