"""UTF-8 texts from files, standard input and arguments.

A byte order mark at the start is dropped; line ends stay as they are.
"""

from __future__ import annotations

import codecs
import os
import sys
from pathlib import Path

from offload.errors import UsageError
from offload.files import expanded
from triforce_cli.ground.inputs import Note, read_file, read_stdin
from triforce_cli.screen.output import Output

STDIN = Path("-")
PIPED = "standard input"
UTF8_BOM = b"\xef\xbb\xbf"
_OTHER_FILES = {  # by first bytes; a longer key comes before a key that is its prefix
    codecs.BOM_UTF32_LE: "it begins as UTF-32 text does; convert it with iconv -f UTF-32 -t UTF-8",
    codecs.BOM_UTF16_LE: "it begins as UTF-16 text does; convert it with iconv -f UTF-16 -t UTF-8",
    codecs.BOM_UTF16_BE: "it begins as UTF-16 text does; convert it with iconv -f UTF-16 -t UTF-8",
    b"%PDF": "it is a PDF; pdftotext makes text of it",
    b"PK\x03\x04": "it is a ZIP archive, as .docx and .epub files are; pandoc -t plain makes text of those",
    b"\x1f\x8b": "it is compressed; gunzip it first",
    b"\xd0\xcf\x11\xe0": "it is an old Word, Excel or PowerPoint file; save it as .docx or PDF",
}
HEAD_BYTES = 4096  # enough to recognise an encoding or a kind of file
_CONTROLS = bytes(set(range(32)) - set(b"\t\n\v\f\r\b\x1b"))
_UTF16_BOMS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)  # UTF-32's little-endian mark begins with UTF-16's


def read_input(file: Path, what: str, *, note: Note) -> str:
    """The UTF-8 text of `file`, or of standard input for "-". Raises UsageError, which calls it `what`."""
    return _decode_text(read_stdin(what, note=note) if file == STDIN else read_file(file, what, note=note), file)


def taken(piped: str, what: str) -> str:
    """The note that standard input was read as `what` beside the typed arguments: a shell's `while read` loop may need
    that input itself."""
    characters = "1 character" if len(piped) == 1 else f"{len(piped):,} characters"
    return f"standard input: {characters}, read as {what}; </dev/null leaves it out"


def without_line_end(text: str) -> str:
    """`text` without its last line end, which belongs to the file or the pipe and not to the message."""
    return text.removesuffix("\n").removesuffix("\r") if text.endswith("\n") else text


def read_text(file: Path, what: str) -> str:
    """The UTF-8 text of a file named by an option, with urgent notes only. Raises UsageError, which calls it `what`."""
    return _decode_text(read_file(file, what, note=Output(quiet=True).note), file)


def user_path(text: str) -> Path:
    """The path typed by a person; "~" is their home folder."""
    if "\0" in text:
        raise UsageError(f"{text!r} is no path: it has a zero byte")
    return expanded(text)


def decode_argument(option: str, value: str) -> str:
    """`value` as the UTF-8 text that its bytes on the command line are, whatever the locale."""
    return _decode(os.fsencode(value), option)


def _decode_text(data: bytes, file: Path) -> str:
    has_bom = data.startswith(UTF8_BOM)
    return _decode(data.removeprefix(UTF8_BOM), _name(file), offset=len(UTF8_BOM) if has_bom else 0)


def _decode(data: bytes, name: str, *, offset: int = 0) -> str:
    if _is_utf16(data):  # decoding would succeed: zero bytes are valid UTF-8
        raise UsageError(f"{name} is UTF-16 text: every other byte is zero; convert it with {_from_utf16(data)}")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        byte = f"byte 0x{data[error.start]:02x} at offset {error.start + offset}"
        raise UsageError(f"{name} is not valid UTF-8: {byte}; {_remedy(data)}") from error


def _remedy(data: bytes) -> str:
    """The way to convert `data`, which is not UTF-8, to UTF-8 text."""
    remedies = (remedy for start, remedy in _OTHER_FILES.items() if data.startswith(start))
    latin = "convert it, for example with iconv -f LATIN1 -t UTF-8"
    return next(remedies, "it is a binary file, of which no text is read" if is_binary(data[:HEAD_BYTES]) else latin)


def is_binary(head: bytes) -> bool:
    """True if the beginning of a file has characters that no text has. UTF-16 with a byte order mark counts as text."""
    return not head.startswith(_UTF16_BOMS) and len(head) != len(head.translate(None, _CONTROLS))


def _is_utf16(data: bytes) -> bool:
    """True for text in a Western language: nearly half of its bytes are zero, all at even or all at odd places."""
    even, odd = (data[start:HEAD_BYTES:2] for start in (0, 1))
    fewer, more = sorted((even.count(0), odd.count(0)))
    return len(odd) > 1 and fewer == 0 and more > 0.8 * len(odd)


def _from_utf16(data: bytes) -> str:
    order = "" if data.startswith(_UTF16_BOMS) else "BE" if data[0] == 0 else "LE"
    return f"iconv -f UTF-16{order} -t UTF-8"


def stdin_is_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


def _name(file: Path) -> str:
    return PIPED if file == STDIN else str(file)
