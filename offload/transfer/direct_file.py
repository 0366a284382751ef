"""Files that are read past the page cache, out of which a file larger than memory would push everything else."""

from __future__ import annotations

import errno
import mmap
import os
from dataclasses import dataclass
from pathlib import Path

from offload.errors import ModelError, unreadable

ALIGNMENT = 4096  # bytes: of direct reads, a multiple of what any disk asks for


@dataclass(frozen=True)
class FileState:
    """The state of a file, by which a changed or replaced one is told from it."""

    device: int
    inode: int
    num_bytes: int
    changed: int  # nanoseconds

    @classmethod
    def of(cls, file: int | Path) -> FileState:
        """The present state of a path, or of an open file's descriptor. OSError."""
        found = os.stat(file)
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


class DirectFile:
    """A file that is read past the page cache: with O_DIRECT where its file system has that, else the pages of a read
    are dropped behind it. Close it."""

    def __init__(self, path: Path, state: FileState | None = None) -> None:
        """state: of the file when its description was read; None: as it is now. ModelError where it cannot be read or
        is another one by now."""
        self.path, self.is_direct = path, hasattr(os, "O_DIRECT")
        try:
            self._fd = self._opened()
            self._state = state or FileState.of(self._fd)
        except OSError as error:
            raise unreadable(path, error) from error
        try:
            self.check()
        except ModelError:
            self.close()
            raise

    @property
    def num_bytes(self) -> int:
        return self._state.num_bytes

    def read(self, start: int, stop: int, buffer: memoryview) -> int:
        """Read the bytes from `start` to `stop` into `buffer`, which is aligned and 2 * ALIGNMENT bytes longer.
        Returns their place in it. ModelError where they cannot be read or the file ends before them."""
        first, end = start // ALIGNMENT * ALIGNMENT, -(-stop // ALIGNMENT) * ALIGNMENT
        done = 0
        while first + done < stop:
            try:
                count = os.preadv(self._fd, [buffer[done : end - first]], first + done)
            except OSError as error:
                raise self._failed(start, stop, error.strerror or str(error)) from error
            done += count
            if first + done < stop:
                if count < ALIGNMENT:
                    raise self._failed(start, stop, f"it ends at byte {first + done}")
                done -= done % ALIGNMENT
        if not self.is_direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._fd, first, end - first, os.POSIX_FADV_DONTNEED)
        return start - first

    def check(self) -> None:
        """Raise ModelError unless the file is as it was when its description was read."""
        if (found := FileState.of(self._fd)) != self._state:
            raise ModelError(
                f"{self.path} is no longer the file that was opened: it had {self._state.num_bytes} bytes, and has "
                f"{found.num_bytes} or was written anew; parts of it are read as they are wanted, so leave it as it "
                "is, and start again"
            )

    def close(self) -> None:
        os.close(self._fd)

    def _opened(self) -> int:
        flags = os.O_RDONLY | os.O_CLOEXEC
        if self.is_direct:
            try:
                fd = os.open(self.path, flags | os.O_DIRECT)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
            else:
                try:
                    os.preadv(fd, [memoryview(mmap.mmap(-1, ALIGNMENT))], 0)
                except OSError as error:  # some file systems say so only here
                    os.close(fd)
                    if error.errno != errno.EINVAL:
                        raise
                else:
                    return fd
        self.is_direct = False
        return os.open(self.path, flags)

    def _failed(self, start: int, stop: int, reason: str) -> ModelError:
        return ModelError(
            f"{self.path}: bytes {start} to {stop} cannot be read ({reason}); if the disk is well, download the file "
            "again"
        )
