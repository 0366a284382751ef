"""The catalogue of sessions in a folder: list, inspect and remove. Listing reads manifests only and takes no lock."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from offload.errors import SessionError
from offload.session import manifest as manifests
from offload.session.folder import READERS, WRITER, Folder, Lock, owner
from offload.session.leftovers import discard, foreign
from offload.session.manifest import Manifest
from offload.session.names import is_name


@dataclass(frozen=True)
class Summary:
    """A session in a list. updated: seconds since the epoch. problem: the reason why it cannot be used, or ""."""

    path: Path
    nbytes: int  # of all its files
    num_tokens: int
    model_name: str
    updated: float
    problem: str = ""

    @property
    def name(self) -> str:
        return self.path.name


def summaries(root: Path) -> list[Summary]:
    """All sessions in `root`, the newest first, damaged ones too. SessionError if `root` cannot be read."""
    try:
        paths = [root / name for name in os.listdir(root) if is_name(name)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise SessionError(f"{root} cannot be listed ({error.strerror}); check its permissions") from error
    found = [_summary(path) for path in paths]
    return sorted((each for each in found if each is not None), key=lambda summary: (-summary.updated, summary.name))


def inspect(path: Path) -> Manifest:
    """The manifest of the session in the folder `path`. Raises SessionError."""
    try:
        with Folder(path) as folder:
            manifest = manifests.read(folder)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise _none_in(path) from error
    except OSError as error:
        raise SessionError(f"{path} cannot be read ({error.strerror}); check its permissions") from error
    if manifest is None:
        raise _none_in(path)
    return manifest


def remove(path: Path) -> int:
    """Remove the session in the folder `path`, damaged or not, and return the number of bytes freed.

    Raises SessionError if it is in use, is not a session, holds other files, or the system refuses.
    """
    try:
        if not path.is_dir():
            raise _none_in(path)
        with ExitStack() as held:
            folder = held.enter_context(Folder(path))
            if path.is_symlink() or foreign(folder):
                raise SessionError(f"{path} is a link or holds other files than a session's; remove it yourself")
            _lock_all(folder, held)
            num_bytes = folder.nbytes()
            discard(folder)
    except FileNotFoundError as error:  # another process removed it first
        raise _none_in(path) from error
    except OSError as error:
        raise SessionError(f"{path} cannot be removed ({error.strerror}); check its permissions") from error
    return num_bytes


def outdated(
    sessions: Sequence[Summary],
    *,
    now: float,
    older_than_seconds: float | None = None,
    keep: int | None = None,
    max_bytes: int | None = None,
) -> list[Summary]:
    """The `sessions` to remove, the oldest first. Of the remaining ones none is older than `older_than_seconds`, there
    are at most `keep`, and they take at most `max_bytes`. None: no limit. Every removed session is older than all that
    stay."""
    newest_first = sorted(sessions, key=lambda session: -session.updated)
    kept = total = 0
    for session in newest_first:
        total += session.nbytes
        old = older_than_seconds is not None and now - session.updated > older_than_seconds
        if old or (keep is not None and kept >= keep) or (max_bytes is not None and total > max_bytes):
            break
        kept += 1
    return newest_first[kept:][::-1]


def _lock_all(folder: Folder, held: ExitStack) -> None:
    """Take the writer's and the readers' lock. SessionError if another process holds one."""
    for name in (WRITER, READERS):
        lock = Lock.take(folder, name)
        if lock is None:
            who = owner(folder) if name == WRITER else "a process that reads it"
            raise SessionError(f"{folder.path} is in use by {who}; wait until that ends")
        held.enter_context(lock)


def _none_in(path: Path) -> SessionError:
    return SessionError(f"there is no session in {path}; 'triforce sessions ls' lists the sessions")


def _summary(path: Path) -> Summary | None:
    """The summary of the session at `path`; None if it is not a session's folder, was removed meanwhile, or cannot be
    read."""
    try:
        with Folder(path) as folder:
            num_bytes, changed = folder.nbytes(), folder.changed()
            try:
                manifest = manifests.read(folder)
            except SessionError as error:
                return Summary(path, num_bytes, 0, "", changed, str(error))
            if manifest is None:
                return None if foreign(folder) else Summary(path, num_bytes, 0, "", changed, "nothing was saved yet")
            name, updated = manifest.identity.model_name, manifest.updated
            return Summary(path, num_bytes, len(manifest.tokens), name, updated)
    except OSError:
        return None
