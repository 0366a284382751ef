"""What ranks say to each other, over pairs of sockets in this process: messages, orders, answers, records of tokens."""

from __future__ import annotations

import atexit
import multiprocessing
import queue
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import pytest

from kit.forked import PATIENCE_SECONDS, forked
from offload.errors import DoesNotFit, RankFailed
from offload.ranks import follower, watch
from offload.ranks.channel import Channel
from offload.ranks.follower import LOST, GivenUp, Orders
from offload.ranks.record import TokenRecord
from offload.ranks.rendezvous import Met
from offload.ranks.team import Team

BEAT = bytes(4)
GONE_SECONDS = 30.0  # in which a process that ends has ended, on a loaded machine, too


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody beats, and a watch looks often."""
    monkeypatch.setattr(watch, "BEAT_SECONDS", 0.02)
    monkeypatch.setattr(Channel, "beat", lambda channel: None)


@contextmanager
def pair() -> Iterator[tuple[Channel, socket.socket]]:
    """A channel and the other end."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(PATIENCE_SECONDS)
        yield Channel(ours), theirs


# Channels


def test_a_message_is_there_with_its_last_byte_and_beats_are_none() -> None:
    said: list[dict[str, Any]] = [{"verb": "forward", "tokens": [1, 2]}, {}, {"verb": "stats"}]
    with pair() as (ours, there), pair() as (theirs, here):
        for message in said:
            theirs.send(message)
        content = BEAT + here.recv(1000) + BEAT
        heard = []
        for place in range(len(content)):
            there.send(content[place : place + 1])
            heard.append(ours.receive())
        ends = [place for place, messages in enumerate(heard) if messages]
        assert [messages for messages in heard if messages] == [[message] for message in said]
        assert ends[-1] == len(content) - len(BEAT) - 1
        there.sendall(content)
        assert ours.receive() == said


def test_a_beat_says_nothing_beside_a_message_and_is_said_as_often_as_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    with pair() as (ours, there):
        ours.beat()
        assert not ours._sending.locked()
        with ours._sending:
            ours.beat()  # at once: a watch must not wait
        ours.beat()
        assert there.recv(100) == 2 * BEAT


def test_messages_and_beats_are_sent_one_after_another() -> None:
    class Checked:
        def sendall(self, content: bytes) -> None:
            assert channel._sending.locked()

    channel = Channel(Checked())  # type: ignore[arg-type]
    channel.send({"verb": "go"})
    assert not channel._sending.locked()


def test_an_end_is_noticed_at_both_ends() -> None:
    with pair() as (ours, there):
        ours.close()
        assert there.recv(1) == b""
        with pytest.raises(EOFError):
            ours.receive()
        with pytest.raises(OSError, match="pipe"):
            ours.send({})
        ours.close()


# Orders


@contextmanager
def ordered(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Orders, Channel]]:
    """Orders, and rank 0's end; when that has gone, so would the process have."""
    ended = queue.SimpleQueue[int]()
    monkeypatch.setattr(follower, "os", SimpleNamespace(_exit=ended.put))
    with pair() as (ours, there):
        yield Orders(ours), Channel(there)
        there.shutdown(socket.SHUT_RDWR)
        assert ended.get(timeout=PATIENCE_SECONDS) == LOST


def test_what_is_told_in_place_of_go_gives_a_forward_up_and_is_obeyed_next(monkeypatch: pytest.MonkeyPatch) -> None:
    with ordered(monkeypatch) as (ours, rank_0):
        told = [{"verb": verb, "number": number} for number, verb in enumerate(("go", "truncate", "stats", "build"))]
        for message in told:
            rank_0.send(message)
        ours.wait_to_go()
        with pytest.raises(GivenUp):
            ours.wait_to_go()
        assert [ours.next(), ours.next()] == told[1:3]


def test_answers_have_the_number_of_what_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with ordered(monkeypatch) as (ours, rank_0):
        ours.answer(7, [1, 2])
        ours.refuse(8, "does_not_fit", "no memory")
        heard = list[dict[str, Any]]()
        while len(heard) < 2:
            heard += rank_0.receive()
        assert heard == [
            {"number": 7, "value": [1, 2]},
            {"number": 8, "error": "does_not_fit", "message": "no memory"},
        ]


# The team


@contextmanager
def team(size: int) -> Iterator[tuple[Team, list[Channel], list[str]]]:
    """A team of so many ranks, the others' ends, and a word for each failure that was called."""
    called = list[str]()
    ends = [socket.socketpair() for _ in range(1, size)]
    channels = {rank: Channel(ours) for rank, (ours, _) in enumerate(ends, 1)}
    for _, theirs in ends:
        theirs.settimeout(PATIENCE_SECONDS)
    made = Team(Met(channels, (), lambda: None), lambda: called.append("failed"))  # type: ignore[arg-type,return-value]
    try:
        yield made, [Channel(theirs) for _, theirs in ends], called
    finally:
        made.close()
        for end in ends:
            for each in end:
                each.close()


def all_of(channel: Channel) -> list[dict[str, Any]]:
    """What comes up to the end."""
    heard = list[dict[str, Any]]()
    with suppress(EOFError):
        while True:
            heard += channel.receive()
    return heard


def test_answers_are_those_to_what_was_told_in_the_order_of_the_ranks() -> None:
    """An answer to an earlier message, for which nobody waited in the end, is not taken for this one's."""
    with team(3) as (made, others, _):
        early, told = made.tell("stats", worker=1), made.tell("stats", worker=2)
        assert early != told
        for rank in (2, 1):
            others[rank - 1].send({"number": early, "value": "early"})
            others[rank - 1].send({"number": told, "value": f"of rank {rank}"})
        assert made.replies(told) == ["of rank 1", "of rank 2"]


def test_an_error_is_raised_as_what_it_is_with_its_rank() -> None:
    with team(3) as (made, others, _):
        for kind, error in (("does_not_fit", DoesNotFit), ("of a later version", RankFailed)):
            told = made.tell("build")
            others[0].send({"number": told, "value": None})
            others[1].send({"number": told, "error": DoesNotFit.kind if error is DoesNotFit else kind, "message": "no"})
            with pytest.raises(error, match="rank 2: no"):
                made.replies(told)
        assert made.tell("stats")


def test_a_rank_that_is_lost_ends_all_others_and_stays_the_one_that_is_named() -> None:
    with team(4) as (made, others, called):
        told = made.tell("stats")
        others[1].send({"failed": "out of GPUs", "traceback": "line 7"})
        with pytest.raises(RankFailed, match="rank 2 failed: out of GPUs; the other ranks are ended") as failed:
            made.replies(told)
        assert "line 7" in str(failed.value.__cause__)
        for other in others:
            assert [message["verb"] for message in all_of(other)] == ["stats"]
        made._watch.join()
        for ask in (made.check, lambda: made.tell("go")):
            with pytest.raises(RankFailed, match="rank 2 failed"):
                ask()
        assert called[0] == "failed"


def test_what_is_told_to_a_rank_that_has_gone_names_it() -> None:
    """Its end is seen by who tells it a thing before the watch has looked."""

    def tell_on() -> None:
        while True:
            made.tell("go")

    with team(3) as (made, others, _):
        others[1].close()
        with pytest.raises(RankFailed, match="rank 2 ended"):
            tell_on()


# Records


def end_without_closing() -> None:
    """In a process of its own: what an interpreter does at its end, which terminates children, and waits for them."""
    ours, theirs = socket.socketpair()
    rank = multiprocessing.get_context("fork").Process(target=follow_for_ever, args=(theirs,), daemon=True)
    rank.start()
    Team(Met({1: Channel(ours)}, (), lambda: pytest.fail("no store is wanted")), lambda: None)
    atexit._run_exitfuncs()


def follow_for_ever(connection: socket.socket) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Orders(Channel(connection)).next()


def test_a_team_that_nobody_closed_does_not_keep_its_process_alive() -> None:
    """After a failed test with an engine of ranks, pytest never ended: it waited for a rank, to which it went on
    beating."""
    process = forked(end_without_closing, daemon=False)
    process.join(GONE_SECONDS)
    process.kill()
    assert process.exitcode == 0


def test_a_team_that_was_closed_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[object] = []
    monkeypatch.setattr(atexit, "register", registered.append)
    monkeypatch.setattr(atexit, "unregister", registered.remove)
    with team(2) as (ours, _, _):
        assert registered == [ours.close]
    assert registered == []


def test_a_record_is_of_the_tokens_that_are_there() -> None:
    ours, theirs = TokenRecord(), TokenRecord()
    ours.append(0, [1, 2, 3, 4])
    theirs.append(0, [1, 2, 9])
    theirs.append(2, [3, 5])  # the third and fourth were forgotten
    theirs.compare(3, ours.digest(3))
    with pytest.raises(RankFailed, match="first 4 tokens are not those of rank 0"):
        theirs.compare(4, ours.digest(4))
    with pytest.raises(RankFailed, match="5 tokens were to be there, and 4 are"):
        theirs.append(5, [6])
    theirs.append(1, [2])
    with pytest.raises(RankFailed, match="3 tokens were to be there, and 2 are"):
        theirs.append(3, [4])


def test_rows_from_elsewhere_are_of_tokens_that_nobody_knows() -> None:
    ours, theirs = TokenRecord(), TokenRecord()
    ours.append(0, [1, 2, 3])
    theirs.forget(3)
    with pytest.raises(RankFailed):
        theirs.compare(3, ours.digest(3))
    ours.forget(3)
    theirs.compare(3, ours.digest(3))
    theirs.take(ours, 2)
    theirs.append(2, [7])
    assert theirs.digest(3) != ours.digest(3)
