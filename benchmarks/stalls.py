"""Stalls of a stream: the longest gap between two pieces of it while prompts of other requests are read.

usage: python benchmarks/stalls.py [--prompts 8] [--tokens 8000] [--new 64]

A server with the demo model answers one request as a stream for as long as the others take. Once its text runs, prompts
of so many tokens arrive at once, each for a text of its own. Rows: the longest and the median gap of the stream before
they came and while they were there, the seconds until all were answered, and tokens written a second in that time, the
stream's among them.
PYTHONPATH says whose server is measured.
"""

from __future__ import annotations

import argparse
import json
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from statistics import median
from typing import Any

import texts
from decode import demo_models
from report import say
from server import Server, serving

from offload.engine.engine import load_tokenizer

WARM_SECONDS = 3.0
END = 1  # the demo model's token, which no text has


def ask(server: Server, prompt: str, max_tokens: int, *, stream: bool = False) -> Any:
    body = {"prompt": prompt, "max_tokens": max_tokens, "stream": stream, "temperature": 0}
    return server.post("/v1/completions", body | {"logit_bias": {str(END): -100}})


def pieces(server: Server, times: list[float], stop: list[bool]) -> None:
    """Note the times at which pieces of a stream come, until it is to stop."""
    with ask(server, "The river", 12_000, stream=True) as stream:
        for line in stream:
            if line.startswith(b"data: "):
                times.append(time.perf_counter())
            if stop:
                return


def gaps(times: list[float]) -> str:
    every = [later - earlier for earlier, later in pairwise(times)]
    return f"longest gap {max(every):.2f} s, median {median(every) * 1e3:.0f} ms, {len(times)} pieces"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--new", type=int, default=64)
    wanted = parser.parse_args()
    model, _ = demo_models(None, None)
    tokenizer = load_tokenizer(model, None)
    starts = [each / wanted.prompts for each in range(wanted.prompts)]
    prompts = [tokenizer.decode(texts.prompt("continue", tokenizer, wanted.tokens, start)) for start in starts]
    times, stop = list[float](), list[bool]()
    batch = wanted.prompts + 1
    sizes = ("--batch", str(batch), "--context", "16384", "--max-waiting", "64", "--no-store")
    with serving(*sizes) as server, ThreadPoolExecutor(batch) as clients:
        reading = clients.submit(pieces, server, times, stop)
        while not times:
            time.sleep(0.1)
        time.sleep(WARM_SECONDS)
        print(f"alone: {gaps(times[1:])}")
        count, start = len(times), time.perf_counter()
        answers = list(clients.map(lambda prompt: json.load(ask(server, prompt, wanted.new)), prompts))
        seconds = time.perf_counter() - start
        stop.append(True)
        reading.result()
    usage = [answer["usage"] for answer in answers]
    say(f"{usage[0]['prompt_tokens']} tokens a prompt")
    written = sum(each["completion_tokens"] for each in usage) + len(times) - count
    print(f"beside: {gaps(times[count - 1 :])}; all answered in {seconds:.1f} s, {written / seconds:.1f} tokens/s")


if __name__ == "__main__":
    main()
