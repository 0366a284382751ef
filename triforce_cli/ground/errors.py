"""The exit code and the message of each exception."""

from __future__ import annotations

import os
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import typer

from offload.errors import DoesNotFit, TriforceError, UsageError

DEBUG_VARIABLE = "TRIFORCE_DEBUG"
_OUT_OF_MEMORY = (
    "there is no more memory, on this machine or for this process (ulimit -v shows its limit); give less text, or end "
    "other programs"
)
FILE_OF_DEFAULTS = "triforce.file"  # key of a context's meta: the file of its default_map


@dataclass(frozen=True)
class Failure:
    message: str  # "" if it has been printed already
    exit_code: int
    kind: str = TriforceError.kind
    traceback: str = ""
    hint: str = ""  # the help to read

    def as_dict(self) -> dict[str, Any]:
        """The error as JSON."""
        message = f"{self.message}\n{self.hint}" if self.hint else self.message
        said = {"kind": self.kind, "message": message, "exit_code": self.exit_code}
        return {"error": said | ({"traceback": self.traceback} if self.traceback else {})}


def debugging() -> bool:
    """True if TRIFORCE_DEBUG asks for tracebacks; `--debug` sets it."""
    return _is_on(DEBUG_VARIABLE)


def wants_json(args: Sequence[str]) -> bool:
    """True if `args`, which could not be parsed, ask for errors as JSON."""
    return not {"--json", "--jsonl"}.isdisjoint(args) or _is_on("TRIFORCE_JSON") or _is_on("TRIFORCE_JSONL")


def _is_on(variable: str) -> bool:
    return os.environ.get(variable, "").lower() not in ("", "0", "false", "no", "off")


def describe(error: Exception, *, debug: bool) -> Failure:
    """The failure of an exception. Its message names the value, the limit and the remedy; a traceback only when
    debugging."""
    failure = _describe(error)
    return replace(failure, traceback="".join(traceback.format_exception(error))) if debug else failure


def _describe(error: Exception) -> Failure:
    if isinstance(error, TriforceError):
        return Failure(str(error), error.exit_code, error.kind)
    if isinstance(error, typer.TyperException):
        message, hint = _usage_message(error)
        return Failure(message, error.exit_code, UsageError.kind, hint=hint)
    if isinstance(error, OSError) and error.filename and error.strerror:
        return Failure(f"{os.fsdecode(error.filename)}: {error.strerror}", TriforceError.exit_code)
    if isinstance(error, MemoryError):
        return Failure(_OUT_OF_MEMORY, DoesNotFit.exit_code, DoesNotFit.kind)
    first_line = (str(error).strip().splitlines() or ["no message"])[0]
    remedy = f"set {DEBUG_VARIABLE}=1 for the traceback"
    return Failure(f"unexpected {type(error).__name__}: {first_line} ({remedy})", TriforceError.exit_code)


def _usage_message(error: typer.TyperException) -> tuple[str, str]:
    """Typer's message, and a hint at the command's help; "" for a bare `triforce`, which has printed its help."""
    message = error.format_message().replace("Value error, ", "")
    context: typer.Context | None = getattr(error, "ctx", None)
    if not message or context is None:
        return message, ""
    return f"{message[0].lower()}{message[1:]}{_origin(error, context)}", f"try '{context.command_path} --help'"


def _origin(error: typer.TyperException, context: typer.Context) -> str:
    """The end of a message: the environment variable or the file that a bad value came from; "" for the command
    line."""
    parameter = getattr(error, "param", None)
    if parameter is None:
        return ""
    source = context.get_parameter_source(parameter.name)
    if source is None or source.name not in ("ENVIRONMENT", "DEFAULT_MAP"):
        return ""
    return f" (from {parameter.envvar if source.name == 'ENVIRONMENT' else context.meta[FILE_OF_DEFAULTS]})"
