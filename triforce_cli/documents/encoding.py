"""The encoding of a web page, detected as browsers do, and its text in that encoding.

Names are the labels of the WHATWG Encoding Standard: gb2312 is gbk, shift_jis is windows-31j, iso-8859-1 is
windows-1252. Python's codecs decode; the characters in which they differ from the standard's tables are here.
"""

from __future__ import annotations

import codecs
import re
from typing import NoReturn

from offload.errors import UsageError
from triforce_cli.documents.limits import Meter, library
from triforce_cli.documents.markup import Attributes, local, parse

_HEAD_BYTES = 1 << 16  # searched for the encoding that a page declares
_MARKS = {
    codecs.BOM_UTF8: "utf-8",
    codecs.BOM_UTF16_LE: "utf-16le",
    codecs.BOM_UTF16_BE: "utf-16be",
    "<?x".encode("utf-16-le"): "utf-16le",
    "<?x".encode("utf-16-be"): "utf-16be",
}
_IN_XML = re.compile(rb"""<\?xml\s[^>]*?\bencoding\s*=\s*["']([^"'>]+)["']""")
_IN_CONTENT = re.compile(r"""charset\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s;"']+))""", re.IGNORECASE)
_READABLE_AS_ASCII = {"utf-16le": "utf-8", "utf-16be": "utf-8", "x-user-defined": "windows-1252"}

_CODECS = {"gbk": "gb18030", "iso-2022-jp": "iso2022_jp_ext"}  # supersets of webencodings' codecs
_JAPANESE = str.maketrans("\u301c\u2016\u2212\xa2\xa3\xac", "\uff5e\u2225\uff0d\uffe0\uffe1\uffe2")
_CHINESE = str.maketrans(
    "\ue5e5\ue78d\ue78e\ue78f\ue790\ue791\ue792\ue793\ue794\ue795\ue796"
    "\ue7c7\ue81e\ue826\ue82b\ue82c\ue832\ue843\ue854\ue864",
    "\u3000\ufe10\ufe12\ufe11\ufe13\ufe14\ufe15\ufe16\ufe17\ufe18\ufe19"
    "\u1e3f\u9fb4\u9fb5\u9fb6\u9fb7\u9fb8\u9fb9\u9fba\u9fbb",
)
_LETTERS = {
    "euc-jp": _JAPANESE,
    "iso-2022-jp": _JAPANESE,
    "gbk": _CHINESE,
    "gb18030": _CHINESE,
    "big5": str.maketrans(
        "\u2022\uff64\u203e\u223c\u2641\u2609\uff0f\uff3c\xa5\xa2\xa3",
        "\u2027\ufe51\xaf\uff5e\u2295\u2299\u2215\ufe68\uffe5\uffe0\uffe1",
    ),
    "koi8-u": str.maketrans("\u255d\u256c", "\u045e\u040e"),
}


def decoded(data: bytes, meter: Meter, what: str = "", *, is_xml: bool = False) -> str:
    """The text of a page. Its encoding is that of its byte order mark, else the one it declares, else UTF-8 if that
    fits, else windows-1252, the default of HTML. is_xml: an XML declaration takes precedence over <meta>. what: the
    page's name in errors. Raises UsageError if bytes are invalid in that encoding."""
    name = what or meter.name
    encoding = _encoding(data, meter, name, is_xml=is_xml)
    codec = _CODECS.get(encoding) or library("webencodings", meter.name).lookup(encoding).codec_info.name
    try:
        text = data.decode(codec, _handler(encoding))
    except UnicodeDecodeError as error:
        place = f"byte 0x{data[error.start]:02x} at offset {error.start:,}"
        remedy = f"iconv -c -f {encoding} -t UTF-8 leaves out such bytes"
        raise UsageError(f"{name} says that it is {encoding} and is not: {place}; {remedy}") from error
    return text.translate(_LETTERS.get(encoding, {})).removeprefix("\ufeff").replace("\0", "")


def _encoding(data: bytes, meter: Meter, name: str, *, is_xml: bool) -> str:
    """The standard's name of the page's encoding."""
    for mark, encoding in _MARKS.items():
        if data.startswith(mark):
            return encoding
    in_xml = _IN_XML.match(data)
    label = in_xml[1].decode("ascii", "replace") if in_xml else ""
    if not (is_xml and label):
        label = _declared(data, meter) or label
    if not label:
        is_utf8 = data.decode("utf-8", "ignore").encode("utf-8") == data
        return "utf-8" if is_utf8 else "windows-1252"
    found = library("webencodings", meter.name).lookup(label)
    if found is None:
        raise UsageError(f"{name} says that it is in {label!r}, which is not known; convert it to UTF-8")
    if found.name == "replacement":
        raise UsageError(f"{name} is in {label!r}, which no browser reads; iconv -f {label} -t UTF-8 converts it")
    return _READABLE_AS_ASCII.get(found.name, str(found.name))


def _declared(data: bytes, meter: Meter) -> str:
    """The encoding in the first <meta> that declares one, or ""."""
    heard = _Meta()
    parse([data[:_HEAD_BYTES].decode("latin-1").encode("utf-8")], "html", heard, meter)
    return heard.label


class _Meta:
    """A listener for the encoding that a page declares. Comments, scripts and descriptions do not count."""

    def __init__(self) -> None:
        self.label = ""

    def start(self, tag: str, attributes: Attributes) -> None:
        if local(tag).lower() != "meta" or self.label:
            return
        label = attributes.get("charset", "")
        if not label.strip() and attributes.get("http-equiv", "").strip().lower() == "content-type":
            found = _IN_CONTENT.search(attributes.get("content", ""))
            label = next(filter(None, found.groups()), "") if found else ""
        self.label = label.strip().lower()

    def end(self, tag: str) -> None: ...

    def text(self, text: str) -> None: ...


def _handler(encoding: str) -> str:
    """The error handler for bytes that are in the standard's table and not in Python's codec."""
    if encoding.startswith("windows-"):
        return "triforce-control"
    if encoding in ("gbk", "gb18030"):
        return "triforce-euro"
    return "triforce-japanese" if encoding in ("euc-jp", "iso-2022-jp") else "strict"


def _control(error: UnicodeError) -> tuple[str, int]:
    """Decode bytes 0x80 to 0x9f without a character as control characters."""
    data, start = _fault(error)
    return (chr(data[start]), start + 1) if 0x80 <= data[start] <= 0x9F else _refuse(error)


def _euro(error: UnicodeError) -> tuple[str, int]:
    data, start = _fault(error)
    return ("€", start + 1) if data[start] == 0x80 else _refuse(error)


def _japanese(error: UnicodeError) -> tuple[str, int]:
    """Decode rows 13 and 89 to 92 of JIS X 0208, NEC's and IBM's, by the same position in windows-31j."""
    data, start = _fault(error)
    pair = [byte & 0x7F for byte in data[start : start + 2]]
    if data[start] == 0x8F or len(pair) < 2 or not all(0x21 <= byte <= 0x7E for byte in pair):
        _refuse(error)
    row, cell = pair[0] - 0x21, pair[1] - 0x21
    first = row // 2 + (0x81 if row < 62 else 0xC1)
    second = cell + 0x9F if row % 2 else cell + 0x40 + (cell >= 63)
    try:
        return bytes((first, second)).decode("cp932"), start + 2
    except UnicodeDecodeError as unknown:
        raise error from unknown


def _fault(error: UnicodeError) -> tuple[bytes, int]:
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return error.object, error.start


def _refuse(error: UnicodeError) -> NoReturn:
    raise error


for _name, _mended in (("control", _control), ("euro", _euro), ("japanese", _japanese)):
    codecs.register_error(f"triforce-{_name}", _mended)
