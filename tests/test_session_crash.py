"""Killed writers, full disks and concurrent processes: the disk always holds one complete session."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import random
import re
import resource
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from kit.forked import forked
from kit.sessions import IDENTITY, Rows, bits, page_files, restore, save, saved
from offload.errors import DoesNotFit, SessionError
from offload.kv.kept import Kept
from offload.session.catalogue import remove, summaries
from offload.session.folder import READERS, WRITER, Folder, Lock
from offload.session.manifest import MANIFEST_FILE
from offload.session.store import Store

OLD, NEW = tuple(range(6)), (*range(4), *range(40, 45))
UNCHANGED = 4
pytestmark = pytest.mark.usefixtures("unsynced")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "chat"


def write_new(store: Store) -> None:
    store.save(Kept(Rows(NEW)), NEW, capacity=0, extra={}, unchanged=min(UNCHANGED, len(store.tokens)))


def assert_tidy(path: Path) -> None:
    """The pages, the manifest and two locks."""
    pages = -(-len(restore(path)[0]) // 4)
    assert len(page_files(path)) == pages
    assert {file.name for file in path.iterdir()} - {file.name for file in page_files(path)} == {
        MANIFEST_FILE,
        WRITER,
        READERS,
    }


# --- every step of a save, deterministically ---

STEPS = ("open", "pwrite", "fsync", "replace", "unlink")


class Killed(BaseException):
    """Stands for a killed process: no later call reaches the disk."""


Failure = Callable[[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


@contextmanager
def at_step(number: int, failure: Failure) -> Iterator[list[str]]:
    """Pass call `number` of those that change the disk to `failure`; the list collects the names of all calls."""
    calls: list[str] = []

    def watch(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            if len(calls) - 1 == number:
                return failure(name, real, args, kwargs)
            return real(*args, **kwargs)

        return watched

    with pytest.MonkeyPatch.context() as patch:
        for name in STEPS:
            patch.setattr(os, name, watch(name, getattr(os, name)))
        yield calls


def num_steps(path: Path, begin: Callable[[Path], None]) -> int:
    begin(path)
    with Store.open(path, IDENTITY) as store, at_step(-1, lambda *call: None) as calls:
        write_new(store)
        return len(calls)


def begin_with_old(path: Path) -> None:
    save(path, OLD)


def begin_with_nothing(path: Path) -> None: ...


@pytest.mark.few(2)
@pytest.mark.parametrize("begin", [begin_with_old, begin_with_nothing])
@pytest.mark.parametrize("half", [False, True], ids=["before the step", "in the middle of a write"])
def test_a_writer_killed_at_any_step_leaves_the_old_or_the_new_session(
    tmp_path: Path, begin: Callable[[Path], None], half: bool
) -> None:
    def die(name: str, real: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if half and name == "pwrite":
            real(args[0], args[1][: len(args[1]) // 2], *args[2:])
        for step in STEPS:
            patch.setattr(os, step, beyond)
        raise Killed

    def beyond(*args: Any, **kwargs: Any) -> Any:
        raise Killed

    outcomes = set()
    for number in range(num_steps(tmp_path / "counted", begin)):
        path = tmp_path / f"killed at {number}"
        begin(path)
        store = Store.open(path, IDENTITY)
        with pytest.MonkeyPatch.context() as patch, at_step(number, die), pytest.raises(Killed):
            write_new(store)
        store._held.close()  # the system gives locks back
        with Store.open(path, IDENTITY) as next_one:
            outcomes.add(next_one.tokens)
            assert next_one.tokens in (OLD if begin is begin_with_old else (), NEW)
            if next_one.tokens:
                assert_tidy(path)
                assert restore(path) == saved(next_one.tokens)
            next_one.save(Kept(Rows(NEW)), NEW, capacity=0, extra={}, unchanged=0)
        assert restore(path) == saved(NEW)
    assert len(outcomes) == 2


def full(name: str, real: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def interrupted_before(name: str, real: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise KeyboardInterrupt


def interrupted_after(name: str, real: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    real(*args, **kwargs)
    raise KeyboardInterrupt


@pytest.mark.few(3)
@pytest.mark.parametrize("failure", [full, interrupted_before, interrupted_after])
def test_a_save_that_fails_at_any_step_leaves_a_whole_session_and_can_be_repeated(
    tmp_path: Path, failure: Failure
) -> None:
    for number in range(num_steps(tmp_path / "counted", begin_with_old)):
        path = tmp_path / f"failed at {number}"
        save(path, OLD)
        with Store.open(path, IDENTITY) as store:
            with at_step(number, failure), suppress(SessionError, KeyboardInterrupt):
                write_new(store)
            assert store.tokens in (OLD, NEW)
            assert restore(path) == saved(store.tokens)
            write_new(store)
            assert_tidy(path)
        assert restore(path) == saved(NEW)


def test_pages_are_on_the_disk_before_the_manifest_names_them_and_go_after(path: Path) -> None:
    save(path, OLD)
    order: list[tuple[str, str]] = []
    names: dict[int, str] = {}

    def watch(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def watched(target: Any, *args: Any, **kwargs: Any) -> Any:
            done = real(target, *args, **kwargs)
            if name == "open":
                names[done] = str(target)
            else:
                what = names.get(target, "folder") if isinstance(target, int) else str(target)
                order.append((name, what.split("-")[0]))
            return done

        return watched

    with Store.open(path, IDENTITY) as store, pytest.MonkeyPatch.context() as patch:
        for name in ("open", "fsync", "replace", "unlink"):
            patch.setattr(os, name, watch(name, getattr(os, name)))
        write_new(store)
    assert order == [
        *[("fsync", "page")] * 2,
        ("fsync", "manifest"),
        ("fsync", "folder"),
        ("replace", "manifest"),
        ("fsync", "folder"),
        ("unlink", "page"),
    ]


# --- a disk that fills ---


def test_a_full_disk_leaves_the_old_session(tmp_path: Path) -> None:
    """On a real file system of 256 KiB that fills up after the check for space."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this user may not mount a file system")
    try:
        path = disk / "chat"
        save(path, OLD)
        with Store.open(path, IDENTITY) as store:
            (disk / "filling").write_bytes(bytes(disk_free(disk) - 8192))
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(store._folder, "free_bytes", lambda: 1 << 40)
                with pytest.raises(
                    SessionError, match=r"saving failed .No space left on device.: .* [kM]?B were to be"
                ):
                    write_new(store)
            with pytest.raises(DoesNotFit, match="sessions prune"):
                store.save(Kept(Rows(range(200))), range(200), capacity=0, extra={}, unchanged=0)
            assert_tidy(path)
            assert restore(path) == saved(OLD)
            (disk / "filling").unlink()
            write_new(store)
        assert restore(path) == saved(NEW)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def disk_free(disk: Path) -> int:
    status = os.statvfs(disk)
    return status.f_bavail * status.f_frsize


def save_within(limit: int, path: Path, answers: Connection) -> None:
    """Save with a limit on file size: the write of a page or of the manifest is short, then fails."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        save(path, NEW, UNCHANGED, text="a" * 1000)
    except SessionError as error:
        answers.send(str(error))


@pytest.mark.parametrize("limit", [100, IDENTITY.page_format.nbytes - 1, IDENTITY.page_format.nbytes])
def test_a_limit_on_file_sizes_leaves_the_old_session(path: Path, limit: int) -> None:
    save(path, OLD)
    ours, theirs = multiprocessing.Pipe()
    with running(save_within, limit, path, theirs) as process:
        process.join()
        assert ours.poll()
        assert "File too large" in ours.recv()
    assert_tidy(path)
    assert restore(path) == saved(OLD)


# --- processes ---


@contextmanager
def running(target: Callable[..., None], *args: object) -> Iterator[BaseProcess]:
    process = forked(target, *args)
    try:
        yield process
    finally:
        process.kill()
        process.join()


def save_for_ever(path: Path, answers: Connection) -> None:
    with Store.open(path, IDENTITY) as store:
        while True:
            for tokens in (NEW, OLD):
                answers.send("next")
                store.save(
                    Kept(Rows(tokens)), tokens, capacity=0, extra={}, unchanged=min(UNCHANGED, len(store.tokens))
                )


def test_a_writer_killed_at_any_moment_leaves_a_whole_session(path: Path) -> None:
    """SIGKILL during a series of saves."""
    chance, seen, litter, seconds = random.Random(5), set(), 0, 0.01
    save(path, OLD)
    for _ in range(30):
        ours, theirs = multiprocessing.Pipe()
        with running(save_for_ever, path, theirs):
            for _ in range(chance.randint(1, 4)):
                start = time.perf_counter()
                assert ours.poll(None)
                ours.recv()
                seconds, last = time.perf_counter() - start, seconds
            time.sleep(chance.uniform(0, min(seconds, last)))
        tokens, rows = restore(path)
        assert (tokens, rows) in (saved(OLD), saved(NEW))
        seen.add(tokens)
        litter += len(list(path.iterdir())) > -(-len(tokens) // 4) + 3
        with Store.open(path, IDENTITY):
            assert_tidy(path)
    assert seen == {OLD, NEW}
    assert litter, "no writer was killed while it saved"


def test_a_lock_on_a_file_that_was_removed_meanwhile_is_no_lock(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flock, calls = fcntl.flock, list[int]()

    def removed_first(fd: int, operation: int) -> None:
        if not calls:
            (path / WRITER).unlink()
        calls.append(operation)
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", removed_first)
    path.mkdir()
    with Folder(path) as folder:
        lock = Lock.take(folder, WRITER)
        assert lock is not None
        with lock:
            assert Lock.take(folder, WRITER) is None


def hold(path: Path, answers: Connection, read_only: bool) -> None:
    rows = Rows()
    with Store.open(path, IDENTITY, read_only=read_only) as store:
        answers.send(os.getpid())
        answers.recv()
        store.load(Kept(rows), len(store.tokens))
        answers.send((store.tokens, bits(rows)))
        answers.recv()


def test_a_second_writer_is_told_who_writes(path: Path) -> None:
    save(path, OLD)
    (path / WRITER).write_text("12345678901234567890\n")  # the last one's number was longer
    ours, theirs = multiprocessing.Pipe()
    with running(hold, path, theirs, False):
        pid = ours.recv()
        with pytest.raises(SessionError, match=f"in use by process {pid}; .*--read-only, or take another name"):
            Store.open(path, IDENTITY)
        with pytest.raises(SessionError, match=f"in use by process {pid}"):
            remove(path)
        assert restore(path) == saved(OLD)
    with Store.open(path, IDENTITY) as store:  # the dead hold nothing
        assert store.tokens == OLD


def test_a_reader_has_its_pages_until_it_closes_whatever_a_writer_saves(path: Path) -> None:
    save(path, OLD)
    before = page_files(path)
    ours, theirs = multiprocessing.Pipe()
    with running(hold, path, theirs, True):
        ours.recv()
        with Store.open(path, IDENTITY) as store:
            write_new(store)
            assert restore(path) == saved(NEW)
            assert set(before) < set(page_files(path))
            ours.send("load")
            assert ours.recv() == saved(OLD)
            with pytest.raises(SessionError, match="in use by process"):
                remove(path)
        with pytest.raises(SessionError, match="in use by a process that reads it"):
            remove(path)
    with Store.open(path, IDENTITY):
        assert_tidy(path)


def compete(path: Path, seed: int, answers: Connection) -> None:
    """Save, read and remove in turn beside other processes: a session may be in use, but is never damaged."""
    chance, num_saved, num_read, refusals = random.Random(seed), 0, 0, set()
    mine = range(100 * seed, 100 * seed + 9)
    for _ in range(150):
        time.sleep(chance.uniform(0, 0.002))
        action = chance.random()
        try:
            if action < 0.5:
                with Store.open(path, IDENTITY) as store:
                    store.save(Kept(Rows(mine)), mine, capacity=0, extra={}, unchanged=0)
                    num_saved += 1
            elif action < 0.9:
                tokens, rows = restore(path)
                assert (tokens, rows) == saved(range(tokens[0] // 100 * 100, tokens[0] // 100 * 100 + 9))
                num_read += 1
            else:
                remove(path)
        except SessionError as error:
            refusals.add(str(error))
    answers.send((num_saved, num_read, refusals))


def test_writers_readers_and_removers_do_not_mix(path: Path) -> None:
    pipes = [multiprocessing.Pipe() for _ in range(4)]
    processes = [forked(compete, path, i, pipe[1]) for i, pipe in enumerate(pipes)]
    for process in processes:
        process.join()
        assert process.exitcode == 0
    num_saved, num_read, refusals = zip(*(pipe[0].recv() for pipe in pipes), strict=True)
    assert sum(count > 0 for count in num_saved) > 1
    assert sum(num_read)
    gone = [f"cannot be opened as a session ({words})" for words in ("No such file or directory", "File exists")]
    in_the_way = ("in use by", "there is no session", *gone)
    assert [text for text in set().union(*refusals) if not any(words in text for words in in_the_way)] == []
    assert all(not summary.problem for summary in summaries(path.parent))


def visit(path: Path, answers: Connection) -> None:
    if os.geteuid() == 0:
        os.setuid(65534)  # root may do everything
    answers.send(restore(path))
    for visited in (path, path.parent / "new"):
        try:
            Store.open(visited, IDENTITY)
        except SessionError as error:
            answers.send(str(error))


def test_a_session_that_may_not_be_written_can_be_read() -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "chat"
        save(path, OLD)
        for file in (Path(folder), path, *path.iterdir()):
            file.chmod(0o555 if file.is_dir() else 0o444)
        ours, theirs = multiprocessing.Pipe()
        with running(visit, path, theirs) as process:
            process.join()
            assert ours.poll()
            assert ours.recv() == saved(OLD)
            for _ in range(2):
                assert ours.poll(None)
                assert re.search(r"cannot be opened as a session \(Permission denied\).*--read-only", ours.recv())
        for file in (Path(folder), path):
            file.chmod(0o755)


def test_a_folder_that_was_put_in_the_place_of_ours_is_not_written_to(path: Path, tmp_path: Path) -> None:
    with Store.open(path, IDENTITY) as store:
        store.save(Kept(Rows(OLD)), OLD, capacity=0, extra={}, unchanged=0)
        path.rename(tmp_path / "moved")
        save(path, range(3))
        write_new(store)
    assert restore(path) == saved(range(3))
    assert restore(tmp_path / "moved") == saved(NEW)
