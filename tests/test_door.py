"""Strangers at the door where ranks of several machines meet: what one does costs his own connection, and no time."""

from __future__ import annotations

import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from offload.errors import RankFailed
from offload.ranks import door as doors
from offload.ranks import rendezvous
from offload.ranks.channel import Channel
from offload.ranks.door import SECRET_BYTES, Door, knock
from offload.speed.hardware import Launched

HOST = "127.0.0.1"
SECRET = bytes(range(SECRET_BYTES))
NOISE = random.Random(3).randbytes(10_000)
LONG = 60.0  # seconds that no test takes
Attack = Callable[[int], list[socket.socket]]  # of a port; connections that stay


def connect(port: int, said: bytes = b"") -> socket.socket:
    connection = socket.create_connection((HOST, port), LONG)
    connection.sendall(said)
    return connection


def reset(port: int, said: bytes = b"") -> list[socket.socket]:
    connection = connect(port, said)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
    return []


def connect_and_close(port: int, said: bytes) -> list[socket.socket]:
    connect(port, said).close()
    return []


ATTACKS: dict[str, Attack] = {
    "waits": lambda port: [connect(port)],
    "resets": reset,
    "resets within the secret": lambda port: reset(port, SECRET[:5]),
    "closes": lambda port: connect_and_close(port, b""),
    "closes before the rank": lambda port: connect_and_close(port, SECRET),
    "waits within the secret": lambda port: [connect(port, SECRET[:-1])],
    "random bytes": lambda port: [connect(port, NOISE)],
    "another secret": lambda port: [connect(port, SECRET[:-1] + b"\0\1")],
    "rank 0": lambda port: [connect(port, SECRET + b"\0")],
    "a rank too many": lambda port: [connect(port, SECRET + b"\3")],
    "rank 255": lambda port: [connect(port, SECRET + b"\xff")],
    "a hundred": lambda port: [connect(port) for _ in range(100)],
    "a request": lambda port: [connect(port, b"GET / HTTP/1.1\r\nHost: " + 100 * b"x" + b"\r\n\r\n")],
}


@pytest.fixture
def held() -> Iterator[ExitStack]:
    """Connections that stay until the test has ended."""
    with ExitStack() as stack:
        yield stack


def is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:  # what he said was not read
        return True


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_a_stranger_keeps_nobody_out(attack: Attack, held: ExitStack) -> None:
    """He comes before everybody else and between them. A silent one was waited for; a reset ended the start."""
    with Door(HOST, SECRET, patience=LONG) as door:
        for rank in (2, 1):
            for connection in attack(door.port):
                held.enter_context(connection)
            held.enter_context(knock(HOST, door.port, SECRET, rank, seconds=LONG)).sendall(b"then")
        began = time.monotonic()
        come = dict(door.admit([1, 2], LONG))
        assert time.monotonic() - began < LONG / 2
    for rank in (1, 2):
        assert held.enter_context(come[rank]).recv(9) == b"then"


@pytest.mark.parametrize("said", [NOISE, SECRET[:-1] + b"\0\1", SECRET + b"\7"], ids=["noise", "secret", "rank"])
def test_who_says_something_wrong_is_turned_away_at_once(said: bytes, held: ExitStack) -> None:
    with Door(HOST, SECRET, patience=LONG) as door:
        stranger = held.enter_context(connect(door.port, said))
        with pytest.raises(TimeoutError):
            list(door.admit([1], 0.1))
        assert is_closed(stranger)


def test_who_says_nothing_is_turned_away_in_time(held: ExitStack) -> None:
    with Door(HOST, SECRET, patience=0.05) as door:
        silent, slow = (held.enter_context(connect(door.port, said)) for said in (b"", SECRET[:9]))
        with pytest.raises(TimeoutError):
            list(door.admit([1], 0.3))
        assert is_closed(silent)
        assert is_closed(slow)


def test_of_very_many_the_first_goes(monkeypatch: pytest.MonkeyPatch, held: ExitStack) -> None:
    """So that no number of them takes all files that a process may open."""
    monkeypatch.setattr(doors, "_MOST", 3)
    with Door(HOST, SECRET, patience=LONG) as door:
        first, *_ = [held.enter_context(connect(door.port)) for _ in range(4)]
        held.enter_context(knock(HOST, door.port, SECRET, 1, seconds=LONG))
        [(_, connection)] = door.admit([1], LONG)
        held.enter_context(connection)
        assert len(door._visitors) == 2
        assert is_closed(first)


def test_a_rank_comes_once(held: ExitStack) -> None:
    """The first stays, and the second is turned away."""
    with Door(HOST, SECRET) as door:
        first, second = (held.enter_context(knock(HOST, door.port, SECRET, 1, seconds=LONG)) for _ in range(2))
        come = []
        with pytest.raises(TimeoutError):
            come.extend(door.admit([1, 2], 0.1))
        assert is_closed(second)
        first.sendall(b"still here")


def test_once_all_have_come_nobody_can_connect(held: ExitStack) -> None:
    with Door(HOST, SECRET) as door:
        waiting = held.enter_context(connect(door.port))
        held.enter_context(knock(HOST, door.port, SECRET, 1, seconds=LONG))
        held.enter_context(dict(door.admit([1], LONG))[1])
        port = door.port
    assert is_closed(waiting)
    with pytest.raises(ConnectionRefusedError):
        connect(port)


# How ranks use it


class TwoRanks:
    """Ranks 0 and 1 that torchrun started, here in two threads, and its store. hosts: machines that they are on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, hosts: int = 1) -> None:
        self.store, self.per_host = HashStore(), 2 // hosts
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            monkeypatch.setenv(name, "lo")
        monkeypatch.setenv("MASTER_ADDR", "localhost")
        monkeypatch.setattr(rendezvous, "rendezvous", lambda *_: iter([(self.store, 0, 2)]))
        self._met: list[Channel] = []
        self._thread = threading.Thread(target=lambda: self._met.append(self.meet(0)), daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self.store.get("triforce/door").decode().split()[0])

    def meet(self, rank: int) -> Channel:
        """Its channel to the other one."""
        met = rendezvous.meet(Launched(rank, 2, rank % self.per_host, self.per_host))
        return met.channels[1 - rank]

    def meet_0(self) -> Channel:
        self._thread.join()
        return self._met[0]


@pytest.mark.parametrize("hosts", [1, 2])
def test_ranks_of_torchrun_meet_among_strangers(monkeypatch: pytest.MonkeyPatch, held: ExitStack, hosts: int) -> None:
    ranks = TwoRanks(monkeypatch, hosts)
    for attack in ATTACKS.values():
        for connection in attack(ranks.port):
            held.enter_context(connection)
    channels = ranks.meet(1), ranks.meet_0()
    for one, other in (channels, channels[::-1]):
        one.send({"verb": "go"})
        assert other.receive() == [{"verb": "go"}]
    with pytest.raises(ConnectionRefusedError):
        connect(ranks.port)


def test_ranks_of_one_machine_listen_to_it_alone(monkeypatch: pytest.MonkeyPatch, held: ExitStack) -> None:
    ranks = TwoRanks(monkeypatch)
    with socket.socket() as other:  # an address of this machine, not the loopback's usual one
        other.settimeout(LONG)
        with pytest.raises(ConnectionRefusedError):
            other.connect(("127.0.0.2", ranks.port))
    ranks.meet(1)
    ranks.meet_0()


def test_the_rank_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch, held: ExitStack) -> None:
    """However many strangers do: each began its time anew."""
    monkeypatch.setattr(rendezvous, "MEET_SECONDS", 0.2)
    monkeypatch.setattr(rendezvous, "rendezvous", lambda *_: iter([(HashStore(), 0, 3)]))
    with pytest.raises(RankFailed, match="rank 1 did not come within 0 seconds"):
        rendezvous.meet(Launched(0, 3, 0, 1))
