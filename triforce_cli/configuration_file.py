"""The configuration file on the disk, rewritten whole: its owner's alone if it is made."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

from offload.errors import UsageError
from offload.files import locked, user_folder, write_whole
from triforce_cli.configuration import default_file, text_of

_PRIVATE = 0o600
_LOCK = "configuration.lock"  # of all such files; beside one of them it would be in the way


def current_text(file: Path) -> str:
    """The file's content; "" if there is none. Raises UsageError."""
    try:
        status = file.stat()
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise _not_written(file, error) from error
    if not stat.S_ISREG(status.st_mode):
        raise UsageError(f"{file} is no file that settings can be written into; --config FILE names another")
    return text_of(file)


def rewrite(file: Path, change: Callable[[str], str]) -> None:
    """Replace the file's content by that of `change`, atomically; its mode stays, and a link to it too. Another process
    that rewrites waits. Raises UsageError."""
    try:
        for folder in (user_folder("state"), *([file.parent] if file == default_file() else [])):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with locked(user_folder("state") / _LOCK):
            text = current_text(file)
            place = Path(os.path.realpath(file))
            mode = stat.S_IMODE(place.stat().st_mode) if place.exists() else _PRIVATE
            changed = change(text)
            if changed != text or not place.exists():
                write_whole(place, changed, mode=mode)
    except OSError as error:
        raise _not_written(file, error) from error


def _not_written(file: Path, error: OSError) -> UsageError:
    return UsageError(f"the configuration file {file} cannot be written: {error.strerror}")
