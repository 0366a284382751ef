"""Removal of leftover files that a session's manifest does not name: files of an earlier save, an interrupted save or a
killed writer. Only files with a session's file names are ever removed."""

from __future__ import annotations

import contextlib
import errno
import os
import re

from offload.session.folder import READERS, WRITER, Folder, Lock
from offload.session.manifest import MANIFEST_FILE, Manifest, is_content_file

_TEMPORARY = re.compile(r"manifest-[0-9a-f]{16}\.tmp", re.ASCII)


def temporary_file(tag: str) -> str:
    """The name of a manifest while it is written; `tag` as for a page."""
    return f"manifest-{tag}.tmp"


def foreign(folder: Folder) -> list[str]:
    """Names of the files that do not belong to a session."""
    own = (MANIFEST_FILE, WRITER, READERS)
    return [name for name in folder.names() if name not in own and not _is_temporary_or_content(name)]


def sweep(folder: Folder, manifest: Manifest | None) -> None:
    """Remove the files that `manifest`, the one on the disk, does not name. The caller holds the writer's lock.

    Files stay for the next time while another process reads, or if the system refuses.
    """
    named = manifest.files if manifest else set()
    with contextlib.suppress(OSError):
        lock = Lock.take(folder, READERS)
        if lock is None:
            return
        with lock:
            for name in folder.names():
                if _is_temporary_or_content(name) and name not in named:
                    folder.remove(name)


def discard(folder: Folder) -> None:
    """Remove the session and its folder: the manifest first, so that an interrupted removal leaves no session, and the
    locks, which the caller holds, last. The folder stays if another process has put files there meanwhile. OSError."""
    for name in (MANIFEST_FILE, *filter(_is_temporary_or_content, folder.names()), READERS, WRITER):
        with contextlib.suppress(FileNotFoundError):
            folder.remove(name)
    try:
        os.rmdir(folder.path)
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:
            raise


def _is_temporary_or_content(name: str) -> bool:
    return is_content_file(name) or _TEMPORARY.fullmatch(name) is not None
