"""Several prompts at a time: this program, llama.cpp's slots and transformers' batches, in one run.

usage: python benchmarks/batches.py [--model DIR --draft DIR] [--lengths 8192,16384] [--batches 1,2,4,8]
                                    [--max-tokens 128] [--turns 3] [--ways "ours, plain;llama.cpp"] [--peers-env DIR]
                                    [--link-gbps 1]

The prompts are equally long parts of a novel, each from another place. Weights are bf16, texts greedy, the number of
threads torch's default, and each way runs in a process of its own. All prompts are read first. The timing is from then
to the end of the last text, and tokens/s is over all texts together. A turn runs all ways with one number of prompts;
every other turn is in reverse order. transformers reads its prompts again in each turn.

"alone" is tokens/s relative to the same way with one prompt. llama.cpp has a slot with its own cache for each prompt,
and runs in the setting that is the fastest for the first prompt alone, found as in peers.py (`setting` and `tried` in
the JSON); transformers uses sdpa attention. --link-gbps is for this program alone: the caches are behind a link of that
speed, and "link idle" is the share of the time without a copy on it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import texts
import torch
from decode import demo_models
from peer import Peer, llama_cpp_program, model_files, open_llama_cpp, wheel_python
from peers import LLAMA_CPP, PLAIN, PROCESS, SLACK
from program import GREEDY, Setting, Tried, fastest, find_setting, name_of
from report import about, emit, say

from offload.engine.engine import load_tokenizer
from offload.errors import TriforceError
from offload.metrics import Spread
from offload.text.tokenizer import Tokenizer

Document = dict[str, Any]
Way = tuple[str, Callable[[], Peer]]


@dataclass(frozen=True)
class Case:
    """Prompts that run at a time, of about `asked` tokens. file: llama.cpp's GGUF file, or the error if there is none;
    python: the Python with its wheel; tried: its settings after a prompt of that length."""

    asked: int
    model: Path
    draft: Path | None
    prompts: list[list[int]]
    max_tokens: int
    threads: int
    python: str
    file: Path | TriforceError
    link_gbps: float | None
    tried: list[Tried] = field(default_factory=list)

    def ways(self) -> list[Way]:
        link: Document = {"link_gbps": self.link_gbps}
        ours: list[Way] = [
            (PLAIN, lambda: self._process({"speculation": False} | link, None)),
            ("ours, default", lambda: self._process({"speculation": True} | link, self.draft)),
        ]
        if self.link_gbps is not None:
            return ours
        return [
            *ours,
            (LLAMA_CPP, self._llama_cpp),
            ("transformers", lambda: self._process({"lookup": False}, None)),
        ]

    def run(self, peer: Peer, max_tokens: int) -> float:
        """Tokens per second over all texts."""
        said, seconds = peer.generate_all(self.prompts, GREEDY, max_tokens=max_tokens, end_tokens=())
        return sum(map(len, said)) / seconds

    def _process(self, options: Document, draft: Path | None) -> Peer:
        lengths = {"prompt_tokens": len(self.prompts[0]), "max_tokens": self.max_tokens, "slots": len(self.prompts)}
        models = {"model": str(self.model), "draft": None if draft is None else str(draft), "threads": self.threads}
        return Peer("the process", [sys.executable, str(PROCESS)], options | models | lengths)

    def _llama_cpp(self) -> Peer:
        if isinstance(self.file, TriforceError):
            raise self.file
        if not self.tried:
            program = llama_cpp_program("bf16", self._start)
            self.tried.extend(find_setting(program, self.prompts[0], on_trial=show))
        context = len(self.prompts[0]) + self.max_tokens + SLACK
        return self._start(fastest(self.tried).setting, context, slots=len(self.prompts))

    def _start(self, setting: Setting, context: int, slots: int = 1) -> Peer:
        assert isinstance(self.file, Path)
        return open_llama_cpp(self.python, self.file, setting, context=context, slots=slots)


def prompts_of(tokenizer: Tokenizer, count: int, num_tokens: int) -> list[list[int]]:
    """Prompts of equal length, each from another place."""
    found = [texts.prompt("continue", tokenizer, num_tokens, start=place / count) for place in range(count)]
    shortest = min(map(len, found))
    return [prompt[:shortest] for prompt in found]


def measure(case: Case, names: Sequence[str], num_turns: int) -> list[Document]:
    """A row for each way. A first run of a few tokens reads the prompts and is not counted."""
    with ExitStack() as stack:
        peers, rates, absent = dict[str, Peer](), dict[str, list[float]](), dict[str, str]()
        for name, start in case.ways():
            if names and name not in names:
                continue
            say(f"{len(case.prompts)} x {len(case.prompts[0])} tokens, {name}: reading")
            rates[name] = []
            try:
                peers[name] = stack.enter_context(start())
                case.run(peers[name], min(8, case.max_tokens))
            except TriforceError as error:
                absent[name] = str(error)
        for turn in range(num_turns):
            for name in list(rates) if turn % 2 == 0 else list(rates)[::-1]:
                if name not in absent:
                    rates[name].append(case.run(peers[name], case.max_tokens))
                    say(f"  turn {turn + 1}, {name}: {rates[name][-1]:.1f} tokens/s")
        shared = {"asked": case.asked, "length": len(case.prompts[0]), "prompts": len(case.prompts)}
        return [
            shared
            | {"way": name}
            | ({"absent": absent[name]} if name in absent else measured(peers[name], rates[name]))
            | (setting_of(case.tried) if name == LLAMA_CPP and case.tried else {})
            for name in rates
        ]


def measured(peer: Peer, rates: list[float]) -> Document:
    return {"tokens_per_second": rates, "peak_bytes": peer.peak_bytes, **peer.about}


def show(setting: Setting) -> None:
    say(f"  trying {name_of(setting)}")


def setting_of(tried: list[Tried]) -> Document:
    return {"setting": name_of(fastest(tried).setting), "tried": [asdict(trial) for trial in tried]}


def row_of(found: Document, alone: Document | None) -> list[str]:
    begin = [str(found["length"]), str(found["prompts"]), found["way"]]
    if "absent" in found:
        return [*begin, "", "", "", "", "", "", f"absent: {found['absent']}"]
    rate = Spread.of(found["tokens_per_second"])
    gain = None if alone is None or "absent" in alone else rate.median / Spread.of(alone["tokens_per_second"]).median
    return [
        *begin,
        f"{rate.median:.1f}",
        f"{rate.least:.1f} to {rate.most:.1f}",
        f"{rate.median / found['prompts']:.1f}",
        "" if gain is None else f"{gain:.2f}x",
        "" if found.get("link_idle") is None else f"{found['link_idle']:.2f}",
        f"{found['peak_bytes'] / 1e9:.2f}",
        found.get("setting", ""),
    ]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument("--draft", default=None, help="folder or none (default: the demo draft with the demo target)")
    parser.add_argument("--lengths", default="8192,16384", help="prompt lengths in tokens")
    parser.add_argument("--batches", default="1,2,4,8", help="numbers of prompts")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--ways", default="", help="names of rows, with ; between them (default: all)")
    parser.add_argument("--peers-env", default="", metavar="DIR")
    parser.add_argument("--link-gbps", type=float, default=None)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    model, draft = demo_models(args.model, args.draft)
    tokenizer, python = load_tokenizer(model, draft), wheel_python(args.peers_env)
    names, found, threads = list(filter(None, args.ways.split(";"))), list[Document](), torch.get_num_threads()
    with model_files() as write:
        no_wheel = isinstance(python, TriforceError)
        file = python if isinstance(python, TriforceError) else write(model, "bf16")
        for length in map(int, args.lengths.split(",")):
            tried = list[Tried]()
            for count in map(int, args.batches.split(",")):
                prompts = prompts_of(tokenizer, count, length)
                wheel = "" if no_wheel else str(python)
                case = Case(length, model, draft, prompts, args.max_tokens, threads, wheel, file, args.link_gbps, tried)
                found += measure(case, names, args.turns)
    alone = {(row["asked"], row["way"]): row for row in found if row["prompts"] == 1}
    columns = ["prompt", "prompts", "way", "tokens/s", "range", "for each", "alone", "link idle", "peak GB", "setting"]
    link = "" if args.link_gbps is None else f", caches over {args.link_gbps:g} GB/s"
    title = f"{model.name}, bf16, {threads} threads, {args.max_tokens} tokens of each prompt{link}"
    emit(columns, [row_of(row, alone.get((row["asked"], row["way"]))) for row in found], about(title, 0), found)


if __name__ == "__main__":
    main()
