"""Long runs: one long text over an offloaded cache, a batch of many prompts that is killed and resumed, and a server
with a crowd of clients.

usage: python benchmarks/soak.py text [--length 28672] [--max-tokens 4096] [--window 512] [--link-gbps 1]
       python benchmarks/soak.py batch [--prompts 500] [--batch 4] [--kills 3]
       python benchmarks/soak.py serve [--requests 500] [--distinct 60] [--seed 1] [--model DIR] [--draft DIR|none]

The text is greedy, and is compared with plain decoding's text with everything resident. Each row is a window of tokens:
ms/token, the share of drafted tokens that the target accepted, and the process's memory at its end.

The batch is `triforce generate --input-jsonl -o FILE` with prompts of 200 to 1,000 tokens, 32 new ones each, and seeds.
It is killed while results arrive, and started again with the same command. Its rows are runs: results, tokens/s in all,
and the peak memory in the first quarter, the first half and all of the run. At the end every id must be there once, and
one of five greedy texts is compared with that of a run with one prompt at a time.

The server answers four requests at a time, of eight clients (crowd.py). Its rows are looks at the process: before,
after every 50 requests, and at the end. It ends with exit code 1 where a text is another one than alone, memory, open
files or threads grow, a request hangs or fails, or a temporary file is left.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import texts
from crowd import soak
from decode import demo_models, without_link
from report import about, emit, say

from offload.decode.sampling import SamplingParams
from offload.engine.engine import Engine, load_tokenizer, plan_request
from offload.engine.request import GenerationRequest
from offload.engine.step import Step
from offload.metrics import LevelStats
from offload.plan.planner import Options, Plan

Document = dict[str, Any]
GREEDY = SamplingParams(temperature=0.0)
MODEL, DRAFT = demo_models(None, None)
NEW_TOKENS = 32  # new tokens of each prompt of the batch
EVERY = 5  # one of so many greedy texts is written again, alone
POLL_SECONDS = 0.2


def steps_of(
    plan: Plan, prompt: Sequence[int], max_tokens: int, *, speculation: bool = True
) -> Iterator[tuple[Step, Engine]]:
    with Engine.load(plan, MODEL, DRAFT, load_tokenizer(MODEL, DRAFT)) as engine:
        settings: Document = {"max_tokens": max_tokens, "end_tokens": (), "speculation": speculation}
        for step in engine.generate(GenerationRequest(prompt, GREEDY, **settings)):
            yield step, engine


def moment(tokens: int, target: LevelStats) -> Document:
    return {
        "tokens": tokens,
        "seconds": time.perf_counter(),
        "drafted": target.drafted,
        "accepted": target.accepted,
        "memory": psutil.Process().memory_info().rss,
    }


def long_text(length: int, max_tokens: int, window: int, link_gbps: float) -> list[Document]:
    """A row for each window. Raises AssertionError if plain decoding writes another text."""
    prompt = texts.prompt("continue", load_tokenizer(MODEL, DRAFT), length)
    sizes = {"num_prompt_tokens": len(prompt), "max_tokens": max_tokens}
    plan = plan_request(MODEL, DRAFT, Options(offload=frozenset({"kv"}), link_gbps=link_gbps), **sizes)
    said, moments = list[int](), list[Document]()
    for step, engine in steps_of(plan, prompt, max_tokens):
        said += step.tokens
        if not moments or len(said) >= moments[-1]["tokens"] + window or step.finish is not None:
            moments.append(moment(len(said), engine.levels["target"].stats))
            say(f"  {len(said):,} of {max_tokens:,} tokens, {moments[-1]['memory'] / 1e6:.0f} MB")
    say("  the same by plain decoding, all resident")
    plainly = steps_of(without_link(plan), prompt, max_tokens, speculation=False)
    expected = [token for step, _ in plainly for token in step.tokens]
    assert said == expected, "plain decoding writes another text"
    return [
        {
            "what": f"tokens {before['tokens']} to {after['tokens']} after {len(prompt)}",
            "milliseconds_per_token": 1000
            * (after["seconds"] - before["seconds"])
            / (after["tokens"] - before["tokens"]),
            "acceptance": (after["accepted"] - before["accepted"]) / max(after["drafted"] - before["drafted"], 1),
            "memory": after["memory"],
        }
        for before, after in pairwise(moments)
    ]


def questions(count: int) -> list[Document]:
    """Prompts of some 200 to 1,000 tokens, each from another place of a novel."""
    tokenizer, found = load_tokenizer(MODEL, DRAFT), []
    novel = tokenizer.encode(texts.NOVEL.read_text(encoding="utf-8"))
    for number in range(count):
        start, length = (len(novel) - 1000) * number // count, 200 + 800 * (7 * number % 11) // 10
        text = tokenizer.decode(novel[start : start + length])
        settings = {"max_tokens": NEW_TOKENS, "temperature": 0.7 * (number % 2), "seed": number}
        found.append({"id": number, "prompt": text} | settings)
    return found


def write(path: Path, documents: Sequence[Document]) -> Path:
    path.write_text("".join(json.dumps(document) + "\n" for document in documents), encoding="utf-8")
    return path


def results_in(path: Path) -> list[Document]:
    """The results in the file's complete lines."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def run_until(source: Path, target: Path, batch: int, num_results: int) -> Document:
    """Start the command and kill it once `target` has `num_results` results; let it end if that is all of them."""
    command = [sys.executable, "-m", "triforce_cli", "generate", "--input-jsonl", str(source)]
    command += ["--output-jsonl", str(target), "--batch", str(batch), "--quiet"]
    num_before, start, memory = len(results_in(target)), time.perf_counter(), list[int]()
    total = num_lines(source)
    with subprocess.Popen(command) as process:
        watched = psutil.Process(process.pid)
        while process.poll() is None:
            if num_results < total and num_lines(target) >= num_results:
                process.kill()
                break
            try:
                memory.append(watched.memory_info().rss)
            except psutil.NoSuchProcess:
                break
            time.sleep(POLL_SECONDS)
    assert process.returncode == 0 or num_results < total, f"the run ended with exit code {process.returncode}"
    seconds, new = time.perf_counter() - start, results_in(target)[num_before:]
    return {
        "what": f"results {num_before} to {num_before + len(new)} of {total}, {batch} at a time",
        "tokens_per_second": sum(len(result["tokens"]) for result in new) / seconds,
        "memory": [max(memory[: len(memory) * part // 4], default=0) for part in (1, 2, 4)],
    }


def batch_of_many(count: int, batch: int, num_kills: int) -> list[Document]:
    """A row for each run. Raises AssertionError if a result is missing, or differs from the text alone."""
    asked, found = questions(count), []
    with tempfile.TemporaryDirectory() as folder:
        source, target = write(Path(folder) / "in.jsonl", asked), Path(folder) / "out.jsonl"
        for stop in [*(count * (number + 1) // (num_kills + 1) for number in range(num_kills)), count]:
            found.append(run_until(source, target, batch, stop))
            say(f"  {found[-1]['what']}")
        said = {result["id"]: result["tokens"] for result in results_in(target)}
        assert len(results_in(target)) == len(said) == count, "results are missing, or there twice"
        # Only greedy texts: a seeded text depends on the plan, and a smaller file may have another plan.
        some = [question for question in asked if question["temperature"] == 0][::EVERY]
        again = Path(folder) / "again.jsonl"
        run_until(write(Path(folder) / "some.jsonl", some), again, 1, len(some))
        alone = {result["id"]: result["tokens"] for result in results_in(again)}
        assert alone == {question["id"]: said[question["id"]] for question in some}, "alone, prompts get other texts"
        return found


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    text = parts.add_parser("text", help="one long text over an offloaded cache")
    text.add_argument("--length", type=int, default=28_672)
    text.add_argument("--max-tokens", type=int, default=4096)
    text.add_argument("--window", type=int, default=512)
    text.add_argument("--link-gbps", type=float, default=1.0)
    batch = parts.add_parser("batch", help="many prompts in a batch that is killed and goes on")
    batch.add_argument("--prompts", type=int, default=500)
    batch.add_argument("--batch", type=int, default=4)
    batch.add_argument("--kills", type=int, default=3)
    serve = parts.add_parser("serve", help="a server with a crowd of clients, some of which leave")
    serve.add_argument("--requests", type=int, default=500)
    serve.add_argument("--distinct", type=int, default=60)
    serve.add_argument("--seed", type=int, default=1)
    serve.add_argument("--model", type=Path, help="target; default: the demo pair")
    serve.add_argument("--draft", help='draft, or "none"')
    return parser.parse_args()


def emit_text(args: argparse.Namespace) -> None:
    found = long_text(args.length, args.max_tokens, args.window, args.link_gbps)
    rows = [
        [row["what"], *numbers(row["milliseconds_per_token"], row["memory"]), f"{row['acceptance']:.2f}"]
        for row in found
    ]
    title = f"{MODEL.name}, cache over {args.link_gbps:g} GB/s"
    emit(["what", "ms/token", "MB", "accepted"], rows, about(title, 1), found)


def emit_batch(args: argparse.Namespace) -> None:
    found = batch_of_many(args.prompts, args.batch, args.kills)
    rows = [[row["what"], *numbers(row["tokens_per_second"], *row["memory"])] for row in found]
    title = f"{MODEL.name}, {args.prompts} prompts, killed {args.kills} times"
    emit(["what", "tokens/s", "MB, a quarter", "half", "all"], rows, about(title, 1), found)


def emit_serve(args: argparse.Namespace) -> None:
    model, draft = demo_models(args.model, args.draft)
    found = soak(model, draft, args.requests, args.distinct, args.seed)
    rows = [
        [f"{look.num_requests}", *numbers(look.seconds, look.memory), f"{look.num_files}", f"{look.num_threads}"]
        for look in found.looks
    ]
    shared = about(f"{model.name}, {args.requests} requests", args.seed, counts=found.counts, faults=found.faults)
    emit(["requests", "seconds", "MB", "files", "threads"], rows, shared, map(asdict, found.looks))
    say("\n".join([*(f"{name}: {number:g}" for name, number in found.counts.items()), *found.faults]))
    if found.faults:
        raise SystemExit(1)


def numbers(rate: float, *memory: int) -> list[str]:
    return [f"{rate:.1f}", *(f"{most / 1e6:.0f}" for most in memory)]


if __name__ == "__main__":
    args = arguments()
    {"text": emit_text, "batch": emit_batch, "serve": emit_serve}[args.part](args)
