"""Refusals under `python -O`, which leaves out assertions: none guards anything that comes from outside. Each case says
the same as with them, and is no unexpected error."""

from __future__ import annotations

import io
import json
import os
import shutil
import struct
import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "triforce_cli" / "models" / "demo-target"
RUNS = """
import json, sys
sys.path.insert(0, "tests")
from test_optimised import outcomes
print(json.dumps([__debug__, outcomes(json.load(sys.stdin))]))
"""


def config(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], list[str]]:
    """A model whose config.json was changed."""

    def made(folder: Path) -> list[str]:
        shutil.copytree(MODEL, folder)
        fields = json.loads((folder / "config.json").read_text())
        change(fields)
        (folder / "config.json").write_text(json.dumps(fields))
        return ["plan", "--model", str(folder), "--draft", "none", "--max-tokens", "8"]

    return made


def weights(change: Callable[[bytes], bytes]) -> Callable[[Path], list[str]]:
    """A model whose weights were changed."""

    def made(folder: Path) -> list[str]:
        shutil.copytree(MODEL, folder)
        file = folder / "model.safetensors"
        file.write_bytes(change(file.read_bytes()))
        return ["generate", "--model", str(folder), "--draft", "none", "--prompt", "Once", "--max-tokens", "2"]

    return made


def gguf(data: bytes) -> Callable[[Path], list[str]]:
    def made(folder: Path) -> list[str]:
        folder.mkdir()
        (folder / "x.gguf").write_bytes(b"GGUF" + data)
        return ["convert", str(folder / "x.gguf"), "--output", str(folder / "out")]

    return made


def asked(*args: str, files: Mapping[str, str] | None = None) -> Callable[[Path], list[str]]:
    """A command of the demo model. {}: the folder with `files`."""

    def made(folder: Path) -> list[str]:
        folder.mkdir()
        for name, text in (files or {}).items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        return [arg.replace("{}", str(folder)) for arg in args]

    return made


def lines(text: str) -> Callable[[Path], list[str]]:
    """A batch of these lines."""
    return asked("generate", "--input-jsonl", "{}/in", "--output-jsonl", "{}/out", files={"in": text + "\n"})


def tensor(*sizes: int, kind: int = 0, start: int = 0) -> bytes:
    """A header of one tensor."""
    return struct.pack(f"<IQQQ1sI{len(sizes)}QIQ", 3, 1, 0, 1, b"t", len(sizes), *sizes, kind, start)


ONE = ("--prompt", "Once", "--max-tokens", "2")
MANIFEST = '{"format": 1, "tokens": [1, 2], "pages": [{"file": "../../x"}]}'
CASES: dict[str, Callable[[Path], list[str]]] = {
    "no heads": config(lambda fields: fields.update(num_attention_heads=0)),
    "heads that do not divide": config(lambda fields: fields.update(num_key_value_heads=3, num_attention_heads=4)),
    "a text for layers": config(lambda fields: fields.update(num_hidden_layers="two")),
    "a huge hidden size": config(lambda fields: fields.update(hidden_size=1 << 70)),
    "an odd head": config(lambda fields: fields.update(head_dim=7)),
    "an unknown family": config(lambda fields: fields.update(model_type="nobody")),
    "a broken rope": config(lambda fields: fields.update(rope_scaling={"rope_type": "yarn", "factor": "x"})),
    "no vocabulary": config(lambda fields: fields.update(vocab_size=-1)),
    "half of the weights": weights(lambda data: data[: len(data) // 2]),
    "a header beyond the file": weights(lambda data: struct.pack("<Q", 1 << 62) + data[8:]),
    "an endless list": gguf(struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"a", 9, 0, 1 << 63)),
    "an endless text": gguf(struct.pack("<IQQQ1sIQ", 3, 0, 1, 1, b"a", 8, (1 << 64) - 1)),
    "sizes whose product wraps": gguf(tensor(1 << 32, 1 << 32)),
    "a size near 2**63": gguf(tensor((1 << 63) - 1)),
    "a size over 2**63": gguf(tensor((1 << 64) - 32, kind=2)),
    "a tensor beyond the file": gguf(tensor(32, start=1 << 40)),
    "a start that wraps": gguf(tensor(32, start=(1 << 64) - 32) + bytes(256)),
    "no dimensions": gguf(tensor()),
    "a negative budget": asked("generate", *ONE, "--budget", "-1"),
    "a huge context": asked("generate", *ONE, "--context", str(1 << 70)),
    "no temperature": asked("generate", *ONE, "--temperature", "nan"),
    "a broken schema": asked("generate", *ONE, "--json-schema", "{}/schema", files={"schema": '{"type": 1'}),
    "a broken regex": asked("generate", *ONE, "--regex", "(" * 60_000),
    "a batch that is no object": lines("[1]"),
    "a batch of other types": lines('{"prompt": 1}'),
    "a seed that is true": lines('{"prompt": "x", "seed": true}'),
    "a session of other types": asked("sessions", "info", "{}/s", files={"s/manifest.json": MANIFEST}),
    "a plan of other types": asked("generate", *ONE, "--plan", "{}/plan", files={"plan": '{"request": []}'}),
    "a configuration of other types": asked("ask", "x", "--config", "{}/c", files={"c": "max_tokens = 'x'\n"}),
}


def outcomes(commands: Mapping[str, list[str]]) -> dict[str, list[Any]]:
    """The exit code of each command line, and the last line of what it said: the others may be of this machine."""
    from triforce_cli.app import main

    found = {}
    for name, args in commands.items():
        said = io.StringIO()
        with (
            open(os.devnull, encoding="utf-8") as nothing,
            patch.object(sys, "stdin", nothing),
            redirect_stdout(said),
            redirect_stderr(said),
        ):
            code = main(args)
        found[name] = [code, said.getvalue().strip().rpartition("\n")[2]]
    return found


def both(root: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The outcomes without assertions, of a process of its own, and with them, of this one meanwhile."""
    commands = {name: make(root / name.replace(" ", "-").replace("*", "")) for name, make in CASES.items()}
    asked, errors = root / "asked", root / "errors"
    asked.write_text(json.dumps(commands))
    with asked.open() as stdin, errors.open("w") as stderr:
        process = Popen(
            [sys.executable, "-O", "-c", RUNS], cwd=ROOT, stdin=stdin, stdout=PIPE, stderr=stderr, text=True
        )
    usual = outcomes(commands)
    said, _ = process.communicate()
    assert process.returncode == 0, errors.read_text()[-3000:]
    has_assertions, bare = json.loads(said.splitlines()[-1])
    assert not has_assertions
    assert __debug__
    return bare, usual


def test_they_are_refused_without_assertions_too(tmp_path: Path) -> None:
    """All in one test, as both processes take ten seconds."""
    bare, usual = both(tmp_path)
    assert bare == usual
    assert not {name: said for name, said in bare.items() if said[0] not in (2, 3, 4) or "unexpected" in said[1]}
    assert bare.keys() == CASES.keys()
