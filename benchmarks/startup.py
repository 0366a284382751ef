"""Start-up time: of help, and of the embedded model from the command to the first byte of text.

Each run is a new process with its files in the page cache. The goals are 0.3 s, and 3 s on two cores.
usage: python benchmarks/startup.py [--repeats 5]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from dataclasses import asdict

from report import about, emit, say

from offload.metrics import Spread

PROGRAM = [sys.executable, "-m", "triforce_cli"]
HELPS = {"triforce --help": ["--help"], "triforce generate --help": ["generate", "--help"]}
GENERATE = ["generate", "--prompt", "It was the best of times", "--max-tokens", "8", "--quiet"]
HELP_SECONDS, FIRST_BYTE_SECONDS = 0.3, 3.0


def seconds_to_first_byte(args: list[str]) -> float:
    start = time.perf_counter()
    with subprocess.Popen([*PROGRAM, *args], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        if not process.stdout.read(1):
            raise SystemExit(f"{args} wrote nothing")
        seconds = time.perf_counter() - start
        process.communicate()
    return seconds


def seconds_to_end(args: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run([*PROGRAM, *args], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    cases = {name: (seconds_to_end, help_args, HELP_SECONDS) for name, help_args in HELPS.items()}
    cases["triforce generate, first byte"] = (seconds_to_first_byte, GENERATE, FIRST_BYTE_SECONDS)
    results = {}
    for name, (measure, command, _) in cases.items():
        measure(command)  # loads the files into the page cache
        results[name] = Spread.of([measure(command) for _ in range(args.repeats)])
        say(f"{name}: {results[name].median:.2f} s")
    rows = [
        [name, f"{seconds.median:.2f}", f"{seconds.least:.2f} to {seconds.most:.2f}", f"{cases[name][2]:.1f}"]
        for name, seconds in results.items()
    ]
    columns = ["what", "seconds", "range", "goal"]
    measured = [{"what": name} | asdict(seconds) for name, seconds in results.items()]
    emit(columns, rows, about("start-up", 0), measured)


if __name__ == "__main__":
    main()
