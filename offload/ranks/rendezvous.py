"""How ranks meet: rank 0 starts the others on this machine, or torchrun has started all, on one machine or several."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from itertools import count
from typing import IO

from torch.distributed import FileStore, PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from offload.errors import RankFailed, UsageError
from offload.plan.hardware import Launched
from offload.ranks import shared
from offload.ranks.channel import Channel
from offload.ranks.door import SECRET_BYTES, Door, knock

FOLLOWER = "offload.ranks.follower"  # the module that a rank's process runs
MEET_SECONDS = 60.0  # for ranks that torchrun started, once rank 0 needs them
_FOR_EVER = timedelta(days=1)
_LOOPBACK = "127.0.0.1"
_LOOPBACK_ONLY = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}  # keep torch.distributed on this machine
_DOOR = "triforce/door"  # where rank 0's door is, in torchrun's store
_starts = count()
_WORDS = 400  # characters of what a rank that died wrote last


@dataclass(frozen=True)
class Process:
    """A rank on this machine. words: where its standard error goes."""

    process: subprocess.Popen[bytes]
    words: IO[bytes]

    def epitaph(self) -> str:
        """How it ended, and its last words."""
        try:
            code = self.process.wait(1.0)
        except subprocess.TimeoutExpired:
            return ""
        how = f" (killed by signal {-code})" if code < 0 else f" (exit code {code})"
        self.words.seek(0)
        lines = self.words.read().decode(errors="replace").strip().splitlines()
        return how + (f": {lines[-1][-_WORDS:]}" if lines else "")


@dataclass(frozen=True)
class Met:
    """The other ranks: channels to them by rank, their processes if they are rank 0's, and the store that
    torch.distributed meets by, once it is wanted: who waits for it in vain has to be watching already. Of rank 0 there
    is one channel, of the others one to rank 0. memory: the file of a memory for their sums, if they share one; for
    this process alone to close."""

    channels: Mapping[int, Channel]
    processes: tuple[Process, ...]
    store: Callable[[], Store]
    memory: int | None = None


def start(size: int) -> Met:
    """Start ranks 1 to size - 1 on this machine. Each has an end of a pair of sockets, and all of them the open file
    that they meet by and the memory that they share: nobody else can reach these. Raises UsageError where a system has
    no such files."""
    if not hasattr(os, "memfd_create"):
        raise UsageError(f"{size} ranks on one machine need Linux; leave out --gpus")
    os.environ.update(_LOOPBACK_ONLY)
    file, memory, number, channels, processes = _meeting_file(), shared.create(size), next(_starts), {}, []
    for rank in range(1, size):
        ours, theirs = socket.socketpair()
        words = tempfile.TemporaryFile()  # noqa: SIM115 (open as long as the process)
        with theirs, _signals_later():
            arguments = map(str, (theirs.fileno(), file, memory, number, rank, size))
            process = subprocess.Popen(
                [sys.executable, "-m", FOLLOWER, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=words,
                pass_fds=(theirs.fileno(), file, memory),
            )
        channels[rank] = Channel(ours)
        processes.append(Process(process, words))
    return Met(channels, tuple(processes), lambda: _store_in(file, number), memory)


@cache
def _meeting_file() -> int:
    """An open file without a name, for all starts. It is never closed: a store writes to it when it goes, and by then
    its number could be another file's."""
    return os.memfd_create("ranks")


@contextmanager
def _signals_later() -> Iterator[None]:
    """A process that is started in the body is born with a terminal's signals blocked: until it ignores them, they
    would end it before rank 0 has said what is to be done."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def started(descriptor: int, file: int, memory: int, number: int) -> Met:
    """The same, seen by a rank that was started."""
    return Met({0: Channel(socket.socket(fileno=descriptor))}, (), lambda: _store_in(file, number), memory)


def _store_in(file: int, number: int) -> Store:
    """The store of that start in an open file, which it opens anew, and locks, for every access."""
    return PrefixStore(str(number), FileStore(f"/proc/self/fd/{file}"))


def meet(launched: Launched) -> Met:
    """Meet the ranks that torchrun started, by its store. Whoever connects has to know a secret from there."""
    if launched.num_hosts == 1:
        os.environ.update(_LOOPBACK_ONLY)
    store, _, _ = next(rendezvous("env://", launched.rank, launched.size))
    store.set_timeout(_FOR_EVER)  # rank 0 may wait for a person; torchrun ends all when one fails
    connections = _wait_for_others(launched, store) if launched.rank == 0 else {0: _connect(launched, store)}
    for connection in connections.values():
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Met({rank: Channel(connection) for rank, connection in sorted(connections.items())}, (), lambda: store)


def _wait_for_others(launched: Launched, store: Store) -> dict[int, socket.socket]:
    secret, others = secrets.token_bytes(SECRET_BYTES), range(1, launched.size)
    come: dict[int, socket.socket] = {}
    with Door(_LOOPBACK if launched.num_hosts == 1 else "", secret) as door:
        store.set(_DOOR, f"{door.port} {secret.hex()}")
        try:
            come.update(door.admit(others, MEET_SECONDS))
        except TimeoutError as error:
            missing = min(set(others) - set(come))
            raise RankFailed(
                f"rank {missing} did not come within {MEET_SECONDS:.0f} seconds; start as many as torchrun says"
            ) from error
    return come


def _connect(launched: Launched, store: Store) -> socket.socket:
    """Rank 0 is on the machine that torchrun's rendezvous names as master."""
    port, secret = store.get(_DOOR).decode().split()
    host = _LOOPBACK if launched.num_hosts == 1 else os.environ["MASTER_ADDR"]
    return knock(host, int(port), bytes.fromhex(secret), launched.rank, seconds=MEET_SECONDS)
