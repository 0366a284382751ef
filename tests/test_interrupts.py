"""Signals are raised in the program's own code, not inside a library's call."""

from __future__ import annotations

import math
import os
import random
import select
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from triforce_cli.signals import Terminated, interruptible

from hearing import hear_signals
from models import TOKENIZER_SIZE, random_model, save
from stage import rehearse
from terminals import Terminal
from triforce_cli import inputs, signals
from triforce_cli.chat import reader
from triforce_cli.commands import sessions

RAISED = {signal.SIGINT: KeyboardInterrupt, signal.SIGTERM: Terminated, signal.SIGHUP: Terminated}
EVERY = pytest.mark.parametrize("number", RAISED, ids=lambda number: number.name)


def code_of(module: str, source: str, **names: object) -> Callable[..., Any]:
    """The function `run` of a module of that name."""
    namespace: dict[str, Any] = {"__name__": module, "os": os, "time": time, **names}
    exec(source, namespace)
    run: Callable[..., Any] = namespace["run"]
    return run


MAIN = code_of("triforce_cli.app", "def run(work): return work()")
CONVERTS = """
def run():
    try:
        interrupt()
        {work}
    except BaseException:
        raise ValueError
"""


@pytest.fixture(autouse=True)
def heard() -> Iterator[None]:
    """Also where the tests are run in the background."""
    before = {number: signal.getsignal(number) for number in RAISED}
    for number in RAISED:
        signal.signal(number, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def interrupt(number: int = signal.SIGINT) -> None:
    os.kill(os.getpid(), number)


def interrupted(work: Callable[[], object]) -> BaseException | None:
    """The exception that ends the program's `work` when signals arrive."""
    try:
        with interruptible(MAIN.__code__):
            MAIN(work)
    except BaseException as error:
        return error
    return None


@EVERY
def test_the_programs_own_code_is_interrupted_at_once(number: signal.Signals) -> None:
    done: list[int] = []
    source = "def run():\n    os.kill(os.getpid(), number)\n    done.append(1)"
    error = interrupted(code_of("offload.model", source, number=number, done=done))
    assert (type(error), done) == (RAISED[number], [])
    if isinstance(error, Terminated):
        assert error.exit_code == 128 + number


@EVERY
def test_a_library_is_left_first(number: signal.Signals) -> None:
    """Torch made a ValueError of it while weights were read."""
    library = code_of("torch.storage", CONVERTS.format(work="time.sleep(0.1)"), interrupt=lambda: interrupt(number))
    done: list[int] = []
    source = "def run():\n    library()\n    time.sleep(60)\n    done.append(1)"
    error = interrupted(code_of("offload.transfer", source, library=library, done=done))
    assert (type(error), done) == (RAISED[number], [])


def test_the_body_of_a_context_manager_is_the_programs_own() -> None:
    done: list[int] = []
    source = "@contextmanager\ndef opened():\n    os.kill(os.getpid(), 2)\n    done.append(1)\n    yield\n"
    source += "def run():\n    with opened():\n        pass"
    work = code_of("triforce_cli.engine", source, contextmanager=contextmanager, done=done)
    assert (type(interrupted(work)), done) == (KeyboardInterrupt, [])


def test_what_a_library_calls_back_is_not_interrupted() -> None:
    """Rich draws the program's columns with a lock that it has taken."""
    done: list[int] = []
    source = "def run():\n    interrupt()\n    done.append(1)"
    callback = code_of("triforce_cli.progress", source, interrupt=interrupt, done=done)
    library = code_of("rich.live", "def run():\n    callback()\n    done.append(2)", callback=callback, done=done)
    error = interrupted(
        code_of("triforce_cli.output", "def run():\n    library()\n    time.sleep(60)", library=library)
    )
    assert (type(error), done) == (KeyboardInterrupt, [1, 2])


def test_what_says_so_is_done_whole() -> None:
    """Also what it calls: ranks that were told a half of it would be out of step."""
    done: list[int] = []
    sends = code_of("offload.model", "def run():\n    os.kill(os.getpid(), 2)\n    done.append(1)", done=done)
    tells = code_of(
        "offload.ranks.team",
        "UNINTERRUPTED = True\ndef run():\n    sends()\n    done.append(2)",
        sends=sends,
        done=done,
    )
    source = "def run():\n    tells()\n    time.sleep(60)\n    done.append(3)"
    error = interrupted(code_of("offload.ranks.leader", source, tells=tells, done=done))
    assert (type(error), done) == (KeyboardInterrupt, [1, 2])


@pytest.mark.parametrize("work", ["while True: time.sleep(0.001)", "while True: pass"])
@pytest.mark.parametrize("converts", [False, True])
def test_a_library_without_end_is_interrupted_all_the_same(
    monkeypatch: pytest.MonkeyPatch, work: str, converts: bool
) -> None:
    """Whatever it makes of that."""
    monkeypatch.setattr(signals, "GRACE_SECONDS", 0.1)
    source = CONVERTS.format(work=work) if converts else f"def run():\n    interrupt()\n    {work}"
    error = interrupted(code_of("transformers.generation", source, interrupt=interrupt))
    assert type(error) is KeyboardInterrupt


@pytest.mark.parametrize("module", ["selectors", "socket", "ssl", "httpcore._backends.sync", "pathlib"])
def test_waiting_for_others_is_interrupted_at_once(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    monkeypatch.setattr(signals, "GRACE_SECONDS", math.inf)
    reader, writer = os.pipe()
    waits = code_of(module, "def run(): return select.select([reader], [], [])", select=select, reader=reader)
    source = "def run():\n    interrupt()\n    waits()"
    library = code_of("prompt_toolkit.application", source, interrupt=interrupt, waits=waits)
    assert type(interrupted(library)) is KeyboardInterrupt
    os.close(reader)
    os.close(writer)


def test_a_wait_for_standard_input_hears_what_did_not_break_it_off() -> None:
    """Ctrl-C between a question and the reading of its answer was heard after the next key only. Here another thread
    gets the signal, which does not break off the main thread's wait either."""
    reader, writer = os.pipe()

    def strike() -> None:
        time.sleep(0.05)
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    source = "def run():\n    other.start()\n    with listening():\n        os.read(reader, 1)"
    names = {"other": threading.Thread(target=strike), "listening": signals.listening, "reader": reader}
    rescue = threading.Timer(20, os.write, (writer, b"."))
    rescue.start()
    assert type(interrupted(code_of("triforce_cli.inputs", source, **names))) is KeyboardInterrupt
    assert rescue.is_alive()
    rescue.cancel()
    os.close(reader)
    os.close(writer)


def _prompt() -> object:
    return inputs.read_stdin("a prompt", note=lambda *_, **__: None)


def _agreed() -> object:
    return sessions._agreed(Mock(has_person=True), "remove it?")


class Heard:
    """Standard input of one line, which notes whether each wait for it listens."""

    def __init__(self) -> None:
        self.lines, self.listening = ["y\n"], list[bool]()

    def readline(self) -> str:
        self.listening.append(signals._is_listening)
        return self.lines.pop() if self.lines else ""

    @property
    def buffer(self) -> object:
        def read(num_bytes: int = -1) -> bytes:
            return self.readline().encode()

        return Mock(read=read, readline=read)


@pytest.mark.parametrize("read", [_prompt, reader._next_line, _agreed])
def test_whoever_reads_standard_input_listens(read: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """And outside of `interruptible` nobody does: the timer would be another's."""
    monkeypatch.setattr(inputs, "_comes", lambda *_: True)
    monkeypatch.setattr(sys, "stdin", within := Heard())
    with signals.interruptible(read.__code__):
        read()
    monkeypatch.setattr(sys, "stdin", outside := Heard())
    read()
    assert set(within.listening) == {True}
    assert set(outside.listening) == {False}
    assert not signals._is_listening


def test_a_signal_is_not_lost_in_a_finaliser(capfd: pytest.CaptureFixture[str]) -> None:
    """Python writes a traceback and goes on."""
    source = "class Memory:\n    def __del__(self):\n        interrupt()\n        time.sleep(0.1)\n"
    source += "def run():\n    block = Memory()\n    del block\n    time.sleep(60)"
    assert type(interrupted(code_of("offload.transfer.memory", source, interrupt=interrupt))) is KeyboardInterrupt
    assert capfd.readouterr().err == ""


def test_another_error_of_a_finaliser_is_shown_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda lost: shown.append(lost.exc_type))
    source = "class Memory:\n    def __del__(self):\n        raise OSError\ndef run():\n    Memory()"
    assert interrupted(code_of("offload.transfer.memory", source)) is None
    assert shown == [OSError]


def test_an_error_of_its_own_stays_one() -> None:
    assert type(interrupted(code_of("offload.engine.engine", "def run():\n    raise ValueError"))) is ValueError


def test_a_signal_that_still_waits_at_the_end_is_raised_there() -> None:
    source = "def run():\n    interrupt()"
    assert type(interrupted(code_of("torch.storage", source, interrupt=interrupt))) is KeyboardInterrupt


def test_nothing_of_it_stays() -> None:
    numbers = (*RAISED, signal.SIGALRM)
    before = [*map(signal.getsignal, numbers), sys.unraisablehook]
    for source in ("def run():\n    interrupt()", "def run():\n    interrupt()\n    time.sleep(0.1)"):
        interrupted(code_of("torch.storage", source, interrupt=interrupt))
        assert [*map(signal.getsignal, numbers), sys.unraisablehook] == before
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


# More than one signal

KEEPS = """
def run():
    try:
        interrupt()
        time.sleep(60)
    finally:
        {more}
        time.sleep(0.03)
        kept.append(1)
"""


@pytest.mark.parametrize(
    "more", ["interrupt()", "interrupt(); interrupt()", "interrupt(15)", "interrupt(1); interrupt()"]
)
def test_another_does_not_break_off_what_the_first_left_to_be_kept(more: str) -> None:
    """What had come was lost, or half of it written, when Ctrl-C was pressed twice."""
    kept: list[int] = []
    error = interrupted(code_of("offload.engine.engine", KEEPS.format(more=more), interrupt=interrupt, kept=kept))
    assert (type(error), kept) == (KeyboardInterrupt, [1])


def test_another_that_comes_while_the_first_is_raised_is_the_same_wish(monkeypatch: pytest.MonkeyPatch) -> None:
    exception_of = signals.exception_of
    monkeypatch.setattr(signals, "exception_of", lambda number: (interrupt(), exception_of(number))[1])
    kept: list[int] = []
    error = interrupted(code_of("offload.engine.engine", KEEPS.format(more="pass"), interrupt=interrupt, kept=kept))
    assert (type(error), kept) == (KeyboardInterrupt, [1])


def test_an_end_that_takes_too_long_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where nobody reads what is written there."""
    monkeypatch.setattr(signals, "GRACE_SECONDS", 0.0)
    kept: list[int] = []
    error = interrupted(
        code_of("offload.engine.engine", KEEPS.format(more="interrupt(15)"), interrupt=interrupt, kept=kept)
    )
    assert (type(error), kept) == (Terminated, [])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_after_an_interrupt_that_a_conversation_goes_on_after_the_next_is_heard(number: signal.Signals) -> None:
    source = "def run():\n    try:\n        interrupt()\n    except KeyboardInterrupt:\n        pass\n"
    source += "    interrupt(number)\n    time.sleep(60)"
    assert type(interrupted(code_of("triforce_cli.chat", source, interrupt=interrupt, number=number))) is RAISED[number]


def test_handlers_are_changed_all_or_none() -> None:
    """A signal between two of them left the first for good with what was meant for a while."""

    class Handlers(dict[signal.Signals, Any]):
        __getitem__ = code_of(
            "triforce_cli.engine",
            "def run(self, number):\n    number != 15 or os.kill(os.getpid(), 15)\n    return lambda *_: None",
        )

    after: list[Any] = []
    source = "def run():\n    try:\n        with handled(handlers):\n            time.sleep(60)\n    finally:\n"
    source += "        after.append(signal.getsignal(2))"
    names = {"handled": signals.handled, "handlers": Handlers({signal.SIGINT: 0, signal.SIGTERM: 0})}
    assert type(interrupted(code_of("triforce_cli.engine", source, **names, after=after, signal=signal))) is Terminated
    assert after[0].__name__ == "on_signal"


def test_a_timer_that_comes_late_is_heard_to_the_end() -> None:
    """Python wrote "Signal 14 ignored due to race condition", or the process died of it."""
    library = code_of("torch.storage", "def run():\n    interrupt()\n    time.sleep(0.03)", interrupt=interrupt)
    source = "def run():\n    try:\n        library()\n        time.sleep(60)\n    finally:\n"
    source += "        os.kill(os.getpid(), 14)\n        kept.append(1)"
    kept: list[int] = []
    before = signal.signal(signal.SIGALRM, signal.SIG_DFL)
    error = interrupted(code_of("offload.engine.engine", source, library=library, kept=kept))
    signal.signal(signal.SIGALRM, before)
    assert (type(error), kept) == (KeyboardInterrupt, [1])


# Stages of a real run, interrupted at many moments

STAGES = {
    "load": "work(*args, **settings).close()",
    "generate": "yield from work(*args, **settings)",
    "save": "work(*args, **settings)",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rehearse()
    layers = random_model(vocab_size=TOKENIZER_SIZE, num_hidden_layers=48, seed=3, max_position_embeddings=2048)
    return save(layers, tmp_path_factory.mktemp("deep"), tokenizer=True)


def repeat(model: Path, stage: str, number: int, seconds: float) -> None:
    """In a fork: `triforce generate` with a stage that goes on for ever and is interrupted after some seconds."""
    hear_signals()
    os.closerange(3, 256)
    code = 1
    try:
        sys.stdin, sys.stdout, sys.stderr = (
            os.fdopen(fd, "rw"[fd > 0], encoding="utf-8", closefd=False) for fd in range(3)
        )
        os.environ["TERM"] = "xterm-256color"
        from offload.engine.engine import Engine
        from triforce_cli.app import main

        def begin() -> None:
            threading.Timer(seconds, os.kill, (os.getpid(), number)).start()

        source = f"def run(*args, **settings):\n    begin()\n    while True:\n        {STAGES[stage]}"
        setattr(Engine, stage, code_of("offload.engine.engine", source, work=getattr(Engine, stage), begin=begin))
        signals.GRACE_SECONDS = math.inf  # nothing is interrupted by force
        args = ("--draft", "none", "--prompt", "x" * 300, "--max-tokens", "8", "--cache", str(model / "session"))
        code = main(["generate", "--model", str(model), *args])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_ends_wherever_it_is_interrupted(model: Path, stage: str, num_cases: Callable[[int], int]) -> None:
    """Reading weights ended in an error of torch's or of the progress bar's, with exit code 1."""
    moments = random.Random(stage)
    for trial in range(num_cases(30)):
        number, seconds = (signal.SIGINT, signal.SIGTERM)[trial % 2], moments.uniform(0.0, 0.1)
        terminal = Terminal(["true"], env={}, begin=lambda n=number, s=seconds: repeat(model, stage, n, s))
        assert terminal.finish() == 128 + number, (seconds, terminal.shown)
        assert "rror" not in terminal.shown
        assert "Traceback" not in terminal.shown
        assert not terminal.is_cursor_hidden
        shutil.rmtree(model / "session", ignore_errors=True)
