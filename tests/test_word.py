"""Word documents: a reader of the page sees what is read, wherever the package keeps it."""

from __future__ import annotations

from pathlib import Path

import pytest

from test_documents_in import Heard, packed
from triforce_cli.documents.kinds import kind_of

pytest.importorskip("lxml")

TRANSITIONAL = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
STRICT = "http://purl.oclc.org/ooxml/wordprocessingml/main"
OFFICE = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
STRICT_OFFICE = "http://purl.oclc.org/ooxml/officeDocument/relationships"
MAIN = "application/vnd.openxmlformats-officedocument.wordprocessingml.document.main+xml"
OTHERS = 'xmlns:w14="w14" xmlns:mc="mc" xmlns:m="m" xmlns:wps="wps" xmlns:v="v" xmlns:c="c" xmlns:d="d"'


@pytest.fixture
def heard() -> Heard:
    return Heard()


def relationships(of: dict[str, str], office: str = OFFICE) -> str:
    """of: targets by type."""
    each = "".join(f'<Relationship Id="r" Type="{office}/{kind}" Target="{name}"/>' for kind, name in of.items())
    return f'<Relationships xmlns="http://schemas.openxmlformats.org/package/2006/relationships">{each}</Relationships>'


def part(name: str, inside: str, namespace: str = TRANSITIONAL) -> str:
    return f'<w:{name} xmlns:w="{namespace}" {OTHERS}>{inside}</w:{name}>'


def document(
    path: Path,
    body: str,
    *,
    main: str = "word/document.xml",
    kind: str = MAIN,
    office: str = OFFICE,
    namespace: str = TRANSITIONAL,
    related: dict[str, str] | None = None,
    **members: str,
) -> Path:
    folder, _, name = main.rpartition("/")
    fixed = {
        "[Content_Types].xml": f'<Types><Override PartName="/{main}" ContentType="{kind}"/></Types>',
        "_rels/.rels": relationships({"officeDocument": main}, office),
        main: part("document", f"<w:body>{body}</w:body>", namespace),
        f"{folder}/_rels/{name}.rels": relationships(related or {}, office),
    }
    return packed(path, {**fixed, **members})


def run(text: str, properties: str = "") -> str:
    return f'<w:r><w:rPr>{properties}</w:rPr><w:t xml:space="preserve">{text}</w:t></w:r>'


def paragraph(*inside: str, properties: str = "") -> str:
    return f"<w:p><w:pPr>{properties}</w:pPr>{''.join(inside)}</w:p>"


def mark(kind: str, inside: str = "") -> str:
    return f'<w:r><w:fldChar w:fldCharType="{kind}">{inside}</w:fldChar></w:r>'


def field(instruction: str, result: str, form: str = "") -> str:
    asked = f"<w:r><w:instrText>{instruction}</w:instrText></w:r>"
    return mark("begin", form) + asked + mark("separate") + result + mark("end")


def styles(*each: str) -> str:
    return part("styles", "".join(each))


def style(name: str, inside: str, *, kind: str = "paragraph", more: str = "") -> str:
    return f'<w:style w:type="{kind}" w:styleId="{name}" {more}>{inside}</w:style>'


HIDDEN = "<w:rPr><w:vanish/></w:rPr>"


@pytest.mark.parametrize("main", ["word/document2.xml", "word/document.xml", "docs/Main.xml"])
@pytest.mark.parametrize("of", [(OFFICE, TRANSITIONAL), (STRICT_OFFICE, STRICT)], ids=["transitional", "strict"])
def test_relationships_name_the_parts(main: str, of: tuple[str, str], heard: Heard, tmp_path: Path) -> None:
    """A document whose main part has another name than Word's was refused as damaged."""
    folder = main.rpartition("/")[0]
    file = document(
        *(tmp_path / "a.docx", paragraph(run("The tenant is Miller."))),
        main=main,
        office=of[0],
        namespace=of[1],
        related={"footnotes": "notes7.xml", "endnotes": "/other/ends.xml", "styles": "looks.xml"},
        **{
            f"{folder}/notes7.xml": part("footnotes", f"<w:footnote>{paragraph(run('A note.'))}</w:footnote>", of[1]),
            "other/ends.xml": part("endnotes", f"<w:endnote>{paragraph(run('An end.'))}</w:endnote>", of[1]),
            f"{folder}/footnotes.xml": part("footnotes", paragraph(run("of nobody"))),
        },
    )
    assert (heard.text(file), heard.notes) == ("The tenant is Miller.\n\nA note.\n\nAn end.\n", [])


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a.docm", "application/vnd.ms-word.document.macroEnabled.main+xml"),
        ("a.dotx", "application/vnd.openxmlformats-officedocument.wordprocessingml.template.main+xml"),
        ("a.dotm", "application/vnd.ms-word.template.macroEnabledTemplate.main+xml"),
        ("download", MAIN),
    ],
)
def test_templates_and_macros_are_word_too(name: str, kind: str, heard: Heard, tmp_path: Path) -> None:
    assert heard.text(document(tmp_path / name, paragraph(run("Text")), main="word/d2.xml", kind=kind)) == "Text\n"


def test_a_workbook_is_no_document(tmp_path: Path) -> None:
    sheet = "application/vnd.openxmlformats-officedocument.spreadsheetml.sheet.main+xml"
    assert kind_of(document(tmp_path / "a.xlsx", "", main="xl/workbook.xml", kind=sheet)) == "binary"


def test_a_document_with_a_password_is_said_to_be_encrypted(heard: Heard, tmp_path: Path) -> None:
    (tmp_path / "a.docx").write_bytes(b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(600))
    assert "a.docx is encrypted, or an old .doc by another name; open it in Word" in heard.refused(tmp_path / "a.docx")


def check(name: str, inside: str = "") -> str:
    form = f"<w:ffData><w:name/><w:checkBox><w:sizeAuto/>{inside}</w:checkBox></w:ffData>"
    return mark("begin", form) + f"<w:r><w:instrText> {name} </w:instrText></w:r>" + mark("end")


def control(checked: str, inside: str) -> str:
    properties = f'<w:rPr><w:vanish/></w:rPr><w14:checkbox><w14:checked w14:val="{checked}"/></w14:checkbox>'
    return f"<w:sdt><w:sdtPr>{properties}</w:sdtPr><w:sdtContent>{inside}</w:sdtContent></w:sdt>"


CHOICE = '<w:ffData><w:ddList>{}<w:listEntry w:val="red"/><w:listEntry w:val="blue"/></w:ddList></w:ffData>'
INNER = field(" MERGEFIELD x ", run("secret"))


@pytest.mark.parametrize(
    ("inside", "text"),
    [
        (check("FORMCHECKBOX", '<w:default w:val="0"/><w:checked/>') + run(" Allergic"), "☒ Allergic"),
        (check("FORMCHECKBOX", '<w:default w:val="0"/>') + run(" Diabetic"), "☐ Diabetic"),
        (check("FORMCHECKBOX", '<w:default w:val="1"/>'), "☒"),
        (check("FORMCHECKBOX", '<w:default w:val="1"/><w:checked w:val="0"/>'), "☐"),
        (check("FORMCHECKBOX"), "☐"),
        (control("1", run("☒")) + run(" yes"), "☒ yes"),
        (control("0", run("☐")) + run(" no"), "☐ no"),
        (control("1", '<w:r><w:sym w:font="Wingdings 9" w:char="F0FE"/></w:r>'), "☒"),
        (control("0", '<w:r><w:sym w:font="Wingdings" w:char="F0A8"/></w:r>'), "☐"),
        (field(" FORMTEXT ", run("Jane")), "Jane"),
        (mark("begin", CHOICE.format('<w:result w:val="1"/>')) + mark("end"), "blue"),
        (mark("begin", CHOICE.format("")) + mark("end"), "red"),
        (run("Page ") + field(" PAGEREF _Toc5 ", run("3")) + run(" end."), "Page 3 end."),
        (mark("begin") + INNER + run(" = 1 ") + mark("separate") + run("shown") + mark("end"), "shown"),
        (f'<w:fldSimple w:instr="DATE">{run("1 May")}</w:fldSimple>', "1 May"),
        (f"<w:ins>{run('new')}</w:ins><w:del><w:r><w:tab/><w:delText>old</w:delText></w:r></w:del>", "new"),
        (f"<w:moveFrom>{run('there')}</w:moveFrom><w:moveTo>{run('here')}</w:moveTo>", "here"),
        (run("a", "<w:rPrChange><w:rPr><w:vanish/></w:rPr></w:rPrChange>"), "a"),
        ("<w:r><w:t>co</w:t><w:softHyphen/><w:t>op</w:t><w:noBreakHyphen/><w:t>b</w:t></w:r>", "coop-b"),
        ("<w:r><w:t>a</w:t><w:ptab/><w:t>b</w:t><w:br/><w:t>c</w:t></w:r>", "a\tb\nc"),
        ('<w:r><w:sym w:font="Symbol" w:char="F06D"/><w:t>m</w:t></w:r>', "μm"),
        ('<w:r><w:sym w:font="Wingdings" w:char="F0FE"/></w:r>', "☑"),
        ("<m:oMath><m:r><m:t>x=1</m:t></m:r></m:oMath>", "x=1"),
        (f"<w:hyperlink>{run('a link')}</w:hyperlink>", "a link"),
        (f"<w:sdt><w:sdtContent>{run('filled in')}</w:sdtContent></w:sdt>", "filled in"),
    ],
)
def test_a_paragraph_is_what_is_seen_of_it(inside: str, text: str, heard: Heard, tmp_path: Path) -> None:
    assert (heard.text(document(tmp_path / "a.docx", paragraph(inside))), heard.notes) == (f"{text}\n", [])


@pytest.mark.parametrize(
    ("body", "num_hidden"),
    [
        (paragraph(run("seen"), run("hidden", "<w:vanish/>")), 6),
        (paragraph(run("seen"), run("hidden", '<w:vanish w:val="true"/>')), 6),
        (paragraph(run("seen", '<w:vanish w:val="0"/>')), 0),
        (paragraph(run("seen")) + paragraph(run("hidden"), properties='<w:pStyle w:val="Gone"/>'), 6),
        (paragraph(run("seen")) + paragraph(run("hidden"), properties='<w:pStyle w:val="Heir"/>'), 6),
        (paragraph(run("seen"), run("hidden", '<w:rStyle w:val="Veil"/>')), 6),
        (paragraph(run("seen", '<w:rStyle w:val="Veil"/><w:vanish w:val="false"/>')), 0),
        (paragraph(run("seen", '<w:rStyle w:val="Veil"/>'), properties='<w:pStyle w:val="Gone"/>'), 0),
        (paragraph(run("seen", '<w:rStyle w:val="Bare"/>')), 0),
        (paragraph(run("seen", "<w:webHidden/>")), 0),
        (paragraph(run("seen"), field(" X ", run("hidden", "<w:vanish/>"))), 6),
    ],
)
def test_hidden_text_is_left_out_and_counted(body: str, num_hidden: int, heard: Heard, tmp_path: Path) -> None:
    """Text that no reader sees, by itself or by its style, was read as if it were seen."""
    looks = styles(
        *(style("Gone", HIDDEN), style("Heir", '<w:basedOn w:val="Gone"/>'), style("Veil", HIDDEN, kind="character")),
        style("Loop", '<w:basedOn w:val="Loop"/>'),
        style("Bare", f"<w:tblStylePr>{HIDDEN}</w:tblStylePr><w:rPr><w:rPrChange>{HIDDEN}</w:rPrChange></w:rPr>"),
    )
    file = document(tmp_path / "a.docx", body, related={"styles": "s.xml"}, **{"word/s.xml": looks})
    assert heard.text(file) == "seen\n"
    notes = [f"a.docx (Word): {num_hidden} hidden characters are left out"] if num_hidden else []
    assert heard.notes == notes


def test_paragraphs_without_a_style_have_the_default_one(heard: Heard, tmp_path: Path) -> None:
    looks = styles(style("Normal", HIDDEN, more='w:default="1"'), style("Plain", ""))
    body = paragraph(run("hidden")) + paragraph(run("seen"), properties='<w:pStyle w:val="Plain"/>')
    file = document(tmp_path / "a.docx", body, related={"styles": "s.xml"}, **{"word/s.xml": looks})
    assert heard.text(file) == "seen\n"


def test_a_text_box_is_read_once(heard: Heard, tmp_path: Path) -> None:
    box = f"<w:txbxContent>{paragraph(run('In the box'))}</w:txbxContent>"
    both = f"<mc:Choice Requires='wps'>{box}</mc:Choice><mc:Fallback>{box}</mc:Fallback>"
    old = f"<mc:Fallback><w:pict><v:textbox>{box.replace('In', 'Only in')}</v:textbox></w:pict></mc:Fallback>"
    body = "".join(
        paragraph(f"<w:r><mc:AlternateContent>{each}</mc:AlternateContent></w:r>", run(f"Around {number}"))
        for number, each in enumerate((both, old))
    )
    file = document(tmp_path / "a.docx", body)
    assert heard.text(file) == "In the box\n\nAround 0\n\nOnly in the box\n\nAround 1\n"


SHAPE = 'xmlns:wps="http://schemas.microsoft.com/office/word/2010/wordprocessingShape"'
CANVAS = 'xmlns:wpc="http://schemas.microsoft.com/office/word/2010/wordprocessingCanvas"'
EMOJI = 'xmlns:w16se="http://schemas.microsoft.com/office/word/2015/wordml/symex"'


@pytest.mark.parametrize(
    ("requires", "declared", "is_read"),
    [
        ("wps", SHAPE, True),
        ("wps wpc", f"{SHAPE} {CANVAS}", True),
        ("a", SHAPE.replace("wps=", "a="), True),  # a prefix is a name alone
        ("wps new", f'{SHAPE} xmlns:new="urn:of-tomorrow"', False),
        ("new wps", f'{SHAPE} xmlns:new="urn:of-tomorrow"', False),
        ("wps", 'xmlns:wps="urn:of-tomorrow"', False),
        ("wps", 'xmlns:wps="http://schemas.microsoft.com/office/word/2099/wordprocessingShape"', False),
        ("w16se", EMOJI, False),
        ("undeclared", SHAPE, False),
        ("", "", True),
    ],
)
def test_a_choice_is_read_if_all_that_it_requires_is_known(
    requires: str, declared: str, is_read: bool, heard: Heard, tmp_path: Path
) -> None:
    """A choice for readers of tomorrow was taken, and the fallback with its text left out."""
    choice = f'<mc:Choice Requires="{requires}">{run("Choice")}</mc:Choice>'
    other = f'<mc:Choice Requires="wps" {SHAPE}>{run("Second")}</mc:Choice>'
    for others, instead in ((f"<mc:Fallback>{run('Fallback')}</mc:Fallback>", "Fallback"), (other, "Second"), ("", "")):
        branches = f"<mc:AlternateContent {declared}>{choice}{others}</mc:AlternateContent>"
        file = document(tmp_path / "a.docx", paragraph(branches, run("|End")))
        assert heard.text(file) == f"{'Choice' if is_read else instead}|End\n"


def test_a_prefix_ends_with_the_element_that_declares_it(heard: Heard, tmp_path: Path) -> None:
    inner = paragraph(
        f'<mc:AlternateContent xmlns:x="urn:of-tomorrow"><mc:Fallback>{run("a")}</mc:Fallback></mc:AlternateContent>'
    )
    outer = f'<mc:AlternateContent><mc:Choice Requires="x">{run("b")}</mc:Choice></mc:AlternateContent>'
    body = f"<w:sdt {SHAPE.replace('wps=', 'x=')}><w:sdtContent>{inner}{paragraph(outer)}</w:sdtContent></w:sdt>"
    assert heard.text(document(tmp_path / "a.docx", body)) == "a\n\nb\n"


def test_paragraphs_whose_mark_is_deleted_or_hidden_are_one(heard: Heard, tmp_path: Path) -> None:
    body = "".join(
        paragraph(run("One "), properties=f"<w:rPr><w:{gone}/></w:rPr>") + paragraph(run("line"))
        for gone in ("del", "vanish", "moveFrom")
    )
    cell = f"<w:tc>{paragraph(run('cell'), properties='<w:rPr><w:del/></w:rPr>')}</w:tc>"
    file = document(tmp_path / "a.docx", f"{body}<w:tbl><w:tr>{cell}{cell}</w:tr></w:tbl>")
    assert heard.text(file) == "One line\n\nOne line\n\nOne line\n\ncell | cell\n"


def test_lists_are_those_of_today(heard: Heard, tmp_path: Path) -> None:
    """A list that a tracked change took off is none; a style has the list of the one that it is based on."""
    looks = styles(
        *(style("List", "<w:pPr><w:numPr/></w:pPr>"), style("Mine", '<w:basedOn w:val="List"/>')),
        style("Not", '<w:basedOn w:val="List"/><w:pPr><w:numPr><w:numId w:val="0"/></w:numPr></w:pPr>'),
    )
    before = "<w:pPrChange><w:pPr><w:numPr><w:ilvl w:val='0'/></w:numPr></w:pPr></w:pPrChange>"
    body = paragraph(run("a"), properties=before) + "".join(
        paragraph(run(name), properties=f'<w:pStyle w:val="{name}"/>') for name in ("List", "Mine", "Not")
    )
    file = document(tmp_path / "a.docx", body, related={"styles": "s.xml"}, **{"word/s.xml": looks})
    assert heard.text(file) == "a\n\n- List\n- Mine\n\nNot\n"


def test_what_is_not_read_is_said(heard: Heard, tmp_path: Path) -> None:
    body = paragraph(
        run("Text"),
        "<w:r><w:drawing><c:chart/></w:drawing></w:r><w:r><w:drawing><d:relIds/></w:drawing></w:r>",
        "<w:r><w:commentReference/></w:r>" * 2,
        '<w:r><w:sym w:font="Odd" w:char="F041"/></w:r>',
    )
    header = part("hdr", paragraph(run("Secret")))
    file = document(tmp_path / "a.docx", f"{body}<w:altChunk/>", related={"header": "h.xml"}, **{"word/h.xml": header})
    assert heard.text(file) == "Text\n"
    assert heard.notes == [
        "a.docx (Word): not read: 1 chart, 1 diagram, 2 comments, 1 symbol, 1 embedded document",
        "a.docx (Word): its headers and footers, 6 characters, are not read",
    ]


def test_a_field_without_an_end_is_said(heard: Heard, tmp_path: Path) -> None:
    file = document(tmp_path / "a.docx", paragraph(run("Before"), mark("begin"), run("lost")))
    assert heard.text(file) == "Before\n"
    assert heard.notes == ["a.docx (Word): 4 characters of a field that has no end are left out"]


def test_a_long_document_takes_the_memory_of_its_text(heard: Heard, tmp_path: Path) -> None:
    """A paragraph of one letter took 300 bytes until the end."""
    import tracemalloc

    number = 12_000
    file = document(tmp_path / "a.docx", paragraph(run("x")) * number)
    heard.text(file)
    tracemalloc.start()
    try:
        assert len(heard.text(file)) == 3 * number - 1
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 40 * number


def test_progress_is_shown_of_a_document_that_unpacks_to_much(heard: Heard, tmp_path: Path) -> None:
    file = document(tmp_path / "a.docx", paragraph(run("x")), **{"word/picture.png": "\0" * 1000})
    heard.read(file)
    assert heard.parts == []
    many = document(tmp_path / "b.docx", "".join(paragraph(run(f"{7 * n % 9973:x}")) for n in range(60_000)))
    assert many.stat().st_size < 2 << 20
    heard.read(many)
    assert len(heard.parts) > 10
