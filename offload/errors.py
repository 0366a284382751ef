"""Errors that a user can cause. The message names the value, the limit and the remedy; the class sets the exit code."""

from __future__ import annotations


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
