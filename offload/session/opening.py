"""The opening of a session's folder, for reading or for writing: its locks, and the errors that name a remedy."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from offload.errors import SessionError
from offload.session.folder import READERS, WRITER, Folder, Lock, owner
from offload.session.identity import Identity, differences
from offload.session.leftovers import foreign
from offload.session.manifest import MANIFEST_FILE
from offload.session.names import remedy


def open_to_read(path: Path, held: ExitStack) -> Folder:
    """Open an existing session and share the readers' lock. Creates no file if there is no session. SessionError."""
    if not path.is_dir():
        raise no_session(path)
    folder = held.enter_context(Folder(path))
    if not folder.has(MANIFEST_FILE):
        raise no_session(path)
    lock = Lock.take(folder, READERS, shared=True, wait=True)
    assert lock is not None
    held.enter_context(lock)
    return folder


def open_to_write(path: Path, held: ExitStack) -> Folder:
    if path.is_file():
        raise SessionError(f"{path} is a file, and a session is a folder; name another one")
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = held.enter_context(Folder(path))
    if not folder.has(MANIFEST_FILE) and (others := foreign(folder)):
        raise SessionError(f"{path} is not a session's folder, it holds {others[0]}; name a new or an empty folder")
    lock = Lock.take(folder, WRITER)
    if lock is None:
        raise SessionError(
            f"{path} is in use by {owner(folder)}; wait until that ends, open it with --read-only, or take another name"
        )
    held.enter_context(lock).sign()
    return folder


def check_identity(path: Path, saved: Identity, now: Identity) -> None:
    if differ := differences(saved, now):
        raise SessionError(
            f"{path} was saved under other conditions, its keys and values cannot be used here: {'; '.join(differ)}; "
            f"run under those conditions, or {remedy(path)}"
        )


def no_session(path: Path) -> SessionError:
    return SessionError(f"there is no session in {path}; leave out --read-only to start one, or name another")


@contextlib.contextmanager
def translated_errors(path: Path, read_only: bool) -> Iterator[None]:
    """Raise OSErrors as SessionErrors."""
    try:
        yield
    except OSError as error:
        remedies = "name another folder" if read_only else "name another folder, or only read it with --read-only"
        raise SessionError(f"{path} cannot be opened as a session ({error.strerror}); {remedies}") from error
