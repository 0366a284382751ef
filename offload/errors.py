"""Errors a user can cause. The message names the value, the limit and the remedy; the class carries the exit code."""

from __future__ import annotations


class TriforceError(Exception):
    """Something went wrong while running; the message is meant for the person at the terminal."""

    exit_code = 1
    kind = "runtime"


class UsageError(TriforceError):
    """An argument or the input itself is wrong."""

    exit_code = 2
    kind = "usage"


class DoesNotFit(TriforceError):
    """The request needs more memory or context than there is."""

    exit_code = 3
    kind = "does-not-fit"


class ModelError(TriforceError):
    """A model folder cannot be loaded, or two models cannot work together."""

    exit_code = 4
    kind = "model"


class SessionError(TriforceError):
    """A session cannot be used or saved: damaged, another model's, in use, or the disk refused. What it holds stays."""

    exit_code = 4
    kind = "session"


class Differs(TriforceError):
    """What was generated is not what the target alone gives: a fault of this program, or of the machine."""

    exit_code = 5
    kind = "differs"
