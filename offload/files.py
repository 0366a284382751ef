"""File paths: paths that the user names, the program's folders, and small files that are written atomically."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from offload.errors import UsageError, shell_line
from offload.interrupts import waiting

_ADDRESS = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]+):/+")


def user_folder(kind: Literal["data", "cache", "config", "state"], name: str = "", *, variable: str = "") -> Path:
    """The folder in the environment variable `variable`, or else `name` in the user's folder of that kind. Raises
    UsageError if the user has no such folder."""
    if variable and (folder := os.environ.get(variable)):
        return expanded(folder)
    import platformdirs

    try:
        return Path(getattr(platformdirs, f"user_{kind}_dir")("triforce", appauthor=False)) / name
    except RuntimeError as error:  # a container may run as a user without an entry in its passwd
        raise UsageError(
            f"there is no home folder: HOME is not set, and this system knows no user {os.getuid()}; set HOME to a "
            "folder that you can write to"
        ) from error


def address_in(text: str) -> str:
    """The network address (URL) that was given as a path; "" if it is not an address, or if such a path exists. A Path
    that was made from an address has one slash instead of two."""
    found = None if os.path.lexists(text) else _ADDRESS.match(text)
    return f"{found['scheme']}://{text[found.end() :]}" if found else ""


def expanded(text: str) -> Path:
    """The path that the user wrote, with "~" expanded to the home folder. Raises UsageError if there is no such home,
    and for a network address."""
    if address := address_in(text):
        remedy = f"download it first ({shell_line('curl', '-LO', address)}) and name the file"
        raise UsageError(f"{address} is an address and nothing is fetched from it; {remedy}")
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise UsageError(f"{text}: there is no such home folder") from error


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on the file `path`, which is created if missing and stays. Other processes wait for the
    lock. The system releases it when the process ends. OSError."""
    with path.open("ab") as file:
        with waiting():
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def write_whole(path: Path, text: str, *, mode: int | None = None) -> None:
    """Write `text` as UTF-8 to `path` atomically: a reader, also after a failure, sees the old file or the new one.
    mode: without one it follows the umask. OSError."""
    temporary = path.parent / f"{path.name}{secrets.token_hex(8)}.tmp"  # also for "/", which cannot be replaced
    try:
        with temporary.open("x", encoding="utf-8") as file:
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
