"""`triforce log`: list, show and remove questions and answers of the past."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import typer

from offload.errors import UsageError
from triforce_cli.ground.text import counted, path_text
from triforce_cli.options import options
from triforce_cli.options.consent import REMOVAL, Yes, agreed
from triforce_cli.options.flags import ProgramFlags, spread
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


@dataclass(frozen=True, kw_only=True)
class Listing:
    """One `triforce log ls`, parsed."""

    words: tuple[str, ...]
    most: int
    as_json: bool
    quiet: bool

    def run(self) -> None:
        from triforce_cli.ground.answer_log import AnswerLog
        from triforce_cli.render import answer_log as render_log

        kept = AnswerLog.of_user()
        with Output(quiet=self.quiet) as output:
            found, count = kept.newest(self.most, self.words)
            if self.as_json:
                output.document(render_log.table_document(path_text(kept.file), found, count))
            elif found:
                output.text(render_log.table(found, width=output.text_width))
                output.note(render_log.more(len(found), count))
            elif self.words:
                output.note(f"no entry of {kept.file} has {' and '.join(map(repr, self.words))}")
            else:
                output.note(f"nothing is kept in {kept.file}; ask, generate and chat keep questions and answers")


@dataclass(frozen=True, kw_only=True)
class Showing:
    """One `triforce log show`, parsed. number: None for the last entry."""

    number: int | None
    as_json: bool

    def run(self) -> None:
        from triforce_cli.ground.answer_log import AnswerLog
        from triforce_cli.render import answer_log as render_log

        kept = AnswerLog.of_user()
        with Output(quiet=True) as output:
            entry = kept.entry(self.number)
            if entry is None:
                which = "no entry at all" if self.number is None else f"no entry {self.number}"
                raise UsageError(f"there is {which} in {kept.file}; 'triforce log ls' lists them")
            if self.as_json:
                output.document(render_log.document(entry))
            else:
                output.text(render_log.whole(entry))


@dataclass(frozen=True, kw_only=True)
class Removal:
    """One `triforce log rm`, parsed. numbers: distinct; empty: all entries."""

    numbers: Sequence[int]
    yes: bool
    quiet: bool

    def run(self) -> None:
        """Remove all that are named, or none if one of them does not exist."""
        from triforce_cli.ground.answer_log import AnswerLog

        kept = AnswerLog.of_user()
        with Output(quiet=self.quiet) as output:
            if not kept.exists():
                raise UsageError(f"there is nothing to remove: {kept.file} does not exist")
            if missing := kept.missing(self.numbers) if self.numbers else []:
                raise UsageError(f"there is no entry {missing[0]} in {kept.file}; 'triforce log ls' lists them")
            which = f"entry {named(list(map(str, self.numbers)))}" if self.numbers else f"all that is in {kept.file}"
            if not self.yes and not agreed(output, f"remove {which} for good?"):
                return
            if self.numbers:
                kept.remove(self.numbers)
                output.note(f"removed {counted(len(self.numbers), 'question')} with the answers")
            else:
                kept.clear()
                output.note(f"removed all questions and answers from {kept.file}")


@log.command()
@spread
def ls(
    *,
    search: Search = None,
    number: Number = NUM_LISTED,
    json: options.AsJson = False,
    quiet: options.Quiet = False,
    program: ProgramFlags,
) -> Listing:
    """List past questions, the newest first.

    They are in the user's state folder, or in the folder that TRIFORCE_LOG_DIR names, with the values of options
    (--system, --var) in clear. Batches keep none.

    Example: triforce log ls --search 'tenant lease' -n 5
    """
    if not 1 <= number <= MOST:
        raise UsageError(f"number is {number}, it must be from 1 to {MOST}")
    return Listing(words=tuple((search or "").split()), most=number, as_json=json, quiet=quiet)


@log.command()
@spread
def show(
    number: Annotated[
        str | None,
        typer.Argument(metavar="[ID]", help="As in triforce log ls; without it the last.", show_default=False),
    ] = None,
    *,
    json: options.AsJson = False,
    program: ProgramFlags,
) -> Showing:
    """Show a question and its answer, whole.

    Example: triforce log show --json
    """
    return Showing(number=None if number is None else _id(number), as_json=json)


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
    program: ProgramFlags,
) -> Removal:
    """Remove questions with their answers.

    Example: triforce log rm 12 13 --yes
    """
    if bool(numbers) == all:
        raise UsageError("name the entries to remove (triforce log rm 12), or give --all" + " alone" * all)
    return Removal(numbers=tuple(dict.fromkeys(map(_id, numbers or ()))), yes=yes, quiet=quiet)


def _id(text: str) -> int:
    found = count(text)
    if found is None:
        raise UsageError(f"{text[:40]!r} is no entry's id; 'triforce log ls' lists them")
    return found
