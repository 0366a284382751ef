"""A busy machine: time per token while other programs compute, in one run.

usage: python benchmarks/busy.py [--length 2048] [--max-tokens 128] [--loops 0,1,2,4] [--turns 3]
                                 [--peers-env DIR|none]

The other programs are 0, 1, 2 and 4 endless loops, started and ended here; they also end by themselves after some
minutes. Beside them, this program continues a prompt greedily with the demo pair, each time as `generate --json` in a
process of its own, by default and without speculation. llama.cpp does the same in its fastest setting beside these
loops (offload/bench/program.py). All processes belong to one terminal: where Linux groups by terminal, they are one
group. "times quiet" is relative to the median without loops. The goal: at most 3 times beside two loops on two cores.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import texts
from decode import demo_models
from peer import llama_cpp_of, wheel_python
from program import GREEDY, Other, Program, fastest, find_setting, milliseconds_after_first, name_of
from report import about, emit, say

from offload.engine.engine import load_tokenizer
from offload.metrics import Spread

LOOP_SECONDS = 600  # after which a loop ends by itself, even if this program was killed
LOOP = "import sys, time; end = time.time() + float(sys.argv[1])\nwhile time.time() < end: sum(range(100_000))"
WAYS: Mapping[str, Sequence[str]] = {"ours, default": (), "ours, plain": ("--no-speculation",)}
LLAMA_CPP = "llama.cpp"


@contextmanager
def loops(number: int) -> Iterator[None]:
    """Run `number` endless loops during the body."""
    running = [subprocess.Popen([sys.executable, "-c", LOOP, str(LOOP_SECONDS)]) for _ in range(number)]
    try:
        yield
    finally:
        for loop in running:
            loop.kill()
            loop.wait()


def ours(prompt_file: Path, max_tokens: int, options: Sequence[str]) -> dict[str, Any]:
    """Times of one text by the command line."""
    command = [sys.executable, "-m", "triforce_cli", "generate", "--prompt-file", str(prompt_file), "--json", "--quiet"]
    command += ["--max-tokens", str(max_tokens), "--temperature", "0", *options]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=True)
    stats = json.loads(done.stdout)["stats"]
    return {name: stats[name] for name in ("milliseconds_per_token", "first_token_seconds", "prefill_seconds")}


def llama_cpp(program: Program, prompt: list[int], max_tokens: int, turns: int) -> Iterator[dict[str, Any]]:
    """Yield the times of `turns` texts of llama.cpp in its fastest setting; each new process reads the prompt."""
    tried = find_setting(program, prompt, on_trial=lambda setting: say(f"  trying {name_of(setting)}"))
    setting = fastest(tried).setting
    for _ in range(turns):
        with program.start(setting, len(prompt) + max_tokens) as other:
            yield _timed(other, prompt, max_tokens) | {"setting": dict(setting)}


def _timed(other: Other, prompt: list[int], max_tokens: int) -> dict[str, Any]:
    _, times = other.generate(prompt, GREEDY, max_tokens=max_tokens, end_tokens=())
    return {"milliseconds_per_token": milliseconds_after_first(times), "first_token_seconds": times[0]}


def rows_of(runs: Sequence[Mapping[str, Any]]) -> Iterator[list[str]]:
    """A line for each way and number of loops."""
    medians: dict[tuple[str, int], float] = {}
    for way, number in dict.fromkeys((run["way"], run["loops"]) for run in runs):
        some = [run for run in runs if (run["way"], run["loops"]) == (way, number)]
        spread = Spread.of([run["milliseconds_per_token"] for run in some])
        medians[way, number] = spread.median
        quiet = medians.get((way, 0))
        yield [
            way,
            f"{number}",
            f"{spread.median:.2f}",
            f"{spread.least:.2f} to {spread.most:.2f}",
            f"{spread.median / quiet:.2f}" if quiet else "",
            f"{Spread.of([run['first_token_seconds'] for run in some]).median:.2f}",
            name_of(some[0]["setting"]) if "setting" in some[0] else "",
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--loops", default="0,1,2,4")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--peers-env", default="none", help="environment with xllamacpp; none: without llama.cpp")
    args = parser.parse_args()
    model, draft = demo_models(None, None)
    tokenizer, python = load_tokenizer(model, draft), wheel_python(args.peers_env)
    prompt = texts.prompt("continue", tokenizer, args.length)
    runs: list[dict[str, Any]] = []
    with ExitStack() as stack:
        prompt_file = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "prompt.txt"
        prompt_file.write_text(tokenizer.decode(prompt), encoding="utf-8")
        program = stack.enter_context(llama_cpp_of(python, model, dtype="bf16")) if isinstance(python, str) else None
        for number in map(int, args.loops.split(",")):
            with loops(number):
                for way, options in [*WAYS.items()] * args.turns:
                    runs.append({"way": way, "loops": number} | ours(prompt_file, args.max_tokens, options))
                    say(f"{number} loops, {way}: {runs[-1]['milliseconds_per_token']:.2f} ms/token")
                for run in llama_cpp(program, prompt, args.max_tokens, args.turns) if program else ():
                    runs.append({"way": LLAMA_CPP, "loops": number} | run)
                    say(f"{number} loops, {LLAMA_CPP}: {run['milliseconds_per_token']:.2f} ms/token")
    runs.sort(key=lambda run: ([*WAYS, LLAMA_CPP].index(run["way"]), run["loops"]))
    columns = ["way", "loops", "ms/token", "range", "times quiet", "first s", "setting"]
    emit(columns, list(rows_of(runs)), about("demo pair on a busy machine", 0, length=len(prompt)), runs)


if __name__ == "__main__":
    main()
