"""The ranks' rendezvous: rank 0 starts the others on this machine, or torchrun has started all, on one or several."""

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
from offload.ranks import shared
from offload.ranks.channel import Channel
from offload.ranks.door import SECRET_BYTES, Door, knock
from offload.speed.hardware import Launched

FOLLOWER = "offload.ranks.follower"  # the module that a rank's process runs
MEET_SECONDS = 60.0  # for ranks that torchrun started, once rank 0 needs them
_FOR_EVER = timedelta(days=1)
_LOOPBACK = "127.0.0.1"
_LOOPBACK_ONLY = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}  # keep torch.distributed on this machine
_DOOR = "triforce/door"  # key of rank 0's port and secret in torchrun's store
_starts = count()
_WORDS = 400  # characters of the last line that a dead rank wrote to standard error


@dataclass(frozen=True)
class Process:
    """A rank's process on this machine. words: the file of its standard error."""

    process: subprocess.Popen[bytes]
    words: IO[bytes]

    def epitaph(self) -> str:
        """The exit code or signal, and the last line of standard error; empty while the process runs."""
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
    """The connections to the other ranks.

    channels: by rank; rank 0 has one to each other rank, the others have one to rank 0. processes: of the ranks that
    rank 0 started. store: makes torch.distributed's store; called after the watch has started, which notices ranks that
    never come. memory: the file of the memory that ranks share for sums, if any; this process alone closes it."""

    channels: Mapping[int, Channel]
    processes: tuple[Process, ...]
    store: Callable[[], Store]
    memory: int | None = None


def start(size: int) -> Met:
    """Start ranks 1 to size - 1 on this machine. Each inherits one end of a socket pair, the open file of the store and
    the shared memory, which no other process can open. Raises UsageError where the system has no memfd_create."""
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
    """The store's file, which is open and has no name; all starts share it. It is never closed: a store writes to its
    descriptor when it is destroyed, and another file could have that descriptor by then."""
    return os.memfd_create("ranks")


@contextmanager
def _signals_later() -> Iterator[None]:
    """Block the terminal's signals for processes that are started in the body: a signal would end them before they
    ignore it, and before rank 0 has decided what to do."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def started(descriptor: int, file: int, memory: int, number: int) -> Met:
    """The connections of a rank that `start` started."""
    return Met({0: Channel(socket.socket(fileno=descriptor))}, (), lambda: _store_in(file, number), memory)


def _store_in(file: int, number: int) -> Store:
    """The store of start `number` in an open file, which the store reopens and locks for every access."""
    return PrefixStore(str(number), FileStore(f"/proc/self/fd/{file}"))


def meet(launched: Launched) -> Met:
    """Connect to the ranks that torchrun started. Connections are authenticated by a secret from torchrun's store."""
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
    """Connect to rank 0, on the machine that torchrun's rendezvous names as master."""
    port, secret = store.get(_DOOR).decode().split()
    host = _LOOPBACK if launched.num_hosts == 1 else os.environ["MASTER_ADDR"]
    return knock(host, int(port), bytes.fromhex(secret), launched.rank, seconds=MEET_SECONDS)
