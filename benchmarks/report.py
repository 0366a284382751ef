"""The output of a benchmark: a table on stderr, JSON lines on stdout.

The first line has what all runs share: title, environment, command. Each run is a line. A run with a plan gives the
plan's number; the plan is a line of its own, `{"plan": {...}}`, before its first run. Plans are numbered from 0 in the
order of their lines. Floating-point numbers have six significant digits.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import triforce_cli
from offload.bench.environment import environment as environment_of_machine

Document = dict[str, Any]


def say(line: str) -> None:
    """Print a line of progress to stderr."""
    print(line, file=sys.stderr, flush=True)


def about(title: str, seed: int, **shared: Any) -> Document:
    """Title, hardware, versions, seed and command of this run. Paths in the command are cut to their last component."""
    command = [Path(word).name if os.sep in word else word for word in sys.argv]
    environment = {"command": shlex.join(["python", *command]), "seed": seed}
    environment |= environment_of_machine() | {"triforce": triforce_cli.__version__}
    return {"title": title, "environment": environment, **shared}


def beside(plan: Document, milliseconds: float) -> str:
    """The ms/token that `plan` predicts, and its share of the measured ones."""
    predicted = 1000 * plan["predicted"]["seconds_per_token"]
    return f"{predicted:.2f} ({predicted / milliseconds:.2f})"


def emit(columns: Sequence[str], rows: Sequence[Sequence[str]], shared: Document, runs: Iterable[Document]) -> None:
    table(shared["title"], columns, rows)
    for line in lines(shared, runs):
        print(line)


def lines(shared: Document, runs: Iterable[Document]) -> Iterator[str]:
    yield json.dumps(_rounded(shared))
    plans: list[Any] = []
    for run in runs:
        if "plan" in run and run["plan"] not in plans:
            plans.append(run["plan"])
            yield json.dumps(_rounded({"plan": run["plan"]}))
        yield json.dumps(_rounded(run | {"plan": plans.index(run["plan"])} if "plan" in run else run))


def read(text: str) -> tuple[Document, list[Document]]:
    """(shared line, runs with their plans) from the output of `emit`."""
    shared, *others = map(json.loads, text.splitlines())
    plans, runs = [], []
    for line in others:
        if line.keys() == {"plan"}:
            plans.append(line["plan"])
        else:
            runs.append(line | {"plan": plans[line["plan"]]} if "plan" in line else line)
    return shared, runs


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    lines = [list(columns), *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    say(f"\n{title}")
    for name, *cells in lines:
        padded = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        say("  ".join([name.ljust(widths[0]), *padded]).rstrip())


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list | tuple) else value
