"""A session's folder: reading, making and replacing files in it.

Names are plain names of regular files: no symbolic link is followed, and nothing that could block is waited for. The
folder is held open, so what is done later is done in the same folder, whatever was put at its path meanwhile.
Everything here raises OSError.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

_CAUTION = os.O_NOFOLLOW | os.O_NONBLOCK


class Folder:
    """An open folder. `path` is where it was found."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def names(self) -> list[str]:
        return sorted(os.listdir(self._fd))

    def has(self, name: str) -> bool:
        try:
            self._status(name)
        except FileNotFoundError:
            return False
        return True

    def nbytes(self) -> int:
        """Of all files in it."""
        total = 0
        for name in self.names():
            try:
                total += self._status(name).st_size
            except FileNotFoundError:  # removed meanwhile by who may
                continue
        return total

    def changed(self) -> float:
        """When a file was last made, renamed or removed in it, in seconds since the epoch."""
        return os.fstat(self._fd).st_mtime

    def free_bytes(self) -> int:
        """Of the disk, for this user."""
        disk = os.fstatvfs(self._fd)
        return disk.f_bavail * disk.f_frsize

    def open(self, name: str) -> int:
        """A descriptor of an existing regular file, to read."""
        return self._open(name, os.O_RDONLY)

    def open_lock(self, name: str, *, shared: bool) -> int:
        """A descriptor of a file that is made where there is none. Who only shares need not be allowed to write."""
        try:
            return self._open(name, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            if not shared or error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise
            return self._open(name, os.O_RDONLY)

    def is_at(self, fd: int, name: str) -> bool:
        """Is the open file still the one of that name?"""
        try:
            return os.path.samestat(os.fstat(fd), self._status(name))
        except FileNotFoundError:
            return False

    def create(self, name: str) -> int:
        """A descriptor of a new file, to write. FileExistsError."""
        return self._open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL)

    def read(self, name: str, max_bytes: int) -> bytes:
        """All of a file, or its first `max_bytes` bytes and one more."""
        fd = self.open(name)
        with os.fdopen(fd, "rb") as file:
            return file.read(min(os.fstat(fd).st_size, max_bytes) + 1)

    def write(self, name: str, content: bytes) -> None:
        """A new file, on the disk when this returns."""
        fd = self.create(name)
        try:
            write_all(fd, memoryview(content), 0)
            os.fsync(fd)
        finally:
            os.close(fd)

    def replace(self, old: str, new: str) -> None:
        """Give `old` the name `new`, at once and for good: whoever reads `new` sees its old content or this one."""
        self.sync()
        os.replace(old, new, src_dir_fd=self._fd, dst_dir_fd=self._fd)
        self.sync()

    def remove(self, name: str) -> None:
        os.unlink(name, dir_fd=self._fd)

    def sync(self) -> None:
        """Names that were made are on the disk."""
        os.fsync(self._fd)

    def _status(self, name: str) -> os.stat_result:
        return os.stat(name, dir_fd=self._fd, follow_symlinks=False)

    def _open(self, name: str, flags: int) -> int:
        try:
            fd = os.open(name, flags | _CAUTION, 0o600, dir_fd=self._fd)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise OSError(errno.ELOOP, "a symbolic link, and none is followed", name) from error
            raise
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise OSError(errno.EINVAL, "not a regular file", name)
        return fd


def write_all(fd: int, content: memoryview, offset: int) -> None:
    """`content` (bytes) at `offset` of an open file."""
    while content:
        written = os.pwrite(fd, content, offset)
        content, offset = content[written:], offset + written


def read_all(fd: int, content: memoryview, offset: int) -> None:
    """Fill `content` (bytes) from `offset` of an open file. ValueError where it ends early."""
    while content:
        count = os.preadv(fd, [content], offset)
        if not count:
            raise ValueError(f"it ends at byte {offset}")
        content, offset = content[count:], offset + count
