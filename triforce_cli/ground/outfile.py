"""`-o FILE`: written atomically; an interrupted run leaves FILE.partial."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from types import TracebackType

from offload.errors import TriforceError, UsageError
from offload.interrupts import waiting

PARTIAL = ".partial"


class OutputFile:
    """The output file, as a context manager. Data goes to FILE.partial, locked, which is renamed to FILE at the end.

    After an error or an interrupt FILE.partial stays, and `note` gets a line that names it; if nothing was written, an
    older FILE.partial is unchanged. A symbolic link stays one. A named pipe or a device is written to directly.
    """

    def __init__(self, path: Path, *, note: Callable[[str], None]) -> None:
        self._path, self._note = path, note
        self._partial: Path | None = None  # None: FILE is written directly
        self._file: FileIO | None = None
        self._begun = False

    def __enter__(self) -> OutputFile:
        """Open and lock the file. Raises UsageError, before anything is computed."""
        try:
            if self._path.is_dir():
                raise IsADirectoryError(0, "it is a folder")
            if self._path.exists() and not self._path.is_file():
                with waiting():
                    self._file = FileIO(self._path, "w")
                return self
            self._partial = self._destination().with_name(self._destination().name + PARTIAL)
        except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle, before Python 3.13
            raise UsageError(f"{self._path} cannot be written: {getattr(error, 'strerror', error)}") from error
        self._file = open_alone(self._partial, self._path)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._file is None:
            return
        with self._file as file:
            if self._partial is None:
                return
            if kind is None:
                self._begin(file)
                os.replace(self._partial, self._destination())
            elif self._begun:
                self._note(f"what came until then is in {self._partial}")
            elif self._partial.stat().st_size == 0:
                self._partial.unlink()

    def write(self, data: bytes) -> None:
        """Write without delay. Raises TriforceError; BrokenPipeError if the reader of a pipe has gone."""
        if self._file is None:
            raise ValueError("the file is not open")
        try:
            self._begin(self._file)
            write_all(self._file, data)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise TriforceError(f"{self._partial or self._path} cannot be written: {error.strerror}") from error

    def _begin(self, file: FileIO) -> None:
        """Truncate an earlier run's FILE.partial before the first write."""
        if not self._begun and self._partial is not None and os.fstat(file.fileno()).st_size > 0:
            file.truncate(0)
        self._begun = True

    def _destination(self) -> Path:
        return self._path.resolve() if self._path.is_symlink() else self._path


def open_alone(path: Path, name: Path) -> FileIO:
    """`path`, opened for writing from its beginning, created if missing, not truncated, locked until it is closed.

    Raises UsageError, which calls it `name`.
    """
    try:
        while True:
            file = FileIO(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666), "w")
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
            file.close()  # its former owner has renamed or removed it since it was opened
    except BlockingIOError as error:
        raise UsageError(f"{name} is being written by another process; name another file") from error
    except OSError as error:
        raise UsageError(f"{name} cannot be written: {error.strerror}") from error


def write_all(file: FileIO, data: bytes) -> None:
    """Write all of `data`, unbuffered: a buffer would fail a second time when it is closed. Raises OSError."""
    rest = memoryview(data)
    while rest:
        with waiting():
            rest = rest[file.write(rest) :]
