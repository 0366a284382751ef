"""Ranks that are killed, stopped or interrupted: all others end soon, nothing stays behind, and what came is kept.

`triforce generate --gpus N`, over links that are slow enough for every stage to last.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from kit.forked import PATIENCE_SECONDS, forked
from kit.models import save_pair
from kit.slow_ranks import HOLD_DECODE, HOLD_PREFILL, HOLD_SAVE, PREFILLS, generate_slowly
from offload.ranks.watch import SILENCE_SECONDS
from offload.session.catalogue import inspect
from triforce_cli.app import main

TEXT = "".join(chr(97 + random.Random(i).randrange(26)) for i in range(1600))
NUM_OLD = 600  # characters, which are tokens, of the session that there is before
NUM_PAGES = NUM_OLD // 512 + 2  # files of the session when the second new one is about to be written
GONE_SECONDS = 10.0 + 20.0  # and what a busy machine may add
SILENCE = 4.0  # seconds after which a rank is hung, where that is waited for
STAGES = ("load", "prefill", "decode", "save")
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}
Triforce = Callable[..., tuple[int, str, str]]


@dataclass(frozen=True)
class Given:
    """What every run has: models, a session that was saved before, and the text that is right."""

    models: tuple[str, ...]
    text: Path
    session: Path
    wanted: str

    def asks(self, session: Path) -> tuple[str, ...]:
        """Options of a run that goes on with `session`."""
        return (*self.models, "--prompt-file", str(self.text), "--context", "1700", "--cache", str(session))

    def begins_with(self, said: str) -> bool:
        """The end may be a newline, or stand for a part of a letter."""
        return self.wanted.startswith(said.removesuffix("\n").rstrip("\ufffd"))


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Given:
    root = tmp_path_factory.mktemp("killed")
    target, draft = save_pair(root, context=4096)
    models = ("--model", str(target), "--draft", str(draft), "--dtype", "fp32", "--device", "cpu", "--temperature", "0")
    text, old, said = (root / name for name in ("text", "old", "said"))
    text.write_text(TEXT)
    old.write_text(TEXT[:NUM_OLD])
    asks = ("--context", "1700", "--prompt-file")
    once(*models, *asks, str(old), "--max-tokens", "1", "--cache", str(root / "kept"))
    once(*models, *asks, str(text), "--max-tokens", "80", "-o", str(said))
    return Given(models, text, root / "kept", said.read_text())


def once(*args: str) -> None:
    """A run with one rank."""
    assert main(["generate", *args, "--quiet"]) == 0


class Run:
    """`triforce generate` with several ranks, of which rank 0 is forked from a process that has its libraries, and the
    others from rank 0 unless they are `started`. said, noted: standard output and standard error so far."""

    def __init__(
        self,
        given: Given,
        folder: Path,
        num_ranks: int = 2,
        *args: str,
        gbps: float = 0.002,
        silence: float = SILENCE_SECONDS,
        started: bool = False,
    ) -> None:
        self.folder, self.session, self.num_ranks = folder, folder / "session", num_ranks
        shutil.copytree(given.session, self.session)
        paced = ("--gpus", str(num_ranks), "--offload", "kv", "--link-gbps", str(gbps), "--gamma", "8")
        for name in ("said", "noted", HOLD_PREFILL):
            (folder / name).touch()
        command = (*given.asks(self.session), *paced, *args)
        settings = (NUM_PAGES, silence, not started)
        self.process = forked(generate_slowly, folder, dict(os.environ), command, *settings, daemon=False)
        assert self.process.pid is not None
        self.ranks = [psutil.Process(self.process.pid)]

    @property
    def said(self) -> str:
        return (self.folder / "said").read_text()

    @property
    def noted(self) -> str:
        return (self.folder / "noted").read_text()

    def until(self, stage: str) -> None:
        """Wait until it is in that stage, by what it shows; "ranks": all were started. It stays in a prefill, and in
        what was waited for, until it may `go_on`."""
        signs: dict[str, Callable[[], object]] = {
            "ranks": self.started,
            "load": lambda: "load:" in self.noted,
            "prefill": (self.folder / PREFILLS).exists,
            "decode": lambda: len(self.said) > 2,
            "save": lambda: len(list(self.session.glob("page-*"))) > NUM_PAGES,
        }
        if stage in ("decode", "save"):
            self.go_on()
            (self.folder / (HOLD_DECODE if stage == "decode" else HOLD_SAVE)).touch()
        latest = time.monotonic() + PATIENCE_SECONDS
        for sign in (signs["ranks"], signs[stage]):
            while not sign():
                assert self.process.exitcode is None, (stage, self.said, self.noted)
                assert time.monotonic() < latest, (stage, self.said, self.noted)
                time.sleep(0.01)

    def go_on(self) -> None:
        for name in (HOLD_PREFILL, HOLD_DECODE, HOLD_SAVE):
            (self.folder / name).unlink(missing_ok=True)

    def started(self) -> bool:
        self.ranks = [self.ranks[0], *sorted(self.ranks[0].children(), key=lambda child: child.pid)]
        return len(self.ranks) == self.num_ranks

    def end(self, seconds: float = GONE_SECONDS) -> int:
        """The exit code of rank 0, once all have ended, soon."""
        self.process.join(seconds)
        assert self.process.exitcode is not None, self.noted
        self.others_end()
        return self.process.exitcode

    def others_end(self) -> None:
        latest = time.monotonic() + GONE_SECONDS
        while left := [rank for rank in self.ranks[1:] if is_running(rank)]:
            assert time.monotonic() < latest, left
            time.sleep(0.01)

    def close(self) -> None:
        for rank in self.ranks:
            if is_running(rank):
                rank.kill()
        self.process.join()


def is_running(process: psutil.Process) -> bool:
    """Not of one that has ended while its parent, stopped, has not heard of it."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@contextmanager
def running(given: Given, folder: Path, *args: object, **settings: Any) -> Iterator[Run]:
    folder.mkdir(exist_ok=True)
    run = Run(given, folder, *args, **settings)  # type: ignore[arg-type]
    try:
        yield run
    finally:
        run.close()


def assert_opens(given: Given, run: Run, triforce: Triforce) -> None:
    """The session is whole: its rows are what the next run begins with."""
    tokens = inspect(run.session).tokens
    assert len(tokens) >= NUM_OLD
    args = ("--read-only", "--max-tokens", "5", "--json", "--quiet")
    code, said, noted = triforce("generate", *given.asks(run.session), *args)
    assert code == 0, noted
    document = json.loads(said)
    assert given.begins_with(document["text"])
    assert document["stats"]["reused_tokens"] >= NUM_OLD - 8


@pytest.mark.few(2)
@pytest.mark.parametrize("rank", [1, 0])
@pytest.mark.parametrize("stage", STAGES[::-1])
def test_a_rank_that_is_killed_ends_all_and_what_came_is_kept(
    given: Given, tmp_path: Path, triforce: Triforce, stage: str, rank: int
) -> None:
    with running(given, tmp_path / "run", 2, "--max-tokens", "3" if stage == "save" else "80") as run:
        run.until(stage)
        run.ranks[rank].kill()
        run.go_on()
        code = run.end()
        assert code == (1 if rank else -signal.SIGKILL)
        if rank:
            assert "rank 1 ended (killed by signal 9)" in run.noted
            assert "Traceback" not in run.noted
        assert given.begins_with(run.said)
        assert (run.said.strip() != "") is (stage in ("decode", "save"))
        if rank == 0 or stage != "decode":  # rank 1 has the rows that a save would write
            assert len(inspect(run.session).tokens) == NUM_OLD
        assert_opens(given, run, triforce)


@pytest.mark.few(1)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_file_keeps_what_came_beside_its_place(given: Given, tmp_path: Path, num_ranks: int) -> None:
    """The last rank is killed."""
    out = tmp_path / "out.txt"
    with running(given, tmp_path / "run", num_ranks, "--max-tokens", "80", "-o", str(out)) as run:
        partial = tmp_path / "out.txt.partial"
        run.until("prefill")
        run.go_on()
        while not partial.exists() or partial.stat().st_size < 2:
            assert run.process.exitcode is None, run.noted
            time.sleep(0.01)
        run.ranks[-1].kill()
        assert run.end() == 1
        assert f"rank {num_ranks - 1} ended (killed by signal 9)" in run.noted
    assert not out.exists()
    assert given.begins_with(partial.read_text())


@pytest.mark.deep
def test_ranks_that_are_stopped(given: Given, tmp_path: Path) -> None:
    """One of them: it counts as dead, whichever it is. All of them, as by Ctrl-Z: they go on."""
    with ExitStack() as stack:
        runs = []
        for number, stopped in enumerate(([0], [1], [0, 1])):
            run = stack.enter_context(running(given, tmp_path / str(number), 2, "--max-tokens", "80", silence=SILENCE))
            run.until("decode")
            for rank in stopped:
                run.ranks[rank].suspend()
            run.go_on()
            runs.append(run)
        first, second, both = runs
        assert second.end() == 1
        assert re.search(r"rank 1 has not been heard of for \d seconds", second.noted)
        assert given.begins_with(second.said)
        first.others_end()
        first.process.kill()
        for process in both.ranks:  # silent for longer than a rank may be
            process.resume()
        assert both.end(PATIENCE_SECONDS) == 0, both.noted
        assert given.begins_with(both.said)
        assert len(both.said) > 10


@pytest.mark.few(2)
@pytest.mark.parametrize("number", CODES, ids=lambda number: number.name)
@pytest.mark.parametrize("stage", ["decode", "ranks", "prefill"])
def test_a_terminals_signal_ends_all_ranks_and_the_session_is_saved(
    given: Given, tmp_path: Path, triforce: Triforce, stage: str, number: signal.Signals
) -> None:
    """It goes to all processes of the group; rank 0 says what becomes of it. "ranks": others than 0 have just begun."""
    with running(given, tmp_path / "run", 2, "--max-tokens", "80") as run:
        run.until(stage)
        os.killpg(run.process.pid, number)
        assert run.end() == CODES[number]
        assert "rror" not in run.noted, run.noted
        num_tokens = len(inspect(run.session).tokens)
        assert num_tokens == NUM_OLD if stage != "decode" else num_tokens > len(TEXT), num_tokens
        assert_opens(given, run, triforce)


def test_runs_side_by_side_do_not_meet(given: Given, tmp_path: Path) -> None:
    """The rank of one of them is started as users' are."""
    with ExitStack() as stack:
        runs = [
            stack.enter_context(
                running(given, tmp_path / str(started), 2, "--max-tokens", "6", "--quiet", gbps=1.0, started=started)
            )
            for started in (True, False)
        ]
        for run in runs:
            run.go_on()
        for run in runs:
            assert run.end(PATIENCE_SECONDS) == 0, run.noted
            assert given.begins_with(run.said)
            assert len(run.said) > 2


@pytest.mark.few(1)
@pytest.mark.parametrize("trial", range(50))
def test_whoever_is_killed_at_any_moment(given: Given, tmp_path: Path, triforce: Triforce, trial: int) -> None:
    """Of any stage, from its start to the next one's: nobody is left over, and the session opens."""
    chance = random.Random(trial)
    with running(given, tmp_path / "run", 2, "--max-tokens", "10", gbps=0.01) as run:
        run.until(chance.choice(["ranks", *STAGES]))
        run.go_on()
        time.sleep(chance.uniform(0.0, 0.4))
        rank = chance.randrange(2)
        if is_running(run.ranks[rank]):
            run.ranks[rank].kill()
        code = run.end()
        assert code in ((0, 1) if rank else (0, -signal.SIGKILL)), run.noted
        assert given.begins_with(run.said)
        assert "Traceback" not in run.noted
        assert_opens(given, run, triforce)
