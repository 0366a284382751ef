#!/usr/bin/env python3
"""Rebuilds the embedded demo pair: a 12M-parameter target stretched to 32K tokens, and its 1M-parameter draft.

    scripts/fetch_corpus.sh corpus
    python scripts/train_demo.py --corpus corpus --out build            # every step, in order
    python scripts/train_demo.py --corpus corpus --out build draft evaluate
    python scripts/train_demo.py --corpus corpus --out build mixture    # a small mixture, for benchmarks/routing.py
    python scripts/train_demo.py --corpus corpus --out build indexed    # one with an index, for benchmarks/blocks.py

Each step leaves its result under --out (the models in demo-target and demo-draft) and resumes from its checkpoint
when it is run again.  Needs torch >= 2.13 (Muon), transformers >= 5, numpy, and a C++ compiler for torch.compile.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from demo import choice, corpus, evaluate, export, flash, model, settings, steps, tokenizer, training
from demo.data import Corpus
from demo.flash import Flash
from demo.model import LanguageModel, Llama
from demo.settings import Paths


def make_corpus(source: Path, paths: Paths) -> None:
    """Builds the corpus: cleans and weights the documents, and holds some out."""
    documents = corpus.build(source, paths.documents)
    print(f"{len(documents)} documents", file=sys.stderr)


def make_tokenizer(source: Path, paths: Paths) -> None:
    """Trains the tokenizer and encodes every document."""
    documents = corpus.load(paths.documents)
    tokenizer.encode(tokenizer.train(documents, paths.tokenizer), documents, paths.tokens)


def make_target(source: Path, paths: Paths) -> None:
    """Trains the target at 512, then 2048 positions."""
    steps.train_target(load_corpus(paths), paths)


def make_stretch(source: Path, paths: Paths) -> None:
    """Stretches the target to 32K positions and saves it."""
    steps.train_stretch(load_corpus(paths), paths)
    save(Llama(settings.TARGET_LONG), "stretch", "target", paths)


def make_draft(source: Path, paths: Paths) -> None:
    """Distils the draft and saves it."""
    steps.train_draft(load_corpus(paths), paths)
    save(Llama(settings.DRAFT), "draft", "draft", paths)


def make_evaluation(source: Path, paths: Paths) -> None:
    """Measures the pair and prints the numbers of the model card."""
    print(json.dumps(evaluate.evaluate(load_corpus(paths), paths), indent=2, ensure_ascii=False))


def make_mixture(source: Path, paths: Paths) -> None:
    """Trains a mixture of experts on the same books and Python's library, with a tokenizer of its own, and saves it."""
    paths = with_library(source, paths)
    steps.train_mixture(load_corpus(paths), paths)
    save(Llama(settings.MIXTURE), "mixture", "mixture", paths)


def make_indexed(source: Path, paths: Paths) -> None:
    """Trains a small model of Qwen3.8-Flash-Next's form on the same texts, saves it, and prints what its index does."""
    paths = with_library(source, paths)
    texts, trained = load_corpus(paths), Flash(settings.INDEXED)
    steps.train_indexed(texts, paths)
    save(trained, "indexed", "indexed", paths)
    print(json.dumps(choice.evaluate(trained, texts), indent=2))


def with_library(source: Path, paths: Paths) -> Paths:
    """The paths of models that read Python's library too, with its texts and a tokenizer of their own."""
    paths = Paths(paths.out / "mixture")
    if not paths.tokens.exists():
        documents = corpus.build(source, paths.documents, library=True)
        tokenizer.encode(tokenizer.train(documents, paths.tokenizer), documents, paths.tokens)
    return paths


STEPS: dict[str, Callable[[Path, Paths], None]] = {
    "corpus": make_corpus,
    "tokenizer": make_tokenizer,
    "target": make_target,
    "stretch": make_stretch,
    "draft": make_draft,
    "evaluate": make_evaluation,
}
APART: dict[str, Callable[[Path, Paths], None]] = {  # from the pair's steps
    "mixture": make_mixture,
    "indexed": make_indexed,
}


def load_corpus(paths: Paths) -> Corpus:
    """The encoded documents."""
    return Corpus(corpus.load(paths.documents), paths.tokens)


def save(empty: LanguageModel, checkpoint: str, name: str, paths: Paths) -> None:
    """Exports a checkpoint to its model folder. empty: a model of its shape, which gets the weights."""
    training.load_weights(empty, paths.checkpoint(checkpoint))
    export.export(empty, paths.tokenizer, paths.model(name))


def main() -> None:
    """Runs the steps asked for."""
    parser = argparse.ArgumentParser(description="Rebuild the embedded demo pair.")
    parser.add_argument(
        "steps", nargs="*", choices=[[], *STEPS, *APART], metavar="step",
        help=f"{', '.join(STEPS)} (default: all these, in order); or {', '.join(APART)}",
    )  # fmt: skip
    parser.add_argument("--corpus", type=Path, required=True, help="folder made by scripts/fetch_corpus.sh")
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoints and models")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: 2)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model.compile_pieces()
    flash.compile_pieces()
    for name in args.steps or STEPS:
        print(f"== {name}", file=sys.stderr, flush=True)
        began = time.monotonic()
        (STEPS | APART)[name](args.corpus, Paths(args.out))
        print(f"== {name} done in {(time.monotonic() - began) / 60:.1f} min", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
