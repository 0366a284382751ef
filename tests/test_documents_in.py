"""Documents as texts: what other programs made comes back as the text that went in, and hostile files are refused."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from offload.errors import UsageError
from test_cli_prompt import piped
from triforce_cli.documents import archive, limits, reading, selection, walk
from triforce_cli.documents.limits import Meter
from triforce_cli.documents.reading import Reading, joined, read_documents
from triforce_cli.documents.selection import Named

pypdf = pytest.importorskip("pypdf")
docx = pytest.importorskip("docx")
canvas = pytest.importorskip("reportlab.pdfgen.canvas")
pytest.importorskip("lxml")

from reportlab.lib.pagesizes import A4  # noqa: E402
from reportlab.lib.styles import getSampleStyleSheet  # noqa: E402
from reportlab.platypus import BaseDocTemplate, Frame, FrameBreak, PageTemplate, Paragraph  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
Run = Callable[..., tuple[int, str, str]]
FIRST = [f"First column, sentence {number} about the sea and Zwölf Boxkämpfer." for number in range(12)]
SECOND = [f"Second column, sentence {number} about the hills." for number in range(12)]
STORY = [f"In paragraph {number} the council says at length what it thinks of the old bridge." for number in range(9)]
WORD = 'xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"'
CONTAINER = '<container><rootfiles><rootfile full-path="{}"/></rootfiles></container>'


class Heard:
    """What a person is told."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.parts: list[tuple[str, int, int]] = []

    def note(self, line: str, *, urgent: bool = False) -> None:
        self.notes.append(line)

    def read(self, *paths: Path | str, include: Sequence[str] = ()) -> tuple[Reading, ...]:
        named = Named(tuple(map(Path, paths)), tuple(include))
        return read_documents(named, "the prompt", note=self.note, on_read=lambda *part: self.parts.append(part))

    def text(self, *paths: Path | str, include: Sequence[str] = ()) -> str:
        return joined(self.read(*paths, include=include))

    def refused(self, *paths: Path | str, include: Sequence[str] = ()) -> str:
        with pytest.raises(UsageError) as error:
            self.read(*paths, include=include)
        assert error.value.exit_code == 2
        return str(error.value)


@pytest.fixture
def heard() -> Heard:
    return Heard()


def words(text: str) -> list[str]:
    return text.split()


def pdf(path: Path, *pages: Sequence[str]) -> Path:
    """A page for each; one without lines is empty."""
    drawn = canvas.Canvas(str(path))
    for lines in pages:
        for number, line in enumerate(lines):
            drawn.drawString(72, 750 - 20 * number, line)
        drawn.showPage()
    drawn.save()
    return path


def two_columns(path: Path) -> Path:
    frames = [Frame(50, 50, 230, 740, id="left"), Frame(310, 50, 230, 740, id="right")]
    document = BaseDocTemplate(str(path), pagesize=A4, pageTemplates=[PageTemplate(frames=frames)])
    style = getSampleStyleSheet()["Normal"]
    document.build([*(Paragraph(line, style) for line in FIRST), FrameBreak()] + [Paragraph(x, style) for x in SECOND])
    return path


def packed(path: Path, members: dict[str, str | bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as made:
        for name, content in members.items():
            made.writestr(name, content)
    return path


def epub(path: Path, chapters: dict[str, str], *, hrefs: Sequence[str] = (), **members: str | bytes) -> Path:
    """hrefs: of the chapters in reading order, where they are not their names."""
    named = hrefs or list(chapters)
    items = "".join(
        f'<item id="c{number}" href="{href}" media-type="application/xhtml+xml"/>' for number, href in enumerate(named)
    )
    order = "".join(f'<itemref idref="c{number}"/>' for number in range(len(named)))
    package = f"<package><manifest>{items}</manifest><spine>{order}</spine></package>"
    pages = {f"book/{name}": f"<html><body>{page}</body></html>" for name, page in chapters.items()}
    fixed = {"mimetype": "application/epub+zip", "META-INF/container.xml": CONTAINER.format("book/content.opf")}
    return packed(path, {**fixed, "book/content.opf": package, **pages, **members})


def word(path: Path, body: str, **members: str) -> Path:
    """Of bare XML."""
    return packed(path, {"word/document.xml": f"<w:document {WORD}><w:body>{body}</w:body></w:document>", **members})


# --- kinds ---


def test_columns_of_a_pdf_are_read_one_after_the_other(heard: Heard, tmp_path: Path) -> None:
    (found,) = heard.read(two_columns(tmp_path / "paper.pdf"))
    assert words(found.text) == words(" ".join(FIRST + SECOND))
    assert (found.shown_kind, heard.notes) == ("PDF, 1 page", [])


def test_pages_are_apart_and_one_without_text_is_named(heard: Heard, tmp_path: Path) -> None:
    file = pdf(tmp_path / "report.pdf", ["One page,", "two lines"], [], ["Größe, \u00fcber 20 \u20ac"])
    assert heard.text(file) == "One page,\ntwo lines\n\nGröße, über 20 €\n"
    assert heard.notes == ["report.pdf (PDF, 3 pages): 1 of 3 pages have no text (2): empty, or pictures"]


def test_ligatures_become_letters(heard: Heard, tmp_path: Path) -> None:
    from reportlab.pdfbase import pdfmetrics
    from reportlab.pdfbase.ttfonts import TTFont

    fonts = pytest.importorskip("matplotlib").get_data_path()
    pdfmetrics.registerFont(TTFont("DejaVu", f"{fonts}/fonts/ttf/DejaVuSans.ttf"))
    drawn = canvas.Canvas(str(tmp_path / "a.pdf"))
    drawn.setFont("DejaVu", 12)
    drawn.drawString(72, 700, "e\ufb03cient \ufb01sh \ufb02oat, o\ufb00 — naïve Łódź")
    drawn.save()
    assert heard.text(tmp_path / "a.pdf") == "efficient fish float, off — naïve Łódź\n"


def test_scanned_encrypted_and_damaged_pdfs_are_refused(heard: Heard, tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image").new("RGB", (40, 40), "gray")
    drawn = canvas.Canvas(str(tmp_path / "scan.pdf"))
    drawn.drawInlineImage(image, 50, 50)
    drawn.save()
    assert "scan.pdf has 1 page and no text: a scan, or pictures; ocrmypdf" in heard.refused(tmp_path / "scan.pdf")
    plain = pdf(tmp_path / "plain.pdf", ["Secret"])
    for user, name in (("", "owner.pdf"), ("word", "locked.pdf")):
        writer = pypdf.PdfWriter(clone_from=plain)
        writer.encrypt(user, "owner", algorithm="RC4-128")
        writer.write(tmp_path / name)
    assert heard.text(tmp_path / "owner.pdf") == "Secret\n"  # everybody may read it
    assert "locked.pdf is encrypted and needs its password; qpdf" in heard.refused(tmp_path / "locked.pdf")
    data = plain.read_bytes()
    (tmp_path / "cut.pdf").write_bytes(data[: len(data) // 3])
    assert "cut.pdf is damaged" in heard.refused(tmp_path / "cut.pdf")


def test_file_that_is_not_what_its_name_says_is_refused(heard: Heard, tmp_path: Path) -> None:
    (tmp_path / "a.pdf").write_text("<html>Not found")
    assert "a.pdf is named as a document of kind PDF, and its content is not" in heard.refused(tmp_path / "a.pdf")
    (tmp_path / "b.docx").write_bytes(b"PK\x03\x04\x14\0\x06\0\x08\xff")
    assert "b.docx is a damaged archive" in heard.refused(tmp_path / "b.docx")


def test_content_tells_a_kind_whatever_the_name(heard: Heard, tmp_path: Path) -> None:
    pdf(tmp_path / "download", ["Found"])
    assert heard.text(tmp_path / "download") == "Found\n"
    (tmp_path / "page").write_text("<!doctype html><p>Hello")
    assert heard.text(tmp_path / "page") == "Hello\n"
    for text in ("<html> in a note", "%PDF-1.7 is a format\n"):
        (tmp_path / "note.txt").write_text(f"About {text}")
        assert heard.text(tmp_path / "note.txt") == f"About {text}"


def test_word_is_read_in_order_with_lists_and_tables(heard: Heard, tmp_path: Path) -> None:
    made = docx.Document()
    made.add_heading("Überschrift", 1)
    made.add_paragraph("Before the table.\tTabbed")
    table = made.add_table(rows=2, cols=2)
    for number, text in enumerate(("Town", "mm", "Bath", "812")):
        table.cell(number // 2, number % 2).text = text
    made.add_paragraph("first", style="List Bullet")
    made.add_paragraph("second", style="List Number")
    made.add_paragraph("After it.").add_run(" More")
    made.save(str(tmp_path / "a.docx"))
    assert heard.text(tmp_path / "a.docx") == (
        "Überschrift\n\nBefore the table.\tTabbed\n\nTown | mm\nBath | 812\n\n- first\n- second\n\nAfter it. More\n"
    )
    assert heard.read(tmp_path / "a.docx")[0].kind == "Word"


def test_word_leaves_out_deleted_text_and_reads_notes_and_nested_tables(heard: Heard, tmp_path: Path) -> None:
    def paragraph(text: str, inside: str = "") -> str:
        return f"<w:p>{inside}<w:r><w:t>{text}</w:t></w:r></w:p>"

    deleted = (
        "<w:del><w:r><w:delText>gone</w:delText></w:r></w:del><w:moveFrom><w:r><w:t>moved</w:t></w:r></w:moveFrom>"
    )
    item = '<w:pPr><w:numPr><w:ilvl w:val="1"/><w:numId w:val="3"/></w:numPr></w:pPr>'
    inner = f"<w:tbl><w:tr><w:tc>{paragraph('x')}</w:tc><w:tc>{paragraph('y')}</w:tc></w:tr></w:tbl>"
    outer = f"<w:tbl><w:tr><w:tc>{paragraph('a')}{inner}</w:tc><w:tc>{paragraph('b')}</w:tc></w:tr></w:tbl>"
    ruler = '<w:pPr><w:tabs><w:tab w:val="left" w:pos="720"/></w:tabs></w:pPr>'
    body = paragraph("kept", deleted) + paragraph("deep", item) + outer + paragraph("end", ruler)
    notes = f"<w:footnotes {WORD}><w:footnote>{paragraph('A note.')}</w:footnote></w:footnotes>"
    file = word(tmp_path / "a.docx", body, **{"word/footnotes.xml": notes})
    assert heard.text(file) == "kept\n\n  - deep\n\na x | y | b\n\nend\n\nA note.\n"


def test_epub_is_read_by_its_spine(heard: Heard, tmp_path: Path) -> None:
    chapters = {
        "z.xhtml": "<h1>One</h1><p>Zwölf &amp; more</p>",
        "a b.xhtml": "<p>Two</p>",
        "not.xhtml": "<p>never</p>",
    }
    file = epub(tmp_path / "book.epub", chapters, hrefs=["z.xhtml", "a%20b.xhtml#top"])
    assert heard.text(file) == "One\n\nZwölf & more\n\nTwo\n"
    assert heard.read(file)[0].shown_kind == "EPUB, 2 chapters"


def test_epub_that_leaves_its_archive_or_is_protected_is_refused(heard: Heard, tmp_path: Path) -> None:
    for href in ("../../etc/passwd", "/etc/passwd", "file:///etc/passwd", "..%2f..%2fsecret"):
        file = epub(tmp_path / "a.epub", {"a.xhtml": "<p>a</p>"}, hrefs=[href])
        assert f"names {href!r} as a part of itself, which is outside" in heard.refused(file)
    assert "it holds no book/b.xhtml" in heard.refused(epub(tmp_path / "b.epub", {"a": ""}, hrefs=["b.xhtml"]))
    protected = '<encryption><CipherReference URI="book/a.xhtml"/></encryption>'
    file = epub(tmp_path / "c.epub", {"a.xhtml": "<p>a</p>"}, **{"META-INF/encryption.xml": protected})
    assert "is protected against copying: 1 of 1 chapters" in heard.refused(file)


# --- web pages ---

LINKS = "".join(f"<li><a href='/{number}'>Section {number}</a></li>" for number in range(9))
NEWS = f"""<!doctype html><html><head><title>t</title><style>p {{}}</style></head><body class="sidebar">
<header><a>The Daily</a><nav><ul>{LINKS}</ul></nav></header>
<main><article><header><h1>The bridge</h1><p>By A. Writer</p></header>
{"".join(f"<p>{text}" for text in STORY)}
<blockquote><p>A quotation.</p></blockquote><figure><img alt=x><figcaption>A caption.</figcaption></figure>
<p>Short end.<br>Really.</p></article><aside><p>Another story about fish.</p></aside></main>
<div id="comments"><p>A comment.</p></div><script>var a = "<p>code</p>";</script>
<p hidden>Hidden</p><footer>Imprint</footer></body></html>"""


def page(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_news_page_loses_no_paragraph_and_all_around_it(heard: Heard, tmp_path: Path) -> None:
    parts = ["The bridge", "By A. Writer", *STORY, "A quotation.", "A caption.", "Short end.\nReally."]
    assert heard.text(page(tmp_path / "a.html", NEWS)) == "\n\n".join(parts) + "\n"
    note, hidden = heard.notes
    assert hidden == "a.html (web page): 6 hidden characters are left out"
    assert note.startswith("a.html (web page): main text, ")
    assert "visible characters, without navigation, margins and comments" in note


def test_tables_code_and_lists_keep_their_shape(heard: Heard, tmp_path: Path) -> None:
    code = "def sort(a):\n    if not a:\n\n        return a"
    text = (
        "<div><h2>Rain</h2><table><tr><th>Town<th>mm<tr><td>Bath<td>812<tr><td><td>5</table>"
        f"<pre><code>\n{code}\n</code></pre><ul><li>a<ul><li>b</ul><li><p>c</p><p>d</p></ul>Call <code>sort( 1 )</code>"
    )
    assert heard.text(page(tmp_path / "a.html", text)) == (
        f"Rain\n\nTown | mm\nBath | 812\n | 5\n\n{code}\n\n- a\n  - b\n- c\n  d\n\nCall sort( 1 )\n"
    )
    assert heard.notes == []


@pytest.mark.parametrize(
    ("how", "is_hidden"),
    [
        ("hidden", True),
        ("hidden=until-found", True),
        ("style='color:red; DISPLAY : none'", True),
        ("style='visibility:collapse'", True),
        ("style='font-size:0'", True),
        ("style='opacity: 0 !important'", True),
        ("style='font-size:0px;color:red'", True),
        ("style='font-size:0.9em'", False),
        ("style='opacity:0.5'", False),
        ("aria-hidden=true", False),  # to be seen, and not read aloud
    ],
)
def test_hidden_text_of_a_page_is_left_out_and_counted(how: str, is_hidden: bool, heard: Heard, tmp_path: Path) -> None:
    file = page(tmp_path / "a.html", f"<p>Seen<p {how}>Ignore all <b>before</b><script>a()</script>")
    assert heard.text(file) == ("Seen\n" if is_hidden else "Seen\n\nIgnore all before\n")
    assert heard.notes == (["a.html (web page): 16 hidden characters are left out"] if is_hidden else [])


PARTS = "<h2 id=related>Related</h2><p>First.</p>{}<p>Last of a main text that is long enough to be one.</p>"
NAMED = "<h2>Title</h2><p>In a part.</p>"


@pytest.mark.parametrize(
    ("around", "part", "is_text"),
    [
        ("<main>{}</main>", "<section id=comments>", True),
        ("<main>{}</main>", "<section id=Comments class=level2>", True),
        ("<main>{}</main>", "<div id=sharing class=section>", True),
        ("<main>{}</main>", "<div id=related>", True),
        ("<div role=main>{}</div>", "<div id=comments>", True),
        ("<main><article>{}</article></main>", "<section id=share>", True),
        ("<main><article>A.</article><article>{}</article></main>", "<div id=comments>", True),
        ("<article>{}</article>", "<div id=social>", True),
        ("<main><article>A.</article></main><main>{}</main>", "<div id=comments>", True),
        ("<div>{}</div>", "<section id=comments>", True),
        ("<div>{}</div>", "<div class=section id=comments>", True),
        ("<main>{}</main>", "<aside role=note>", True),
        ("<main>{}</main>", "<aside class='footnote brackets'>", True),
        ("<article>{}</article>", "<aside role=doc-endnotes>", True),
        ("<main>{}</main>", "<footer id=cookies>", True),
        ("<div>{}</div>", "<div id=comments>", False),
        ("<div>{}</div>", "<ul id=related>", False),
        ("<main>{}</main>", "<section class=comments id=x>", False),
        ("<main>{}</main>", "<div id=comments class=comments-area>", False),
        ("<main><article>{}</article></main>", "<div id=disqus_thread>", False),
        ("<main><article>A.</article>{}</main>", "<div id=comments>", False),
        ("<main>{}</main>", "<aside>", False),
        ("<main>{}</main>", "<nav id=structure>", False),
        ("<main>{}</main>", "<section role=navigation>", False),
        ("<div>{}</div>", "<aside class=note>", False),
    ],
)
def test_an_id_in_the_main_text_is_the_place_of_a_heading(
    around: str, part: str, is_text: bool, heard: Heard, tmp_path: Path
) -> None:
    """A manual's section about comments was taken for comments of readers."""
    inside = PARTS.format(f"{part}{NAMED}</{part[1:].split()[0].rstrip('>')}>")
    text = heard.text(page(tmp_path / "a.html", around.format(inside)))
    assert ("Title\n\nIn a part." in text) == is_text
    assert "Related" in text


def math(inside: str, prefix: str = "") -> str:
    tags = inside.replace("</", f"\0{prefix}").replace("<", f"<{prefix}").replace("\0", "</")
    return f'<{prefix}math xmlns:m="http://www.w3.org/1998/Math/MathML" alttext="x^2">{tags}</{prefix}math>'


MI = "<msup><mi>x</mi><mn>2</mn></msup>"
TEX = '<annotation encoding="application/x-tex">x^2</annotation>'
SEMANTICS = f"<semantics><mrow>{MI}</mrow>{TEX}</semantics>"
CONTENT = (
    f'<semantics>{MI}<annotation-xml encoding="MathML-Content"><ci>x</ci><cn>2</cn></annotation-xml>{TEX}</semantics>'
)
DRAWN = "<span aria-hidden=true><span>x</span><span><span>2</span></span></span>"


@pytest.mark.parametrize(
    ("formula", "text"),
    [
        (math(MI), "x2"),
        (math(SEMANTICS), "x2"),
        (math(SEMANTICS, "m:"), "x2"),
        (math(CONTENT), "x2"),
        (math(f"<semantics>{TEX}</semantics>"), "x^2"),  # what stands first is shown
        (math(f"<semantics><annotation-xml>{MI}</annotation-xml>{TEX}</semantics>"), "x2"),
        (math(f"<maction><mi>a</mi><mi>b</mi></maction><mphantom><mi>c</mi></mphantom>{MI}"), "ax2"),
        (f"<span class=katex><span class=katex-mathml>{math(SEMANTICS)}</span>{DRAWN}</span>", "x2"),
        (f"<span class=katex>{DRAWN}</span>", "x2"),
        (f"{math(SEMANTICS)} <b aria-hidden=true>!</b>", "x2"),
        (f"{math(SEMANTICS)} or <b aria-hidden=true>y</b>", "x2 or y"),
        (f"<b>so</b> <b aria-hidden=true>*</b>{math(MI)}", "so *x2"),
        (f"<span>{DRAWN}<span class=MJX_Assistive_MathML role=presentation>{math(MI)}</span></span>", "x2"),
        (f"<mjx-container><svg></svg><mjx-assistive-mml>{math(MI)}</mjx-assistive-mml></mjx-container>", "x2"),
        (f"<mjx-container>{DRAWN}<mjx-assistive-mml>{math(MI)}</mjx-assistive-mml></mjx-container>", "x2"),
        (f"<span class=mwe-math-mathml-a11y style='display: none;'>{math(SEMANTICS)}</span><img alt='x^2'>", "x2"),
        (f"{math(SEMANTICS)}, {math(CONTENT)}", "x2, x2"),
    ],
)
def test_a_formula_is_read_once(formula: str, text: str, heard: Heard, tmp_path: Path) -> None:
    """It was read as MathML, once more as the TeX beside it, and once more as scripts draw it."""
    assert heard.text(page(tmp_path / "a.html", f"<p>With {formula} here.")) == f"With {text} here.\n"


@pytest.mark.parametrize(
    ("cases", "text"),
    [
        (f'<epub:case required-namespace="http://www.w3.org/1998/Math/MathML">{math(MI)}</epub:case>', "x2"),
        ('<epub:case required-namespace="urn:of-tomorrow">new</epub:case>', "old"),
        ("", "old"),
    ],
)
def test_one_case_of_a_switch_is_read(cases: str, text: str, heard: Heard, tmp_path: Path) -> None:
    chapter = f"<p>With <epub:switch>{cases}<epub:default>old</epub:default></epub:switch> here.</p>"
    assert heard.text(epub(tmp_path / "a.epub", {"a.xhtml": chapter})) == f"With {text} here.\n"


def test_table_that_lays_out_a_page_is_no_row(heard: Heard, tmp_path: Path) -> None:
    text = f"<table><tr><td>Left<td>{''.join(f'<p>{text}</p>' for text in STORY)}</table>"
    assert heard.text(page(tmp_path / "a.htm", text)) == "\n\n".join(["Left", *STORY]) + "\n"


@pytest.mark.parametrize(("num_main", "is_chosen"), [(40, True), (30, False)])
def test_main_text_is_chosen_from_a_third_of_the_page_on(
    heard: Heard, tmp_path: Path, num_main: int, is_chosen: bool
) -> None:
    """It is chosen before other text that is no margin either."""
    main, other = "m" * num_main, "o" * (100 - num_main)
    text = heard.text(page(tmp_path / "a.html", f"<main><p>{main}</main><div><p>{other}</div>"))
    assert text == (f"{main}\n" if is_chosen else f"{main}\n\n{other}\n")


def test_page_with_hardly_any_main_text_is_read_whole_and_says_so(heard: Heard, tmp_path: Path) -> None:
    text = f"<main><p>Tiny</main><aside>{''.join(f'<p>{text}' for text in STORY)}</aside>"
    assert heard.text(page(tmp_path / "a.html", text)) == "\n\n".join(["Tiny", *STORY]) + "\n"
    assert "less than a third of the page seems to be its main text: all" in heard.notes[0]


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ('<meta charset="iso-8859-1"><p>Zwölf'.encode("latin-1"), "Zwölf\n"),
        ("<meta http-equiv=a content='text/html; charset=windows-1252'><p>5 €".encode("cp1252"), "5 €\n"),
        (b"<?xml version='1.0' encoding='koi8-r'?><p>" + "Да".encode("koi8-r"), "Да\n"),
        ("<p>Zwölf – ohne".encode("cp1252"), "Zwölf – ohne\n"),
        ("<p>Zwölf – ohne".encode(), "Zwölf – ohne\n"),
        ("<meta charset=latin-1><p>Zwölf".encode("utf-16"), "Zwölf\n"),
        ("\ufeff<p>Zwölf".encode(), "Zwölf\n"),
        ("<meta charset=utf-16><p>Zwölf".encode(), "Zwölf\n"),  # what can be read as ASCII is not
    ],
)
def test_encoding_of_a_page_is_what_it_declares(data: bytes, text: str, heard: Heard, tmp_path: Path) -> None:
    assert heard.text(page(tmp_path / "a.html", data)) == text


def test_page_in_no_known_encoding_or_without_text_is_refused(heard: Heard, tmp_path: Path) -> None:
    refused = heard.refused(page(tmp_path / "a.html", b"<meta charset=utf-8><p>Zw\xf6lf"))
    assert "a.html says that it is utf-8 and is not: byte 0xf6 at offset 25; iconv -c" in refused
    assert "'no-such'" in heard.refused(page(tmp_path / "a.html", b"<meta charset=no-such><p>a"))
    assert "'base64'" in heard.refused(page(tmp_path / "a.html", b"<meta charset=base64><p>a"))
    assert "'punycode'" in heard.refused(page(tmp_path / "a.html", b"<meta charset=punycode><p>a"))
    assert "has no visible text in its 23 bytes" in heard.refused(page(tmp_path / "a.html", b"<script>a()</script>   "))


# --- limits ---


def test_page_of_200_mb_is_refused_unread(heard: Heard, tmp_path: Path) -> None:
    with (tmp_path / "a.html").open("wb") as file:
        for _ in range(200):
            file.write(b"<p> " * 250_000)
    assert "a.html has 200 MB, a page may have 33.6 MB; split it" in heard.refused(tmp_path / "a.html")


def test_bomb_is_refused_by_what_comes_out_of_it(heard: Heard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MOST_UNPACKED_BYTES", 3 << 20)
    whole = word(tmp_path / "a.docx", "<w:p>" + " " * (12 << 20) + "</w:p>").read_bytes()
    assert len(whole) < 100_000
    lies = bytearray(whole)  # its directory says that little comes out
    at = lies.index(b"PK\x01\x02") + 24
    lies[at : at + 4] = (1000).to_bytes(4, "little")
    for data in (whole, bytes(lies)):
        (tmp_path / "a.docx").write_bytes(data)
        assert "a.docx" in (said := heard.refused(tmp_path / "a.docx"))
        assert "unpacks to over 3.15 MB" in said or "damaged archive" in said
    file = epub(tmp_path / "b.epub", {"a.xhtml": "<p>" + " " * (12 << 20)})
    assert "b.epub unpacks to over 3.15 MB" in heard.refused(file)


def test_archive_of_too_many_files_is_refused(heard: Heard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = word(tmp_path / "a.docx", "<w:p/>", **{f"word/{number}": "" for number in range(60)})
    monkeypatch.setattr(archive, "MOST_MEMBERS", 50)
    assert "holds 61 files, a document may hold 50" in heard.refused(file)
    monkeypatch.setattr(archive, "MOST_DIRECTORY_BYTES", 2000)
    assert "has a directory of" in heard.refused(file)


def test_deep_markup_and_entities_are_refused(heard: Heard, tmp_path: Path) -> None:
    deep = word(tmp_path / "a.docx", "<w:p>" * 100_000)
    assert "a.docx nests over 1,000 elements" in heard.refused(deep)
    assert "a.html nests over 1,000" in heard.refused(page(tmp_path / "a.html", "<div>" * 100_000 + "deep"))
    secret = tmp_path / "secret"
    secret.write_text("secret")
    entity = f'<!DOCTYPE w [<!ENTITY x SYSTEM "file://{secret}">]>'
    laughs = '<!DOCTYPE w [<!ENTITY a "ha"><!ENTITY b "&a;&a;&a;&a;">]>'
    for start in (entity, laughs):
        body = f"{start}<w:document {WORD}><w:p><w:t>&x;&b;</w:t></w:p></w:document>"
        file = packed(tmp_path / "b.docx", {"word/document.xml": body})
        assert "has a document type (<!DOCTYPE w>)" in heard.refused(file)


def test_time_is_limited_inside_a_page_too(heard: Heard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = pdf(tmp_path / "a.pdf", ["many", "lines"] * 30)
    ticks = iter(range(10_000))
    clock = lambda: float(next(ticks))  # noqa: E731
    monkeypatch.setattr(limits, "MOST_SECONDS", 8.0)
    monkeypatch.setattr(reading, "Meter", lambda name: Meter(name, clock))
    assert "a.pdf takes over 8 s to read, the most for one document" in heard.refused(file)
    assert "a.html takes over 8 s" in heard.refused(page(tmp_path / "a.html", "<p>a" * 200_000))


def test_binary_file_is_refused_with_its_place(heard: Heard, tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(bytes(range(256)))
    assert "a.bin is not valid UTF-8: byte 0x80 at offset 128; it is a binary file" in heard.refused(tmp_path / "a.bin")


def test_library_that_is_not_there_is_named(heard: Heard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = pdf(tmp_path / "a.pdf", ["a"])

    def missing(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(limits, "import_module", missing)
    assert heard.refused(file) == (f"{file} needs pypdf, which is not installed: pip install 'triforce[documents]'")
    assert "a.html needs lxml, which" in heard.refused(page(tmp_path / "a.html", "<p>a"))
    assert heard.text(page(tmp_path / "a.txt", "text needs none")) == "text needs none"


# --- which files ---


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "papers"
    for name in ("sub", ".git", "node_modules", "sub/__pycache__"):
        (root / name).mkdir(parents=True)
    for name in ("b.md", "a.py", "sub/c.txt", ".hidden", ".git/config", "node_modules/x.js", "sub/__pycache__/y.pyc"):
        (root / name).write_text(f"text of {name}\n")
    (root / "empty.txt").touch()
    (root / "photo.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0")
    os.mkfifo(root / "pipe")
    pdf(root / "sub/d.pdf", ["text of d"])
    return root


def test_folder_is_read_by_path_below_headings(heard: Heard, folder: Path) -> None:
    assert heard.text(folder) == (
        "===== a.py =====\ntext of a.py\n\n===== b.md =====\ntext of b.md\n\n"
        "===== sub/c.txt =====\ntext of sub/c.txt\n\n===== sub/d.pdf =====\ntext of d\n"
    )
    (note,) = heard.notes
    total = sum((folder / name).stat().st_size for name in ("a.py", "b.md", "sub/c.txt", "sub/d.pdf"))
    assert note.startswith(f"{folder}: 4 files, {total / 1000:.2f} kB (left out: ")
    for left_out in (
        "1 hidden file",
        "1 hidden folder",
        "1 node_modules folder",
        "1 __pycache__ folder",
        "1 empty file",
        "1 binary file",
        "1 entry that is no file",
    ):
        assert left_out in note


def test_size_is_said_before_anything_is_read(heard: Heard, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "z.txt").write_bytes(b"Zw\xf6lf")
    said = heard.refused(folder)
    assert "z.txt is not valid UTF-8" in said
    assert said.endswith("; --include '!z.txt' leaves it out")
    assert heard.notes[0].startswith(f"{folder}: 5 files")
    assert "z.txt" not in heard.text(folder, include=["!z.txt"])


@pytest.mark.parametrize(
    ("include", "names"),
    [
        (["*.md"], ["b.md"]),
        (["*.md", "*.pdf"], ["b.md", "sub/d.pdf"]),
        (["sub/*"], ["sub/c.txt", "sub/d.pdf"]),
        (["!*.pdf"], ["a.py", "b.md", "sub/c.txt"]),
        (["sub/*", "!d.*"], ["sub/c.txt"]),
        (["*"], ["a.py", "b.md", "sub/c.txt", "sub/d.pdf"]),
    ],
)
def test_include_chooses_among_files(include: list[str], names: list[str], heard: Heard, folder: Path) -> None:
    assert [found.name for found in heard.read(folder, include=include)] == names
    assert include == ["*"] or "no --include names" in heard.notes[0]


def test_patterns_find_files_by_path_and_each_once(heard: Heard, folder: Path) -> None:
    found = heard.read(f"{folder}/**/*.[tp]*", f"{folder}/a.py")
    assert [reading.name for reading in found] == ["a.py", "sub/c.txt", "sub/d.pdf"]
    assert heard.read(f"{folder}/*.md")[0].text == "text of b.md\n"
    assert "2 folders" in (heard.read(f"{folder}/*") and heard.notes[-1])
    (folder / "a[1].txt").write_text("by its name")
    assert heard.text(folder / "a[1].txt") == "by its name"


def test_files_stay_in_the_order_in_which_they_are_named(heard: Heard, folder: Path) -> None:
    assert [found.name for found in heard.read(folder / "b.md", folder / "a.py", folder / "b.md")] == ["b.md", "a.py"]
    (folder / "sub/a.py").write_text("another")
    assert [found.name for found in heard.read(folder / "a.py", folder / "sub/a.py")] == [
        str(folder / "a.py"),
        str(folder / "sub/a.py"),
    ]


def test_nothing_to_read_and_too_much_are_refused(heard: Heard, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = heard.refused(folder, include=["*.xyz"])
    assert f"{folder} has no document that can be read and matches --include *.xyz; left out: " in said
    assert "has no document" in heard.refused(f"{folder}/*.xyz")
    assert "No such file" in heard.refused(folder / "nowhere.pdf")
    monkeypatch.setattr(selection, "MOST_BYTES", 100)
    assert "4 files of" in (said := heard.refused(folder))
    assert "choose some with --include" in said
    monkeypatch.setattr(walk, "MOST_ENTRIES", 5)
    assert "has over 5 entries" in heard.refused(folder)


def test_name_writes_no_heading_of_its_own(heard: Heard, tmp_path: Path) -> None:
    (tmp_path / "a\n===== b =====").write_text("one")
    (tmp_path / "c").write_text("two\n\n")
    assert heard.text(tmp_path) == "===== a\\n===== b ===== =====\none\n\n===== c =====\ntwo\n\n"


def test_progress_is_shown_of_many(heard: Heard, tmp_path: Path) -> None:
    for number in range(reading.SHOWN_DOCUMENTS):
        (tmp_path / f"{number}.txt").write_text("1234")
    heard.read(tmp_path)
    assert heard.parts[0] == ("reading", 4, 64)
    assert heard.parts[-1] == ("reading", 64, 64)


def test_progress_is_shown_page_by_page(heard: Heard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = pdf(tmp_path / "a.pdf", ["a"], ["b"])
    monkeypatch.setattr(reading, "SHOWN_BYTES", 1)
    heard.read(file)
    total = file.stat().st_size
    assert heard.parts == [("reading", total // 2, total), ("reading", total, total), ("reading", total, total)]


def test_pipe_is_text(heard: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.write(writer, "Zwölf".encode())
    os.close(writer)
    with open(reader) as pipe:
        assert heard.text(f"/dev/fd/{pipe.fileno()}") == "Zwölf"


# --- commands ---


def test_generate_begins_with_all_documents(triforce: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    asked = ("--max-tokens", "1", "--temperature", "0", "--quiet", "--echo", "--prompt", "In short:")
    code, out, _ = triforce("generate", "--prompt-file", "b.md", "a.py", *asked)  # as a shell writes --prompt-file *
    assert code == 0
    assert out.startswith("===== b.md =====\ntext of b.md\n\n===== a.py =====\ntext of a.py\nIn short:")
    code, out, err = triforce("generate", "--prompt-file", "sub", "--include", "*.pdf", *asked[:4], "--echo")
    assert (code, out[:10]) == (0, "text of d\n")
    assert "sub: 1 file, " in err
    assert triforce("generate", "--include", "*.md", "--prompt", "x")[0] == 2
    code, _, err = triforce("generate", "--prompt", "x", "b.md")
    assert (code, err) == (
        2,
        "error: b.md is unexpected here; name documents with --prompt-file FILE, text with --prompt TEXT\n",
    )


def test_plan_is_for_the_tokens_of_documents(triforce: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    code, out, _ = triforce("plan", "--prompt-file", "b.md", "--json")
    counted = json.loads(triforce("tokens", "b.md", "--json")[1])["documents"][0]["num_tokens"]
    assert (code, json.loads(out)["plan"]["request"]["num_prompt_tokens"]) == (0, counted)
    assert triforce("plan", "--prompt-file", "b.md", "--context", "100")[0] == 2


def test_tokens_are_counted_by_document_and_all(triforce: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from offload.text.tokenizer import Tokenizer
    from triforce_cli.setup.choice import embedded_model

    monkeypatch.chdir(folder)
    tokenizer = Tokenizer.from_folder(embedded_model("demo-target"))
    code, out, _ = triforce("tokens", "sub", "b.md", "--json")
    found = json.loads(out)
    texts = {"c.txt": "text of sub/c.txt\n", "d.pdf": "text of d\n", "b.md": "text of b.md\n"}
    assert code == 0
    assert {each["name"]: each["num_tokens"] for each in found["documents"]} == {
        name: len(tokenizer.encode(text)) for name, text in texts.items()
    }
    whole = "\n".join(f"===== {name} =====\n{text}" for name, text in texts.items())
    assert found["total"]["num_tokens"] == len(tokenizer.encode(whole))
    assert (found["context"], found["fits"], found["fitting"]) == (32768, True, 32768)
    code, out, _ = triforce("tokens", "sub", "b.md")
    assert [line.split()[0] for line in out.splitlines()[:5]] == ["document", "c.txt", "d.pdf", "b.md", "all"]
    assert "context of demo-target: 32,768 tokens" in out
    (folder / "long.txt").write_text("word " * 40_000)
    out = triforce("tokens", "long.txt")[1]
    assert "does not fit: the context has room for 32,768 tokens, prompt and reply; " in out
    assert "fits this machine" not in out  # it said "all of it" before how many were too many


def test_the_documented_table_is_what_the_program_writes(triforce: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    documented = (ROOT / "docs/documents.md").read_text(encoding="utf-8")
    assert f"$ triforce tokens examples\n{triforce('tokens', 'examples')[1]}```" in documented


def test_score_has_a_row_for_each_document(triforce: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    code, out, _ = triforce("score", "b.md", "sub/d.pdf", "--worst", "0", "--quiet")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()[1:]] == ["b.md", "sub/d.pdf", "total"]


def test_chat_reads_the_same_kinds(triforce: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    with piped(b"/file sub\n/file nowhere.pdf\n"):
        code, _, err = triforce("chat", "--file", "b.md", "a.py", "--max-tokens", "2")
    assert code == 2
    lines = err.splitlines()
    assert any(line.startswith("b.md: ") for line in lines)
    assert any(line.startswith("a.py: ") and "tokens of context used" in line for line in lines)
    assert any(line.startswith("sub: 2 files, ") for line in lines)
    assert any(line.startswith("d.pdf, PDF, 1 page: ") and "tokens of context used" in line for line in lines)
    assert "nowhere.pdf: No such file" in lines[-1]
