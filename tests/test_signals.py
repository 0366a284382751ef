"""Being interrupted, and being asked to end, at any moment: what came so far is kept, and the exit code says it."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import pytest

from kit.hearing import hear_signals
from kit.models import TOKENIZER_SIZE, random_model, save
from kit.programs import ProgramTerminal, begin
from kit.terminals import ENTER, Terminal
from offload.session.catalogue import inspect
from test_chat_terminal import arguments
from test_chat_terminal import environment as chat_environment
from test_cli import PIPES, read_until
from test_cli_fake import ROOT, command, environment, fork, start
from test_cli_terminal import HIDE_CURSOR, SHOW_CURSOR, SLOW, Screen, shown_at_the_end
from triforce_cli import app
from triforce_cli.ground import inputs

CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}
EVERY = pytest.mark.parametrize("number", CODES, ids=lambda number: number.name)
ASKED = pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)


@pytest.fixture
def args(tmp_path: Path) -> tuple[str, ...]:
    return ("--model", str(tmp_path), "--prompt", "x" * 100)


# While it generates


@ASKED
def test_text_so_far_is_kept(args, number: signal.Signals) -> None:
    with fork(*args, "--quiet", script={"pieces": ["partial"], "hang": True}, **PIPES) as process:
        read_until(process, b"partial")
        process.send_signal(number)
        out, err = process.communicate()
    assert (process.returncode, out, err) == (CODES[number], b"", b"")  # no newline in a pipe, no message


@ASKED
def test_json_holds_what_came(args, number: signal.Signals) -> None:
    script = {"pieces": ["partial"], "hang": True, "tells": True}
    with fork(*args, "--json", "--stats", script=script, **PIPES) as process:
        assert process.stderr is not None
        while not process.stderr.readline().startswith(b"decode"):
            pass
        process.send_signal(number)
        out, _ = process.communicate()
    assert process.returncode == CODES[number]
    document = json.loads(out)
    assert (document["text"], document["finish_reason"]) == ("partial", "interrupted")


@pytest.mark.few(3)
@EVERY
@pytest.mark.parametrize("stage", ["load", "prefill"])
def test_a_stage_is_broken_off_without_a_word(args, number: signal.Signals, stage: str) -> None:
    with fork(*args, script={f"{stage}_ticks": 2000, "tick_seconds": 0.1, "tells": True}, **PIPES) as process:
        assert process.stderr is not None
        while not process.stderr.readline().startswith(stage.encode()):
            pass
        process.send_signal(number)
        out, err = process.communicate()
    assert (process.returncode, out, err) == (CODES[number], b"", b"")


@EVERY
def test_waiting_for_a_prompt_ends(tmp_path: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "PATIENCE_SECONDS", 0.01)
    with fork("--model", str(tmp_path), **PIPES | {"stdin": subprocess.PIPE}) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith(b"waiting for the prompt")
        process.send_signal(number)
        out, err = process.communicate()
    assert (process.returncode, out, err) == (CODES[number], b"", b"")


def num_unread(pipe: IO[bytes]) -> int:
    return int(struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)))[0])


@pytest.mark.few(2)
@EVERY
@pytest.mark.parametrize(
    ("mode", "script"),
    [("--json", {"pieces": ["x" * 100_000]}), ("--quiet", {"pieces": ["x" * 1000], "endless": True})],
    ids=["json", "text"],
)
def test_a_reader_that_does_not_read_holds_nobody_up(
    args, number: signal.Signals, mode: str, script: dict[str, Any]
) -> None:
    """Bug: buffered output was written at exit, which waited until the reader read or left."""
    with start(*args, mode, script=script, **PIPES) as process:
        assert process.stdout is not None
        assert process.stdout.read(1) != b""
        while num_unread(process.stdout) < 60_000:  # it writes more than a pipe takes
            time.sleep(0.01)
        process.send_signal(number)
        assert process.wait() == CODES[number]
        assert process.stderr is not None
        assert b"rror" not in process.stderr.read()


@pytest.mark.few(1)
@ASKED
def test_who_has_it_ignored_goes_on(args, number: signal.Signals) -> None:
    """As nohup does."""
    line = f"trap '' {number.name.removeprefix('SIG')}; exec \"$@\""
    script = {"pieces": ["all", " of it"], "piece_seconds": 0.2}
    shell = ["bash", "-c", line, "bash", *command(*args, "--quiet")]
    with subprocess.Popen(shell, env=environment(script), **PIPES) as process:
        read_until(process, b"all")
        process.send_signal(number)
        out, err = process.communicate()
    assert (process.returncode, out, err) == (0, b" of it", b"")


@pytest.mark.few(1)
@ASKED
def test_a_terminal_gets_its_cursor_and_its_line_back(args, number: signal.Signals) -> None:
    screen = Screen(*args, script=SLOW | {"hang": True})
    screen.wait_for(lambda text: "there" in text)
    screen.process.send_signal(number)
    assert screen.finish() == CODES[number]
    assert shown_at_the_end(screen.text) == "Hello there\n"
    screen = Screen(*args, script=SLOW | {"tick_seconds": 5})
    screen.wait_for(lambda text: "load" in text)
    screen.process.send_signal(number)
    assert screen.finish() == CODES[number]
    assert screen.text.rindex(SHOW_CURSOR) > screen.text.rindex(HIDE_CURSOR)


def test_more_signals_at_any_distance_change_nothing(args) -> None:
    """Ctrl-C twice ended in a traceback or in death by the signal, with half of the answer."""
    script = {"pieces": ["partial"], "hang": True, "tells": True}
    moments = ((0.0, signal.SIGINT), (0.02, signal.SIGTERM), (0.1, signal.SIGINT))
    processes = [fork(*args, "--json", script=script, **PIPES) for _ in moments]
    for process, (seconds, second) in zip(processes, moments, strict=True):
        assert process.stderr is not None
        while not process.stderr.readline().startswith(b"decode"):
            pass
        for number in (signal.SIGINT, second, signal.SIGINT):
            process.send_signal(number)
            time.sleep(seconds)
    for process in processes:
        out, err = process.communicate()
        assert (process.returncode, json.loads(out)["finish_reason"], err) == (130, "interrupted", b"")


# While it starts


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_nothing_is_said_while_the_program_itself_is_imported(number: signal.Signals) -> None:
    """Ctrl-C in the first tenth of a second left a traceback."""
    code = f"""
import os, sys
class Finder:
    def find_spec(self, name, path, target=None):
        if name == "triforce_cli.app":
            os.kill(os.getpid(), {number.value})
sys.meta_path.insert(0, Finder())
from triforce_cli.__main__ import run
sys.exit(run())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment(), capture_output=True, preexec_fn=hear_signals
    )
    assert (done.returncode, done.stdout, done.stderr) == (-number, b"", b"")


@pytest.mark.few(1)
@EVERY
def test_libraries_are_imported_to_their_end(tmp_path: Path, number: signal.Signals) -> None:
    """They made an ImportError of it, or swallowed it and broke later. This one would do both."""
    (tmp_path / "torch.py").write_text(
        f"import os\ntry:\n    os.kill(os.getpid(), {number.value})\n"
        "    sum(range(10**5))\nexcept BaseException:\n    raise ImportError('half imported')\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "triforce_cli", "generate", "--prompt", "x", "--quiet"],
        cwd=ROOT,
        env=environment(PYTHONPATH=str(tmp_path)),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        preexec_fn=hear_signals,
    )
    assert (done.returncode, done.stdout, done.stderr) == (CODES[number], b"", b"")


def test_handlers_are_as_they_were_before(monkeypatch: pytest.MonkeyPatch) -> None:
    before = [signal.getsignal(number) for number in CODES]

    def run(*_: object, **__: object) -> int:
        assert signal.getsignal(signal.SIGTERM) not in before
        return 0

    monkeypatch.setattr(app, "app", run)
    assert app.main([]) == 0
    assert [signal.getsignal(number) for number in CODES] == before


# A chat keeps its session


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    reference = random_model(vocab_size=TOKENIZER_SIZE, seed=11, max_position_embeddings=16384)
    return save(reference, tmp_path_factory.mktemp("chat"), tokenizer=True)


@pytest.fixture
def talk(model: Path, tmp_path: Path) -> Iterator[Terminal]:
    args = ("--cache", str(tmp_path / "kept"), "--max-tokens", "9000")
    terminal = ProgramTerminal(arguments(model, *args), env=chat_environment(tmp_path))
    terminal.until_prompt(1)
    yield terminal
    terminal.close()


def kept(folder: Path) -> list[dict[str, Any]]:
    """The turns that the session in it holds."""
    conversation: Any = inspect(folder / "kept").extra["conversation"]
    return list(conversation["turns"])


@pytest.mark.few(1)
@ASKED
def test_a_reply_so_far_is_in_the_session(talk: Terminal, tmp_path: Path, number: signal.Signals) -> None:
    begin = len(talk.written)
    talk.send("first" + ENTER)
    talk.until(lambda: len(talk.written) > begin + 1000, "a reply")
    talk.signal(number)
    assert talk.finish() == CODES[number]
    assert "stopped" in talk.written  # it was not waited for to its end
    (turn,) = kept(tmp_path)
    assert turn["user"] == "first"
    assert len(turn["reply"]) > 100


def test_at_the_prompt_the_last_turn_is_in_the_session(talk: Terminal, tmp_path: Path) -> None:
    talk.ask("/set max-tokens 20")
    talk.ask("first")
    talk.signal(signal.SIGTERM)
    assert talk.finish() == 143
    assert [turn["user"] for turn in kept(tmp_path)] == ["first"]


def test_a_prefill_is_not_waited_for(talk: Terminal, tmp_path: Path) -> None:
    """It may take minutes, and who asks a program to end kills it after some seconds."""
    talk.ask("/set max-tokens 20")
    talk.ask("first")
    (tmp_path / "book.txt").write_text("all work and no play " * 650)
    talk.ask(f"/file {tmp_path / 'book.txt'}")
    talk.until(lambda: "prefill" in talk.toolbar, "the prefill")
    talk.signal(signal.SIGTERM)
    assert talk.finish() == 143
    assert len(inspect(tmp_path / "kept").tokens) < 1000
    assert [turn["user"] for turn in kept(tmp_path)] == ["first"]


def test_a_chat_in_a_pipe_keeps_the_turns_before(model: Path, tmp_path: Path) -> None:
    args = ("--cache", str(tmp_path / "kept"), "--max-tokens", "20", "--quiet")
    (reading, asks), (reads, writing) = os.pipe(), os.pipe()
    with TemporaryFile() as errors:
        streams = (reading, writing, errors.fileno())
        process = begin(arguments(model, *args), env=chat_environment(tmp_path), streams=streams)
        os.write(asks, b"first\n")
        with open(reads, "rb") as reply:
            assert reply.readline() != b""
            assert process.pid is not None
            os.kill(process.pid, signal.SIGTERM)
            process.join()
        for end in (reading, asks, writing):
            os.close(end)
        assert (process.exitcode, os.pread(errors.fileno(), 1000, 0)) == (143, b"")
    assert [turn["user"] for turn in kept(tmp_path)] == ["first"]


# A reader that has gone


@pytest.mark.few(1)
@pytest.mark.parametrize("mode", ["--quiet", "--json"])
def test_a_reader_that_left_before_the_first_byte_is_no_error(args, mode: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with start(*args, mode, script={"pieces": ["text"]}, **PIPES | {"stdout": writing}) as process:
        os.close(writing)
        _, err = process.communicate()
    assert process.returncode == 0
    assert b"rror" not in err
