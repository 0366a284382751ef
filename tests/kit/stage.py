"""Runs scenes in a process and on a machine whose output is the same every time. No tests in here.

A scene is played in a fork of a process that has imported everything, in a folder of its own, so that what it replaces
need not be put back. Models are not run: the stand-in of test_cli_fake says a text that is written here. Hardware,
versions, clocks and measurements are fixed; plans are real, for this hardware, and made once.
"""

from __future__ import annotations

import gc
import itertools
import os
import shlex
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from io import StringIO
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import typer

import triforce_cli
from kit.hearing import hear_signals
from kit.planned import Plans
from kit.terminals import ENTER, Terminal
from triforce_cli.settings import tree

NOW = 1_800_000_000  # 2027-01-15 08:00:00 UTC
GIB = 2**30
BROKEN = 99  # no exit code of the program's
ROWS = 300  # of the terminal: more than any output, so that nothing scrolls away
MODELS = ("demo-target", "demo-draft")
TEXT = "It was a bright cold day in April, and the clocks were striking thirteen.\n"
PIECES = ["The hallway smelt", " of boiled cabbage", " and old rag mats.\n", "At one end of it"]

_KEPT = ExitStack()  # to the end of the process

Prepare = Callable[[], None]
HEAVY = (
    *("torch", "huggingface_hub", "prompt_toolkit.shortcuts", "rich.progress", "platformdirs", "encodings.idna"),
    *("kit.hub", "test_cli_bench", "test_cli_models", "test_cli_plan", "test_cli_sessions", "test_doctor"),
    *("lxml.etree", "webencodings", "fontTools.ttLib", "llguidance", "offload.bench.environment"),
    *("offload.engine.engine", "offload.engine.sequences", "offload.hub.convert", "offload.hub.pull"),
    "offload.hub.offers",
    *("offload.bench.exactness", "offload.bench.trial", "offload.plan.what_if", "triforce_cli.app"),
    *("triforce_cli.chat.engine", "triforce_cli.chat.background", "triforce_cli.chat.reader"),
    *("triforce_cli.prompts.script", "triforce_cli.chat.slash", "triforce_cli.render.plan"),
)


def nothing() -> None: ...


@dataclass(frozen=True)
class Scene:
    """`triforce ARGS`. typed: lines at the terminal, each once the text is there that is named first, "" for another
    prompt of a chat.

    prepare: called in the scene's folder and in its process, before it begins.
    """

    args: str
    prepare: Prepare = nothing
    stdin: str = ""
    columns: int = 80
    modes: str = "terminal piped json"
    typed: Sequence[tuple[str, str]] = ()


def play(scene: Scene, *more: str) -> None:
    """In a fork: run it where standard streams lead to, and end. What the scene itself does wrong is BROKEN."""
    hear_signals()
    os.closerange(3, 256)  # who waits for an exec is told that there was one
    code = BROKEN
    try:
        with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # of a path that is as long on any machine
            os.chdir(folder)
            code = _run(scene, more)
            os.chdir("/")
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run(scene: Scene, more: Sequence[str]) -> int:
    from triforce_cli.app import main

    sys.stdin, sys.stdout, sys.stderr = (
        os.fdopen(fd, "rw"[fd > 0], encoding="utf-8", closefd=False) for fd in range(3)
    )
    os.environ.clear()
    os.environ.update(
        HOME="home", PATH=os.defpath, TERM="xterm-256color", TZ="UTC", NO_PROXY="127.0.0.1", XDG_STATE_HOME="state",
        XDG_CONFIG_HOME="config", TRIFORCE_CACHE_DIR="cache", TRIFORCE_MODELS_DIR="models",
        TRIFORCE_SESSIONS_DIR="sessions", TRIFORCE_LOG_DIR="log",
    )  # fmt: skip
    time.tzset()
    _fix_the_machine()
    scene.prepare()
    return main([*shlex.split(scene.args), *more])


def at_terminal(scene: Scene) -> tuple[str, int]:
    """The screen at the end, and the exit code."""
    terminal = Terminal(["true"], env={}, rows=ROWS, columns=scene.columns, begin=lambda: play(scene))
    for number, (text, line) in enumerate(scene.typed, 1):
        if text:
            terminal.until_shown(text)
        else:
            terminal.until_prompt(number)
        terminal.send(f"{line}{ENTER}")
    code = terminal.finish()
    assert code != BROKEN, terminal.shown
    return terminal.shown + "\n" * terminal.is_at_line_start, code


def piped(scene: Scene, *more: str) -> tuple[str, str, int]:
    """(standard output, standard error, exit code)"""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(["true"], preexec_fn=lambda: play(scene, *more), **pipes) as process:
        out, err = process.communicate(scene.stdin.encode())
    assert process.returncode != BROKEN, err.decode()
    return out.decode(), err.decode(), process.returncode


def rehearse() -> None:
    """Import what scenes use, once."""
    for name in HEAVY:
        import_module(name)
    import_module("torch").set_num_threads(1)
    typer.main.get_command = cache(typer.main.get_command)  # type: ignore[assignment]
    app = import_module("triforce_cli.app")
    with redirect_stdout(StringIO()):  # what is imported, and made of options, in any run
        assert app.main(["plan", "--help"]) == 0
    root = typer.main.get_command(app.app)
    above = root.make_context("triforce", [], resilient_parsing=True)  # it names the options for help
    for words, command in tree.commands(root).items():
        command.make_context(words[-1], [], above, resilient_parsing=True)  # what reads the values of its options
    _read_tokenizers_once()
    gc.freeze()  # or every fork would copy what the collector looks at


def keep_plans() -> None:
    """Make each plan once, for all forks of this process, as long as it lasts."""
    Plans(Path(_KEPT.enter_context(tempfile.TemporaryDirectory()))).keep(pytest.MonkeyPatch())


def _read_tokenizers_once() -> None:
    """Those of the embedded models, which most scenes have by these names."""
    from offload.text import tokenizer_files
    from triforce_cli.setup.choice import embedded_model

    load = tokenizer_files.load
    kept = {name: load(embedded_model(name)) for name in MODELS}
    tokenizer_files.load = lambda folder: kept[folder.name] if folder.name in kept else load(folder)


def _fix_the_machine() -> None:
    """Two cores, 32 GiB, passes of typical times, a clock that goes on by a quarter of a second whenever somebody looks
    at it."""
    from offload import machine
    from offload.bench import diagnosis, environment
    from offload.engine import engine
    from offload.plan import request
    from offload.session import store
    from offload.speed import hardware
    from test_doctor import LAPTOP
    from triforce_cli.answering import recorder
    from triforce_cli.chat import background
    from triforce_cli.commands import models, sessions
    from triforce_cli.ground import deadline
    from triforce_cli.screen import busy, progress
    from triforce_cli.setup import choice

    laptop = hardware.Hardware("cpu", "Some laptop's CPU", 32 * GIB, 32 * GIB, True)
    gpu = hardware.Hardware("cuda:0", "NVIDIA GeForce RTX 4090", 24 * 10**9, 128 * 10**9, True, hardware.RTX_4090)
    for module in (hardware, request, diagnosis):
        module.probe = lambda device, gpus=1: gpu if device.startswith("cuda") else laptop
    busy.OtherPrograms.share = lambda self: 0.0
    engine.timed = lambda request: request
    engine.time_again = lambda target, draft: None
    engine.kernels_problem = lambda device, model: ""
    engine.prefill_problem = lambda device: ""
    moments = itertools.count(1000.0, 0.25)
    for clocked in (deadline.Deadline, progress.PlainDisplay, progress.TimeLeft):
        clocked.__init__.__defaults__ = (lambda: next(moments),)
    _replace_time(sessions, time=lambda: NOW)
    _replace_time(recorder, time=lambda: NOW)
    _replace_time(store, time=lambda: NOW - 90 * 86400)
    os.fsync = lambda fd: None
    os.getpid = lambda: 12345  # a session's lock holds it, and its digits count in the session's size
    background.ThreadPoolExecutor = _AtOnce
    for module in (choice, models):
        module.embedded_model = Path
    for name in MODELS:
        os.symlink(Path(triforce_cli.__file__).parent / "models" / name, name)
    diagnosis.software = lambda: LAPTOP.software
    machine.driver = lambda: None
    environment.look = lambda: LAPTOP.machine
    environment.platform = SimpleNamespace(python_version=lambda: "3.12.1")
    environment.torch = SimpleNamespace(
        __version__="2.13.0+cpu", get_num_threads=lambda: 2, cuda=SimpleNamespace(is_available=lambda: False)
    )
    environment.transformers = SimpleNamespace(__version__="5.23.0")
    Path("book.txt").write_text(TEXT * 20)
    (log := Path("log", "answers.db")).parent.mkdir(mode=0o700)
    log.touch()  # no first use, which would be said


def _replace_time(module: ModuleType, **clocks: Callable[[], float]) -> None:
    module.time = SimpleNamespace(**clocks)


class _AtOnce:
    """An executor on the thread of who asks: background work is done before anything else is shown."""

    def __init__(self, *args: object) -> None: ...

    def submit(self, work: Callable[..., None], *args: object) -> Future[None]:
        done: Future[None] = Future()
        done.set_result(work(*args))
        return done

    def shutdown(self) -> None: ...


def fake_engine(*, plans: bool = True, **script: Any) -> Prepare:
    """Texts are PIECES, unless `script` says otherwise (see test_cli_fake). Tokens are those of the demo model. plans:
    those of test_cli_fake instead of real ones."""

    def prepare() -> None:
        import test_cli_fake as fake
        from offload.engine import engine, sequences
        from offload.engine.request import GenerationRequest
        from offload.plan import request

        class Actor(fake.Engine):
            def generate(self, request: GenerationRequest, **settings: Any) -> Any:
                return super().generate(replace(request, prompt=[65] * len(request.prompt)), **settings)

            def precompute(self, tokens: Sequence[int], **settings: Any) -> None: ...

            def replan(self, plan: object) -> None: ...

        fake.SCRIPT.update({"pieces": PIECES} | script)
        engine.Engine, sequences.Sequences = Actor, fake.Sequences
        if plans:
            request.Request.plan, request.Request.together = fake.Request.plan, fake.Request.together

    return prepare
