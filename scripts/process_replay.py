"""A process replay: what a change of the code changes in plans, tokens and served events, by some 60 configurations.

usage: python scripts/process_replay.py record FOLDER    # at the commit before
       python scripts/process_replay.py compare FOLDER   # at the commit after

`record` makes tiny models in FOLDER, and both commits read them. A configuration is one or more command lines of the
program, or one request to each API of its server. Its record has exit codes, plans, tokens and events, without measured
times. `compare` prints each value that differs, and exits with 1 if one does. --only WORD: the configurations whose
names have it. The program must be on both sides of the same machine.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ["OMP_NUM_THREADS"] = "1"  # a fork does not have the threads that torch has started, and waits for them

from kit.replay_models import FAMILIES, FILES, FOLDERS, HEADS, LARGE, model_path  # noqa: E402

PROMPT = "".join(
    f"{number}. The clerk of room {number * 7 % 31} wrote {number * number} lines. " for number in range(14)
)
LONG = PROMPT * 3  # of a byte a token: over a page of the cache
SCHEMA = '{"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}}}'
NAMES = {"created", "created_at", "id", "item_id", "model", "system_fingerprint", "version"}  # of files and of answers
# Of a measured run: times, and counts that depend on them, since the drafting length does.
TIMED = {
    "decode_link",
    "gamma",
    "levels",
    "link_idle",
    "link_utilisation",
    "milliseconds_per_token",
    "predicted",
    "ranks",
}

Line = tuple[str, ...]  # a command line; {}: the configuration's own folder


class Configurations:
    """The command lines of each configuration, by name, with models in one folder."""

    def __init__(self, models: Path) -> None:
        self._models = models

    def all(self) -> Iterator[tuple[str, Callable[[], Sequence[Line]]]]:
        """The name of each, and a function that gives its command lines and makes the models that they read."""
        yield from ((f"family {name}", partial(self._one, name)) for name in FAMILIES)
        yield from ((f"file {name}", partial(self._one, f"file {name}")) for name in FILES)
        yield from ((f"folder {name}", partial(self._one, f"folder {name}", "--dtype", "fp32")) for name in FOLDERS)
        yield from ((f"head {name}", partial(self._one, f"head {name}", "--context", "900")) for name in HEADS)
        for count in ("1", "2"):
            yield from ((f"plan of {name}, {count} GPUs", partial(self._plan, name, count)) for name in LARGE)
        yield from self._placed()
        yield from self._spoken()

    def path(self, name: str) -> str:
        """The path of a model, see `model_path`; "pair/target" and "pair/draft" are in one folder."""
        whole, _, part = name.partition("/")
        return str(model_path(self._models, whole) / part)

    def _placed(self) -> Iterator[tuple[str, Callable[[], Sequence[Line]]]]:
        """Every level, place and number of ranks."""
        small = ("--device-memory", "0.05")
        yield "a draft", self._drafted
        yield "a draft, bf16", partial(self._drafted, "--dtype", "bf16")
        yield "plain", partial(self._one, "pair/target", "--no-speculation")
        yield "retrieval", partial(self._drafted, "--budget", "64", "--chunk", "16", prompt=LONG)
        yield "cache streamed", partial(self._drafted, "--offload", "kv", *small, prompt=LONG)
        yield "weights streamed", partial(self._drafted, "--offload", "weights", *small)
        yield "both streamed", partial(self._drafted, "--offload", "weights,kv", *small, prompt=LONG)
        yield "a 4-bit cache proposes", partial(self._drafted, "--kv-bits", "4", "--dtype", "bf16", prompt=LONG)
        yield (
            "4-bit weights propose",
            partial(self._one, "wide", "--weight-bits", "4", "--kv-bits", "16", "--dtype", "bf16", "--no-lookup"),
        )
        yield "two ranks", partial(self._drafted, "--gpus", "2")
        yield "two ranks, streamed", partial(self._drafted, "--gpus", "2", "--offload", "kv", prompt=LONG)
        yield "two ranks of states", partial(self._one, "qwen3_5", "--gpus", "2")
        yield "two ranks of experts", partial(self._one, "gpt_oss", "--gpus", "2")
        yield "experts on the host", partial(self._one, "gpt_oss", "--offload", "weights", *small)

    def _spoken(self) -> Iterator[tuple[str, Callable[[], Sequence[Line]]]]:
        """Samplers, constraints, kept rows and batches."""
        yield "a seed", partial(self._drafted, "--temperature", "0.8", "--seed", "7", "--top-p", "0.95")
        yield "penalties", partial(self._drafted, "--repetition-penalty", "1.2", "--dry-multiplier", "0.8")
        yield "a schema", partial(self._drafted, "--json-schema", SCHEMA)
        for name, model in (("rows", "pair/target"), ("states", "qwen3_5"), ("windows", "gemma3")):
            yield f"a session of {name}", partial(self._session, model)
            yield f"a store of {name}", partial(self._store, model)
        yield "a batch", self._batch

    def _plan(self, model: str, num_gpus: str) -> Sequence[Line]:
        path = self.path(model)
        return [("plan", "--model", path, "--draft", "none", "--json", "--gpus", num_gpus, "--context", "120000")]

    def _session(self, model: str) -> Sequence[Line]:
        """A prompt, then a longer one."""
        path = self.path(model)
        return [self._line(path, "--cache", "{}/session", prompt=PROMPT * count) for count in (1, 2)]

    def _store(self, model: str) -> Sequence[Line]:
        """A prompt over a page, cold and warm."""
        line = self._line(self.path(model), "--store", prompt=LONG)
        return [("store", "clear", "--yes"), line, line]

    def _batch(self) -> Sequence[Line]:
        lines = [json.dumps({"id": str(number), "prompt": PROMPT[number * 30 :]}) for number in range(4)]
        (batch := self._models / "batch.jsonl").write_text("\n".join(lines) + "\n")
        models = ("--model", self.path("pair/target"), "--draft", "none")
        usual = ("--max-tokens", "64", "--temperature", "0", "--no-log", "--device", "cpu", "--ignore-eos")
        return [("generate", *models, "--input-jsonl", str(batch), *usual)]

    def _drafted(self, *options: str, prompt: str = PROMPT) -> Sequence[Line]:
        target, draft = self.path("pair/target"), self.path("pair/draft")
        return [self._line(target, *options, prompt=prompt, draft=draft)]

    def _one(self, model: str, *options: str) -> Sequence[Line]:
        return [self._line(self.path(model), *options, prompt=PROMPT)]

    @staticmethod
    def _line(model: str, *options: str, prompt: str, draft: str = "none") -> Line:
        """A command line that generates 64 tokens. Later options replace earlier ones."""
        endless = () if "--json-schema" in options else ("--ignore-eos",)
        return (
            "generate", "--model", model, "--draft", draft, "--prompt", prompt, "--max-tokens", "64", "--json",
            "--temperature", "0", "--no-log", "--device", "cpu", "--no-store", *endless, *options,
        )  # fmt: skip


def stable(value: Any, *, is_timed: bool = True) -> Any:
    """`value`, of JSON, without names, and of a run that was measured without times."""
    if isinstance(value, dict):
        return {
            key: stable(part, is_timed=is_timed)
            for key, part in value.items()
            if key not in NAMES and not (is_timed and (key in TIMED or key.endswith(("seconds", "per_second"))))
        }
    return [stable(part, is_timed=is_timed) for part in value] if isinstance(value, list) else value


def run(args: Sequence[str], folder: Path) -> dict[str, Any]:
    """The exit code and the output of a command line, which runs in a fork of this process, since that has the
    libraries. Each line of JSON is read. Output goes through files in `folder`."""
    files = [(folder / name).open("w+") for name in ("stdout", "stderr")]
    child = os.fork()
    if child == 0:
        for number, file in enumerate(files):
            os.dup2(file.fileno(), number + 1)
        sys.stdout, sys.stderr = files
        from triforce_cli.app import main

        code = main(list(args))
        for file in files:
            file.flush()
        os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    texts = []
    for file in files:
        with file:
            file.seek(0)
            texts.append(file.read())
    is_timed = args[0] != "plan"
    lines = [json.loads(line) if line[:1] in ("{", "[") else line for line in texts[0].splitlines()]
    if all(isinstance(line, dict) and "id" in line for line in lines):
        lines.sort(key=lambda line: line["id"])  # a batch's results come as they end
    said = [stable(line, is_timed=is_timed) for line in lines]
    found: dict[str, Any] = {"exit": code, "said": said}
    if code:
        found["error"] = texts[1].splitlines()[-1:]
        print(f"  exit code {code}: {found['error']}", file=sys.stderr)
    return found


def served(target: str) -> dict[str, list[Any]]:
    """The events of one streamed answer in each API of the server, by path."""
    command = [sys.executable, "-m", "triforce_cli", "serve", "--model", target, "--draft", "none", "--port", "0"]
    command += ["--device", "cpu", "--no-store", "--context", "900", "--no-speculation"]  # else events depend on times
    server = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    try:
        url = next(word for line in server.stderr for word in line.split() if word.startswith("http://"))
        return {path: _events(url.partition("/v1")[0] + path, body) for path, body in _requests().items()}
    finally:
        server.terminate()
        server.communicate(timeout=60)


def _requests() -> dict[str, dict[str, Any]]:
    said = [{"role": "user", "content": PROMPT[:200]}]
    usual = {"model": "target", "max_tokens": 64, "temperature": 0, "stream": True}
    return {
        "/v1/completions": {**usual, "prompt": PROMPT[:200]},
        "/v1/chat/completions": {**usual, "messages": said, "stream_options": {"include_usage": True}},
        "/v1/messages": {**usual, "messages": said},
        "/v1/responses": {"model": "target", "input": said, "stream": True, "temperature": 0, "max_output_tokens": 64},
    }


def _events(url: str, body: dict[str, Any]) -> list[Any]:
    """Each event of a server's answer; a refusal's text."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=600) as response:
            lines = response.read().decode().splitlines()
    except urllib.error.HTTPError as error:
        return [f"{error.code} {error.read().decode()}"]
    told = [line for line in lines if line and not line.startswith(":")]  # the others keep a connection
    return [stable(json.loads(line[6:])) if line.startswith("data: {") else line for line in told]


def record(folder: Path, word: str) -> dict[str, Any]:
    """The record of each configuration whose name has `word`."""
    models = folder / "models"
    models.mkdir(parents=True, exist_ok=True)
    os.environ |= {
        "TRIFORCE_CACHE_DIR": str(folder / "cache"), "TRIFORCE_LOG_DIR": str(folder / "log"),
        "TRIFORCE_CONFIG": os.devnull, "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    _import_libraries()
    found: dict[str, Any] = {}
    configurations = Configurations(models)
    for name, lines in configurations.all():
        if word not in name:
            continue
        print(name, file=sys.stderr)
        shutil.rmtree(own := folder / "runs" / name, ignore_errors=True)
        own.mkdir(parents=True)
        found[name] = [run([part.replace("{}", str(own)) for part in line], own) for line in lines()]
    if word in "served":
        print("served", file=sys.stderr)
        found["served"] = served(configurations.path("pair/target"))
    return found


def _import_libraries() -> None:
    from triforce_cli.__main__ import silence_libraries

    silence_libraries()
    for name in ("torch", "transformers", "offload.engine.engine", "triforce_cli.commands.generate"):
        importlib.import_module(name)


def differences(before: Any, after: Any, place: str = "") -> Iterator[str]:
    """A line for each value that differs, with its place."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in [*before, *(key for key in after if key not in before)]:
            yield from differences(before.get(key), after.get(key), f"{place}/{key}")
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for number, (one, other) in enumerate(zip(before, after, strict=True)):
            yield from differences(one, other, f"{place}/{number}")
    elif before != after:
        yield f"{place}: {json.dumps(before)[:300]} -> {json.dumps(after)[:300]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["record", "compare"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", metavar="WORD")
    given = parser.parse_args()
    folder = given.folder.resolve()
    found = record(folder, given.only)
    if given.what == "record":
        (folder / "record.json").write_text(json.dumps(found, indent=1))
        return 0
    recorded = json.loads((folder / "record.json").read_text())
    lines = list(differences({name: value for name, value in recorded.items() if given.only in name}, found))
    print("\n".join(lines) if lines else f"equal in {len(found)} configurations")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
