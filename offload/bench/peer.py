"""Somebody who continues the same prompts in a process of its own, so that its memory and threads are its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import psutil
import torch

from offload.bench import llama_cpp
from offload.bench.gguf_file import write_gguf
from offload.decode.sampling import SamplingParams
from offload.errors import TriforceError, UsageError
from offload.plan.files import user_folder
from offload.plan.rates import FOLDER_VARIABLE

ENVIRONMENT_VARIABLE = "TRIFORCE_LLAMA_CPP"
Cache = Literal["f16", "bf16", "f32"]
LOOKUPS = ("simple", "map_k", "map_k4v", "mod", "cache")  # n-gram lookups that the wheel has


class Peer:
    """A process that serves as `llama_cpp.serve` says. Use as a context manager, or `close` it.

    about: what it last said of itself. An error of the process is a TriforceError with its last words.
    """

    def __init__(self, name: str, command: Sequence[str], options: Mapping[str, Any]) -> None:
        """Start it and wait until it is loaded. name: for messages."""
        self.name = name
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the process)
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, start_new_session=True
        )
        try:
            self._ask(options)
        except BaseException:
            self.close()
            raise

    def generate(
        self, prompt: Sequence[int], sampling: SamplingParams, *, max_tokens: int, end_tokens: Collection[int]
    ) -> tuple[list[int], list[float]]:
        """(tokens, seconds from the start at which each was known). The first time that a prompt is asked, all of it is
        read; after that, its rows are there but for the last."""
        answer = self._ask({"prompt": list(prompt)} | _request(sampling, max_tokens, end_tokens))
        return answer["tokens"], answer["seconds"]

    def generate_all(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        *,
        max_tokens: int,
        end_tokens: Collection[int],
    ) -> tuple[list[list[int]], float]:
        """(tokens of each, seconds from when all prompts have been read): they are continued side by side."""
        answer = self._ask({"prompts": list(map(list, prompts))} | _request(sampling, max_tokens, end_tokens))
        return answer["tokens"], answer["seconds"]

    @property
    def peak_bytes(self) -> int:
        """The most memory that the process had at once, files that it maps included; where the system does not say,
        what it has now."""
        status = Path(f"/proc/{self._process.pid}/status")
        if status.exists():
            peak = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
            return 1024 * int(peak.split()[1])
        memory = psutil.Process(self._process.pid).memory_info()
        return int(getattr(memory, "peak_wset", memory.rss))

    def close(self) -> None:
        """End the process, in whatever it does. Idempotent."""
        self._process.kill()
        self._process.wait()
        for file in (self._process.stdin, self._process.stdout, self._log):
            with suppress(BrokenPipeError):  # a request that was never read
                file.close()  # type: ignore[union-attr]

    def __enter__(self) -> Peer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ask(self, document: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(document) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise TriforceError(f"{self.name} ended with exit code {self._process.wait()}: {self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        self.about: dict[str, Any] = answer["about"]
        return answer

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"


def _request(sampling: SamplingParams, max_tokens: int, end_tokens: Collection[int]) -> dict[str, Any]:
    return {
        "max_tokens": max_tokens,
        "end_tokens": sorted(end_tokens),
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "seed": sampling.seed or 0,
    }


def llama_cpp_python() -> str:
    """The Python that has the xllamacpp wheel: of the environment whose folder TRIFORCE_LLAMA_CPP names, or else this
    one. Raises UsageError where there is none."""
    if folder := os.environ.get(ENVIRONMENT_VARIABLE):
        python = Path(folder).expanduser() / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
        if not python.exists():
            raise UsageError(f"{ENVIRONMENT_VARIABLE} is {folder}, without {python}; name a virtual environment")
        return str(python)
    if find_spec("xllamacpp") is None:
        raise UsageError(
            "llama.cpp is run by the package xllamacpp, which is not installed; pip install xllamacpp, or install it "
            f"in another virtual environment and name its folder in {ENVIRONMENT_VARIABLE}"
        )
    return sys.executable


def open_llama_cpp(
    python: str,
    model: Path,
    *,
    context: int,
    slots: int = 1,
    threads: int,
    cache: Cache = "f16",
    flash: bool = True,
    draft: Path | None = None,
    lookup: str | None = None,
    rows: Path | None = None,
) -> Peer:
    """llama.cpp with a GGUF file that `gguf_file` wrote. context: tokens of prompt and output, of each of
    `slots` prompts that run at a time. lookup: of LOOKUPS; what
    they look up they keep, so a text that is written again is found in the first. rows: a file that the rows of the
    first prompt are written to, or read from if it is there, with the same cache and flash. Raises TriforceError."""
    options = {
        "model": str(model),
        "context": context,
        "slots": slots,
        "threads": threads,
        "cache": cache,
        "flash": flash,
        "draft": None if draft is None else str(draft),
        "lookup": lookup,
        "rows": None if rows is None else str(rows),
    }
    return Peer("llama.cpp", [python, llama_cpp.__file__], options)


@contextmanager
def llama_cpp_of(folder: Path, *, dtype: str, context: int) -> Iterator[Peer]:
    """llama.cpp with the model in `folder`, its weights in `dtype` (bf16, fp16 or fp32), its cache in fp16 (in fp32 for
    fp32 weights), flash attention, and as many threads as torch has. Raises UsageError, ModelError, DoesNotFit,
    TriforceError."""
    python = llama_cpp_python()
    with model_files() as write:
        file = write(folder, dtype)
        cache: Cache = "f32" if dtype == "fp32" else "f16"
        with open_llama_cpp(python, file, context=context, threads=torch.get_num_threads(), cache=cache) as peer:
            yield peer


@contextmanager
def model_files() -> Iterator[Callable[[Path, str], Path]]:
    """A function that writes the model in a folder as a GGUF file of a dtype, in the user's cache folder. At the end
    the files are removed."""
    place = user_folder("cache", variable=FOLDER_VARIABLE)
    place.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place, prefix="gguf-") as made:

        def write(folder: Path, dtype: str) -> Path:
            file = Path(made) / f"{folder.absolute().name}-{dtype}.gguf"
            write_gguf(folder, file, dtype=dtype)
            return file

        yield write
