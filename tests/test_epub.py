"""EPUBs: what the spine names is read once, or a note names it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from test_documents_in import CONTAINER, Heard, packed

pytest.importorskip("lxml")

XHTML = "application/xhtml+xml"


@pytest.fixture
def heard() -> Heard:
    return Heard()


def book(path: Path, items: Sequence[str], order: Sequence[str], *, start: str = "", **members: str | bytes) -> Path:
    """items: attributes of the manifest's. order: attributes of the spine's."""
    listed, spine = "".join(f"<item {item}/>" for item in items), "".join(f"<itemref {each}/>" for each in order)
    package = f"{start}<package><manifest>{listed}</manifest><spine>{spine}</spine></package>"
    return packed(path, {"META-INF/container.xml": CONTAINER.format("O/c.opf"), "O/c.opf": package, **members})


def item(name: str, media_type: str = XHTML, more: str = "") -> str:
    return f'id="{name}" href="{name}" media-type="{media_type}" {more}'


def page(text: str) -> str:
    return f'<?xml version="1.0"?><html xmlns="http://www.w3.org/1999/xhtml"><body><p>{text}</p></body></html>'


@pytest.mark.parametrize(
    ("name", "media_type"),
    [
        ("a", "text/xml"),
        ("a", "Application/XHTML+XML"),
        ("a", "application/xhtml+xml; charset=utf-8"),
        ("a", "text/html"),
        ("a", "application/xml"),
        ("a", "application/x-dtbook+xml"),
        ("a", "text/x-oeb1-document"),
        ("a.xhtml", "application/octet-stream"),
        ("a.HTML", ""),
    ],
)
def test_a_chapter_is_a_page_of_any_media_type(name: str, media_type: str, heard: Heard, tmp_path: Path) -> None:
    """Chapters that were text/xml, or whose media type was in other letters, were skipped without a word."""
    items, order = [item(name, media_type), item("b")], [f'idref="{name}"', 'idref="b"']
    file = book(tmp_path / "a.epub", items, order, **{f"O/{name}": page("First"), "O/b": page("Second")})
    assert (heard.text(file), heard.notes) == ("First\n\nSecond\n", [])


def test_what_cannot_be_read_is_named(heard: Heard, tmp_path: Path) -> None:
    items = [item("a"), item("cover.svg", "image/svg+xml"), item("gone"), item("extra")]
    order = ['idref="cover.svg"', 'idref="a"', 'idref="gone"', 'idref="x9"', 'idref="extra" linear="no"']
    file = book(tmp_path / "a.epub", items, order, **{"O/a": page("Text"), "O/extra": page("Aside")})
    assert heard.text(file) == "Text\n"
    assert heard.notes == [
        "a.epub (EPUB, 1 chapter): without 4 of the parts that the spine names: cover.svg (image/svg+xml), "
        "'x9' (not in its list), "
        'extra (linear="no"), O/gone (missing)'
    ]


def test_a_fallback_is_read_in_place_of_what_is_no_page(heard: Heard, tmp_path: Path) -> None:
    items = [
        item("a.svg", "image/svg+xml", 'fallback="b.pdf"'),
        item("b.pdf", "application/pdf", 'fallback="c"'),
        item("c"),
        item("d.png", "image/png", 'fallback="d.png"'),
    ]
    file = book(tmp_path / "a.epub", items, ['idref="a.svg"', 'idref="d.png"'], **{"O/c": page("In words")})
    assert heard.text(file) == "In words\n"
    assert "d.png (image/png)" in heard.notes[0]


def test_a_chapter_that_is_named_again_is_read_once(heard: Heard, tmp_path: Path) -> None:
    """An EPUB of 7 kB that named a chapter 100,000 times took minutes."""
    items = [item("a"), 'id="again" href="a#part" media-type="text/html"']
    order = ['idref="a"'] * 20_000 + ['idref="again"', 'idref="a" linear="no"']
    file = book(tmp_path / "a.epub", items, order, **{"O/a": page("Once")})
    assert (heard.text(file), heard.notes) == ("Once\n", [])
    assert heard.read(file)[0].shown_kind == "EPUB, 1 chapter"


def test_names_are_found_as_addresses_and_as_written(heard: Heard, tmp_path: Path) -> None:
    items = ['id="a" href="a%20b.xhtml"', 'id="b" href="%C3%BC.xhtml"', 'id="c" href="c%20d.xhtml"']
    order = ['idref="a"', 'idref="b"', 'idref="c"']
    members = {"O/a b.xhtml": page("A"), "O/ü.xhtml": page("B"), "O/c%20d.xhtml": page("C")}
    assert heard.text(book(tmp_path / "a.epub", items, order, **members)) == "A\n\nB\n\nC\n"


def test_the_first_package_is_read_of_several(heard: Heard, tmp_path: Path) -> None:
    roots = '<rootfile full-path="x.pdf" media-type="application/pdf"/>' + "".join(
        f'<rootfile full-path="{name}" media-type="application/oebps-package+xml"/>' for name in ("O/c.opf", "P/c.opf")
    )
    container = f"<container><rootfiles>{roots}</rootfiles></container>"
    members = {"META-INF/container.xml": container, "O/a": page("Text")}
    start = '<!DOCTYPE package PUBLIC "+//ISBN 0-9673008-1-9//DTD OEB 1.2 Package//EN" "http://x.org/a.dtd">'
    package = f'{start}<package><manifest><item {item("a")}/></manifest><spine><itemref idref="a"/></spine></package>'
    assert heard.text(packed(tmp_path / "a.epub", {**members, "O/c.opf": package})) == "Text\n"
    assert heard.notes == ["a.epub (EPUB, 1 chapter): the first of its 2 renditions"]


def test_entities_and_elements_that_close_themselves(heard: Heard, tmp_path: Path) -> None:
    text = (
        '<html><head><title/><script src="k.js"/></head><body><p>First&nbsp;para &mdash; caf&eacute;</p></body></html>'
    )
    file = book(tmp_path / "a.epub", [item("a")], ['idref="a"'], **{"O/a": text})
    assert heard.text(file) == "First para — café\n"


def test_encrypted_fonts_do_not_matter(heard: Heard, tmp_path: Path) -> None:
    fonts = '<encryption><CipherReference URI="O/font.otf"/></encryption>'
    members = {"O/a": page("Text"), "META-INF/encryption.xml": fonts}
    assert heard.text(book(tmp_path / "a.epub", [item("a")], ['idref="a"'], **members)) == "Text\n"


def test_no_chapter_but_pictures_is_said(heard: Heard, tmp_path: Path) -> None:
    file = book(tmp_path / "a.epub", [item("a.svg", "image/svg+xml")], ['idref="a.svg"'])
    said = heard.refused(file)
    assert (
        "has 0 chapters and no text, without 1 of the parts that the spine names: a.svg (image/svg+xml); if they are"
        in said
    )


def test_hidden_text_of_a_chapter_is_counted(heard: Heard, tmp_path: Path) -> None:
    text = page('Seen<span style="display:none">hidden</span>')
    assert heard.text(book(tmp_path / "a.epub", [item("a")], ['idref="a"'], **{"O/a": text})) == "Seen\n"
    assert heard.notes == ["a.epub (EPUB, 1 chapter): 6 hidden characters are left out"]
