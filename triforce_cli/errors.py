"""From any exception to what the person at the terminal reads, and to the exit code."""

from __future__ import annotations

import os
import traceback
from dataclasses import dataclass, replace

import typer

from offload.errors import TriforceError

DEBUG_VARIABLE = "TRIFORCE_DEBUG"


@dataclass(frozen=True)
class Failure:
    message: str  # "" where everything has been said
    exit_code: int
    traceback: str = ""


def debugging() -> bool:
    """Whether TRIFORCE_DEBUG asks for tracebacks; `--debug` sets it."""
    return os.environ.get(DEBUG_VARIABLE, "").lower() not in ("", "0", "false", "no", "off")


def describe(error: Exception, *, debug: bool) -> Failure:
    """The message names the value, the limit and the remedy; there is a traceback only when debugging."""
    failure = _describe(error)
    return replace(failure, traceback="".join(traceback.format_exception(error))) if debug else failure


def _describe(error: Exception) -> Failure:
    if isinstance(error, TriforceError):
        return Failure(str(error), error.exit_code)
    if isinstance(error, typer.TyperException):
        return Failure(_usage_message(error), error.exit_code)
    first_line = (str(error).strip().splitlines() or ["no message"])[0]
    remedy = f"set {DEBUG_VARIABLE}=1 for the traceback"
    return Failure(f"unexpected {type(error).__name__}: {first_line} ({remedy})", TriforceError.exit_code)


def _usage_message(error: typer.TyperException) -> str:
    """Typer's message with a hint where to read on; "" for a bare `triforce`, which has printed its help."""
    message = error.format_message().replace("Value error, ", "")
    context: typer.Context | None = getattr(error, "ctx", None)
    if not message or context is None:
        return message
    return f"{message[0].lower()}{message[1:]}{_origin(error, context)}\ntry '{context.command_path} --help'"


def _origin(error: typer.TyperException, context: typer.Context) -> str:
    """The environment variable that a bad value came from, if it did."""
    parameter = getattr(error, "param", None)
    if parameter is None:
        return ""
    source = context.get_parameter_source(parameter.name)
    return f" (from {parameter.envvar})" if source is not None and source.name == "ENVIRONMENT" else ""
