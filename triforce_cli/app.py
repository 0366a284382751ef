"""The Typer app and `main`, the only place that catches errors.

Typer parses and each command returns a `Command`, which `main` then runs: inside Typer a closed pipe would become exit
code 1 and an interrupt would be swallowed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from triforce_cli import __version__
from triforce_cli.commands import Command
from triforce_cli.commands.chat import chat
from triforce_cli.commands.doctor import doctor
from triforce_cli.commands.generate import generate
from triforce_cli.commands.plan import plan
from triforce_cli.commands.sessions import sessions
from triforce_cli.errors import debugging, describe
from triforce_cli.output import Output

INTERRUPTED = 130

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.command()(generate)
app.command()(chat)
app.command()(plan)
app.command()(doctor)
app.add_typer(sessions, name="sessions")


def _print_version(wanted: bool) -> None:
    if wanted:
        Output().text(f"triforce {__version__}\n")
        raise typer.Exit


@app.callback()
def triforce(
    version: Annotated[
        bool,
        typer.Option(
            "--version", metavar="", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Exact speculative decoding for long-context models that do not fit the GPU.

    Every option of a command is also an environment variable: --max-tokens is TRIFORCE_MAX_TOKENS. An option wins.

    Exit codes: 0 done (also when the reader goes away, as in "| head"),
    1 error while running, 2 usage, 3 does not fit, 4 model or session cannot
    be used, 130 interrupted.
    """


def main(args: Sequence[str] | None = None) -> int:
    """Run one command line (default: that of the process) and return its exit code."""
    try:
        parsed: int | Command = app(args=args, prog_name="triforce", standalone_mode=False)
        if isinstance(parsed, int):  # --help or --version: all is done
            return parsed
        parsed.run()
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # nobody reads any more: what was asked for has been delivered
        return 0
    except Exception as error:
        failure = describe(error, debug=debugging())
        Output().error(failure.message, traceback=failure.traceback)
        return failure.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
