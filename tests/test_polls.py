"""Every long loop polls for signals, and every wait that may last for ever is broken off by one: endless turns and
waits are planted in each. A loop that does not poll, or a wait that is not `waiting`, is Deaf."""

from __future__ import annotations

import ast
import fcntl
import os
import queue
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import repeat
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
import torch
from safetensors.torch import save_file

from kit.models import GREEDY, Sizes, byte_tokenizer, random_model, save, tiny_engine, tiny_plan
from offload import files
from offload.bench import measure
from offload.engine.engine import Engine
from offload.engine.request import GenerationRequest
from offload.engine.sequences import Sequences, _Running
from offload.hub import fetch, gguf, pickles, remote
from offload.hub.remote import RemoteFile
from offload.interrupts import interruptible
from offload.model import quantised
from offload.model.passes import Pass
from offload.plan import request
from offload.progress import Progress, bytes_of
from offload.ranks import sums
from offload.ranks.door import Door
from offload.ranks.team import Team
from offload.session.folder import Folder, Lock
from offload.text.tokenizer import Tokenizer
from offload.transfer.prepinned import Prepinned
from offload.worker import models as worker_models
from offload.worker import timed_runs
from test_architecture import parsed, sources
from triforce_cli.agents import server
from triforce_cli.answering.request import Wanted
from triforce_cli.batch.records import read_records
from triforce_cli.chat import background, keys, reader
from triforce_cli.documents import reading, selection
from triforce_cli.documents.limits import Meter
from triforce_cli.documents.selection import Named
from triforce_cli.documents.walk import Pattern, Walk
from triforce_cli.ground import inputs, outfile
from triforce_cli.options import consent
from triforce_cli.prompts import steps
from triforce_cli.screen.output import Output

FIRST, MOST = 3, 20  # the turn in which the signal comes, and the one in which nobody has heard it
WAIT_SECONDS = 20.0

Turn = Callable[..., Any]


class Deaf(BaseException):
    """The loop went on, or the wait came to its end."""


class Turns:
    """Counts the turns of a loop, whatever it is called with."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, *args: object, **more: object) -> None:
        self.count += 1
        if self.count == FIRST:
            os.kill(os.getpid(), signal.SIGINT)
        if self.count == MOST:
            raise Deaf


def waits(*args: object, **more: object) -> Any:
    """Stands for a system call that does not return; the signal comes in the middle of it."""
    threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
    time.sleep(WAIT_SECONDS)
    raise Deaf


class Place:
    """Where a loop or a wait runs."""

    def __init__(self, engine: Callable[[], Engine], folder: Path, patch: pytest.MonkeyPatch) -> None:
        self._engine, self.folder, self.patch = engine, folder, patch

    @property
    def engine(self) -> Engine:
        return self._engine()


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Engine]]:
    opened: list[Engine] = []
    folder = tmp_path_factory.mktemp("model")

    def engine() -> Engine:
        if not opened:
            model = save(random_model(vocab_size=264, num_hidden_layers=24, seed=4), folder, tokenizer=True)
            plan = tiny_plan(model, None, Sizes(), num_prompt_tokens=80, max_tokens=40)
            opened.append(tiny_engine(plan, model, None))
        return opened[0]

    yield engine
    for each in opened:
        each.close()


@pytest.fixture
def place(engines: Callable[[], Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # tests may run where it is ignored
    yield Place(engines, tmp_path, monkeypatch)
    signal.signal(signal.SIGINT, before)


# Loops, by the function that polls


def endlessly(turn: Turn, work: Callable[[], object]) -> None:
    while True:
        turn()
        work()


def passes(place: Place, turn: Turn) -> None:
    """Of one sequence and of several."""
    target = place.engine.levels["target"]

    def work() -> Iterator[Any]:
        while True:
            turn()
            target.truncate(0)
            yield Pass(target, [1], 1)

    with Sequences[int](place.engine) as sequences:
        sequences._running[0] = _Running(place.engine, work())  # type: ignore[arg-type]
        sequences._running[0].begin()
        sequences.steps()


def prefill(place: Place, turn: Turn) -> None:
    next(place.engine.generate(GenerationRequest([5] * 80, GREEDY, max_tokens=1), on_progress=turn))


def quantise(place: Place, turn: Turn) -> None:
    decoder = place.engine.worker.target
    place.patch.setattr(quantised, "fill_coded", turn)
    place.patch.setattr(quantised.LayerLayout, "of_layers", lambda *args: MagicMock())
    quantised.quantised_weights(decoder.weights, decoder.config, 4, Mock(), Mock(usable=True))


def take_ahead(place: Place, turn: Turn) -> None:
    made = threading.Event()
    ahead = Prepinned([8], lambda num_bytes: made.wait() and torch.zeros(num_bytes))  # type: ignore[arg-type,return-value]
    place.patch.setattr(ahead._changed, "wait", turn)
    try:
        ahead.take(8)
    finally:
        made.set()
        ahead.close()


def hash_file(place: Place, turn: Turn) -> None:
    (place.folder / "file").write_bytes(bytes(100))
    place.patch.setattr(fetch, "_BLOCK_BYTES", 1)
    fetch.is_whole(place.folder / "file", RemoteFile("file", 100, "0" * 64), count=turn)


def verify_shard(place: Place, turn: Turn) -> None:
    tensors = {str(number): torch.zeros(1) for number in range(100)}
    save_file(tensors, path := place.folder / "file.safetensors")
    place.patch.setattr(pickles, "_bits", lambda tensor: turn() or tensor)
    pickles._verify(path, tensors)


def measuring(place: Place, turn: Turn) -> None:
    measure._best_seconds(turn, seconds=1e9)


def timing(place: Place, turn: Turn) -> None:
    place.patch.setattr(timed_runs, "MOST_TURNS", 10**9)
    place.patch.setattr(timed_runs, "ENOUGH_SECONDS", 1e9)
    timed_runs.median_seconds({("a", 1): turn}, 1e9)


def planning(place: Place, turn: Turn) -> None:
    place.patch.setattr(request, "make_plan", turn)
    asked = Mock(given=None, _of=())
    while True:
        request.Request.plan(asked, num_prompt_tokens=1, max_tokens=1)


def meet(place: Place, turn: Turn) -> None:
    """The others never come."""
    come = threading.Event()
    place.patch.setattr(sums.dist, "init_process_group", lambda *args, **more: come.wait())
    place.patch.setattr(sums, "_LOOK", sums.timedelta(seconds=0.01))
    own = sums.Sums(0, 2, torch.device("cpu"), check=turn, go=lambda: None)
    try:
        own.connect(Mock())
    finally:
        come.set()


def reply(place: Place, turn: Turn) -> None:
    place.patch.setattr(sys.modules[Team.__module__], "_LOOK_SECONDS", 0.01)
    team = Team.__new__(Team)
    team._answers = {1: queue.SimpleQueue()}
    team.check = turn  # type: ignore[method-assign]
    team.replies(1)


def walk(place: Place, turn: Turn) -> None:
    """Folders in which nothing is found."""
    found = Walk(place.folder, Pattern(), asked=place.folder)
    place.patch.setattr(found, "_below", lambda *folder: turn() or found._folders.append(folder) or [])
    list(found.entries())


def select_files(place: Place, turn: Turn) -> None:
    entry = Mock(path=place.folder / "file", real=place.folder / "file", why="folder")
    place.patch.setattr(Walk, "entries", lambda self: (turn() or entry for _ in repeat(None)))
    selection.select(Named((place.folder,)), note=Mock())


def read_files(place: Place, turn: Turn) -> None:
    source = selection.Source(place.folder, "file")
    place.patch.setattr(reading, "select", lambda *args, **more: [source] * 100)
    place.patch.setattr(reading, "_read", turn)
    reading.read_documents(Named(()), "it", note=Mock(), on_read=Mock())


def read_lines(place: Place, turn: Turn) -> None:
    place.patch.setattr(
        sys.modules[read_records.__module__], "_object", lambda line, where: turn() or {"prompt": "x", "id": turn.count}
    )
    read_records("{}\n" * 100, "it", Wanted(sampling=GREEDY, max_tokens=1))


def work_ahead(place: Place, turn: Turn) -> None:
    over = threading.Event()
    work = background.BackgroundWork()
    work.start(lambda on_progress: over.wait() and None, "it")  # type: ignore[arg-type,return-value]
    place.patch.setattr(background, "wait", turn)
    try:
        work.wait(turn)
    finally:
        over.set()
        place.patch.undo()
        work.close()


def progress() -> Progress:
    return Progress("load", 1, 2, "bytes")


def render(place: Place, turn: Turn) -> None:
    place.patch.setattr(steps, "_STEPS_PER_LOOK", 1)
    with steps.limited_steps():
        endlessly(turn, lambda: None)


def encode(place: Place, turn: Turn) -> None:
    tokenizer = Tokenizer(byte_tokenizer())
    endlessly(turn, lambda: tokenizer.encode("x"))


QUIET = Output(quiet=True)
LOOPS: dict[str, Callable[[Place, Turn], object]] = {
    "offload.model.level.Level.run": passes,
    "offload.model.decoder.Decoder._append": prefill,
    "offload.model.quantised.quantised_weights": quantise,
    "offload.transfer.prepinned.Prepinned.take": take_ahead,
    "offload.worker.models._stage.report": lambda place, turn: endlessly(
        turn, lambda: worker_models._stage("load", Mock())(1, 2)
    ),
    "offload.progress.bytes_of.count": lambda place, turn: endlessly(turn, lambda: bytes_of("save", 9, Mock())(1)),
    "offload.hub.fetch._hash_of": hash_file,
    "offload.hub.pickles._verify": verify_shard,
    "offload.bench.measure._best_seconds": measuring,
    "offload.worker.timed_runs.median_seconds": timing,
    "offload.plan.request.Request.plan": planning,
    "offload.ranks.sums.Sums.connect": meet,
    "offload.ranks.team.Team._reply": reply,
    "triforce_cli.documents.limits.Meter.check": lambda place, turn: endlessly(turn, Meter("it").check),
    "triforce_cli.documents.walk.Walk.entries": walk,
    "triforce_cli.documents.selection._found": select_files,
    "triforce_cli.documents.reading.read_documents": read_files,
    "triforce_cli.batch.records._read": read_lines,
    "triforce_cli.chat.background.BackgroundWork._join": work_ahead,
    "triforce_cli.prompts.steps.limited_steps.step": render,
    "offload.text.tokenizer.Tokenizer._encoded": encode,
    "triforce_cli.screen.output.Output.wait": lambda place, turn: endlessly(turn, lambda: QUIET.wait("it")),
    "triforce_cli.screen.output.Output.progress": lambda place, turn: endlessly(
        turn, lambda: QUIET.progress(progress())
    ),
    "triforce_cli.screen.output.Output.report": lambda place, turn: endlessly(turn, lambda: QUIET.report("it", 1, 2)),
}


@pytest.mark.parametrize("loop", LOOPS)
def test_an_endless_loop_is_ended_by_a_signal(place: Place, loop: str) -> None:
    turns = Turns()
    with pytest.raises(KeyboardInterrupt), interruptible():
        LOOPS[loop](place, turns)
    assert FIRST <= turns.count <= FIRST + 2


# Waits, by the function that waits


def locked(place: Place) -> None:
    place.patch.setattr(fcntl, "flock", waits)
    with files.locked(place.folder / "lock"):
        raise Deaf


def take_lock(place: Place) -> None:
    place.patch.setattr(fcntl, "flock", waits)
    with Folder(place.folder) as folder:
        Lock.take(folder, "writer.lock", wait=True)


def pull(place: Place) -> None:
    import huggingface_hub.file_download

    place.patch.setattr(huggingface_hub.file_download, "http_get", waits)
    fetch.fetch("http://it", RemoteFile("file", 9, "0" * 64), place.folder, count=Mock())


def pull_bytes(place: Place) -> None:
    import huggingface_hub.utils

    place.patch.setattr(huggingface_hub.utils, "http_stream_backoff", waits)
    fetch.fetch_range("http://it", RemoteFile("file", 9, "0" * 64), 0, 4)


def ask_hub(place: Place) -> None:
    import huggingface_hub

    place.patch.setattr(huggingface_hub.HfApi, "model_info", waits)
    remote.list_repository("a/b", "main")


def unpack(place: Place) -> None:
    for name in ("_check_packages", "_open", "_check_memory"):
        place.patch.setattr(gguf, name, Mock())
    place.patch.setattr(gguf.gguf_tokenizer, "write", Mock())
    place.patch.setattr(gguf, "_unpack", waits)
    gguf.dequantise(place.folder / "file.gguf", place.folder)


def admit(place: Place) -> None:
    with Door("127.0.0.1", bytes(32)) as door:
        place.patch.setattr(door, "_selector", Mock(wraps=door._selector, select=waits))
        list(door.admit([1], 60.0))


def read_pipe(place: Place) -> None:
    inputs._read(Mock(read=waits), "it")


def look_at_pipe(place: Place) -> None:
    place.patch.setattr(select, "select", waits)
    inputs._comes(Mock(), None)


def next_line(place: Place) -> None:
    place.patch.setattr(sys, "stdin", Mock(buffer=Mock(readline=waits)))
    reader._next_line()


def agree(place: Place) -> None:
    place.patch.setattr(sys, "stdin", Mock(readline=waits))
    consent.answered(Mock(), "remove it?")


def press(place: Place) -> None:
    place.patch.setattr(sys, "stdin", Mock())
    for name, stand_in in (("termios", Mock()), ("Keys", MagicMock()), ("os", Mock(read=waits))):
        place.patch.setattr(keys, name, stand_in)
    keys.pressed(["1"], Mock(), "which?")


def type_message(place: Place) -> None:
    typed = reader.PromptReader.__new__(reader.PromptReader)
    typed._session = Mock(prompt=waits)
    typed.read()


def open_pipe(place: Place) -> None:
    os.mkfifo(path := place.folder / "pipe")
    place.patch.setattr(outfile, "FileIO", waits)
    with outfile.OutputFile(path, note=Mock()):
        raise Deaf


def write_file(place: Place) -> None:
    outfile.write_all(Mock(write=waits), b"it")


def write_text(place: Place) -> None:
    """Nobody reads, and nobody will: what was not taken is dropped."""
    reading_end, writing_end = os.pipe()
    with open(reading_end, "rb"), open(writing_end, "w") as stream:
        place.patch.setattr(sys, "stdout", Mock(buffer=Mock(write=waits), fileno=stream.fileno, isatty=lambda: False))
        Output().text("it")


def begin_server(place: Place) -> None:
    """The server is not well, and does not end."""
    (log := place.folder / "log").touch()
    place.patch.setattr(server, "_is_well", lambda url: False)
    place.patch.setattr(server, "time", Mock(sleep=waits))
    server._wait(Mock(poll=lambda: None), "http://it", log, Mock())


WAITS: dict[str, Callable[[Place], object]] = {
    "offload.files.locked": locked,
    "offload.session.folder.Lock.take": take_lock,
    "offload.hub.fetch.fetch": pull,
    "offload.hub.fetch.fetch_range": pull_bytes,
    "offload.hub.remote.list_repository": ask_hub,
    "offload.hub.gguf.dequantise": unpack,
    "offload.ranks.door.Door.admit": admit,
    "triforce_cli.ground.inputs._piece": read_pipe,
    "triforce_cli.ground.inputs._comes": look_at_pipe,
    "triforce_cli.chat.reader._next_line": next_line,
    "triforce_cli.chat.reader.PromptReader.read": type_message,
    "triforce_cli.options.consent.answered": agree,
    "triforce_cli.chat.keys.pressed": press,
    "triforce_cli.ground.outfile.OutputFile.__enter__": open_pipe,
    "triforce_cli.ground.outfile.write_all": write_file,
    "triforce_cli.screen.output._write": write_text,
    "triforce_cli.agents.server._wait": begin_server,
}


@pytest.mark.parametrize("wait", WAITS)
def test_an_endless_wait_is_broken_off_by_a_signal(place: Place, wait: str) -> None:
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt), interruptible():
        WAITS[wait](place)
    assert time.monotonic() - begin < WAIT_SECONDS


# All of them


def callers(name: str) -> set[str]:
    """The functions of the program that call `name`, with their modules."""
    found: set[str] = set()

    def look(node: ast.AST, owner: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Call) and isinstance(child.func, ast.Name) and child.func.id == name:
                found.add(owner)
            named = isinstance(child, ast.FunctionDef | ast.ClassDef)
            look(child, f"{owner}.{child.name}" if named else owner)  # type: ignore[attr-defined]

    for module, source in sources():
        if module != "offload.interrupts" and f"{name}(" in source:
            look(parsed(source), module)
    return found


def test_every_poll_has_its_endless_loop() -> None:
    assert callers("poll") == set(LOOPS)


def test_every_wait_has_its_endless_one() -> None:
    assert callers("waiting") == set(WAITS)
