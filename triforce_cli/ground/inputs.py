"""Bytes of files, pipes and standard input, up to a limit. Devices and sockets, which may never end, are refused."""

from __future__ import annotations

import os
import select
import stat
import sys
from pathlib import Path
from typing import IO, Any, Protocol

from offload.errors import UsageError
from offload.interrupts import waiting
from offload.units import size

MOST_TEXT_BYTES = 256 << 20  # of one text, at most
PATIENCE_SECONDS = 2.0  # before the note that a pipe is silent
LONG_SECONDS = 8.0  # after the first note: before a second one, shown even with --quiet
_PIECE_BYTES = 1 << 20
_ENDLESS = {stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFSOCK: "a socket"}


class Note(Protocol):
    """A function that shows the person a line; urgent: even with --quiet."""

    def __call__(self, line: str, *, urgent: bool = False) -> None: ...


def read_file(path: Path, what: str, *, note: Note) -> bytes:
    """All of a file, or of a pipe until its writers close it. what: its name in messages. Raises UsageError."""
    try:
        _check_kind(path, what, path.stat().st_mode)  # before opening it, which may affect a device
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as stream:
            found = os.fstat(stream.fileno())
            _check_kind(path, what, found.st_mode)
            _check_size(str(path), found.st_size)
            if not stat.S_ISFIFO(found.st_mode):
                return _read(stream, str(path))
            _wait(stream, what, f"{path} (Ctrl-C gives up)", f"nothing writes to {path}", note)
            os.set_blocking(stream.fileno(), True)
            return _read(stream, str(path))
    except OSError as error:
        raise UsageError(f"{what} cannot be read from {path}: {error.strerror}") from error


def read_stdin(what: str, *, note: Note) -> bytes:
    """All of standard input; no bytes if it is closed. Raises UsageError."""
    if sys.stdin is None:  # closed by the caller
        return b""
    silent = "standard input is open, and nothing comes; </dev/null where there is none"
    _wait(sys.stdin, what, "standard input (Ctrl-D ends it)", silent, note)
    return _read(sys.stdin.buffer, "standard input")


def _check_kind(path: Path, what: str, mode: int) -> None:
    """Raises UsageError for files without a definite end (devices, sockets)."""
    if found := _ENDLESS.get(stat.S_IFMT(mode)):
        raise UsageError(
            f"{what} cannot be read from {path}: it is {found}, which need not end; name a file or a pipe "
            f'("-" is standard input)'
        )


def _check_size(name: str, num_bytes: int, more: str = "") -> None:
    if num_bytes > MOST_TEXT_BYTES:
        raise UsageError(f"{name} has {more}{size(num_bytes)}, a text may have {size(MOST_TEXT_BYTES)}; split it")


def _read(stream: IO[bytes], name: str) -> bytes:
    """The stream's bytes to its end, whatever size the system reports; past the limit the rest is not read."""
    found = bytearray()
    while piece := _piece(stream, min(_PIECE_BYTES, MOST_TEXT_BYTES + 1 - len(found))):
        found += piece
        _check_size(name, len(found), "over ")
    return bytes(found)


def _piece(stream: IO[bytes], num_bytes: int) -> bytes:
    with waiting():
        return stream.read(num_bytes)


def _wait(stream: IO[Any], what: str, where: str, silent: str, note: Note) -> None:
    """Wait until the stream has data or has ended. Notes tell the person about a silent stream."""
    if _comes(stream, PATIENCE_SECONDS):
        return
    note(f"waiting for {what} on {where}")
    if not _comes(stream, LONG_SECONDS):
        note(f"still waiting for {what}: {silent}", urgent=True)
        _comes(stream, None)


def _comes(stream: IO[Any], seconds: float | None) -> bool:
    """True if the stream has data or has ended within `seconds`; None: wait without a limit."""
    with waiting():
        return bool(select.select([stream], [], [], seconds)[0])
