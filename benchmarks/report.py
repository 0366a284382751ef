"""What a benchmark prints: a table on stderr, one JSON document on stdout."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import triforce_cli
from offload.environment import environment as environment_of_machine


def say(line: str) -> None:
    """Progress, on stderr."""
    print(line, file=sys.stderr, flush=True)


def environment(seed: int) -> dict[str, Any]:
    """Hardware, versions, seed and command of this run. Paths in the command are cut to their last part."""
    command = [Path(word).name if os.sep in word else word for word in sys.argv]
    about = {"command": shlex.join(["python", *command]), "seed": seed}
    return about | environment_of_machine() | {"triforce": triforce_cli.__version__}


def emit(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], document: dict[str, Any]) -> None:
    table(title, columns, rows)
    print(json.dumps(document, indent=1))


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    lines = [list(columns), *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    say(f"\n{title}")
    for name, *cells in lines:
        padded = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        say("  ".join([name.ljust(widths[0]), *padded]).rstrip())
