"""The prompt: a file or standard input, then `--prompt`.

The text is what the bytes say in UTF-8: a byte order mark at the start is dropped, line ends are kept as they are.
"""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from offload.errors import UsageError

STDIN = Path("-")
UTF8_BOM = b"\xef\xbb\xbf"
TEXT_MODULES = ("argparse", "typing", "inspect", "doctest", "tarfile", "pathlib", "subprocess", "ast", "configparser")
LIBRARY = "sources of Python's standard library"
PATIENCE_SECONDS = 2.0  # a silent pipe is waited for, but not without a word

Note = Callable[[str], None]


def read_prompt(file: Path | None, text: str | None, *, note: Note) -> str:
    """The content of `file`, then `text` on a new line. Without a file, standard input unless it is a terminal."""
    sources = _sources(file, text)
    if not sources:
        raise UsageError(
            "there is no prompt; name a file (triforce generate --prompt-file book.txt), pipe one in "
            "(cat book.txt | triforce generate) or give --prompt TEXT"
        )
    before = read_input(file or STDIN, "the prompt", note=note) if sources[0] != "--prompt" else ""
    prompt = _join(before, decode_argument("--prompt", text or ""))
    if not prompt:
        raise UsageError(f"the prompt is empty ({' and '.join(sources)}); it needs at least one character")
    return prompt


def read_input(file: Path, what: str, *, note: Note) -> str:
    """The UTF-8 text of `file`, or of standard input for "-". Raises UsageError, which calls it `what`."""
    return _decode_text(_read_stdin(what, note), STDIN) if file == STDIN else read_text(file, what)


def read_text(file: Path, what: str) -> str:
    """The UTF-8 text of `file`. Raises UsageError, which calls it `what`."""
    try:
        data = file.read_bytes()
    except OSError as error:
        raise UsageError(f"{what} cannot be read from {file}: {error.strerror}") from error
    return _decode_text(data, file)


def user_path(text: str) -> Path:
    """The path that a person typed, "~" being their home."""
    if "\0" in text:
        raise UsageError(f"{text!r} is no path: it has a zero byte")
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise UsageError(f"{text}: there is no such home folder") from error


def decode_argument(option: str, value: str) -> str:
    """`value` as the UTF-8 text that its bytes on the command line are, whatever the locale."""
    return _decode(os.fsencode(value), option)


def _sources(file: Path | None, text: str | None) -> list[str]:
    """The names of what makes up the prompt, in order."""
    read = [_name(file or STDIN)] if file or not _stdin_is_terminal() else []
    return read + (["--prompt"] if text is not None else [])


def _decode_text(data: bytes, file: Path) -> str:
    has_bom = data.startswith(UTF8_BOM)
    return _decode(data.removeprefix(UTF8_BOM), _name(file), offset=len(UTF8_BOM) if has_bom else 0)


def _read_stdin(what: str, note: Note) -> bytes:
    if sys.stdin is None:  # closed by the caller
        return b""
    if not select.select([sys.stdin], [], [], PATIENCE_SECONDS)[0]:
        note(f"waiting for {what} on standard input (Ctrl-D ends it)")
    return sys.stdin.buffer.read()


def _decode(data: bytes, name: str, *, offset: int = 0) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{name} is not valid UTF-8: byte 0x{data[error.start]:02x} at offset {error.start + offset}; "
            "convert it, for example with iconv -f LATIN1 -t UTF-8"
        ) from error


def _join(before: str, after: str) -> str:
    separator = "\n" if before and after and not before.endswith("\n") else ""
    return before + separator + after


def _stdin_is_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


def _name(file: Path) -> str:
    return "standard input" if file == STDIN else str(file)


def library_text() -> str:
    """A long real text that every machine has: about 700,000 characters, the same for one version of Python. Raises
    UsageError where Python has no sources."""
    return "\n\n".join(_source(name) for name in TEXT_MODULES)


def _source(module: str) -> str:
    found = find_spec(module)
    file = Path(found.origin) if found is not None and found.origin else None
    if file is None or file.suffix != ".py" or not file.is_file():
        raise UsageError(f"this Python has no source of its module {module} to make a prompt of; give --prompt-file")
    return file.read_text(encoding="utf-8")
