"""Places of documents: a passage is found on the page, in the chapter or below the heading that its document has."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from offload.engine.passages import Passage
from offload.errors import UsageError
from triforce_cli.answering.citations import Citation, citations
from triforce_cli.documents import Document
from triforce_cli.documents.places import Place, marked, place_at
from triforce_cli.documents.reading import joined
from triforce_cli.prompts.conversation import Conversation

pytest.importorskip("pypdf")
pytest.importorskip("docx")
pytest.importorskip("reportlab")
pytest.importorskip("lxml")

from test_cli_prompt import piped
from test_documents_in import Heard, epub, pdf, word
from test_documents_in import page as web_page
from test_epub import XHTML, book
from test_word import document, paragraph, run, style, styles

Run = Callable[..., tuple[int, str, str]]
NAV = '<html xmlns:epub="http://www.idpf.org/2007/ops"><body><nav epub:type="toc"><ol>{}</ol></nav>{}</body></html>'
LETTER = "Dear reader, this head stands on every page."


class Letters:
    """A tokenizer of characters."""

    def decode(self, tokens: Any) -> str:
        return "".join(map(chr, tokens))


def cited(prompt: str, documents: list[Document], start: int, end: int) -> Citation:
    [found] = citations([Passage(start, end, (0.5,))], list(map(ord, prompt)), documents, Letters(), "")  # type: ignore[arg-type]
    return found


def begun(text: str, places: tuple[Place, ...]) -> list[tuple[str, str]]:
    """Each place, and the text at which it begins."""
    return [(str(place), text[place.start :].split("\n", 1)[0]) for place in places]


def test_pages_of_a_pdf_begin_where_their_text_does(tmp_path: Path) -> None:
    [read] = Heard().read(pdf(tmp_path / "a.pdf", ["First", "of one"], [], ["Third"], ["Fourth"]))
    assert begun(read.text, read.places) == [("p. 1", "First"), ("p. 3", "Third"), ("p. 4", "Fourth")]
    assert read.document.places == read.places


def test_headings_of_a_page_are_of_its_main_text(tmp_path: Path) -> None:
    content = (
        "<nav><h2>Menu</h2></nav><main><p>Before.</p><h1>The <b>sea</b><br>and more</h1><p>Blue.</p>"
        "<h2>Hills</h2><ul><li>Green.</li></ul><table><tr><th>No heading</th></tr></table></main>"
    )
    [read] = Heard().read(web_page(tmp_path / "a.html", content))
    assert begun(read.text, read.places) == [('"The sea and more"', "The sea"), ('"Hills"', "Hills")]
    assert cited(f"    {read.text}", [read.document], 0, 15).place == 'before "The sea and more"'


def test_headings_of_word_are_styles_and_outline_levels(tmp_path: Path) -> None:
    told = styles(
        style("H1", '<w:name w:val="heading 1"/>'),
        style("Mine", '<w:basedOn w:val="H1"/>'),
        style("Contents", '<w:basedOn w:val="H1"/><w:pPr><w:outlineLvl w:val="9"/></w:pPr>'),
        style("Outlined", '<w:name w:val="Clause"/><w:pPr><w:outlineLvl w:val="2"/></w:pPr>'),
    )

    def styled(name: str, text: str, more: str = "") -> str:
        return paragraph(run(text), properties=f'<w:pStyle w:val="{name}"/>{more}')

    body = (
        paragraph(run("Text.")) + styled("H1", "One") + styled("Contents", "Contents") + styled("Mine", "Two")
        + styled("Outlined", "Three", '<w:numPr><w:numId w:val="1"/></w:numPr>')
        + styled("H1", "No heading", '<w:outlineLvl w:val="9"/>')
        + paragraph(run("Four"), properties='<w:outlineLvl w:val="0"/>') + paragraph(run("End."))
    )  # fmt: skip
    [read] = Heard().read(
        document(tmp_path / "a.docx", body, related={"styles": "styles.xml", "footnotes": "notes.xml"},
                 **{"word/styles.xml": told, "word/notes.xml": f"<w:footnotes xmlns:w='http://schemas.openxmlformats.org/wordprocessingml/2006/main'>{paragraph(run('Below.'))}</w:footnotes>"})
    )  # fmt: skip
    assert begun(read.text, read.places) == [
        ('"One"', "One"),
        ('"Two"', "Two"),
        ('"Three"', "- Three"),
        ('"Four"', "Four"),
        ('"footnotes"', "Below."),
    ]
    [plain] = Heard().read(word(tmp_path / "b.docx", paragraph(run("No style at all."))))
    assert plain.places == ()


def test_chapters_are_called_as_the_contents_call_them(tmp_path: Path) -> None:
    chapters = {
        "a.xhtml": "<h1>Not this one</h1><p>First.</p>",
        "b.xhtml": "<p>Goes on.</p><h2 id='two'>II</h2><p>Second.</p><h2 id='x y'>III</h2><p>Third.</p>",
        "c.xhtml": "<h2>By its heading</h2><p>Fourth.</p>",
        "d.xhtml": "<p>Fifth.</p>",
    }
    path = epub(tmp_path / "a.epub", chapters)
    [read] = Heard().read(path)
    assert [str(place) for place in read.places] == ['"Not this one"', '"II"', '"By its heading"', "chapter 4"]
    links = {"a.xhtml": "I. The  beginning", "b.xhtml#two": "The middle", "b.xhtml#x%20y": "The third", "e.xhtml": "No"}
    listed = "".join(f'<li><a href="t/../{to}">{title}</a></li>' for to, title in links.items())
    pages = '<nav epub:type="page-list"><a href="d.xhtml">77</a></nav>'
    items = [f'id="{name[0]}" href="{name}" media-type="{XHTML}"' for name in chapters]
    order = [f'idref="{name[0]}"' for name in chapters]
    members = {f"O/{name}": f"<html><body>{text}</body></html>" for name, text in chapters.items()}
    nav = f'id="nav" href="nav.xhtml" media-type="{XHTML}" properties="nav"'
    path = book(tmp_path / "b.epub", [*items, nav], order, **members, **{"O/nav.xhtml": NAV.format(listed, pages)})
    [read] = Heard().read(path)
    assert begun(read.text, read.places) == [
        ('"I. The beginning"', "Not this one"),
        ("chapter 2", "Goes on."),
        ('"The middle"', "II"),
        ('"The third"', "III"),
        ('"By its heading"', "By its heading"),
        ("chapter 4", "Fifth."),
    ]
    assert [place.number for place in read.places] == [1, 2, 2, 2, 3, 4]
    ncx = (
        "<ncx><navMap><navPoint><navLabel><text>One</text></navLabel><content src='a.xhtml'/><navPoint><navLabel><text>"
        "Two</text></navLabel><content src='b.xhtml'/></navPoint></navPoint></navMap><pageList><pageTarget><navLabel>"
        "<text>9</text></navLabel><content src='d.xhtml'/></pageTarget></pageList></ncx>"
    )
    old = 'id="n" href="toc.ncx" media-type="application/x-dtbncx+xml"'
    [read] = Heard().read(book(tmp_path / "c.epub", [*items, old], order, **members, **{"O/toc.ncx": ncx}))
    assert [str(place) for place in read.places] == ['"One"', '"Two"', '"By its heading"', "chapter 4"]
    heard = Heard()
    [read] = heard.read(book(tmp_path / "d.epub", [*items, old], order, **members, **{"O/toc.ncx": ncx[:40]}))
    assert next(str(place) for place in read.places) == '"Not this one"'
    assert "table of contents is damaged, so chapters are called by their headings" in heard.notes[0]


def test_a_character_is_in_the_last_place_that_has_begun() -> None:
    pages = tuple(Place("page", start, number) for number, start in enumerate((3, 10, 20), 1))
    assert [place_at(pages, at) for at in (2, 3, 9, 10, 99)] == [None, pages[0], pages[0], pages[1], pages[2]]
    assert place_at((), 0) is None
    long = str(Place("heading", 0, 1, "line\nbreak and \x1b[2J " * 20))
    assert long.startswith('"line break and \\u001b[2J line')
    assert len(long) < 80


def test_the_same_words_on_every_page_are_cited_by_the_page(tmp_path: Path) -> None:
    """Places were estimated by the share of the prompt before the passage: with a long system message, a long question
    or two editions of a document, that named another page."""
    pages = [[LETTER, f"Number {number}. " + "Word after word. " * (3 * number)] for number in range(6)]
    heard = Heard()
    [first] = heard.read(pdf(tmp_path / "first.pdf", *pages))
    [second] = heard.read(pdf(tmp_path / "second.pdf", *pages))
    documents = [first.document, second.document]
    prompt = f"{'Be brief. ' * 300}{joined([first, second])}{'Why? ' * 90}"
    heads = [at for at in range(len(prompt)) if prompt.startswith(LETTER, at)]
    assert len(heads) == 12
    found = [cited(prompt, documents, at, at + len(LETTER)) for at in heads]
    assert [(each.document, each.place) for each in found] == [
        (name, f"p. {number}") for name in ("first.pdf", "second.pdf") for number in range(1, 7)
    ]
    [as_json] = {json.dumps(found[3].as_dict()["places"])}
    assert json.loads(as_json) == [{"kind": "page", "number": 4, "title": ""}]
    assert str(found[3]).startswith("first.pdf, p. 4 (50%): Dear reader, this head")


PLACED = (
    "Before.\nOne\nThe first fact is 11. It is old.\nTwo\nThe second fact is 22 and\nit is new.\nThree\nThe last one."
)


def placed(kind: Any) -> Document:
    starts = [PLACED.index(title) for title in ("One", "Two", "Three")]
    return Document("d", PLACED, tuple(Place(kind, at, number, f"No {number}") for number, at in enumerate(starts, 1)))


@pytest.mark.parametrize(
    ("shares", "place", "text"),
    [
        ((0.4, 0.1, 0.1), '"No 1"', "The first fact is 11. It is old."),
        ((0.1, 0.2, 0.1), '"No 2"', "Two\nThe second fact is 22 and\nit is new."),
        ((0.1, 0.1, 0.5), '"No 3"', "Three\nThe last one."),
    ],
)
def test_a_passage_over_several_places_is_cited_by_the_one_that_has_most_of_its_share(
    shares: tuple[float, ...], place: str, text: str
) -> None:
    """It was named by all of them ("32. ..." to "34. ..."), and began in the middle of a word."""
    document, start = placed("heading"), PLACED.index("fact is 11") - 4
    whole = f"{PLACED}\nWhy is it so?"
    [found] = citations([Passage(start, len(PLACED) + 4, shares)], list(map(ord, whole)), [document], Letters(), "")  # type: ignore[arg-type]
    assert (found.place, found.text) == (place, text)
    assert [each["number"] for each in found.as_dict()["places"]] == [int(place[-2])]
    assert shares[0] / 9 < found.share < sum(shares)  # without what fell on other places, and on the question


def test_a_sentence_over_a_page_break_is_cited_whole() -> None:
    text = "A first page. It says that the\n\nlimit is 40. Another."
    document = Document("d", text, (Place("page", 0, 1), Place("page", text.index("limit"), 2)))
    found = cited(text, [document], text.index("limit") - 4, text.index("40") + 8)
    assert (found.place, found.text) == ("p. 2", "limit is 40.")  # the blank line between pages begins a sentence
    wrapped = text.replace("\n\n", "\n")
    wide = Document("d", f"{wrapped}\n", (Place("page", 0, 1), Place("page", wrapped.index("limit"), 2)))
    found = cited(wide.text, [wide], wrapped.index("limit") - 4, wrapped.index("40") + 8)
    assert (found.place, found.text) == ("p. 2", "It says that the\nlimit is 40.")


@pytest.mark.parametrize("change", [str.strip, partial(unicodedata.normalize, "NFD"), lambda text: text[1:]])
def test_places_are_right_where_a_template_changes_texts(change: Any) -> None:
    whole = "".join(f"é{LETTER}\nOn page {number} there is a sentence {number * 'more '}\n\n" for number in range(6))
    starts = [at for at in range(len(whole)) if whole.startswith(f"é{LETTER}", at)]
    pages = tuple(Place("page", start, number) for number, start in enumerate(starts, 1))
    documents = [Document("a.pdf", f"\n \n{whole}", tuple(Place("page", p.start + 3, p.number) for p in pages))]
    documents.append(Document("b.pdf", whole, pages))
    prompt = f"{'Be brief. ' * 100}[a]\n{change(documents[0].text)}[b]\n{change(whole)}{'Why? ' * 200}"
    heads = [at for at in range(len(prompt)) if prompt.startswith(LETTER, at)]
    found = [cited(prompt, documents, at, at + len(LETTER)) for at in heads]
    assert [(each.document, each.place) for each in found] == [
        (name, f"p. {number}") for name in ("a.pdf", "b.pdf") for number in range(1, 7)
    ]


def test_a_conversation_keeps_places_and_reads_one_from_before() -> None:
    places = (Place("page", 0, 1), Place("page", 5, 2), Place("chapter", 6, 3, "Third"))
    conversation = Conversation().with_document(Document("a.pdf", "text and more", places)).asked("Why?")
    data = json.loads(conversation.to_json())
    again = Conversation.from_data(data, "it")
    assert again.documents[0].places == places
    answered = Conversation.from_json(conversation.answered("So.", [1], complete=True).to_json(), "it")
    assert answered.documents[0].places == places
    del data["pending_documents"][0]["places"]
    before = Conversation.from_data(data, "it")
    assert before.documents[0].places == ()
    assert before == conversation  # so naming the file again adds nothing
    data["pending_documents"][0]["places"] = [{"kind": "verse", "start": 0, "number": 1, "title": ""}]
    with pytest.raises(UsageError, match=r"places\[0\].kind is \"verse\"; it must be "):
        Conversation.from_data(data, "it")


def test_text_is_what_the_model_reads(triforce: Run, tmp_path: Path) -> None:
    note = tmp_path / "b.txt"
    note.write_bytes("No line end,\r\nand ünïcode".encode())
    files = [pdf(tmp_path / "a.pdf", ["First"], [], ["Third", "and more"]), note]
    assert triforce("text", str(note)) == (0, "No line end,\r\nand ünïcode", "")
    code, out, err = triforce("text", *map(str, files), "--quiet")
    assert (code, out, err) == (0, joined(Heard().read(*files)), "")
    assert triforce("text", *map(str, files), "--places", "-q")[1] == (
        "===== a.pdf =====\n--- p. 1 ---\nFirst\n\n--- p. 3 ---\nThird\nand more\n\n"
        "===== b.txt =====\nNo line end,\r\nand ünïcode\n"
    )
    code, out, _ = triforce("text", str(tmp_path), "--include", "*.pdf", "--json")
    [found] = json.loads(out)["documents"]
    assert found["places"] == [
        {"kind": "page", "number": 1, "title": "", "start": 0, "line": 1},
        {"kind": "page", "number": 3, "title": "", "start": 7, "line": 3},
    ]
    assert (found["name"], found["kind"], found["text"]) == ("a.pdf", "PDF", "First\n\nThird\nand more\n")
    assert found["remarks"] == ["1 of 3 pages have no text (2): empty, or pictures"]
    code, _, err = triforce("text", str(note), "--json", "--places")
    assert (code, "--json has the places" in err) == (2, True)
    with piped(b"From a pipe"):
        assert triforce("text") == (0, "From a pipe", "")


def test_a_place_within_a_line_is_marked_on_a_line_of_its_own() -> None:
    places = (Place("chapter", 4, 1, "The sea"), Place("chapter", 8, 2))
    assert marked("one two three", places) == 'one \n--- "The sea" ---\ntwo \n--- chapter 2 ---\nthree'
    assert marked("", ()) == ""
