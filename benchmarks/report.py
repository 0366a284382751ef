"""What a benchmark prints: a table on stderr, one JSON document on stdout."""

from __future__ import annotations

import json
import os
import platform
import shlex
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

import triforce_cli
from offload.plan.machine import look


def say(line: str) -> None:
    """Progress, on stderr."""
    print(line, file=sys.stderr, flush=True)


def environment(seed: int) -> dict[str, Any]:
    """Hardware, versions, seed and command of this run. Paths in the command are cut to their last part."""
    command = [Path(word).name if os.sep in word else word for word in sys.argv]
    machine = look()
    return {
        "command": shlex.join(["python", *command]),
        "seed": seed,
        "cpu": machine.processor,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "threads": torch.get_num_threads(),
        "memory_bytes": machine.host_bytes,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "triforce": triforce_cli.__version__,
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


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
