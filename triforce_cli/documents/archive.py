"""A ZIP archive with limits: unpacked sizes are counted while reading, whatever its directory says."""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from offload.errors import UsageError
from offload.units import size
from triforce_cli.documents.limits import MOST_DIRECTORY_BYTES, MOST_MEMBERS, PIECE_BYTES, Meter

_FAULTS = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError, KeyError, OSError)


class Archive:
    """A ZIP archive. Its methods raise UsageError."""

    def __init__(self, stream: IO[bytes], meter: Meter) -> None:
        self._meter = meter
        with _translated(meter.name):
            self._zip = zipfile.ZipFile(_Sparing(stream, meter.name))
        self.names = frozenset(self._zip.namelist())
        self._sizes = {member.filename: member.file_size for member in self._zip.infolist()}
        if len(self._zip.infolist()) > MOST_MEMBERS:
            raise UsageError(
                f"{meter.name} holds {len(self._zip.infolist()):,} files, a document may hold {MOST_MEMBERS:,}; is it "
                "a real one?"
            )

    def pieces(self, name: str) -> Iterator[bytes]:
        """The content of a member, piece by piece."""
        if name not in self.names:
            raise UsageError(f"{self._meter.name} is damaged: it holds no {name}; fetch it again, or save it anew")
        with _translated(self._meter.name), self._zip.open(name) as member:
            while piece := member.read(PIECE_BYTES):
                self._meter.unpacked(len(piece))
                yield piece

    def num_bytes(self, name: str) -> int:
        """The size of a member in bytes, from the archive's directory."""
        return self._sizes.get(name, 0)

    def read(self, name: str) -> bytes:
        """The content of a member, at most the size of a page."""
        found = bytearray()
        for piece in self.pieces(name):
            found += piece
            self._meter.markup(len(found), f"{name} in {self._meter.name}")
        return bytes(found)


class _Sparing(io.BufferedReader):
    """A reader that refuses huge reads: the only one of `zipfile` is the directory."""

    def __init__(self, stream: IO[bytes], name: str) -> None:
        super().__init__(stream)  # type: ignore[arg-type]
        self._document = name

    def read(self, size_: int | None = -1) -> bytes:
        if size_ is not None and size_ > MOST_DIRECTORY_BYTES:
            raise UsageError(
                f"{self._document} has a directory of {size(size_)}, an archive's may have "
                f"{size(MOST_DIRECTORY_BYTES)}; is it a real document?"
            )
        return super().read(size_)


@contextmanager
def opened(path: Path) -> Iterator[Archive | None]:
    """The archive in a file, or None if the file is damaged or no archive. Raises UsageError past a limit."""
    with path.open("rb") as stream:
        yield Archive(stream, Meter(str(path))) if zipfile.is_zipfile(stream) else None


@contextmanager
def _translated(name: str) -> Iterator[None]:
    try:
        yield
    except UsageError:
        raise
    except _FAULTS as error:
        if "password" in str(error) or "encrypted" in str(error):
            raise UsageError(f"{name} is encrypted; open it where the password is known and save it without") from error
        raise UsageError(f"{name} is a damaged archive ({error}); fetch it again, or save it anew") from error
