"""Another program that continues the same prompts, in a process of its own, with its own memory and threads."""

from __future__ import annotations

import offload  # noqa: F401  # isort: skip  # before torch, which reads its threads' wait policy once

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import llama_cpp
import psutil
import torch
from gguf_file import write_gguf
from program import Program, Setting
from report import say

from offload.decode.sampling import SamplingParams
from offload.errors import TriforceError, UsageError
from offload.files import user_folder
from offload.interrupts import waiting
from offload.speed.rates import FOLDER_VARIABLE

LOOKUPS = ("simple", "map_k", "map_k4v", "mod", "cache")  # n-gram lookups of the wheel


class Peer:
    """A process that follows the protocol of `llama_cpp.serve`. Use it as a context manager, or `close` it.

    about: its last information on itself. An error of the process is a TriforceError with its last output.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        options: Mapping[str, Any],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start the process and wait until the model is loaded. name: in messages; environment: in place of this
        process's."""
        self.name = name
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the process)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,
            env=environment,
        )
        try:
            self.ask(options)
        except BaseException:
            self.close()
            raise

    def generate(
        self, prompt: Sequence[int], sampling: SamplingParams, *, max_tokens: int, end_tokens: Collection[int]
    ) -> tuple[list[int], list[float]]:
        """(tokens, seconds from the start to each). A new prompt is read whole; for a repeated prompt only the last row
        is computed again."""
        answer = self.ask({"prompt": list(prompt)} | _request(sampling, max_tokens, end_tokens))
        return answer["tokens"], answer["seconds"]

    def generate_all(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        *,
        max_tokens: int,
        end_tokens: Collection[int],
    ) -> tuple[list[list[int]], float]:
        """(tokens of each prompt, seconds from the end of reading all prompts): the prompts run side by side."""
        answer = self.ask({"prompts": list(map(list, prompts))} | _request(sampling, max_tokens, end_tokens))
        return answer["tokens"], answer["seconds"]

    @property
    def peak_bytes(self) -> int:
        """The peak memory of the process, mapped files included; the current memory if the system does not report a
        peak."""
        status = Path(f"/proc/{self._process.pid}/status")
        if status.exists():
            peak = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
            return 1024 * int(peak.split()[1])
        memory = psutil.Process(self._process.pid).memory_info()
        return int(getattr(memory, "peak_wset", memory.rss))

    def close(self) -> None:
        """End the process, whatever its state. Idempotent."""
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

    def ask(self, document: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request as it is, and return its answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(document) + "\n")
            self._process.stdin.flush()
            with waiting():
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
    """The sampling part of a request. sampling: its constraint, if any, is a JSON schema."""
    constraint = sampling.constraint
    schema = {} if constraint is None else {"json_schema": json.loads(constraint.text)}
    return schema | {
        "max_tokens": max_tokens,
        "end_tokens": sorted(end_tokens),
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "seed": sampling.seed or 0,
    }


def wheel_python(environment: str) -> str | TriforceError:
    """The Python of the virtual environment in the folder `environment`, with the package xllamacpp; or the error if
    there is none. "": a folder in the user's cache. A missing environment is created; "none": without llama.cpp."""
    if environment == "none":
        return TriforceError("--peers-env none")
    folder = Path(environment) if environment else user_folder("cache") / "peers"
    try:
        if not folder.exists():
            say(f"installing xllamacpp in {folder}")
            subprocess.run([sys.executable, "-m", "venv", folder], check=True, stdout=sys.stderr)
            subprocess.run([python_of(folder), "-m", "pip", "install", "xllamacpp"], check=True, stdout=sys.stderr)
        return python_of(folder)
    except (subprocess.CalledProcessError, TriforceError) as error:
        return TriforceError(f"no xllamacpp in {folder}: {error}")


def needed_wheel_python(environment: str) -> str:
    """The Python with the package xllamacpp, see `wheel_python`. Raises UsageError if there is none."""
    python = wheel_python(environment)
    if isinstance(python, TriforceError):
        raise UsageError(str(python))
    return python


def python_of(folder: Path) -> str:
    """The Python of a virtual environment. Raises UsageError if there is none, and if idle threads of this program
    would occupy llama.cpp's cores."""
    policy = os.environ.get("OMP_WAIT_POLICY", "")
    if policy.lower() == "active":
        raise UsageError(
            f"OMP_WAIT_POLICY is {policy}: between its turns this program would keep the cores from llama.cpp; unset it"
        )
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if not python.exists():
        raise UsageError(f"{folder} has no {python}; name a virtual environment")
    return str(python)


def llama_cpp_choices(dtype: str) -> dict[str, Sequence[str | int]]:
    """The settings of `open_llama_cpp` to try, for weights in `dtype`. Caches are no less precise than weights.
    wait_policy comes first: beside other programs, threads that spin while waiting slow each token down many times,
    which hides all other effects."""
    threads = torch.get_num_threads()
    return {
        "wait_policy": ("default", "passive"),
        "flash_attention": ("off", "on"),
        "cache": {"bf16": ("f16", "bf16", "f32"), "fp16": ("f16", "f32"), "fp32": ("f32",)}[dtype],
        "threads": tuple(dict.fromkeys((threads, (threads + 1) // 2))),
        "ubatch": (512, 128, 2048),
    }


def open_llama_cpp(
    python: str,
    model: Path,
    setting: Setting,
    *,
    context: int,
    slots: int = 1,
    draft: Path | None = None,
    lookup: str | None = None,
    rows: Path | None = None,
) -> Peer:
    """llama.cpp with a GGUF file that `gguf_file` wrote. setting: a value of each of `llama_cpp_choices`; prompts are
    read with torch's number of threads. context: tokens of prompt and output, for each of `slots` prompts that run at a
    time. lookup: of LOOKUPS; lookups remember earlier texts, so a repeated text is found in the first. rows: a file to
    write the rows of the first prompt to, or to read them from if it exists, with the same cache and flash attention.
    Raises TriforceError."""
    options = {
        "model": str(model),
        "context": context,
        "slots": slots,
        "threads": setting["threads"],
        "prompt_threads": torch.get_num_threads(),
        "cache": setting["cache"],
        "flash": setting["flash_attention"] == "on",
        "ubatch": setting["ubatch"],
        "draft": None if draft is None else str(draft),
        "lookup": lookup,
        "rows": None if rows is None else str(rows),
    }
    environment = without_openmp(os.environ)
    if setting["wait_policy"] == "passive":
        environment["OMP_WAIT_POLICY"] = "passive"
    return Peer("llama.cpp", [python, llama_cpp.__file__], options, environment)


def without_openmp(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` without the variables of OpenMP runtimes: they are chosen for this program, not for another."""
    return {name: value for name, value in environment.items() if not name.startswith(("OMP_", "GOMP_", "KMP_"))}


@contextmanager
def llama_cpp_of(python: str, folder: Path, *, dtype: str) -> Iterator[Program]:
    """llama.cpp with the model in `folder`, its weights in `dtype` (bf16, fp16 or fp32). Raises ModelError,
    DoesNotFit."""
    with model_files() as write:
        file = write(folder, dtype)
        yield llama_cpp_program(dtype, lambda setting, context: open_llama_cpp(python, file, setting, context=context))


def llama_cpp_program(dtype: str, start: Callable[[Setting, int], Peer]) -> Program:
    """llama.cpp as a `Program`. start: see `Program`. dtype: of its weights."""
    by_length = frozenset({"flash_attention", "cache"})
    return Program(name="llama.cpp", choices=llama_cpp_choices(dtype), by_length=by_length, start=start)


@contextmanager
def model_files() -> Iterator[Callable[..., Path]]:
    """A function that writes the model in a folder as a GGUF file of a dtype, in the user's cache folder; names: see
    `write_gguf`. The files are removed at the end."""
    place = user_folder("cache", variable=FOLDER_VARIABLE)
    place.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place, prefix="gguf-") as made:

        def write(folder: Path, dtype: str, names: Sequence[str] = ()) -> Path:
            file = Path(made) / f"{folder.absolute().name}-{dtype}.gguf"
            write_gguf(folder, file, dtype=dtype, names=names)
            return file

        yield write
