"""Who may do what in a session's folder: one writer for as long as it lives, and readers whose pages nobody removes.

Pages are never changed, only made and removed. So a writer and readers need not wait for each other: readers hold
READERS together while they read, and a writer leaves old pages lying while somebody does.
"""

from __future__ import annotations

import contextlib
import fcntl
import os

from offload.session.folder import Folder

WRITER, READERS = "writer.lock", "readers.lock"
_MAX_OWNER_BYTES = 32


class Lock:
    """A lock on one file of a folder (flock). The system gives it back when the process ends, however it ends."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    @classmethod
    def take(cls, folder: Folder, name: str, *, shared: bool = False, wait: bool = False) -> Lock | None:
        """The lock; None where somebody has it and we do not `wait`. Raises OSError.

        Its file goes with a session that is removed, so it is looked at again once the lock is ours.
        """
        while True:
            fd = folder.open_lock(name, shared=shared)
            try:
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
        """Write down whose the lock is. On a full disk it stays unsaid."""
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
    """Who has the writer's lock, in words."""
    with contextlib.suppress(OSError):
        text = folder.read(WRITER, _MAX_OWNER_BYTES)[:_MAX_OWNER_BYTES].strip()
        if text.isdigit():
            return f"process {int(text)}"
    return "another process"
