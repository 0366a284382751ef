"""A session's folder: its files, read, created and replaced, and its locks.

Files are regular files: symbolic links are not followed, and opening never blocks. The folder is kept open, so every
later operation is on the same folder even if its path is replaced. Everything here raises OSError.

One writer holds WRITER as long as it lives. Readers share READERS while they read. Pages are never changed, only
created and removed, so a writer and readers need not wait for each other: while a process reads, a writer removes no
old pages.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from offload.interrupts import waiting

WRITER, READERS = "writer.lock", "readers.lock"
_MAX_OWNER_BYTES = 32
_SAFE_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK


class Folder:
    """An open folder. path: the path by which it was opened."""

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

    def nbytes(self, names: Iterable[str] | None = None) -> int:
        """Bytes of the files `names`, as far as they are in the folder; None: of all files."""
        total = 0
        for name in self.names() if names is None else names:
            try:
                total += self._status(name).st_size
            except FileNotFoundError:  # removed meanwhile by another process
                continue
        return total

    def changed(self) -> float:
        """The time a file was last created, renamed or removed in the folder, in seconds since the epoch."""
        return os.fstat(self._fd).st_mtime

    def free_bytes(self) -> int:
        """Bytes on the disk that this user may still write."""
        disk = os.fstatvfs(self._fd)
        return disk.f_bavail * disk.f_frsize

    def open(self, name: str) -> int:
        """Open an existing regular file for reading; returns its descriptor."""
        return self._open(name, os.O_RDONLY)

    def open_lock(self, name: str, *, shared: bool) -> int:
        """Open a lock file, created if missing; returns its descriptor. A shared lock needs no permission to write."""
        try:
            return self._open(name, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            if not shared or error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise
            return self._open(name, os.O_RDONLY)

    def is_at(self, fd: int, name: str) -> bool:
        """Tell whether the open file `fd` is still the one called `name`."""
        try:
            return os.path.samestat(os.fstat(fd), self._status(name))
        except FileNotFoundError:
            return False

    def create(self, name: str) -> int:
        """Create a new file for writing; returns its descriptor. FileExistsError."""
        return self._open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL)

    def read(self, name: str, max_bytes: int) -> bytes:
        """The content of a file; of a file over `max_bytes`, the first `max_bytes` + 1 bytes."""
        fd = self.open(name)
        with os.fdopen(fd, "rb") as file:
            return file.read(min(os.fstat(fd).st_size, max_bytes) + 1)

    def write(self, name: str, content: bytes) -> None:
        """Create a new file with `content`. It is synced to the disk when this returns."""
        fd = self.create(name)
        try:
            write_all(fd, memoryview(content), 0)
            os.fsync(fd)
        finally:
            os.close(fd)

    def replace(self, old: str, new: str) -> None:
        """Rename `old` to `new` atomically and durably: a reader of `new` sees the old content or the new one."""
        self.sync()
        self.rename(old, new)
        self.sync()

    def rename(self, old: str, new: str) -> None:
        """Rename `old` to `new` atomically; perhaps not yet on the disk when this returns."""
        os.replace(old, new, src_dir_fd=self._fd, dst_dir_fd=self._fd)

    def remove(self, name: str) -> None:
        os.unlink(name, dir_fd=self._fd)

    def sync(self) -> None:
        """Sync the folder, so that new names are on the disk."""
        os.fsync(self._fd)

    def _status(self, name: str) -> os.stat_result:
        return os.stat(name, dir_fd=self._fd, follow_symlinks=False)

    def _open(self, name: str, flags: int) -> int:
        try:
            fd = os.open(name, flags | _SAFE_FLAGS, 0o600, dir_fd=self._fd)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise OSError(errno.ELOOP, "a symbolic link, which is not followed", name) from error
            raise
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise OSError(errno.EINVAL, "not a regular file", name)
        return fd


class Lock:
    """A lock on one file of a folder (flock). The system releases it when the process ends, even by a crash."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    @classmethod
    def take(cls, folder: Folder, name: str, *, shared: bool = False, wait: bool = False) -> Lock | None:
        """Take the lock. Returns None if another process holds it and `wait` is not set.

        Removing a session removes the lock's file too, so the file is checked again once the lock is taken.
        """
        while True:
            fd = folder.open_lock(name, shared=shared)
            try:
                with waiting():
                    fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
                if folder.is_at(fd, name):
                    return cls(fd)
            except BlockingIOError:
                os.close(fd)
                return None
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)

    def sign(self) -> None:
        """Write this process's id into the lock's file, if the disk has room."""
        with contextlib.suppress(OSError):
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, b"%d\n" % os.getpid(), 0)

    def release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


def owner(folder: Folder) -> str:
    """The holder of the writer's lock, for a message."""
    with contextlib.suppress(OSError):
        text = folder.read(WRITER, _MAX_OWNER_BYTES)[:_MAX_OWNER_BYTES].strip()
        if text.isdigit():
            return f"process {int(text)}"
    return "another process"


def write_all(fd: int, content: memoryview, offset: int) -> None:
    """Write `content` (bytes) at `offset` of an open file."""
    while content:
        written = os.pwrite(fd, content, offset)
        content, offset = content[written:], offset + written


def read_all(fd: int, content: memoryview, offset: int) -> None:
    """Fill `content` (bytes) from `offset` of an open file. ValueError if the file ends early."""
    while content:
        count = os.preadv(fd, [content], offset)
        if not count:
            raise ValueError(f"it ends at byte {offset}")
        content, offset = content[count:], offset + count
