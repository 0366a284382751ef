"""Consent to a removal that cannot be undone: `--yes`, or an answer at the terminal."""

from __future__ import annotations

import sys
from typing import Annotated

from offload.errors import UsageError
from offload.interrupts import waiting
from triforce_cli.options import switch
from triforce_cli.output import Output

REMOVAL = "Removal"

Yes = Annotated[bool, switch("--yes", "Do not ask. Needed where nobody can be asked.", REMOVAL, short="-y")]


def agreed(output: Output, question: str, table: str = "") -> bool:
    """Show the table, ask, and return the answer. Raises UsageError if there is no terminal to ask at."""
    if not output.has_person:
        raise UsageError("removal cannot be undone and there is no terminal to ask at; give --yes")
    if table:
        output.table(table)
    output.question(f"{question} [y/N]")
    with waiting():
        said = sys.stdin.readline().strip().lower()
    if said not in ("y", "yes"):
        output.note("nothing was removed")
    return said in ("y", "yes")
