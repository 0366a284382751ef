"""Files of a session that its manifest does not name: of the save before, of one that was broken off, of a writer that
was killed. Only files that are called as ours are touched."""

from __future__ import annotations

import contextlib
import errno
import os
import re

from offload.session.folder import Folder
from offload.session.lock import READERS, WRITER, Lock
from offload.session.manifest import MANIFEST_FILE, Manifest, is_page_file

_TEMPORARY = re.compile(r"manifest-[0-9a-f]{16}\.tmp", re.ASCII)


def temporary_file(tag: str) -> str:
    """What a manifest is called before it is whole; `tag` as for a page."""
    return f"manifest-{tag}.tmp"


def foreign(folder: Folder) -> list[str]:
    """Files that are none of ours."""
    ours = (MANIFEST_FILE, WRITER, READERS)
    return [name for name in folder.names() if name not in ours and not _is_passing(name)]


def sweep(folder: Folder, manifest: Manifest | None) -> None:
    """Remove what `manifest`, which is the one on the disk, does not name. The writer's business.

    While somebody reads, and what the system will not remove: left for the next time.
    """
    named = {page.file for page in manifest.pages} if manifest else set()
    with contextlib.suppress(OSError):
        lock = Lock.take(folder, READERS)
        if lock is None:
            return
        with lock:
            for name in folder.names():
                if _is_passing(name) and name not in named:
                    folder.remove(name)


def discard(folder: Folder) -> None:
    """Remove the session and its folder: the manifest first, so that what is left of a removal is no session, and the
    locks, which the caller holds, last. A folder in which somebody has begun anew meanwhile stays. OSError."""
    for name in (MANIFEST_FILE, *filter(_is_passing, folder.names()), READERS, WRITER):
        with contextlib.suppress(FileNotFoundError):
            folder.remove(name)
    try:
        os.rmdir(folder.path)
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:
            raise


def _is_passing(name: str) -> bool:
    return is_page_file(name) or _TEMPORARY.fullmatch(name) is not None
