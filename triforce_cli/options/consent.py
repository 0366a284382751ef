"""A person's consent to a removal, asked for at a terminal or given by --yes, and answers to other questions."""

from __future__ import annotations

import sys
from typing import Annotated

from offload.errors import UsageError
from offload.interrupts import waiting
from triforce_cli.options.options import switch
from triforce_cli.screen.output import Output

REMOVAL = "Removal"
Yes = Annotated[bool, switch("--yes", "Do not ask. Needed where nobody can be asked.", REMOVAL, short="-y")]


def agreed(output: Output, question: str, table: str = "") -> bool:
    """Show the table, ask whether to remove it, and return the answer. Raises UsageError if there is no terminal to ask
    at."""
    if not output.has_person:
        raise UsageError("removal cannot be undone and there is no terminal to ask at; give --yes")
    if table:
        output.table(table)
    answer = answered(output, question)
    if not answer:
        output.note("nothing was removed")
    return answer


def answered(output: Output, question: str) -> bool:
    """Ask a question at the terminal, and return whether the answer is yes."""
    output.question(f"{question} [y/N]")
    with waiting():
        return sys.stdin.readline().strip().lower() in ("y", "yes")
