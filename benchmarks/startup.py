"""Start-up time: of help, and of the embedded model from the command to the first byte of text.

Each run is a new process with its files in the page cache. The goals are 0.3 s, and 3 s on two cores.
usage: python benchmarks/startup.py [--repeats 5] [--other FOLDER]

--other: a checkout of other code, which is started in turns with this one. "of the other" is the median of the ratios.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from report import about, emit, say

from offload.metrics import Spread

ROOT = Path(__file__).resolve().parents[1]
HELPS = ("--help", "generate --help", "serve --help")
GENERATE = ["generate", "--prompt", "It was the best of times", "--max-tokens", "8", "--quiet"]
HELP_SECONDS, FIRST_BYTE_SECONDS = 0.3, 3.0


@dataclass(frozen=True)
class Case:
    """A command. goal: in seconds."""

    name: str
    measure: Callable[[Path, Sequence[str]], float]
    args: Sequence[str]
    goal: float


def started(folder: Path, args: Sequence[str], stdout: int) -> subprocess.Popen[bytes]:
    """The program of a checkout."""
    command, environment = [sys.executable, "-m", "triforce_cli", *args], {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.Popen(command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=stdout)


def seconds_to_first_byte(folder: Path, args: Sequence[str]) -> float:
    start = time.perf_counter()
    with started(folder, args, subprocess.PIPE) as process:
        assert process.stdout is not None
        if not process.stdout.read(1):
            raise SystemExit(f"{args} wrote nothing")
        seconds = time.perf_counter() - start
        process.communicate()
    return seconds


def seconds_to_end(folder: Path, args: Sequence[str]) -> float:
    start = time.perf_counter()
    with started(folder, args, subprocess.DEVNULL) as process:
        if process.wait():
            raise SystemExit(f"{args} in {folder.name} ended with exit code {process.returncode}")
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--other", type=Path, help="a checkout that is started in turns with this one")
    args = parser.parse_args()
    folders = [ROOT, *([args.other.resolve()] if args.other else [])]
    cases = [Case(f"triforce {words}", seconds_to_end, words.split(), HELP_SECONDS) for words in HELPS]
    cases.append(Case("triforce generate, first byte", seconds_to_first_byte, GENERATE, FIRST_BYTE_SECONDS))
    rows, measured = [], []
    for case in cases:
        for folder in folders:
            case.measure(folder, case.args)  # loads the files into the page cache
        runs = [[case.measure(folder, case.args) for folder in folders] for _ in range(args.repeats)]
        own, ratio = Spread.of([run[0] for run in runs]), Spread.of([run[0] / run[-1] for run in runs])
        say(f"{case.name}: {own.median:.2f} s")
        found = [f"{own.median:.2f}", f"{own.least:.2f} to {own.most:.2f}", f"{case.goal:.1f}"]
        rows.append([case.name, *found, f"{ratio.median:.2f}" if args.other else "-"])
        measured.append({"what": case.name} | asdict(own) | ({"of_other": asdict(ratio)} if args.other else {}))
    emit(["what", "seconds", "range", "goal", "of the other"], rows, about("start-up", 0), measured)


if __name__ == "__main__":
    main()
