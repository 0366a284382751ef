"""A parser of markup that reports events. Nothing of a document is kept in memory but what its listener keeps, and
nothing outside it is fetched."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, Protocol, runtime_checkable

from offload.errors import UsageError
from triforce_cli.documents.limits import Meter, library

Attributes = Mapping[str, str]


class Listener(Protocol):
    """A receiver of elements and text in document order."""

    def start(self, tag: str, attributes: Attributes) -> None: ...

    def end(self, tag: str) -> None: ...

    def text(self, text: str) -> None: ...


@runtime_checkable
class NamespaceListener(Listener, Protocol):
    """A listener that also hears which prefixes stand for which namespaces, around the elements that declare them."""

    def start_ns(self, prefix: str, namespace: str) -> None: ...

    def end_ns(self, prefix: str) -> None: ...


class _Events:
    """The parser's target: counts the depth of nested elements, and refuses entity definitions."""

    def __init__(self, listener: Listener, meter: Meter, *, is_xml: bool) -> None:
        self._listener, self._meter, self._is_xml = listener, meter, is_xml
        self._depth = 0
        self.data = listener.text
        self.is_over = False
        if isinstance(listener, NamespaceListener):
            self.start_ns, self.end_ns = listener.start_ns, listener.end_ns

    def start(self, tag: str, attributes: Attributes) -> None:
        self._depth += 1
        self._meter.depth(self._depth)
        self._listener.start(tag, attributes)

    def end(self, tag: str) -> None:
        self._depth -= 1
        self._listener.end(tag)

    def doctype(self, name: str, public: str | None, system: str | None) -> None:
        if self._is_xml and public is None:  # a public one, as in an old EPUB, is not fetched
            raise UsageError(
                f"{self._meter.name} has a document type (<!DOCTYPE {name}>) where no such document has one; is it a "
                "real one? save it anew"
            )

    def close(self) -> None:
        self.is_over = True


def parse(pieces: Iterable[bytes], kind: Literal["html", "xml"], listener: Listener, meter: Meter) -> None:
    """Report every element and text to `listener`. HTML is decoded as UTF-8, whatever it declares, and repaired as
    browsers do. Raises UsageError."""
    etree: Any = library("lxml.etree", meter.name)
    events = _Events(listener, meter, is_xml=kind == "xml")
    if kind == "html":
        parser = etree.HTMLParser(target=events, encoding="utf-8", huge_tree=True)
    else:
        parser = etree.XMLParser(target=events, resolve_entities=False, no_network=True, load_dtd=False)
    try:
        for piece in pieces:
            meter.check()
            parser.feed(piece)
        parser.close()
    except etree.LxmlError as error:
        raise UsageError(f"{meter.name} is damaged: {error}; fetch it again, or save it anew") from error


def local(tag: str) -> str:
    """A tag without its namespace."""
    return tag.rpartition("}")[2]
