"""Sources of the prompt, and refused ones."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from offload.errors import UsageError
from test_cli_fake import command, environment, run, start
from triforce_cli.documents.prompt import read_prompt
from triforce_cli.documents.selection import Named
from triforce_cli.ground import inputs
from triforce_cli.screen.utf8 import decode_argument


class Terminal:
    """A standard input that is a terminal and must not be read."""

    def isatty(self) -> bool:
        return True


@contextmanager
def piped(data: bytes) -> Iterator[None]:
    """Standard input is a pipe that holds `data` and is closed at the other end."""
    reader, writer = os.pipe()
    os.write(writer, data)
    os.close(writer)
    before, sys.stdin = sys.stdin, open(reader, encoding="utf-8")  # noqa: SIM115
    try:
        yield
    finally:
        sys.stdin.close()
        sys.stdin = before


def read(file: Path | None = None, text: str | None = None) -> str:
    return read_prompt(Named(() if file is None else (file,)), text, note=silent, on_read=unread).text


def silent(line: str, *, urgent: bool = False) -> None:
    """Says nothing."""


def unread(stage: str, done: int, total: int) -> None:
    """Small texts are read before anybody looks."""
    raise AssertionError(stage)


@pytest.fixture
def book(tmp_path: Path) -> Path:
    return tmp_path / "book.txt"


def test_file_is_read_as_it_is(book):
    book.write_bytes("Zwölf\r\nBoxkämpfer\t\0\n\n".encode())
    with piped(b"not this"):
        assert read(book) == "Zwölf\r\nBoxkämpfer\t\0\n\n"


def test_byte_order_mark_is_dropped_at_the_start_only(book):
    book.write_bytes(b"\xef\xbb\xbfHi\xef\xbb\xbf")
    assert read(book) == "Hi\ufeff"


def test_pipe_is_read_when_no_file_is_named():
    with piped(b"from a pipe"):
        assert read() == "from a pipe"


def test_dash_is_standard_input():
    with piped(b"from a pipe"):
        assert read(Path("-")) == "from a pipe"


@pytest.mark.parametrize(
    ("before", "joined"),
    [(b"Some text", "Some text\nIn short:"), (b"Some text\n", "Some text\nIn short:"), (b"", "In short:")],
)
def test_prompt_text_comes_after_on_a_new_line(before, joined, book):
    book.write_bytes(before)
    assert read(book, "In short:") == joined
    with piped(before):
        assert read(None, "In short:") == joined


def test_empty_prompt_text_adds_nothing(book):
    book.write_text("Some text")
    assert read(book, "") == "Some text"


def test_terminal_is_not_read_when_the_text_is_given(monkeypatch):
    monkeypatch.setattr(sys, "stdin", Terminal())
    assert read(None, "In short:") == "In short:"


def test_file_is_read_at_a_terminal_too(monkeypatch, book):
    book.write_text("Some text")
    monkeypatch.setattr(sys, "stdin", Terminal())
    assert read(book) == "Some text"


def test_nothing_at_a_terminal_is_refused_with_an_example(monkeypatch):
    monkeypatch.setattr(sys, "stdin", Terminal())
    with pytest.raises(UsageError, match=r"--prompt-file book\.txt"):
        read()


@pytest.mark.parametrize("text", [None, ""])
def test_empty_prompt_is_refused_and_says_where_it_looked(text, book):
    book.write_bytes(b"\xef\xbb\xbf")
    with pytest.raises(UsageError, match=r"the prompt is empty.*book\.txt"):
        read(book, text)
    with piped(b""), pytest.raises(UsageError, match=r"the prompt is empty.*standard input"):
        read(None, text)


@pytest.mark.parametrize(
    ("data", "offset"),
    [(b"abc\xff", 3), (b"\xef\xbb\xbfabc\xff", 6), (b"\xff\xfeH\0\xfe\1", 0), (b"ab\xc3", 2), (b"\xed\xa0\x80", 0)],
)
def test_invalid_utf8_names_file_byte_and_offset(data, offset, book):
    book.write_bytes(data)
    with pytest.raises(UsageError, match=f"book.txt is not valid UTF-8: byte 0x{data[offset]:02x} at offset {offset};"):
        read(book)
    with piped(data), pytest.raises(UsageError, match=f"standard input is not valid UTF-8.* offset {offset};"):
        read()


def test_missing_file_and_empty_folder_are_named(book, tmp_path):
    with pytest.raises(UsageError, match=r"book\.txt: No such file"):
        read(book)
    with pytest.raises(UsageError, match=f"{tmp_path} has no document that can be read; name another"):
        read(tmp_path)


def test_unreadable_file_is_named(book, monkeypatch):
    def refuse(path: Path, flags: int) -> int:
        raise PermissionError(13, "Permission denied", str(path))

    book.write_text("closed")
    monkeypatch.setattr(inputs.os, "open", refuse)  # root could read any file
    with pytest.raises(UsageError, match=r"book\.txt: Permission denied"):
        read(book)


def test_invalid_utf8_on_the_command_line_is_refused():
    assert decode_argument("--prompt", os.fsdecode("naïve".encode())) == "naïve"
    with pytest.raises(UsageError, match="--prompt is not valid UTF-8: byte 0xff at offset 1"):
        decode_argument("--prompt", os.fsdecode(b"a\xff"))


def test_silent_pipe_is_waited_for_but_not_without_a_word(monkeypatch):
    monkeypatch.setattr(inputs, "PATIENCE_SECONDS", 0.05)
    reader, writer = os.pipe()
    notes: list[str] = []

    def speak(line: str) -> None:
        notes.append(line)
        os.write(writer, b"at last")
        os.close(writer)

    with open(reader, encoding="utf-8") as pipe:
        monkeypatch.setattr(sys, "stdin", pipe)
        assert read_prompt(Named(), None, note=speak, on_read=unread).text == "at last"
    assert notes == ["waiting for the prompt on standard input (Ctrl-D ends it)"]


@pytest.mark.few(1)
@pytest.mark.parametrize("redirection", ["<&-", "</dev/null"])
def test_prompt_text_alone_works_without_a_standard_input(redirection, tmp_path):
    line = '"$0" "$@" ' + redirection
    args = command("--model", str(tmp_path), "--prompt", "Hi")
    done = subprocess.run(["/bin/sh", "-c", line, *args], env=environment({"pieces": ["there"]}), capture_output=True)
    assert (done.returncode, done.stdout) == (0, b"there")


@pytest.mark.few(1)
@pytest.mark.parametrize("redirection", ["<&-", "</dev/null"])
def test_no_prompt_at_all_ends_with_2(redirection, tmp_path):
    line = '"$0" "$@" ' + redirection
    args = command("--model", str(tmp_path))
    done = subprocess.run(["/bin/sh", "-c", line, *args], env=environment(), capture_output=True)
    assert (done.returncode, done.stdout) == (2, b"")
    assert b"the prompt" in done.stderr
    assert b"standard input" in done.stderr


def test_utf8_prompt_arrives_whole_in_a_c_locale(tmp_path):
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = run(
        "--model", str(tmp_path), "--prompt", "naïve", "--stop", "Ende…", stdin="Äpfel".encode(), env=locale, how=start
    )
    assert done.returncode == 0
    asked = done.stdout.decode("utf-8")
    assert '"prompt": "\\u00c4pfel\\nna\\u00efve"' in asked
    assert '"stop": ["Ende\\u2026"]' in asked
