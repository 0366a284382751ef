"""`triforce sessions`: list, show and remove saved sessions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from offload.errors import SessionError, UsageError
from offload.session.catalogue import inspect, outdated, remove, summaries
from offload.session.folder import Folder
from offload.session.names import session_folder, sessions_folder
from offload.units import size
from triforce_cli.options import completion, options
from triforce_cli.options.call import spread
from triforce_cli.options.consent import REMOVAL, Yes, agreed
from triforce_cli.options.options import number, option, switch, whole
from triforce_cli.options.other_programs import Group
from triforce_cli.render import sessions as render_sessions
from triforce_cli.screen.output import Output
from triforce_cli.screen.utf8 import user_path

SECONDS_PER_DAY = 86400
LIMITS = "What stays: the newest (give at least one of these)"

NAME = typer.Argument(
    metavar="NAME",
    help="A session's name, or its folder (with a slash in it: ./kept).",
    show_default=False,
    autocompletion=completion.sessions,
)
OlderThan = Annotated[
    float | None,
    option("--older-than", "Remove what was not updated for more days.", LIMITS, metavar="DAYS", parser=number),
]
Keep = Annotated[int | None, option("--keep", "Keep at most so many.", LIMITS, metavar="N", parser=whole)]
MaxSize = Annotated[
    float | None,
    option("--max-size", "Keep at most so much, in 10^9 bytes.", LIMITS, metavar="GB", parser=number),
]
DryRun = Annotated[bool, switch("--dry-run", "Show what would be removed, and remove nothing.", REMOVAL)]

sessions = typer.Typer(
    cls=Group, no_args_is_help=True, help="Look at sessions that were kept (--session NAME), or remove them."
)


@sessions.command()
@spread
def ls(
    *,
    json: options.AsJson = False,
    quiet: options.Quiet = False,
) -> None:
    """List the named sessions, the last updated first.

    They are in the user's data folder, or in the folder that TRIFORCE_SESSIONS_DIR names.
    """
    root = sessions_folder()
    with Output(quiet=quiet) as output:
        found = summaries(root)
        if json:
            output.document(render_sessions.table_document(root, found))
        elif found:
            output.text(render_sessions.table(found, width=output.width))
            output.note(f"{render_sessions.total(found)}, in {root}")
        else:
            output.note(f"there are no sessions in {root}; --session NAME of chat or generate begins one")


@sessions.command()
@spread
def info(
    name: Annotated[str, NAME],
    *,
    json: options.AsJson = False,
) -> None:
    """Show a session: its model, size and dates.

    Example: triforce sessions info book --json
    """
    path = _located(name)
    with Output(quiet=True) as output:
        _check_there(path)
        manifest = inspect(path)
        with Folder(path) as folder:
            nbytes = folder.nbytes()
        if json:
            output.document(render_sessions.description_document(path, manifest, nbytes))
        else:
            output.text(render_sessions.description(path, manifest, nbytes))


@sessions.command()
@spread
def rm(
    names: Annotated[list[str], NAME],
    *,
    yes: Yes = False,
    quiet: options.Quiet = False,
) -> None:
    """Remove sessions, damaged ones too. A session in use is not removed (exit code 4).

    Example: triforce sessions rm book ./kept
    """
    paths = tuple(dict.fromkeys(map(_located, names)))
    with Output(quiet=quiet) as output:
        for path in paths:
            _check_there(path)
        if yes or agreed(output, f"remove {render_sessions.named([_label(path) for path in paths])} for good?"):
            _remove(paths, output)


@sessions.command()
@spread
def prune(
    *,
    older_than: OlderThan = None,
    keep: Keep = None,
    max_size: MaxSize = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    quiet: options.Quiet = False,
) -> None:
    """Remove the oldest sessions until the others are within all given limits.

    Example: triforce sessions prune --older-than 30 --max-size 20 --dry-run
    """
    for flag, value in (("older-than", older_than), ("keep", keep), ("max-size", max_size)):
        if value is not None and not 0 <= value <= 1e6:
            raise UsageError(f"{flag} is {value}, it must be from 0 to 1000000")
    if older_than is None and keep is None and max_size is None:
        raise UsageError("no limit is given; add --older-than DAYS, --keep N or --max-size GB")
    with Output(quiet=quiet) as output:
        found = summaries(sessions_folder())
        chosen = outdated(
            found,
            now=time.time(),
            older_than_seconds=None if older_than is None else older_than * SECONDS_PER_DAY,
            keep=keep,
            max_bytes=None if max_size is None else int(max_size * 1e9),
        )
        if not chosen:
            output.note(f"nothing to remove: {render_sessions.total(found)}, in {sessions_folder()}")
            return
        table, total = render_sessions.table(chosen, width=output.width), render_sessions.total(chosen)
        if dry_run:
            output.text(table)
            output.note(f"{total} would be removed")
        elif yes or agreed(output, f"remove {total}, for good?", table):
            _remove([session.path for session in chosen], output)


def _located(name: str) -> Path:
    """The folder of a session's name, or of a path with a slash. Raises UsageError."""
    return user_path(name) if "/" in name else session_folder(name)


def _label(path: Path) -> str:
    """The session's name, or its path."""
    return path.name if path.parent == sessions_folder() else str(path)


def _check_there(path: Path) -> None:
    """Raises SessionError if there is no such folder; the message lists existing sessions."""
    try:
        found = path.is_dir()
    except OSError as error:
        raise SessionError(f"{path} cannot be read ({error.strerror}); check its permissions") from error
    if not found:
        there = render_sessions.named([session.name for session in summaries(path.parent)])
        raise SessionError(f"there is no session {path.name!r} in {path.parent}; there are: {there}")


def _remove(paths: Sequence[Path], output: Output) -> None:
    """Remove the sessions one after the other; a failure does not stop the others. Raises SessionError at the end."""
    failures = [failure for path in paths if (failure := _remove_one(path, output)) is not None]
    if len(paths) == 1 and failures:
        raise failures[0]
    for failure in failures:
        output.error(str(failure))
    if failures:
        raise SessionError(f"{len(failures)} of {len(paths)} sessions stay")


def _remove_one(path: Path, output: Output) -> SessionError | None:
    """Remove one session. Returns the error if it cannot be removed."""
    try:
        freed = remove(path)
    except SessionError as error:
        return error
    output.note(f"removed {_label(path)}, {size(freed)}")
    return None
