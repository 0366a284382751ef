"""`triforce log`: list, show and remove questions and answers of the past."""

from __future__ import annotations

from typing import Annotated

import typer

from offload.errors import UsageError
from triforce_cli.ground.text import counted, path_text
from triforce_cli.options import options
from triforce_cli.options.call import spread
from triforce_cli.options.consent import REMOVAL, Yes, agreed
from triforce_cli.options.options import MOST, count, option, switch, whole
from triforce_cli.options.other_programs import Group
from triforce_cli.render.sessions import named
from triforce_cli.screen.output import Output

CHOICE = "Choice"
NUM_LISTED = 20

Search = Annotated[
    str | None,
    option("--search", "Those with all of these words in question, answer or document names.", CHOICE, metavar="WORDS"),
]
Number = Annotated[int, option("--number", "List at most so many.", CHOICE, short="-n", metavar="N", parser=whole)]
All = Annotated[bool, switch("--all", "Remove all of them, and a damaged file.", REMOVAL)]

log = typer.Typer(
    cls=Group, no_args_is_help=True, help="Look at past questions and answers (--no-log), or remove them."
)


@log.command()
@spread
def ls(
    *,
    search: Search = None,
    number: Number = NUM_LISTED,
    json: options.AsJson = False,
    quiet: options.Quiet = False,
) -> None:
    """List past questions, the newest first.

    They are in the user's state folder, or in the folder that TRIFORCE_LOG_DIR names, with the values of options
    (--system, --var) in clear. Batches keep none.

    Example: triforce log ls --search 'tenant lease' -n 5
    """
    if not 1 <= number <= MOST:
        raise UsageError(f"number is {number}, it must be from 1 to {MOST}")
    from triforce_cli.ground.answer_log import AnswerLog
    from triforce_cli.render import answer_log as render_log

    kept = AnswerLog.of_user()
    words = (search or "").split()
    with Output(quiet=quiet) as output:
        found, count = kept.newest(number, words)
        if json:
            output.document(render_log.table_document(path_text(kept.file), found, count))
        elif found:
            output.text(render_log.table(found, width=output.text_width))
            output.note(render_log.more(len(found), count))
        elif words:
            output.note(f"no entry of {kept.file} has {' and '.join(map(repr, words))}")
        else:
            output.note(f"nothing is kept in {kept.file}; ask, generate and chat keep questions and answers")


@log.command()
@spread
def show(
    number: Annotated[
        str | None,
        typer.Argument(metavar="[ID]", help="As in triforce log ls; without it the last.", show_default=False),
    ] = None,
    *,
    json: options.AsJson = False,
) -> None:
    """Show a question and its answer, whole.

    Example: triforce log show --json
    """
    wanted = None if number is None else _id(number)
    from triforce_cli.ground.answer_log import AnswerLog
    from triforce_cli.render import answer_log as render_log

    kept = AnswerLog.of_user()
    with Output(quiet=True) as output:
        entry = kept.entry(wanted)
        if entry is None:
            which = "no entry at all" if wanted is None else f"no entry {wanted}"
            raise UsageError(f"there is {which} in {kept.file}; 'triforce log ls' lists them")
        if json:
            output.document(render_log.document(entry))
        else:
            output.text(render_log.whole(entry))


@log.command()
@spread
def rm(
    numbers: Annotated[
        list[str] | None, typer.Argument(metavar="ID", help="As in triforce log ls.", show_default=False)
    ] = None,
    *,
    all: All = False,
    yes: Yes = False,
    quiet: options.Quiet = False,
) -> None:
    """Remove questions with their answers.

    Example: triforce log rm 12 13 --yes
    """
    if bool(numbers) == all:
        raise UsageError("name the entries to remove (triforce log rm 12), or give --all" + " alone" * all)
    chosen = tuple(dict.fromkeys(map(_id, numbers or ())))
    from triforce_cli.ground.answer_log import AnswerLog

    kept = AnswerLog.of_user()
    with Output(quiet=quiet) as output:
        if not kept.exists():
            raise UsageError(f"there is nothing to remove: {kept.file} does not exist")
        if missing := kept.missing(chosen) if chosen else []:
            raise UsageError(f"there is no entry {missing[0]} in {kept.file}; 'triforce log ls' lists them")
        which = f"entry {named(list(map(str, chosen)))}" if chosen else f"all that is in {kept.file}"
        if not yes and not agreed(output, f"remove {which} for good?"):
            return
        if chosen:
            kept.remove(chosen)
            output.note(f"removed {counted(len(chosen), 'question')} with the answers")
        else:
            kept.clear()
            output.note(f"removed all questions and answers from {kept.file}")


def _id(text: str) -> int:
    found = count(text)
    if found is None:
        raise UsageError(f"{text[:40]!r} is no entry's id; 'triforce log ls' lists them")
    return found
