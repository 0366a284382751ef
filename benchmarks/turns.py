"""Turns of a conversation: how much of each prompt is read anew, and how long its answer takes to begin.

usage: python benchmarks/turns.py clients [--names openai-chat,openai-responses,anthropic,llm] [--model DIR]
                                          [--context 32768] [--max-tokens 256]
       python benchmarks/turns.py billing [--tokens 18000] [--model DIR] [--context 32768]

Clients: each one in names has a talk of five turns with a server of its own (clients.py). Python packages have to be on
PYTHONPATH, agents (claude, codex, opencode, pi, aider, qwen-code) on PATH; these run by `triforce launch`, with a home
of their own. In a turn the model reads a file by the client's tool, and then answers; a relay demands the call
(relay.py). The lines of the output have a measured answer each, the table a turn each.

Billing: a talk of two turns in Anthropic's messages, whose first prompt has so many tokens, with Claude Code's billing
block before the system prompt, other in each request: left out, as it is by default, with --keep-billing, and, for
comparison, a prompt without the block.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import texts
from clients import Client, Place, client_of, version_of, write_files
from crowd import with_template
from decode import demo_models
from relay import Measured, relaying
from report import about, emit, say
from server import Server, serving

from offload.engine.engine import load_tokenizer

Document = dict[str, Any]
BILLING = "x-anthropic-billing-header: cc_version=2.1.197.c0e; cc_entrypoint=cli; cch={cch};"
QUESTIONS = ("Who is in it?", "And where are they?")
NEW_TOKENS = 64
NAME = "m"


def talk(client: Client, model: Path, draft: Path | None, args: argparse.Namespace) -> Iterator[list[Measured]]:
    """Yield the answers of each turn."""
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        for part in ("work", "home", "store", "model"):
            (place / part).mkdir()
        write_files(place / "work")
        options = _options(with_template(model, place / "model"), draft, args)
        with (
            serving(*options, TRIFORCE_CACHE_DIR=str(place / "store")) as server,
            relaying(server, client.tool, args.max_tokens) as relay,
        ):
            for _ in client.talk(Place(relay.url, NAME, place / "work", place / "home")):
                yield relay.measured()


def _options(model: Path, draft: Path | None, args: argparse.Namespace) -> list[str]:
    return ["--model", str(model), "--draft", str(draft or "none"), "--context", str(args.context), "--serve-as", NAME]


def billing_talk(server: Server, text: str, *, has_block: bool) -> Iterator[Measured]:
    """Yield the answers of two turns whose system prompts differ in Claude Code's billing block, if they have one."""
    messages: list[Document] = []
    with relaying(server, "", NEW_TOKENS) as relay:
        for number, question in enumerate(QUESTIONS):
            messages.append({"role": "user", "content": question})
            blocks = [BILLING.format(cch=f"{0xA17C0 + 7919 * number:05x}")] if has_block else []
            system = [{"type": "text", "text": block} for block in (*blocks, text)]
            body = {"model": NAME, "max_tokens": NEW_TOKENS, "system": system, "messages": messages}
            with replace(server, url=relay.url).post("/v1/messages", body) as response:
                messages.append({"role": "assistant", "content": json.load(response)["content"]})
            yield from relay.measured()


def clients(args: argparse.Namespace) -> Iterator[Document]:
    """A run for each answer. A talk ends early at an error, or a turn without an answer."""
    model, draft = demo_models(args.model, args.draft)
    for client in [client_of(name) for name in args.names.split(",")]:
        say(f"{client.name} {version_of(client)}")
        try:
            for turn, answers in enumerate(talk(client, model, draft, args), 1):
                if not answers:
                    raise ValueError(f"turn {turn} had no answer")
                for each in answers:
                    say(f"  turn {turn}: {each.cached:,} of {each.prompt:,} tokens cached, {each.first_seconds:.1f} s")
                    yield {"what": client.name, "version": version_of(client), "turn": turn} | asdict(each)
        except Exception as error:
            say(f"  the talk ended: {type(error).__name__}: {error}")


def billing(args: argparse.Namespace) -> Iterator[Document]:
    """A run for each answer."""
    model, draft = demo_models(args.model, args.draft)
    tokenizer = load_tokenizer(model, draft)
    text = tokenizer.decode(texts.prompt("continue", tokenizer, args.tokens))
    ways = {"block left out": (), "block kept": ("--keep-billing",), "no block": ()}
    for way, options in ways.items():
        with (
            tempfile.TemporaryDirectory() as store,
            serving(*_options(model, draft, args), *options, TRIFORCE_CACHE_DIR=store) as server,
        ):
            for turn, each in enumerate(billing_talk(server, text, has_block=way != "no block"), 1):
                say(f"  {way}, turn {turn}: {each.cached:,} of {each.prompt:,} cached, {each.first_seconds:.1f} s")
                yield {"what": way, "turn": turn} | asdict(each)


def rows_of(runs: Sequence[Document]) -> Iterator[list[str]]:
    """A line for each turn. Its prompt is that of its last answer."""
    for what, turn in dict.fromkeys((run["what"], run["turn"]) for run in runs):
        answers = [run for run in runs if (run["what"], run["turn"]) == (what, turn)]
        anew = sum(each["prompt"] - each["cached"] for each in answers)
        seconds = sum(each["seconds"] for each in answers)
        tokens = [f"{number:,}" for number in (answers[-1]["prompt"], anew, sum(each["new"] for each in answers))]
        yield [what, f"{turn}", f"{len(answers)}", *tokens, f"{answers[0]['first_seconds']:.1f}", f"{seconds:.1f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    talks = parts.add_parser("clients", help="five turns with tools by clients")
    talks.add_argument("--names", default="openai-chat,openai-responses,anthropic,llm")
    talks.add_argument("--max-tokens", type=int, default=256, help="of an answer at most")
    prompts = parts.add_parser("billing", help="a second turn with and without the billing block")
    prompts.add_argument("--tokens", type=int, default=18_000)
    for part in (talks, prompts):
        part.add_argument("--model", type=Path, help="target; default: the demo pair")
        part.add_argument("--draft", help='draft, or "none"')
        part.add_argument("--context", type=int, default=32_768)
    args = parser.parse_args()
    runs = list({"clients": clients, "billing": billing}[args.part](args))
    model, _ = demo_models(args.model, args.draft)
    columns = ["what", "turn", "answers", "prompt", "read anew", "new", "first s", "s"]
    emit(columns, list(rows_of(runs)), about(f"{args.part}, {model.name}", 0), runs)


if __name__ == "__main__":
    main()
