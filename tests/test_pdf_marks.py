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


def raw(path: Path, annotations: list[str], *, catalog: str = "", contents: str = "Page", num_pages: int = 1) -> Path:
    """Of a page with annotations, as its objects are written, from object 6 on, and objects that they name."""
    drawn = f"BT /F1 12 Tf 72 720 Td ({contents}) Tj ET"
    named = " ".join(f"{6 + number} 0 R" for number, each in enumerate(annotations) if "/Annot " in each)
    font = "/Resources << /Font << /F1 5 0 R >> >>"
    page = f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 4 0 R {font} /Annots [{named}] >>"
    objects = [
        f"<< /Type /Catalog /Pages 2 0 R {catalog} >>",
        f"<< /Type /Pages /Kids [{'3 0 R' if num_pages else ''}] /Count {num_pages} >>",
        page,
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
