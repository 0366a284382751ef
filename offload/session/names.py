"""Names of sessions, the folder of all sessions, and the remedies that error messages give for one."""

from __future__ import annotations

import re
from pathlib import Path

from offload.errors import SessionError, UsageError, quoted_line
from offload.files import user_folder

FOLDER_VARIABLE = "TRIFORCE_SESSIONS_DIR"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}", re.ASCII)


def sessions_folder() -> Path:
    """The folder of named sessions: in the user's data folder, or the one that TRIFORCE_SESSIONS_DIR names."""
    return user_folder("data", "sessions", variable=FOLDER_VARIABLE)


def is_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def session_folder(name: str) -> Path:
    """The folder of the session called `name`, whether it exists or not. UsageError if `name` is not a valid name."""
    if not is_name(name):
        raise UsageError(
            f"{name!r} cannot be a session's name: 1 to 64 letters, digits, '.', '_' or '-', not '.' or '-' first"
        )
    return sessions_folder() / name


def damaged(path: Path, what: str) -> SessionError:
    """The error for a damaged file at `path` in a session's folder. what: the damage."""
    return SessionError(f"{path}: {what}; {remedy(path.parent)}")


def remedy(folder: Path) -> str:
    """The remedy in an error message: how to remove the session in `folder`, or avoid it."""
    if folder.parent == sessions_folder() and is_name(folder.name):
        return f"remove it with {quoted_line('triforce', 'sessions', 'rm', folder.name)}, or start with another name"
    return f"remove the folder {folder}, or name another one"
