"""Errors that a user can cause. The message names the value, the limit and the remedy; the class sets the exit code."""

from __future__ import annotations

import shlex
from pathlib import Path


class TriforceError(Exception):
    """A failure while running. The base of all errors whose message is shown to the user."""

    exit_code = 1
    kind = "runtime"


class UsageError(TriforceError):
    """An argument or the input itself is wrong."""

    exit_code = 2
    kind = "usage"


class DoesNotFit(TriforceError):
    """The request needs more memory, disk space or context than is available."""

    exit_code = 3
    kind = "does-not-fit"


class ModelError(TriforceError):
    """A model folder cannot be loaded, or two models cannot work together."""

    exit_code = 4
    kind = "model"


def shell_line(*words: str) -> str:
    """A command for a person to paste into a shell, which takes each word as it is, whatever it holds."""
    return shlex.join(words)


def quoted_line(*words: str) -> str:
    """`shell_line` in the middle of a sentence: in quotes, unless it has some."""
    line = shell_line(*words)
    return line if "'" in line else f"'{line}'"


def unreadable(path: Path, error: OSError) -> ModelError:
    """The ModelError for a file or folder of a model that cannot be read. error: the system's error, best with the name
    of the file."""
    foreign = "whoever owns it can let you read it: chmod -R a+rX, and a+x for the folders above it"
    remedy = foreign if isinstance(error, PermissionError) else "try again, and if that fails, download it again"
    return ModelError(f"{error.filename or path} cannot be read ({error.strerror or error}); {remedy}")


class RankFailed(TriforceError):
    """One of several ranks died, hangs or failed; the others have been ended."""

    kind = "rank"


class SessionError(TriforceError):
    """A session cannot be used or saved: damaged, another model's, in use, or a disk error. Its saved contents stay."""

    exit_code = 4
    kind = "session"


class Differs(TriforceError):
    """The generated text differs from the target's own output: a fault of this program or of the machine."""

    exit_code = 5
    kind = "differs"
