"""Peers: this program, transformers and llama.cpp on the same weights, prompts and machine, in one run.

usage: python benchmarks/peers.py [--model DIR --draft DIR] [--lengths 2048,8192,16384,30720] [--max-tokens 128]
                                  [--turns 3] [--ways "ours, plain;llama.cpp"] [--peers-env DIR]

All weights are bf16, prompts are the same token ids, texts are greedy, and the number of threads is torch's default.
Each way runs in a process of its own, so that peak memory (mapped files included) is its own: together they need memory
for the weights of every way. The prompt is read once, which gives the time to the first token; then the ways continue
it in turns, every other turn in reverse order. ms/token counts the tokens after the first.

A GGUF file as --model serves all programs: llama.cpp's copy of it has the same tensors, with a vocabulary of ids.

"llama.cpp, Q4_0" writes another text, from weights in 4 bits (head and embeddings in 8), about as many bytes as its
Q4_K_M, which the wheel cannot make.

llama.cpp is the wheel xllamacpp in an environment of its own, `--peers-env` (created if missing; by default in the
user's cache folder; "none": without llama.cpp). It reads a GGUF file written from the same safetensors. llama.cpp and
transformers run in their fastest settings, found by short trials before the turns (program.py), which are
in the JSON, `tried`. llama.cpp with its draft or lookups has the same setting, and the fastest of its n-gram lookups is
found in the same way. Lookups remember earlier texts, so each of their turns is a new process, which takes over the
prompt's rows from plain llama.cpp. transformers reads the prompt again in each turn with speculation.

"parts" is the index, from 1, of the first token that differs from plain decoding's: other programs round differently.
llama.cpp computes its rows in fp32. "predicted" is our plan's ms/token and its share of the measured median. A way that
cannot run is a row with the reason.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import texts
import torch
from decode import demo_models
from peer import (
    LOOKUPS,
    Peer,
    llama_cpp_choices,
    llama_cpp_program,
    model_files,
    open_llama_cpp,
    wheel_python,
)
from program import GREEDY, Program, Setting, fastest, find_setting, milliseconds_after_first, name_of
from reference import CHOICES, SDPA
from report import about, beside, emit, say

from offload.bench.comparison import first_difference
from offload.config.gguf_header import is_gguf
from offload.config.reading import read_config
from offload.engine.engine import load_tokenizer
from offload.errors import TriforceError
from offload.metrics import Spread

PLAIN, TRANSFORMERS = "ours, plain", "transformers"
LLAMA_CPP, LLAMA_CPP_LOOKUPS = "llama.cpp", "llama.cpp, n-grams"
FOUR_BITS = "llama.cpp, Q4_0"
FIRST_TOKENS = 24  # tokens of the run that reads the prompt
TRIALS = 2  # of each kind of lookups; the faster one counts
SLACK = 64  # tokens of context beyond prompt and output, for drafts
PROCESS = Path(__file__).parent / "peer_process.py"
ABSENT = {
    "openvino-genai": "takes exported OpenVINO IR or GGUF with its vocabulary, not these safetensors",
}

Document = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A prompt, its models and other programs' files. files: GGUF by "target" and "draft"; python: the Python with the
    wheel, or the error if there is none; rows: the file where llama.cpp stores the rows of the prompt."""

    model: Path
    draft: Path | None
    prompt: list[int]
    max_tokens: int
    end_tokens: frozenset[int]
    threads: int
    files: dict[str, Path]
    python: str | TriforceError
    rows: Path

    def measure(self, peer: Peer, max_tokens: int = sys.maxsize) -> Document:
        """Times and tokens of a text of at most the case's own length."""
        max_tokens = min(max_tokens, self.max_tokens)
        tokens, seconds = peer.generate(self.prompt, GREEDY, max_tokens=max_tokens, end_tokens=self.end_tokens)
        milliseconds = milliseconds_after_first(seconds)
        if milliseconds is None:
            raise TriforceError("its text is too short to be timed")
        return {"first_seconds": seconds[0], "ms": milliseconds, "tokens": tokens}

    def ours(self, speculation: bool) -> Peer:
        lengths = {"prompt_tokens": len(self.prompt), "max_tokens": self.max_tokens}
        return self._process({"speculation": speculation, **lengths}, self.draft)

    def transformers(self, draft: bool = False, lookup: bool = False, attention: str = SDPA) -> Peer:
        options = {"lookup": lookup, "attention": attention}
        return self._process(options, self._known_draft() if draft else None)

    def llama_cpp(self, setting: Setting, draft: bool = False, file: str = "target", **options: Any) -> Peer:
        if isinstance(self.python, TriforceError):
            raise self.python
        if draft:
            self._known_draft()
            options["draft"] = self.files["draft"]
        context = len(self.prompt) + self.max_tokens + SLACK
        return open_llama_cpp(self.python, self.files[file], setting, context=context, **options)

    def find(self, way: Way, program: Program) -> Setting:
        """The fastest setting of `way`; the trials are stored in it. A way whose program does not run is marked
        absent."""
        try:
            tried = find_setting(program, self.prompt, on_trial=lambda setting: say(f"  trying {name_of(setting)}"))
        except TriforceError as error:
            way.absent = str(error)
            return {}
        best = fastest(tried).setting
        way.tried, way.setting = [asdict(trial) for trial in tried], name_of(best)
        return best

    def _process(self, options: Document, draft: Path | None) -> Peer:
        models = {"model": str(self.model), "draft": None if draft is None else str(draft), "threads": self.threads}
        return Peer("the process", [sys.executable, str(PROCESS)], options | models)

    def _known_draft(self) -> Path:
        if self.draft is None:
            raise TriforceError("no draft model is given")
        return self.draft


@dataclass
class Way:
    """A way to continue the prompt. open_peer: starts its process; fresh: start it again for each turn. setting, tried:
    the chosen setting and the trials. first_seconds: to the first token, with the whole prompt to read; None if it
    never reads it."""

    name: str
    open_peer: Callable[[], Peer]
    fresh: bool = False
    setting: str = ""
    tried: list[Document] = field(default_factory=list)
    peer: Peer | None = None
    first_seconds: float | None = None
    absent: str = ""
    turns: list[Document] = field(default_factory=list)
    peak_bytes: int = 0
    about: Document = field(default_factory=dict)

    def begin(self, case: Case) -> None:
        """Load the model and read the prompt, unless that is done."""
        if self.fresh or self.peer is not None or self.absent:
            return
        try:
            self.peer = self.open_peer()
            self.first_seconds = case.measure(self.peer, FIRST_TOKENS)["first_seconds"]
        except TriforceError as error:
            self.end(str(error))

    def run(self, case: Case) -> None:
        """Run one turn."""
        if self.absent:
            return
        try:
            peer = self.open_peer() if self.peer is None else self.peer
            self.turns.append(case.measure(peer))
            self.peak_bytes, self.about = max(peer.peak_bytes, self.peak_bytes), peer.about
            if self.fresh:
                peer.close()
        except TriforceError as error:
            self.end(str(error))

    def end(self, absent: str = "") -> None:
        self.absent = self.absent or absent
        if self.peer is not None:
            self.peer.close()

    def document(self, plain: Way, num_prompt_tokens: int) -> Document:
        """The row of the results."""
        shared = {"length": num_prompt_tokens, "way": self.name}
        if self.absent:
            return shared | {"absent": self.absent, "tried": self.tried}
        seconds = self.first_seconds
        places = [first_difference(plain.turns[0]["tokens"], turn["tokens"]) for turn in self.turns if plain.turns]
        parts = {"first_difference_from_plain": min((at for at in places if at is not None), default=None)}
        return {
            **shared,
            "setting": self.setting,
            "first_token_seconds": seconds,
            "prefill_tokens_per_second": None if seconds is None else num_prompt_tokens / seconds,
            "milliseconds_per_token": [turn["ms"] for turn in self.turns],
            "peak_bytes": self.peak_bytes,
            "tried": self.tried,
            **(parts if places else {}),
            **self.about,
        }


def ways_of(case: Case, names: list[str]) -> Iterator[Way]:
    """Yield the ways named in `names`, by default all. llama.cpp's settings are tried when its ways are created."""
    wanted = {way.name: way for way in simple_ways(case)}
    if any(name.startswith(LLAMA_CPP) and name != FOUR_BITS for name in names or [LLAMA_CPP]):
        wanted |= {way.name: way for way in llama_cpp_ways(case, lookups=not names or LLAMA_CPP_LOOKUPS in names)}
    if TRANSFORMERS in (names or [TRANSFORMERS]):
        wanted[TRANSFORMERS] = transformers_way(case)
    wanted |= {name: Way(name, lambda: case.ours(False), absent=reason) for name, reason in ABSENT.items()}
    unknown = set(names) - wanted.keys()
    if unknown:
        raise SystemExit(f"no way is called {', '.join(sorted(unknown))}; they are {'; '.join(wanted)}")
    return (way for name, way in wanted.items() if not names or name in names)


def simple_ways(case: Case) -> list[Way]:
    plain = {part: values[0] for part, values in llama_cpp_choices("bf16").items()}
    four_bits = [Way(FOUR_BITS, lambda: case.llama_cpp(plain, file="4 bits"), setting="another output")]
    return [
        Way(PLAIN, lambda: case.ours(False)),
        Way("ours, default", lambda: case.ours(True)),
        Way("transformers, draft", lambda: case.transformers(draft=True)),
        Way("transformers, lookups", lambda: case.transformers(lookup=True)),
        *(four_bits if "4 bits" in case.files else []),
    ]


def transformers_way(case: Case) -> Way:
    way = Way(TRANSFORMERS, lambda: case.transformers(attention=str(setting["attention"])))
    setting = case.find(
        way,
        Program(
            name=TRANSFORMERS,
            choices=CHOICES,
            by_length=frozenset(CHOICES),
            start=lambda setting, context: case.transformers(attention=str(setting["attention"])),
        ),
    )
    return way


def llama_cpp_ways(case: Case, *, lookups: bool) -> list[Way]:
    """The ways of llama.cpp: plain in its fastest setting, which reads the prompt; then draft and lookups in the same
    setting. lookups: try them."""
    rows = case.rows / str(len(case.prompt))
    plain = Way(LLAMA_CPP, lambda: case.llama_cpp(setting, rows=rows))
    setting = case.find(plain, llama_cpp_program("bf16", lambda setting, context: case.llama_cpp(setting)))
    plain.begin(case)
    n_grams = Way(LLAMA_CPP_LOOKUPS, lambda: case.llama_cpp(setting, lookup=n_grams.setting, rows=rows), fresh=True)
    n_grams.absent = plain.absent
    for lookup in LOOKUPS if lookups and not plain.absent else ():
        n_grams.tried.append({"lookup": lookup} | try_lookup(case, setting, lookup, rows))
        say(f"  llama.cpp, {n_grams.tried[-1]}")
    timed = [tried for tried in n_grams.tried if "ms" in tried]
    n_grams.setting = min(timed, key=lambda tried: tried["ms"])["lookup"] if timed else ""
    draft = Way("llama.cpp, draft", lambda: case.llama_cpp(setting, draft=True), setting=plain.setting)
    draft.absent = plain.absent
    return [plain, draft, n_grams]


def try_lookup(case: Case, setting: Setting, lookup: str, rows: Path) -> Document:
    milliseconds = []
    try:
        for _ in range(TRIALS):
            with case.llama_cpp(setting, lookup=lookup, rows=rows) as peer:
                milliseconds.append(case.measure(peer)["ms"])
    except TriforceError as error:
        return {"absent": str(error)}
    return {"ms": min(milliseconds)}


def measure(case: Case, names: list[str], num_turns: int) -> list[Document]:
    """The rows of one prompt."""
    with ExitStack() as stack:
        ways = []
        for way in ways_of(case, names):
            stack.callback(way.end)
            ways.append(way)
        for way in ways:
            say(f"{len(case.prompt)} tokens, {way.name}: {way.absent or 'reading'}")
            way.begin(case)
        for turn in range(num_turns):
            for way in ways if turn % 2 == 0 else ways[::-1]:
                way.run(case)
                if way.turns and not way.absent:
                    say(f"  turn {turn + 1}, {way.name}: {way.turns[-1]['ms']:.2f} ms/token")
        plain = next((way for way in ways if way.name == PLAIN), ways[0])
        return [way.document(plain, len(case.prompt)) for way in ways]


def row_of(found: Document) -> list[str]:
    begin = [str(found["length"]), found["way"]]
    if "absent" in found:
        return [*begin, "", "", "", "", "", "", "", f"absent: {found['absent']}"]
    milliseconds, seconds = Spread.of(found["milliseconds_per_token"]), found["first_token_seconds"]
    parts = found.get("first_difference_from_plain", -1)  # missing if plain decoding is not measured: shown as ""
    return [
        *begin,
        "" if seconds is None else f"{seconds:.2f}",
        "" if seconds is None else f"{found['prefill_tokens_per_second']:.0f}",
        f"{milliseconds.median:.2f}",
        f"{milliseconds.least:.2f} to {milliseconds.most:.2f}",
        beside(found["plan"], milliseconds.median) if "plan" in found else "",
        f"{found['peak_bytes'] / 1e9:.2f}",
        "same" if parts is None else "" if parts < 0 else str(parts + 1),
        found["setting"],
    ]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument("--draft", default=None, help="folder or none (default: the demo draft with the demo target)")
    parser.add_argument("--task", default="continue", help=f"of {', '.join(texts.TASKS)}")
    parser.add_argument("--lengths", default="2048,8192,16384,30720", help="prompt lengths in tokens")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--ways", default="", help="names of rows, with ; between them (default: all)")
    parser.add_argument("--peers-env", default="", metavar="DIR")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    model, draft = demo_models(args.model, args.draft)
    tokenizer, python = load_tokenizer(model, draft), wheel_python(args.peers_env)
    names, found = list(filter(None, args.ways.split(";"))), list[Document]()
    with model_files() as write, tempfile.TemporaryDirectory() as rows:
        folders = {"target": model} | ({"draft": draft} if draft is not None else {})
        files = dict[str, Path]()
        if not isinstance(python, TriforceError):
            files = {key: write(at, "bf16") for key, at in folders.items()}
            files |= {} if is_gguf(model) else {"4 bits": write(model, "q4_0")}
        for length in map(int, args.lengths.split(",")):
            prompt = texts.prompt(args.task, tokenizer, length)
            ends = frozenset(read_config(model).eos_token_ids)
            threads = torch.get_num_threads()
            case = Case(model, draft, prompt, args.max_tokens, ends, threads, files, python, Path(rows))
            found += measure(case, names, args.turns)
            for file in Path(rows).iterdir():
                file.unlink()
    columns = ["prompt", "way", "first s", "prefill/s", "ms/token", "range", "predicted", "peak GB", "parts", "setting"]
    stored = ", ".join(read_config(model).stored_in) or "bf16"
    title = f"{model.name}, {stored}, {torch.get_num_threads()} threads, {args.max_tokens} tokens of {args.task}"
    emit(columns, [row_of(row) for row in found], about(title, 0), found)


if __name__ == "__main__":
    main()
