"""A stand-in for the environment that has xllamacpp. No tests in here."""

from __future__ import annotations

import sys
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SOURCE = f"""
import os, sys
sys.path.insert(0, {str(BENCHMARKS)!r})
from llama_cpp import serve

class Fake:
    def __init__(self, options):
        print("a line of the library's own")
        if options["lookup"] == "mod":
            sys.exit("no room for lookups")
        if options["cache"] == "f32":
            sys.exit("no room for wide rows")
        self.held = []
        self.about = options | dict(wait_policy=os.environ.get("OMP_WAIT_POLICY"))
    def generate(self, request):
        print("another line")
        if not request["prompt"]:
            raise ValueError("an empty prompt")
        tokens = [sum(request["prompt"]) % 256 + i for i in range(request["max_tokens"])]
        first = 0.5 if self.about["ubatch"] == 2048 else 0.75
        held, self.held = self.held, request["prompt"]
        if held and held == self.held[: len(held)] != self.held:
            first = 0.1
        later = 0.75 if self.about["flash"] else 0.25
        return tokens, [first + later * i for i in range(len(tokens))]
    def generate_all(self, request):
        all = [self.generate(request | dict(prompt=prompt)) for prompt in request["prompts"]]
        return [tokens for tokens, _ in all], all[0][1][-1]

serve(Fake)
"""


def fake_environment(folder: Path) -> Path:
    """Make `folder` look like a virtual environment, whose Python runs a llama.cpp that counts upwards from the sum of
    the prompt. A token takes it a quarter of a second, with flash attention three quarters; the first one half a second
    with a ubatch of 2,048, else three quarters, or a tenth for a prompt that begins with the whole last one. It
    has no n-gram lookups called mod, and no room for a cache in f32."""
    (folder / "bin").mkdir(parents=True)
    (folder / "fake.py").write_text(SOURCE)
    python = folder / "bin" / "python"
    python.write_text(f"#!/bin/sh\nexec {sys.executable} {folder / 'fake.py'}\n")
    python.chmod(0o755)
    return folder
