"""A signal is noted where it comes, and raised where the program polls or waits."""

from __future__ import annotations

import os
import random
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from kit.hearing import hear_signals
from kit.models import TOKENIZER_SIZE, random_model, save
from kit.stage import rehearse
from kit.terminals import Terminal
from offload import interrupts
from offload.interrupts import Terminated, exit_status, handled, in_foreground, interruptible, poll, resume, waiting
from triforce_cli.chat import reader
from triforce_cli.ground import inputs
from triforce_cli.options import consent

RAISED = {signal.SIGINT: KeyboardInterrupt, signal.SIGTERM: Terminated, signal.SIGHUP: Terminated}
EVERY = pytest.mark.parametrize("number", RAISED, ids=lambda number: number.name)


@pytest.fixture(autouse=True)
def heard() -> Iterator[None]:
    """Also where the tests are run in the background."""
    before = {number: signal.getsignal(number) for number in RAISED}
    for number in RAISED:
        signal.signal(number, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No signal is waited for."""
    monkeypatch.setattr(interrupts, "GRACE_SECONDS", 0.0)


def interrupt(number: int = signal.SIGINT) -> None:
    os.kill(os.getpid(), number)


def interrupted(work: Callable[[], object]) -> BaseException | None:
    """The exception that ends the program's `work` when signals arrive."""
    try:
        with interruptible():
            work()
    except BaseException as error:
        return error
    return None


@EVERY
def test_it_is_raised_by_the_next_poll_and_by_nothing_before(number: signal.Signals) -> None:
    done: list[int] = []

    def work() -> None:
        interrupt(number)
        done.append(1)
        poll()
        done.append(2)

    error = interrupted(work)
    assert (type(error), done) == (RAISED[number], [1])
    if isinstance(error, Terminated):
        assert error.exit_code == 128 + number


def test_a_poll_without_a_signal_does_nothing() -> None:
    poll()
    assert interrupted(poll) is None


def test_a_signal_is_raised_once() -> None:
    def work() -> None:
        interrupt()
        with pytest.raises(KeyboardInterrupt):
            poll()
        poll()

    assert interrupted(work) is None


def test_a_signal_that_comes_in_a_finaliser_is_not_lost(capfd: pytest.CaptureFixture[str]) -> None:
    """Python writes a traceback of what one raises and goes on."""

    class Memory:
        def __del__(self) -> None:
            interrupt()

    def work() -> None:
        Memory()
        poll()

    assert type(interrupted(work)) is KeyboardInterrupt
    assert capfd.readouterr().err == ""


def test_a_poll_of_another_thread_leaves_it_to_the_main_one() -> None:
    """Background work of a chat goes on, or is broken off by whoever started it."""
    errors: list[BaseException] = []

    def elsewhere() -> None:
        try:
            poll()
            with waiting():
                poll()
        except BaseException as error:
            errors.append(error)

    def work() -> None:
        interrupt()
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        poll()

    assert type(interrupted(work)) is KeyboardInterrupt
    assert errors == []


def test_a_signal_that_is_still_noted_at_the_end_is_raised_there() -> None:
    assert type(interrupted(interrupt)) is KeyboardInterrupt


def test_an_error_after_a_signal_is_not_told() -> None:
    """As where a library makes one of an import that nobody waits for any more."""

    def work() -> None:
        interrupt(signal.SIGTERM)
        raise ValueError

    assert type(interrupted(work)) is Terminated


def test_an_error_of_its_own_stays_one() -> None:
    def work() -> None:
        raise ValueError

    assert type(interrupted(work)) is ValueError


def test_nothing_of_it_stays() -> None:
    def wait() -> None:
        with waiting():
            interrupt()

    numbers = (*RAISED, signal.SIGALRM)
    before = [*map(signal.getsignal, numbers)]
    for work in (interrupt, wait, poll):
        interrupted(work)
        assert [*map(signal.getsignal, numbers)] == before
        assert signal.getitimer(signal.ITIMER_REAL)[1] == 0.0
        poll()


# Waits


@EVERY
def test_a_wait_is_broken_off_at_once(number: signal.Signals) -> None:
    def work() -> None:
        with waiting():
            interrupt(number)
            time.sleep(60)

    assert type(interrupted(work)) is RAISED[number]


def test_a_signal_that_came_before_a_wait_breaks_it_off() -> None:
    begin = time.monotonic()

    def work() -> None:
        interrupt()
        with waiting():
            time.sleep(60)

    assert type(interrupted(work)) is KeyboardInterrupt
    assert time.monotonic() - begin < 30


def test_after_a_wait_nothing_is_raised_but_by_a_poll() -> None:
    done: list[int] = []

    def work() -> None:
        with waiting(), waiting():
            pass
        interrupt()
        time.sleep(0.3)
        done.append(1)

    assert type(interrupted(work)) is KeyboardInterrupt
    assert done == [1]


def test_a_wait_hears_what_did_not_break_it_off() -> None:
    """Ctrl-C between a question and the reading of its answer was heard after the next key only. Here another thread
    gets the signal, which does not break off the main thread's wait either."""
    read, write = os.pipe()

    def strike() -> None:
        time.sleep(0.05)
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    def work() -> None:
        threading.Thread(target=strike).start()
        with waiting():
            os.read(read, 1)

    rescue = threading.Timer(20, os.write, (write, b"."))
    rescue.start()
    assert type(interrupted(work)) is KeyboardInterrupt
    assert rescue.is_alive()
    rescue.cancel()
    os.close(read)
    os.close(write)


def _prompt() -> object:
    return inputs.read_stdin("a prompt", note=lambda *_, **__: None)


def _agreed() -> object:
    return consent.agreed(Mock(has_person=True), "remove it?")


class Heard:
    """Standard input of one line, which notes whether a timer goes off in each wait for it."""

    def __init__(self) -> None:
        self.lines, self.waiting = ["y\n"], list[bool]()

    def readline(self) -> str:
        self.waiting.append(signal.getitimer(signal.ITIMER_REAL)[1] > 0)
        return self.lines.pop() if self.lines else ""

    @property
    def buffer(self) -> object:
        def read(num_bytes: int = -1) -> bytes:
            return self.readline().encode()

        return Mock(read=read, readline=read)


@pytest.mark.parametrize("read", [_prompt, reader._next_line, _agreed])
def test_whoever_reads_standard_input_waits(read: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """And outside of `interruptible` nobody does: the timer would be another's."""
    monkeypatch.setattr(select, "select", lambda *_: [True])
    monkeypatch.setattr(sys, "stdin", within := Heard())
    with interruptible():
        read()
    monkeypatch.setattr(sys, "stdin", outside := Heard())
    read()
    assert set(within.waiting) == {True}
    assert set(outside.waiting) == {False}
    assert signal.getitimer(signal.ITIMER_REAL)[1] == 0.0


# More than one signal


def keeps(kept: list[int], more: Callable[[], object]) -> Callable[[], None]:
    """Work that is interrupted, and then interrupted again by `more` while it keeps what it has."""

    def work() -> None:
        try:
            interrupt()
            poll()
        finally:
            more()
            poll()
            with waiting():
                time.sleep(0.03)
            kept.append(1)

    return work


@pytest.mark.parametrize("numbers", [(2,), (2, 2), (15,), (1, 2)])
def test_another_does_not_break_off_what_the_first_left_to_be_kept(numbers: tuple[int, ...]) -> None:
    """What had come was lost, or half of it written, when Ctrl-C was pressed twice."""
    kept: list[int] = []
    error = interrupted(keeps(kept, lambda: [interrupt(number) for number in numbers]))
    assert (type(error), kept) == (KeyboardInterrupt, [1])


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_an_end_that_takes_too_long_is_interrupted(number: signal.Signals) -> None:
    """As where nobody reads what is written there."""
    kept: list[int] = []
    error = interrupted(keeps(kept, lambda: interrupt(number)))
    assert (type(error), kept) == (RAISED[number], [])


@EVERY
def test_after_an_interrupt_that_a_conversation_goes_on_after_the_next_is_heard(number: signal.Signals) -> None:
    def work() -> None:
        interrupt()
        with pytest.raises(KeyboardInterrupt):
            poll()
        resume()
        interrupt(number)
        poll()

    assert type(interrupted(work)) is RAISED[number]


def test_what_asks_to_end_while_an_interrupt_is_under_way_is_raised_once_the_conversation_goes_on() -> None:
    def work() -> None:
        interrupt()
        with pytest.raises(KeyboardInterrupt):
            poll()
        interrupt(signal.SIGHUP)
        poll()
        resume()
        poll()

    assert type(interrupted(work)) is Terminated


@pytest.mark.parametrize("numbers", [(2, 15), (2, 2, 1), (15, 2)])
def test_of_several_signals_the_first_is_raised_first(numbers: tuple[int, ...]) -> None:
    """However long the next poll takes. A conversation that goes on after an interrupt ends then, if that was asked."""
    raised: list[type[BaseException]] = []

    def work() -> None:
        for number in numbers:
            interrupt(number)
        for _ in range(2):
            try:
                poll()
            except BaseException as error:
                raised.append(type(error))
            resume()

    interrupted(work)
    assert raised == [RAISED[signal.Signals(number)] for number in dict.fromkeys(numbers)]


@pytest.mark.usefixtures("impatient")
@EVERY
@pytest.mark.parametrize("converts", [False, True])
def test_a_signal_that_is_repeated_is_raised_wherever_that_is(number: signal.Signals, converts: bool) -> None:
    """A library without end polls for nothing, whatever it makes of an exception. A conversation does not go on then:
    what was being changed may be half done."""

    def work() -> None:
        try:
            interrupt(number)
            interrupt(number)
            time.sleep(60)
        except BaseException:
            if converts:
                raise ValueError from None
            raise

    error = interrupted(work)
    assert isinstance(error, Terminated)
    assert (error.exit_code, error.forced) == (128 + number, True)


def test_a_signal_that_is_repeated_soon_waits_for_the_next_poll() -> None:
    done: list[int] = []

    def work() -> None:
        for _ in range(6):
            interrupt()
        done.append(1)
        poll()

    assert type(interrupted(work)) is KeyboardInterrupt
    assert done == [1]


def test_handlers_are_changed_all_or_none() -> None:
    """A signal between two of them left the first for good with what was meant for a while."""

    class Handlers(dict[signal.Signals, Any]):
        def __getitem__(self, number: signal.Signals) -> Any:
            if number == signal.SIGTERM:
                interrupt(number)
            return lambda *_: None

    before: list[object] = []

    def work() -> None:
        before.append(signal.getsignal(signal.SIGINT))
        with handled(Handlers({signal.SIGINT: 0, signal.SIGTERM: 0})):
            pass
        before.append(signal.getsignal(signal.SIGINT))

    assert type(interrupted(work)) is Terminated
    assert before[0] == before[1]


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
        names: dict[str, Any] = {"work": getattr(Engine, stage), "begin": begin}
        exec(source, names)
        setattr(Engine, stage, names["run"])
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


@pytest.mark.parametrize("is_early", [True, False])
def test_a_request_to_end_is_the_childs_in_the_foreground_from_before_its_start(is_early: bool) -> None:
    """Between both it ended this program."""

    def start() -> int:
        if is_early:
            os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)  # a terminal sends it to the child by itself
        return subprocess.Popen(["sleep", "60"]).pid

    with interruptible(), in_foreground(start) as pid:
        if not is_early:
            os.kill(os.getpid(), signal.SIGTERM)
        assert exit_status(pid) == -signal.SIGTERM
