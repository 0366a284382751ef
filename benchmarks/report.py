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

import psutil
import torch
import transformers
from rich.console import Console
from rich.table import Table

import triforce_cli

console = Console(stderr=True, width=None if sys.stderr.isatty() else 120)


def environment(seed: int) -> dict[str, Any]:
    """Hardware, versions, seed and command of this run. Paths in the command are cut to their last part."""
    command = [Path(word).name if os.sep in word else word for word in sys.argv]
    return {
        "command": shlex.join(["python", *command]),
        "seed": seed,
        "cpu": _cpu_name(),
        "threads": torch.get_num_threads(),
        "memory_bytes": psutil.virtual_memory().total,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "triforce": triforce_cli.__version__,
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def emit(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], document: dict[str, Any]) -> None:
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="left" if column == columns[0] else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    print(json.dumps(document, indent=1))


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
