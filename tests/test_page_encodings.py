"""The encoding of a page is the one that a browser finds, and its letters are the ones that a browser shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from offload.errors import UsageError
from test_documents_in import Heard, epub
from triforce_cli.documents.encoding import decoded
from triforce_cli.documents.limits import Meter

pytest.importorskip("lxml")
webencodings = pytest.importorskip("webencodings")

HEAD = '<html><head><meta http-equiv="Content-Type" content="text/html; charset={}"><title>x</title></head><body><p>'


@pytest.fixture
def heard() -> Heard:
    return Heard()


def read(heard: Heard, folder: Path, data: bytes, name: str = "a.html") -> str:
    (folder / name).write_bytes(data)
    return heard.text(folder / name).removesuffix("\n")


@pytest.mark.parametrize(
    ("label", "data", "text"),
    [
        ("gb2312", "陶喆与朱镕基".encode("gbk"), "陶喆与朱镕基"),
        ("gbk", b"\x80 \xa8\xbc \x81\x30\x84\x36", "€ ḿ ¥"),
        ("gb18030", "\U0001f600".encode("gb18030"), "\U0001f600"),
        ("euc-kr", "똠방각하".encode("cp949"), "똠방각하"),
        ("ks_c_5601-1987", "똠방각하".encode("cp949"), "똠방각하"),
        ("big5", "啫喱嘅嘢".encode("big5hkscs"), "啫喱嘅嘢"),
        ("big5-hkscs", b"\xa1\x45\xa2\x46", "‧￠"),
        ("x-sjis", "日本語".encode("cp932"), "日本語"),
        ("shift_jis", "①～㈱髙".encode("cp932"), "①～㈱髙"),
        ("ms_kanji", "①".encode("cp932"), "①"),
        ("euc-jp", b"\xad\xa1\xa1\xc1\xad\xea\xfc\xe2\xc6\xfc", "①～㈱髙日"),
        ("x-euc-jp", b"\x8e\xb1\x8f\xb0\xa1", "ｱ丂"),
        ("iso-2022-jp", b"\x1b$B\x2d\x21\x46\x7c\x21\x41\x1b(I1\x1b(B a", "①日～ｱ a"),
        ("iso-8859-9", "“İstanbul”".encode("cp1254"), "“İstanbul”"),
        ("latin5", "“İstanbul”".encode("cp1254"), "“İstanbul”"),
        ("iso-8859-1", "5 € – “x”".encode("cp1252"), "5 € – “x”"),
        ("us-ascii", "5 €".encode("cp1252"), "5 €"),
        ("windows-1252", b"a\x81\x9db", "a\x81\x9db"),
        ("iso-8859-11", "“ไทย”".encode("cp874"), "“ไทย”"),
        ("tis-620", "ไทย".encode("cp874"), "ไทย"),
        ("iso-8859-8-i", "שלום".encode("iso8859-8"), "שלום"),
        ("koi8-r", "Привет".encode("koi8-r"), "Привет"),
        ("koi8-u", b"\xae\xbe \xc1", "ўЎ а"),
        ("x-cp1251", "Привет".encode("cp1251"), "Привет"),
        ("cp866", "Привет".encode("cp866"), "Привет"),
        ("x-mac-cyrillic", "Привет".encode("mac-cyrillic"), "Привет"),
        ("macintosh", "é €".encode("mac-roman"), "é €"),
        ("arabic", "سلام".encode("iso8859-6"), "سلام"),
        ("greek", "γειά".encode("iso8859-7"), "γειά"),
        ("l2", "Łódź".encode("iso8859-2"), "Łódź"),
        ("utf8", "日本語".encode(), "日本語"),
        ("unicode-1-1-utf-8", "日本語".encode(), "日本語"),
        ("utf-16", "日本語".encode(), "日本語"),
        ("unicode", "日本語".encode(), "日本語"),
        ("x-user-defined", "5 €".encode("cp1252"), "5 €"),
    ],
)
def test_labels_mean_what_browsers_mean(label: str, data: bytes, text: str, heard: Heard, tmp_path: Path) -> None:
    """Python's codecs of the same names refuse such pages, or read other letters. Compared with Chromium's decoders."""
    assert read(heard, tmp_path, HEAD.format(label).encode() + data + b"</p>") == text


def test_every_label_of_the_standard_is_known(heard: Heard, tmp_path: Path) -> None:
    for label in webencodings.labels.LABELS:
        page = HEAD.format(label).encode() + b"plain"
        if webencodings.lookup(label).name == "replacement":
            with pytest.raises(UsageError, match=f"page is in '{label}', which no browser reads; iconv"):
                decoded(page, Meter("page"))
        else:
            assert decoded(page, Meter("page")).endswith("plain")


@pytest.mark.parametrize(
    "head",
    [
        '<!-- <meta charset="koi8-r"> --><meta charset="utf-8">',
        '<meta name="description" content="about charset=koi8-r pages"><meta charset="utf-8">',
        '<meta name="description" content="about charset=koi8-r pages">',
        "<script>var page = '<meta charset=koi8-r>'</script><meta charset=utf-8>",
        '<title>&lt;meta charset="koi8-r"&gt;</title><meta charset=utf-8>',
        '<meta data-charset="koi8-r"><meta charset=utf-8>',
        '<meta http-equiv="refresh" content="5; url=?charset=koi8-r"><meta charset=utf-8>',
        '<a href="?charset=koi8-r"></a>',
        '<meta charset=""><meta charset="utf-8">',
        "<META CHARSET=' UTF-8 '><meta charset=koi8-r>",
        "<meta http-equiv=content-type content=\"text/html; CharSet = 'utf-8'; x\">",
        '<meta content="text/html;charset=utf-8;x" http-equiv="Content-Type">',
        f"<!-- {'long ' * 500} --><meta charset=utf-8>",
        '<?xml version="1.0" encoding="koi8-r"?><meta charset="utf-8">',
    ],
    ids=range(14),
)
def test_only_a_declaration_declares(head: str, heard: Heard, tmp_path: Path) -> None:
    """An encoding that stood in a comment or a description was taken for the page's."""
    xml, _, rest = head.rpartition("?>")
    page = f"{xml}?>" if xml else ""
    assert read(heard, tmp_path, f"{page}<html><head>{rest}</head><body><p>Привет".encode()) == "Привет"


@pytest.mark.parametrize(
    "data",
    [
        "\ufeff<meta charset=koi8-r><p>Привет".encode(),
        "<meta charset=koi8-r><p>Привет".encode("utf-16"),
        "\ufeff<p>Привет".encode("utf-16-be"),
        '<?xml version="1.0" encoding="windows-1251"?><html><p>Привет'.encode("cp1251"),
        '<?xml version="1.0" encoding="utf-16"?><html><p>Привет'.encode(),
    ],
    ids=range(5),
)
def test_byte_order_marks_and_xml_declarations(data: bytes, heard: Heard, tmp_path: Path) -> None:
    assert read(heard, tmp_path, data) == "Привет"


def test_a_chapter_is_xml_and_its_declaration_comes_first(heard: Heard, tmp_path: Path) -> None:
    text = '<?xml version="1.0" encoding="{}"?><html><head><meta charset="koi8-r"/></head><body><p>Привет</p></body>'
    for encoding in ("utf-8", "windows-1251", "utf-16", "utf-16-le", "utf-16-be"):  # with a mark, and without
        file = epub(tmp_path / "a.epub", {"a": ""}, **{"book/a": text.format(encoding).encode(encoding)})
        assert heard.text(file) == "Привет\n"


@pytest.mark.parametrize(
    ("label", "data", "byte"),
    [("gb2312", b"\x81\x30<", "0x81"), ("euc-jp", b"\x8f\xff\xff", "0x8f"), ("windows-1253", b"\xd2", "0xd2")],
)
def test_bytes_of_no_letter_are_named(label: str, data: bytes, byte: str, heard: Heard, tmp_path: Path) -> None:
    head = f"<meta charset={label}><p>".encode()
    (tmp_path / "a.html").write_bytes(head + data)
    assert f"and is not: byte {byte} at offset {len(head)}; iconv -c -f" in heard.refused(tmp_path / "a.html")
