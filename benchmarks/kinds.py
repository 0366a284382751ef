"""Files of one model in GGUF's kinds, made by ggml's own quantiser: their cost in nats, their texts and their speed.

usage: python benchmarks/kinds.py make --model DIR --out FOLDER [--kinds Q4_K_M,IQ4_XS] [--cuts qwen2]
       python benchmarks/kinds.py score --model DIR --files FOLDER [--text FILE --text FILE]
       python benchmarks/kinds.py texts --files FOLDER [--length 256] [--max-tokens 48]
       python benchmarks/kinds.py speed --files FOLDER [--length 2048] [--max-tokens 128] [--turns 3]

make: a file is named after llama-quantize's mixture and has its kinds, tensor by tensor (mixtures.py). The importance
matrix is over CHUNKS pieces of this repository's docs and engine; it is kept beside the files, and files that are there
are not made again, nor are their tensors. --cuts: llama.cpp's name of how the tokenizer cuts texts.

score: `triforce score` of the files against the folder. Its texts, the beginning of a novel and a source file, are in
no importance matrix. worse: nats a token more than the folder's model needs.

texts: greedy texts of this program and of llama.cpp. parts: the first token, from 1, that differs; llama.cpp rounds
rows to 8 bits. speed: the same, with llama.cpp in its fastest setting and in turns, as peers.py does. limit: 1.05 of a
file and its cache, and 350 MB. All take --kinds, by default all, and --peers-env (not score) as peers.py.
"""

from __future__ import annotations

import offload  # noqa: F401  # isort: skip  # before torch, which reads its threads' wait policy once

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import texts
import torch
from gguf import GGMLQuantizationType as Kind
from gguf_file import Numbers, ggml_name, metadata, store_with, vocabulary
from mixtures import MIXTURES, kind_of
from peer import llama_cpp_choices, model_files, wheel_python
from peers import LLAMA_CPP, PLAIN, Case, Way, measure, row_of
from quantiser import Quantiser, importance_matrix
from report import about, emit, say
from safetensors.torch import load_file, save_file

from offload.config.gguf_header import models_in, read_header
from offload.config.reading import read_config
from offload.engine.engine import load_tokenizer
from offload.errors import TriforceError

ROOT = Path(__file__).parents[1]
CHUNKS, CHUNK = 8, 512  # of tokens for the importance matrix
SCORED_CHARACTERS = 4000  # of each scored text
SCORED = (ROOT / "examples" / "persuasion.txt", ROOT / "benchmarks" / "peers.py")
SLACK_BYTES, SLACK = 350_000_000, 1.05
IMPORTANCE = "importance.safetensors"

Document = dict[str, Any]


def make(args: argparse.Namespace) -> None:
    model, out = args.model, args.files
    out.mkdir(parents=True, exist_ok=True)
    quantiser, config = Quantiser(python_with_wheel(args)), read_config(model)
    if not (out / IMPORTANCE).exists():
        say(f"importance matrix: {CHUNKS} x {CHUNK} tokens")
        save_file(importance_matrix(model, calibration(model)), out / IMPORTANCE)
    importance = {ggml_name(name, config): found.numpy() for name, found in load_file(out / IMPORTANCE).items()}
    values = metadata(config) | vocabulary(config, model, args.cuts)
    made = [read_header(file) for file in models_in(out)]

    def store(name: str, numbers: Numbers, kind: Kind) -> Numbers:
        """The bytes of a tensor; those of a file that has it in this kind are copied."""
        for header in made:
            if (info := header.tensors[name]).kind == kind.name:
                return np.fromfile(info.path, np.uint8, info.nbytes, offset=info.start)
        return quantiser.quantise(numbers, kind, importance.get(name))

    for mixture in kinds_of(args) or MIXTURES:
        file = out / f"{mixture}.gguf"
        if not file.exists():
            say(file.name)
            part = file.with_suffix(".part")
            store_with(model, part, dict(values), partial(kind_of, mixture=mixture, config=config), store)
            part.rename(file)
            made.append(read_header(file))


def calibration(model: Path) -> list[list[int]]:
    """CHUNKS pieces of CHUNK tokens, at even distances in the docs and the engine's sources."""
    sources = [*sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "offload" / "engine").glob("*.py"))]
    tokens = load_tokenizer(model, None).encode("\n".join(file.read_text(encoding="utf-8") for file in sources))
    return [tokens[start : start + CHUNK] for start in range(0, len(tokens) - CHUNK, len(tokens) // CHUNKS)][:CHUNKS]


def score(args: argparse.Namespace) -> None:
    files = files_of(args)
    with tempfile.TemporaryDirectory() as folder:
        told = [*map(str, args.text or beginnings(Path(folder))), "--model", str(args.model), "--json"]
        against = [word for file in files for word in ("--against", str(file))]
        command = [sys.executable, "-m", "triforce_cli", "score", *told, *against]
        said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    total = json.loads(said)["total"]
    base = total["mean_log_likelihood"]
    found = [
        stored(file) | {"worse": base - judged["mean_log_likelihood"], **judged, "model": file.stem}
        for file, judged in zip(files, total["against"], strict=True)
    ]
    columns = ["file", "GB", "bits", "worse", "mean KL", "same token", "kinds by bytes"]
    shared = {name: total[name] for name in ("num_tokens", "num_scored", "mean_log_likelihood")}
    emit(columns, [score_row(run) for run in found], about(f"{args.model.name}, kinds", 0, **shared), found)


def beginnings(folder: Path) -> Iterator[Path]:
    """Write the beginnings of SCORED into a folder, and yield their files."""
    for text in SCORED:
        cut = folder / f"{text.stem}.txt"
        cut.write_text(text.read_text(encoding="utf-8")[:SCORED_CHARACTERS], encoding="utf-8")
        yield cut


def score_row(run: Document) -> list[str]:
    kinds = ", ".join(f"{kind} {share:.0%}" for kind, share in run["kinds"].items())
    numbers = [f"{run['worse']:.4f}", f"{run['mean_kl']:.4f}", f"{run['same_likeliest']:.2%}"]
    return [run["model"], f"{run['file_bytes'] / 1e9:.3f}", f"{run['bits']:.2f}", *numbers, kinds]


def stored(file: Path) -> Document:
    """Bytes of a file, bits a number over all its tensors, and the share of each kind in their bytes."""
    tensors = read_header(file).tensors.values()
    total, kinds = sum(info.nbytes for info in tensors), Counter[str]()
    for info in tensors:
        kinds[info.kind] += info.nbytes
    numbers = sum(torch.Size(info.shape).numel() for info in tensors)
    shares = {kind: nbytes / total for kind, nbytes in kinds.most_common()}
    return {"file_bytes": file.stat().st_size, "bits": 8 * total / numbers, "kinds": shares}


def beside_llama_cpp(args: argparse.Namespace) -> None:
    """Texts and times of the files beside llama.cpp's."""
    python, threads, found = python_with_wheel(args), torch.get_num_threads(), list[Document]()
    for file in files_of(args):
        with model_files() as write, tempfile.TemporaryDirectory() as rows:
            config, prompt = read_config(file), texts.prompt("continue", load_tokenizer(file, None), args.length)
            ends, files = frozenset(config.eos_token_ids), {"target": write(file, "bf16")}
            case = Case(file, None, prompt, args.max_tokens, ends, threads, files, python, Path(rows))
            cache = config.kv_bytes_per_token(2) * (len(prompt) + args.max_tokens)
            limit = int(SLACK * (file.stat().st_size + cache)) + SLACK_BYTES
            runs = measure(case, [PLAIN, LLAMA_CPP], args.turns) if args.command == "speed" else text_of(case)
            found += [{"file": file.stem, "limit_bytes": limit} | run for run in runs]
    columns = ["file", "prompt", "way", "first s", "prefill/s", "ms/token", "range", "predicted", "peak GB", "parts"]
    table = [[run["file"], *row_of(run), f"{run['limit_bytes'] / 1e9:.2f}"] for run in found]
    emit([*columns, "setting", "limit GB"], table, about(f"kinds, {threads} threads", 0), found)


def text_of(case: Case) -> list[Document]:
    """One text of each program, in llama.cpp's first setting."""
    first = {part: values[0] for part, values in llama_cpp_choices("bf16").items()}
    ways = [Way(PLAIN, lambda: case.ours(False), fresh=True), Way(LLAMA_CPP, lambda: case.llama_cpp(first), fresh=True)]
    for way in ways:
        way.run(case)
        say(f"  {case.model.stem}, {way.name}: {way.absent or way.turns[0]['tokens'][:8]}")
    return [way.document(ways[0], len(case.prompt)) for way in ways]


def files_of(args: argparse.Namespace) -> list[Path]:
    """The files to compare, the largest first. SystemExit where there are none."""
    wanted = kinds_of(args)
    files = [file for file in models_in(args.files) if not wanted or file.stem in wanted]
    if not files:
        raise SystemExit(f"{args.files} has no files of {args.kinds or 'any kind'}; make them first")
    return sorted(files, key=lambda file: -file.stat().st_size)


def kinds_of(args: argparse.Namespace) -> Sequence[str]:
    """The kinds that are asked for, none for all. SystemExit."""
    kinds = [*filter(None, args.kinds.split(","))]
    if unknown := set(kinds) - MIXTURES.keys():
        raise SystemExit(f"no file is called {', '.join(sorted(unknown))}; they are {', '.join(MIXTURES)}")
    return kinds


def python_with_wheel(args: argparse.Namespace) -> str:
    python = wheel_python(args.peers_env)
    if isinstance(python, TriforceError):
        raise python
    return python


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    making, scoring, *beside = (commands.add_parser(name) for name in ("make", "score", "texts", "speed"))
    for command in (making, scoring, *beside):
        command.add_argument("--files", "--out", type=Path, required=True, metavar="FOLDER")
        command.add_argument("--kinds", default="")
    for command in (making, scoring):
        command.add_argument("--model", type=Path, required=True, help="the folder that the files are made of")
    for command in (making, *beside):
        command.add_argument("--peers-env", default="", metavar="DIR")
    making.add_argument("--cuts", default="qwen2")
    scoring.add_argument("--text", type=Path, action="append", default=[])
    for command, length, max_tokens in zip(beside, (256, 2048), (48, 128), strict=True):
        command.add_argument("--length", type=int, default=length, help="of the prompt, in tokens")
        command.add_argument("--max-tokens", type=int, default=max_tokens)
        command.add_argument("--turns", type=int, default=3)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    commands = {"make": make, "score": score, "texts": beside_llama_cpp, "speed": beside_llama_cpp}
    commands[args.command](args)


if __name__ == "__main__":
    main()
