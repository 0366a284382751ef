"""How ranks meet: rank 0 starts the others on this machine, or torchrun has started all, on one machine or several."""

from __future__ import annotations

import hmac
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
from typing import IO

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from offload.errors import RankFailed
from offload.plan.torchrun import Launched
from offload.ranks.channel import Channel

FOLLOWER = "offload.follower"  # the module that a rank's process runs
MEET_SECONDS = 60.0  # for ranks that torchrun started, once rank 0 needs them
_FOR_EVER = timedelta(days=1)
_LOOPBACK = "127.0.0.1"
_SECRET_BYTES = 32
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
    is one channel, of the others one to rank 0."""

    channels: Mapping[int, Channel]
    processes: tuple[Process, ...]
    store: Callable[[], Store]


def start(size: int) -> Met:
    """Start ranks 1 to size - 1 on this machine. Each has an end of a pair of sockets, which nobody else can reach."""
    os.environ.update(_loopback())
    store = TCPStore(_LOOPBACK, 0, is_master=True, wait_for_workers=False)
    channels, processes = {}, []
    for rank in range(1, size):
        ours, theirs = socket.socketpair()
        words = tempfile.TemporaryFile()  # noqa: SIM115 (open as long as the process)
        with theirs, _signals_later():
            arguments = map(str, (theirs.fileno(), rank, size, store.port))
            process = subprocess.Popen(
                [sys.executable, "-m", FOLLOWER, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=words,
                pass_fds=(theirs.fileno(),),
            )
        channels[rank] = Channel(ours)
        processes.append(Process(process, words))
    return Met(channels, tuple(processes), lambda: store)


@contextmanager
def _signals_later() -> Iterator[None]:
    """A process that is started in the body is born with a terminal's signals blocked: until it ignores them, they
    would end it before rank 0 has said what is to be done."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def started(descriptor: int, port: int) -> Met:
    """The same, seen by a rank that was started."""
    channel = Channel(socket.socket(fileno=descriptor))
    return Met({0: channel}, (), lambda: TCPStore(_LOOPBACK, port, is_master=False))


def meet(launched: Launched) -> Met:
    """Meet the ranks that torchrun started, by its store. Whoever connects has to know a secret from there."""
    store, _, _ = next(rendezvous("env://", launched.rank, launched.size))
    store.set_timeout(_FOR_EVER)  # rank 0 may wait for a person; torchrun ends all when one fails
    channels = _wait_for_others(launched, store) if launched.rank == 0 else {0: _connect(launched, store)}
    return Met(channels, (), lambda: store)


def _wait_for_others(launched: Launched, store: Store) -> dict[int, Channel]:
    secret = secrets.token_bytes(_SECRET_BYTES)
    channels: dict[int, Channel] = {}
    with socket.create_server(("", 0), backlog=launched.size) as server:
        server.settimeout(MEET_SECONDS)
        store.set("triforce/door", f"{server.getsockname()[1]} {secret.hex()}")
        while len(channels) < launched.size - 1:
            try:
                connection, _ = server.accept()
            except TimeoutError as error:
                missing = sorted(set(range(1, launched.size)) - set(channels))
                raise RankFailed(
                    f"rank {missing[0]} did not come within {MEET_SECONDS:.0f} seconds; start as many as torchrun says"
                ) from error
            connection.settimeout(MEET_SECONDS)
            said = connection.recv(_SECRET_BYTES + 1, socket.MSG_WAITALL)
            if len(said) == _SECRET_BYTES + 1 and hmac.compare_digest(said[:-1], secret):
                connection.settimeout(None)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                channels[said[-1]] = Channel(connection)
            else:
                connection.close()
    return dict(sorted(channels.items()))


def _connect(launched: Launched, store: Store) -> Channel:
    """Rank 0 is on the machine that torchrun's rendezvous names as master."""
    port, secret = store.get("triforce/door").decode().split()
    connection = socket.create_connection((os.environ["MASTER_ADDR"], int(port)), MEET_SECONDS)
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(bytes.fromhex(secret) + bytes([launched.rank]))
    return Channel(connection)


def _loopback() -> dict[str, str]:
    """Variables that keep torch.distributed on this machine."""
    name = "lo" if sys.platform.startswith("linux") else "lo0"
    return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}
