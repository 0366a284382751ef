"""PDFs: what was filled in or written on a page is read, and a note says what else a reader would see."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from test_documents_in import Heard

pypdf = pytest.importorskip("pypdf")
canvas = pytest.importorskip("reportlab.pdfgen.canvas")


@pytest.fixture
def heard() -> Heard:
    return Heard()


def raw(
    path: Path,
    annotations: list[str],
    *,
    catalog: str = "",
    contents: str = "Page",
    page: str = "",
    resources: str = "",
    num_pages: int = 1,
) -> Path:
    """Of a page with annotations, as its objects are written, from object 6 on, and objects that they name."""
    drawn = f"BT /F1 12 Tf 72 720 Td ({contents}) Tj ET"
    named = " ".join(f"{6 + number} 0 R" for number, each in enumerate(annotations) if "/Annot " in each)
    font = f"/Resources << /Font << /F1 5 0 R >> {resources} >>"
    whole = f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 4 0 R {font} /Annots [{named}] {page} >>"
    objects = [
        f"<< /Type /Catalog /Pages 2 0 R {catalog} >>",
        f"<< /Type /Pages /Kids [{'3 0 R' if num_pages else ''}] /Count {num_pages} >>",
        whole,
        f"<< /Length {len(drawn)} >>\nstream\n{drawn}\nendstream",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
        *annotations,
    ]
    data, places = b"%PDF-1.7\n", []
    for number, written in enumerate(objects, 1):
        places.append(len(data))
        data += f"{number} 0 obj\n{written}\nendobj\n".encode("latin-1")
    table = "".join(f"{place:010d} 00000 n \n" for place in places)
    size = len(places) + 1
    end = f"xref\n0 {size}\n0000000000 65535 f \n{table}trailer\n<< /Size {size} /Root 1 0 R >>\n"
    path.write_bytes(data + f"{end}startxref\n{len(data)}\n%%EOF\n".encode())
    return path


def annotation(kind: str, more: str) -> str:
    return f"<< /Type /Annot /Subtype /{kind} /Rect [72 600 300 640] {more} >>"


def widget(more: str) -> str:
    return annotation("Widget", more)


def appearance(text: str) -> str:
    drawn = f"BT /F1 12 Tf 2 5 Td ({text}) Tj ET"
    font = "/Resources << /Font << /F1 5 0 R >> >>"
    start = f"<< /Type /XObject /Subtype /Form /BBox [0 0 180 20] {font} /Length {len(drawn)} >>"
    return f"{start}\nstream\n{drawn}\nendstream"


def form(path: Path) -> Path:
    drawn: Any = canvas.Canvas(str(path))
    fields = drawn.acroForm
    drawn.drawString(72, 720, "Application")
    fields.textfield(name="name", value="Jane Miller", x=120, y=710)
    fields.textfield(name="empty", x=120, y=700)
    fields.checkbox(name="married", checked=True, x=72, y=685)
    fields.checkbox(name="student", checked=False, x=72, y=655)
    fields.choice(name="city", value="Oslo", options=["Oslo", "Rome"], x=120, y=610)
    for value in "ABC":
        fields.radio(name="plan", value=value, selected=value == "B", x=72, y=560)
    drawn.save()
    return path


def test_what_was_filled_into_a_form_is_read(heard: Heard, tmp_path: Path) -> None:
    """Values of fields were left out without a word."""
    assert heard.text(form(tmp_path / "a.pdf")) == (
        "Application\nname: Jane Miller\n☒ married\n☐ student\ncity: Oslo\n☐ plan A\n☒ plan B\n☐ plan C\n"
    )
    assert heard.notes == []


@pytest.mark.parametrize(
    ("annotations", "text"),
    [
        ([widget("/FT /Tx /T (name) /V (Jane Miller)")], "name: Jane Miller"),
        ([widget("/FT /Tx /T (a) /TU (First name) /V (Jane)")], "First name: Jane"),
        ([widget("/FT /Tx /V (two\rlines)")], "two\nlines"),
        ([widget("/Parent 7 0 R /T (b)"), "<< /T (a) /FT /Tx /V (up) >>"], "a.b: up"),
        ([widget("/FT /Ch /T (c) /V (no) /Opt [[(no) (Norway)] [(it) (Italy)]]")], "c: Norway"),
        ([widget("/FT /Ch /T (c) /V [(a) (b)] /Opt [(a) (b) (d)]")], "c: a, b"),
        ([widget("/FT /Tx /T (pin) /V (1234) /Ff 8192")], ""),
        ([widget("/FT /Tx /T (a) /V (gone) /F 2")], ""),
        ([widget("/FT /Tx /T (a) /V (gone) /F 32")], ""),
        ([widget("/FT /Tx /T (a)")], ""),
        ([widget("/FT /Btn /T (ok) /AS /Yes")], "☒ ok"),
        ([widget("/FT /Btn /T (ok) /Ff 65536")], ""),
        ([widget("/FT /Sig /T (s) /AP << /N 7 0 R >>"), appearance("Signed by Ann")], "Signed by Ann"),
        ([annotation("FreeText", "/Contents (APPROVED by Ann)")], "APPROVED by Ann"),
        ([annotation("FreeText", "/Contents (old) /AP << /N 7 0 R >>"), appearance("APPROVED")], "APPROVED"),
        ([annotation("Stamp", "/Contents (x) /AP << /N 7 0 R >>"), appearance("DRAFT")], "DRAFT"),
        ([annotation("Link", "/Contents (a link)")], ""),
    ],
    ids=range(17),
)
def test_annotations_are_read_as_they_are_seen(annotations: list[str], text: str, heard: Heard, tmp_path: Path) -> None:
    found = heard.text(raw(tmp_path / "a.pdf", annotations)).removeprefix("Page\n").strip()
    assert found == text
    assert heard.notes == []


def test_comments_layers_files_and_xfa_are_said(heard: Heard, tmp_path: Path) -> None:
    notes = [annotation("Text", "/Contents (why?)"), annotation("Highlight", "/Contents (so)"), annotation("Ink", "")]
    layers = "/OCProperties << /OCGs [9 0 R] /D << /OFF [9 0 R] >> >>"
    catalog = f"{layers} /Names << /EmbeddedFiles << >> >> /AcroForm << /XFA [] /Fields [] >>"
    file = raw(tmp_path / "a.pdf", [*notes, "<< /Type /OCG /Name (Draft) >>"], catalog=catalog)
    assert heard.text(file) == "Page\n"
    assert heard.notes == [
        "a.pdf (PDF, 1 page): 2 comments not read",
        "a.pdf (PDF, 1 page): it has attached files, which are not read",
        "a.pdf (PDF, 1 page): its form is an XFA form, of which only the pages' own text and fields are read",
        "a.pdf (PDF, 1 page): layers that are not shown are read as well (Draft)",
    ]


def test_damaged_annotations_do_not_keep_a_page_from_being_read(heard: Heard, tmp_path: Path) -> None:
    file = raw(tmp_path / "a.pdf", [annotation("FreeText", "/F (x) /Contents (lost)")])
    assert heard.text(file) == "Page\n"
    assert heard.notes == ["a.pdf (PDF, 1 page): 1 page with damaged annotations not read"]


def test_a_pdf_without_pages_is_no_scan(heard: Heard, tmp_path: Path) -> None:
    said = heard.refused(raw(tmp_path / "a.pdf", [], num_pages=0))
    assert said.endswith("a.pdf has no pages; fetch it again, or save it anew")


def actual(text: str, inside: str = "(x) Tj") -> str:
    """Content of an ActualText, within the text of a page: it ends a string, and begins one."""
    return f") Tj /Span << /ActualText {text} >> BDC {inside} EMC ("


@pytest.mark.parametrize(
    ("contents", "text"),
    [
        (f"Of{actual('(fi)')}ce", "Office"),
        (f"a{actual('()')}b", "ab"),
        (f"a{actual('<FEFF00E9D83DDE00>')}b", "aé😀b"),
        (f"a{actual('<FFFEE900>')}b", "aéb"),
        (f"a{actual('<EFBBBFC3A9>')}b", "aéb"),
        (f"a{actual('<FEFF001B0065006E001B0062>')}c", "abc"),  # its language is no text
        (f"a{actual('(b)', '[(x) 20 (y)] TJ')}c", "abc"),
        (f"a{actual('(b)', '/Span << /ActualText (no) >> BDC (x) Tj EMC (y) Tj')}c", "abc"),
        (f"a{actual('(b)', '/Art BMC (x) Tj EMC (y) Tj')}c", "abc"),
        (f"a{actual('(b)', '12 TL (x) Tj (y) ' + chr(39))}c", "ab\nc"),
        (f"a{actual('(b)', '1 2 (y) ' + chr(34))}c", "abc"),
        (f"a{actual('(b)', '/Form Do')}c", "a\nbc"),
        (f"{actual('(b)')}{actual('(c)')}d", "bcd"),
        (f"a{actual('7')}b", "axb"),
        (f"a{actual('<FEFFD8>')}b", "axb"),  # half a character
        ("a) Tj /Span << /Lang (en) >> BDC (x) Tj EMC (b", "axb"),
        ("a) Tj /Span /Named BDC (x) Tj EMC (b", "anamedb"),
        ("a) Tj /Span /NoSuch BDC (x) Tj EMC EMC BDC (y) Tj EMC (b", "axyb"),
        ("a) Tj /Form Do /Span /Named BDC (x) Tj EMC (b", "a\nin a formnamedb"),
    ],
)
def test_an_actual_text_is_read_in_place_of_what_is_drawn(
    contents: str, text: str, heard: Heard, tmp_path: Path
) -> None:
    """A ligature without a code of its own was read as another character, and a hyphen at a line's end as one."""
    drawn = "BT /F1 12 Tf 72 720 Td (in a ) Tj /Span /Named BDC (x) Tj EMC ET"
    own = "/Resources << /Font << /F1 5 0 R >> /Properties << /Named << /ActualText (form) >> >> >>"
    form = f"<< /Type /XObject /Subtype /Form /BBox [0 0 612 792] {own} /Length {len(drawn)} >>"
    named = "/XObject << /Form 6 0 R >> /Properties << /Named << /ActualText (named) >> >>"
    assert (
        heard.text(raw(tmp_path / "a.pdf", [f"{form}\nstream\n{drawn}\nendstream"], contents=contents, resources=named))
        == f"{text}\n"
    )


def test_an_actual_text_of_the_structure_is_read_once_for_all_its_content(heard: Heard, tmp_path: Path) -> None:
    objects = [
        "<< /Type /StructTreeRoot /ParentTree 7 0 R >>",
        "<< /Kids [<< /Limits [0 1] /Nums [0 [11 0 R]] >> "
        "<< /Limits [2 9] /Nums [2 [8 0 R 9 0 R 10 0 R 11 0 R]] >>] >>",
        "<< /S /Span /P 12 0 R /ActualText (ffi) >>",
        "<< /S /Span /P 8 0 R /ActualText (inner) >>",
        "<< /S /P /P 12 0 R >>",
        "<< /S /Span /P 12 0 R /ActualText () >>",
        "<< /S /Document >>",
    ]
    content = "".join(f") Tj /Span << /MCID {number} >> BDC ({number}) Tj EMC (-" for number in (0, 1, 2, 3, 9))
    file = raw(tmp_path / "a.pdf", objects, catalog="/StructTreeRoot 6 0 R", contents=content, page="/StructParents 2")
    assert heard.text(file) == "ffi--2--9-\n"


def test_an_actual_text_of_an_annotation_is_read(heard: Heard, tmp_path: Path) -> None:
    stamp = annotation("Stamp", "/AP << /N 7 0 R >>")
    drawn = appearance(f"a{actual('(b)')}c")
    assert heard.text(raw(tmp_path / "a.pdf", [stamp, drawn])) == "Page\nabc\n"
