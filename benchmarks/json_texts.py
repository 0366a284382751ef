"""JSON by schemas: whether a model's texts fit, whether speculation changes them, and their cost.

Each text is written greedily without speculation and with it, and with speculation once more at a temperature, from a
seed. The greedy texts must be the same, and each text that ends by itself must be JSON that the library jsonschema
accepts; texts cut by --tokens are counted. Schemas: JSON lines, or a folder of files as in
github.com/json-schema-org/JSON-Schema-Test-Suite, tests/draft2020-12, of which the supported schemas count. --against
llama.cpp: the same texts, greedily, with its parameter json_schema, in turns; it reads the same GGUF file.

usage: python benchmarks/json_texts.py --model FILE_OR_DIR --schemas FILE.jsonl|DIR [--tokens N] [--most N]
                                       [--list] [--against llama.cpp] [--peers-env DIR]
"""

from __future__ import annotations

import offload  # noqa: F401  # isort: skip  # before torch, which reads its threads' wait policy once

import argparse
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError
from jsonschema.validators import validator_for
from peer import Peer, open_llama_cpp, wheel_python
from referencing.exceptions import Unresolvable
from report import about, emit, say
from schemas import groups

from offload import strict_json
from offload.config.gguf_header import is_gguf
from offload.config.reading import read_config
from offload.decode.sampling import SamplingParams
from offload.engine.engine import Engine, load_tokenizer, plan_request
from offload.engine.request import GenerationRequest, check_sampling
from offload.errors import TriforceError, UsageError
from offload.grammar.constraint import Constraint
from offload.plan.planner import Options

PLAIN, GREEDY, WARM = "plain, greedy", "greedy", "temperature 0.8"
LLAMA_CPP = "llama.cpp"
SETTING = {"flash_attention": "off", "cache": "f16", "ubatch": 512, "wait_policy": "passive"}
SLACK = 64

Document = dict[str, Any]


@dataclass
class Way:
    """The totals of one way of writing over all schemas."""

    texts: int = 0
    finished: int = 0
    unfit: list[str] = field(default_factory=list)
    unjudged: int = 0  # texts that jsonschema cannot judge
    differing: list[str] = field(default_factory=list)  # texts that differ from the one without speculation
    tokens: int = 0
    later_tokens: int = 0  # tokens after each text's first
    passes: int = 0  # passes after the first token's
    seconds: float = 0.0  # of later tokens
    drafted: dict[str, int] = field(default_factory=dict)
    accepted: dict[str, int] = field(default_factory=dict)

    def judge(self, name: str, schema: object, text: str) -> None:
        """Count a text that ended by itself, and whether it fits."""
        self.finished += 1
        try:
            if fault := misfit(schema, text):
                self.unfit.append(f"{name}: {fault}: {text!r}")
        except (re.error, Unresolvable, RecursionError):
            self.unjudged += 1

    def count(self, stats: Any) -> None:
        """Count the latest text. stats: the engine's."""
        target = next(level for level in stats.levels if level.name == "target")
        self.texts += 1
        self.tokens += stats.output_tokens
        self.later_tokens += stats.output_tokens - 1
        self.passes += target.rounds - 1
        self.seconds += stats.decode_seconds
        for name, number in target.drafted_by.items():
            self.drafted[name] = self.drafted.get(name, 0) + number
            self.accepted[name] = self.accepted.get(name, 0) + target.accepted_by[name]

    @property
    def document(self) -> Document:
        numbers = {"tokens": self.tokens, "texts": self.texts, "finished": self.finished, "unfit": len(self.unfit)}
        return {
            **numbers,
            "unjudged": self.unjudged,
            "differing": len(self.differing),
            "tokens_per_pass": self.later_tokens / self.passes if self.passes else None,
            "milliseconds_per_token": 1000 * self.seconds / max(self.later_tokens, 1),
            "drafted": self.drafted,
            "accepted": self.accepted,
        }


def misfit(schema: object, text: str) -> str:
    """The reason why `text` does not fit the schema; "" if it fits. Formats are not checked."""
    try:
        value = strict_json.parse(text)
    except ValueError as error:
        return f"no JSON ({error})"
    try:
        validator_for(schema, default=Draft202012Validator)(schema).validate(value)
    except ValidationError as error:
        return error.message.partition("\n")[0][:100]
    return ""


def schemas_of(place: Path) -> Iterator[tuple[str, Any]]:
    if place.is_dir():
        yield from ((name, group["schema"]) for name, group in groups(place, optional=False))
        return
    for number, line in enumerate(place.read_text(encoding="utf-8").splitlines(), 1):
        yield f"line {number}", json.loads(line)


def prompt_of(schema: object) -> str:
    return f"A JSON schema, and an example of a value that fits it.\n\nSchema: {json.dumps(schema)}\n\nExample:\n"


def usable(found: Iterator[tuple[str, Any]], model: Path, most: int) -> list[tuple[str, Any]]:
    """The supported schemas; more than `most` are thinned evenly."""
    config, tokenizer, good, num_refused = read_config(model), load_tokenizer(model, None), list[tuple[str, Any]](), 0
    for name, schema in found:
        try:
            check_sampling(greedy(schema), config, tokenizer)
            good.append((name, schema))
        except UsageError:
            num_refused += 1
    say(f"{len(good)} schemas can be followed, {num_refused} cannot")
    return [good[i * len(good) // most] for i in range(most)] if len(good) > most else good


def greedy(schema: object) -> SamplingParams:
    return SamplingParams(temperature=0.0, constraint=constraint_of(schema))


def constraint_of(schema: object) -> Constraint:
    return Constraint("json-schema", json.dumps(schema))


class Writer:
    """Writes every schema's texts, one after the other, with one engine and an optional peer."""

    def __init__(self, engine: Engine, peer: Peer | None, num_tokens: int) -> None:
        self._engine, self._peer, self._num_tokens = engine, peer, num_tokens
        names = (PLAIN, GREEDY, WARM, *([] if peer is None else [LLAMA_CPP]))
        self.ways: Mapping[str, Way] = {name: Way() for name in names}

    def write(self, name: str, schema: object, prompt: Sequence[int]) -> None:
        warm = SamplingParams(temperature=0.8, constraint=constraint_of(schema), seed=1)
        asked = GenerationRequest(prompt, greedy(schema), self._num_tokens)
        plain = self._text(PLAIN, name, schema, replace(asked, speculation=False))
        drafted = self._text(GREEDY, name, schema, asked)
        if drafted != plain:
            self.ways[GREEDY].differing.append(f"{name}: {drafted}, not {plain}")
        self._text(WARM, name, schema, replace(asked, sampling=warm))
        if self._peer is not None:
            self._ask(self._peer, name, schema, prompt)

    def _text(self, way: str, name: str, schema: object, request: GenerationRequest) -> tuple[str, list[int]]:
        """The text and tokens of one way, counted and judged."""
        steps = list(self._engine.generate(request))
        text, tokens = "".join(step.text for step in steps), [token for step in steps for token in step.tokens]
        self.ways[way].count(self._engine.stats)
        if steps[-1].finish == "stop":
            self.ways[way].judge(name, schema, text)
        return text, tokens

    def _ask(self, peer: Peer, name: str, schema: object, prompt: Sequence[int]) -> None:
        """Count and judge one text of a peer, which has the text and times in `about`."""
        way = self.ways[LLAMA_CPP]
        try:
            peer.generate(prompt, greedy(schema), max_tokens=self._num_tokens, end_tokens=self._engine.end_tokens)
        except TriforceError as error:
            way.unfit.append(f"{name}: {error}")
            return
        said, timings = peer.about, peer.about["timings"]
        way.texts += 1
        way.tokens += timings["predicted_n"]
        way.later_tokens += timings["predicted_n"] - 1
        way.seconds += timings["predicted_ms"] / 1000
        if said["finish"] == "stop":
            way.judge(name, schema, said["text"])


def row(name: str, document: Document) -> list[str]:
    counts = [str(document[key]) for key in ("texts", "finished", "unfit", "differing", "tokens")]
    per_pass = document["tokens_per_pass"]
    drafts = (f"{by} {document['accepted'][by]}/{number}" for by, number in document["drafted"].items())
    number = "" if per_pass is None else f"{per_pass:.2f}"
    return [name, *counts, number, f"{document['milliseconds_per_token']:.1f}", ", ".join(drafts)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--schemas", type=Path, action="append", required=True, help="may be given again")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--most", type=int, default=200, help="schemas, of all that can be followed")
    parser.add_argument("--list", action="store_true", help="show every text that does not fit or differs")
    parser.add_argument("--against", choices=[LLAMA_CPP])
    parser.add_argument("--peers-env", default="", metavar="DIR", help="environment with xllamacpp, as in peers.py")
    args = parser.parse_args()
    found = (pair for place in args.schemas for pair in schemas_of(place))
    tokenizer, schemas = load_tokenizer(args.model, None), usable(found, args.model, args.most)
    prompts = [tokenizer.encode(prompt_of(schema)) for _, schema in schemas]
    longest = max(map(len, prompts))
    options = Options(device="cpu")
    plan = plan_request(args.model, None, options, num_prompt_tokens=longest, max_tokens=args.tokens)
    with Engine.load(plan, args.model, None, tokenizer) as engine, peer_of(args, longest) as peer:
        writer = Writer(engine, peer, args.tokens)
        for number, ((name, schema), prompt) in enumerate(zip(schemas, prompts, strict=True), 1):
            writer.write(name, schema, prompt)
            if number % 20 == 0:
                say(f"  {number} of {len(schemas)} schemas")
    for way, found_faults in writer.ways.items():
        for fault in [*found_faults.unfit, *found_faults.differing] if args.list else []:
            say(f"{way}: {fault}")
    documents = {name: way.document for name, way in writer.ways.items()}
    columns = ["way", "texts", "finished", "unfit", "differing", "tokens", "tokens/pass", "ms/token", "kept/drafted"]
    shared = about(f"JSON by {len(schemas)} schemas, {args.model.name}", 1, max_tokens=args.tokens, plan=plan.as_dict())
    rows = [row(name, document) for name, document in documents.items()]
    emit(columns, rows, shared, [{"way": name} | document for name, document in documents.items()])


def peer_of(args: argparse.Namespace, longest: int) -> AbstractContextManager[Peer | None]:
    if args.against is None:
        return nullcontext()
    if not is_gguf(args.model):
        raise SystemExit(f"llama.cpp reads a GGUF file, and --model is {args.model}; name one, or leave --against out")
    setting = SETTING | {"threads": torch.get_num_threads()}
    python = wheel_python(args.peers_env)
    if isinstance(python, TriforceError):
        raise SystemExit(str(python))
    return open_llama_cpp(python, args.model, setting, context=longest + args.tokens + SLACK)


if __name__ == "__main__":
    main()
