"""The Typer app and `main`, the only place that catches errors.

Typer parses and returns the `Call` of a command, which `main` then makes: inside Typer a closed pipe would become exit
code 1 and an interrupt would be swallowed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from offload.interrupts import Terminated, interruptible
from offload.speed.hardware import Launched
from triforce_cli import __version__
from triforce_cli.commands import version as version_command
from triforce_cli.commands.ask import ask
from triforce_cli.commands.bench import bench
from triforce_cli.commands.chat import chat
from triforce_cli.commands.config import config
from triforce_cli.commands.convert import convert
from triforce_cli.commands.doctor import doctor
from triforce_cli.commands.generate import generate
from triforce_cli.commands.launch import launch
from triforce_cli.commands.log import log as answers
from triforce_cli.commands.models import models
from triforce_cli.commands.plan import plan
from triforce_cli.commands.pull import pull
from triforce_cli.commands.score import score
from triforce_cli.commands.serve import serve
from triforce_cli.commands.sessions import sessions
from triforce_cli.commands.start import start
from triforce_cli.commands.store import store
from triforce_cli.commands.text import text
from triforce_cli.commands.tokens import tokens
from triforce_cli.commands.verify import verify
from triforce_cli.ground import log
from triforce_cli.ground.errors import debugging, describe, wants_json
from triforce_cli.options.call import Call, flowing
from triforce_cli.options.other_programs import Group
from triforce_cli.screen.output import Output
from triforce_cli.settings import variables

INTERRUPTED = 130


class Program(Group):
    """All commands. Alone at a terminal the program is the command `start`; elsewhere it prints its help."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        is_alone = not args and not ctx.resilient_parsing and Output().is_dialogue
        return super().parse_args(ctx, ["start"] if is_alone else args)


app = typer.Typer(
    cls=Program,
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)
app.command()(start)
app.command()(generate)
app.command()(ask)
app.command()(chat)
app.command()(serve)
app.command()(launch)
app.command()(plan)
app.command()(verify)
app.command()(score)
app.command()(tokens)
app.command()(text)
app.command()(bench)
app.command()(doctor)
app.command()(pull)
app.command()(convert)
app.add_typer(models, name="models")
app.add_typer(sessions, name="sessions")
app.add_typer(store, name="store")
app.add_typer(answers, name="log")
app.add_typer(config, name="config")
app.command()(version_command.version)


def _print_version(wanted: bool) -> None:
    if wanted:
        Output().text(f"triforce {__version__}\n")
        raise typer.Exit


@app.callback()
def triforce(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", metavar="", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Exact speculative decoding for long-context models that do not fit the GPU.

    Every option of a command is also an environment variable (--max-tokens
    is TRIFORCE_MAX_TOKENS; several values are separated by spaces) and a line
    of the configuration file (max-tokens = 100; see triforce config show). An
    option wins over a variable, a variable over the file.

    Exit codes: 0 done (also when the reader goes away, as in "| head"),
    1 error while running, 2 usage, 3 does not fit, 4 model or session cannot
    be used, 5 not what the target alone gives (verify) or a device computes
    wrong (doctor), 6 cut short, so that it may not match its schema or other
    constraint, or without a code block (--extract), 124 out of time (--timeout), 130 interrupted, 143 asked to end
    (SIGTERM), 129 the terminal is gone; the last five keep what came so far.
    """
    variables.check(context.command)


triforce.__doc__ = flowing(triforce.__doc__)


def main(args: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code. Default: that of the process, which ends with it."""
    launched = Launched.look()
    if launched is not None and launched.rank > 0:
        return _follow(launched)
    call: Call | None = None
    try:
        with interruptible(last=args is None):
            parsed: int | Call = app(args=args, prog_name="triforce", standalone_mode=False)
            if isinstance(parsed, int):  # --help or --version, done by Typer
                return parsed
            call = parsed
            log.event(f"triforce {__version__}: {call.command.__name__}")
            call()
    except KeyboardInterrupt:
        return INTERRUPTED
    except Terminated as ending:
        return ending.exit_code
    except BrokenPipeError:  # the reader of the pipe has gone: no error
        return 0
    except Exception as error:
        as_json = call.as_json if call is not None else wants_json(sys.argv if args is None else args)
        return _report(error, as_json=as_json)
    finally:
        log.end()
    return 0


def _follow(launched: Launched) -> int:
    """Run as one of torchrun's ranks other than 0, for the command that rank 0 runs."""
    from offload.ranks.follower import follow_torchrun

    follow_torchrun(launched)
    return 0


def _report(error: Exception, *, as_json: bool) -> int:
    """Report the error and return its exit code."""
    log.failure(describe(error, debug=True).traceback)
    failure = describe(error, debug=debugging())
    if as_json:
        Output().error_document(failure.as_dict())
    else:
        Output().error(failure.message, hint=failure.hint, traceback=failure.traceback)
    return failure.exit_code


if __name__ == "__main__":
    sys.exit(main())
