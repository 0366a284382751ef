"""Entries of the answer log as tables, as whole texts and as JSON objects. Pure functions."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.text import Text

from triforce_cli import __version__
from triforce_cli.ground.text import NOTHING, counted, duration, line_text
from triforce_cli.render.sessions import moment, timestamp

if TYPE_CHECKING:
    from triforce_cli.ground.answer_log import Entry

_LEAST_QUESTION = 16  # columns


def table(entries: Sequence[Entry], *, width: int) -> str:
    """One line per entry: id, time, command, and the question as far as `width` columns have room."""
    column = max(2, *(len(str(entry.id)) for entry in entries))
    rows = [("id", "time", "command", "question"), *map(_cells, entries)]
    lines = []
    for number, time, command, question in rows:
        start = f"{number:>{column}}  {time:<16}  {command:<8}  "
        lines.append(start + _cut(question, max(width - len(start), _LEAST_QUESTION)))
    return "\n".join(line.rstrip() for line in lines) + "\n"


def more(num_shown: int, count: int) -> str:
    """The note on entries that are not shown; "" if all are."""
    return f"the newest {num_shown:,} of {count:,}; -n {count} shows all" if num_shown < count else ""


def whole(entry: Entry) -> str:
    """The lines of `log show`: facts, then the question and the answer as they were."""
    rows = [
        ("id", f"{entry.id}"),
        ("time", f"{moment(entry.time)}, {duration(entry.seconds)}"),
        ("command", f"{entry.command}, model {entry.model}"),
        ("seed", NOTHING if entry.seed is None else f"{entry.seed}"),
        ("options", " ".join(_typed(name, value) for name, value in entry.options.items()) or NOTHING),
        ("prompt", counted(entry.prompt_tokens, "token")),
        ("documents", ", ".join(entry.documents) or NOTHING),
        ("ended", entry.finish),
    ]
    facts = "".join(f"{label:<11}{line_text(value)}\n" for label, value in rows)
    return f"{facts}\n{_ended(entry.question)}\n{_ended(entry.answer)}"


def document(entry: Entry) -> dict[str, Any]:
    """An entry as JSON."""
    return {
        "id": entry.id,
        "time": timestamp(entry.time),
        "command": entry.command,
        "model": entry.model,
        "seed": entry.seed,
        "options": entry.options,
        "prompt_tokens": entry.prompt_tokens,
        "question": entry.question,
        "documents": list(entry.documents),
        "answer": entry.answer,
        "finish_reason": entry.finish,
        "seconds": entry.seconds,
    }


def table_document(file: str, entries: Sequence[Entry], count: int) -> dict[str, Any]:
    """The JSON of `log ls`. count: of all entries that were asked for."""
    return {"file": file, "count": count, "entries": [document(entry) for entry in entries], "version": __version__}


def _cells(entry: Entry) -> tuple[str, str, str, str]:
    return str(entry.id), moment(entry.time), entry.command, line_text(" ".join(entry.question.split()))


def _cut(text: str, width: int) -> str:
    """`text` in at most `width` columns of a terminal, where some characters take two."""
    if cell_len(text) <= width:
        return text
    cut = Text(text)
    cut.truncate(width, overflow="ellipsis")
    return cut.plain


def _typed(name: str, value: Any) -> str:
    """An option as it is typed in a shell."""
    if isinstance(value, bool):
        return f"--{'' if value else 'no-'}{name}"
    values = value if isinstance(value, list) else [value]
    return " ".join(f"--{name} {shlex.quote(f'{each:g}' if isinstance(each, float) else str(each))}" for each in values)


def _ended(text: str) -> str:
    return text if text.endswith("\n") else f"{text}\n"
