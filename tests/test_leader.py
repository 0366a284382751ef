"""What rank 0 does, it tells the others first, and these do the same: with stand-ins for workers and for the team.

With real ranks: test_ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from offload.errors import RankFailed
from offload.model.level import Level
from offload.model.passes import forward
from offload.plan.planner import Plan
from offload.ranks.follower import Follower
from offload.ranks.leader import Lead, LeadingLevel, LeadingWorker
from offload.ranks.record import TokenRecord
from offload.worker.worker import Worker

NUMBER, GONE = 7, RankFailed("rank 1 ended")
Call = tuple[str, tuple[Any, ...], dict[str, Any]]


class Told:
    """The team: what it is told, and what it answers. lost: who asks it anything hears so."""

    def __init__(self, *answers: object, lost: bool = False) -> None:
        self.size, self.answers, self.lost = 1 + len(answers), answers, lost
        self.said: list[tuple[str, dict[str, Any]]] = []

    def tell(self, verb: str, **arguments: Any) -> int:
        self.check()
        self.said.append((verb, arguments))
        return len(self.said)

    def replies(self, told: int) -> list[Any]:
        assert told == len(self.said)
        return list(self.answers)

    def check(self) -> None:
        if self.lost:
            raise GONE

    def close(self) -> None: ...


class Noted:
    """A worker, or its full cache: what it is called with. All succeeds."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def __getattr__(self, name: str) -> Callable[..., bool]:
        def called(*args: Any, **settings: Any) -> bool:
            self.calls.append((name, args, settings))
            return True

        return called


def leading(team: Told) -> LeadingWorker:
    worker = LeadingWorker.__new__(LeadingWorker)
    worker._lead, worker.number, worker._record = SimpleNamespace(team=team), NUMBER, TokenRecord()  # type: ignore[assignment]
    return worker


def following(worker: object) -> Follower:
    follower = Follower.__new__(Follower)
    follower._workers, follower._records = {NUMBER: worker}, {NUMBER: TokenRecord()}  # type: ignore[dict-item]
    return follower


@pytest.mark.parametrize(
    "call",
    [
        *[("record_mass", (wanted,), {}) for wanted in (True, False)],
        *[("prepare_copies", (3, wanted), {}) for wanted in (True, False)],
        ("refresh", (3,), {}),
        ("fetch_ahead", (), {}),
        ("release", (), {}),
    ],
)
def test_what_rank_0s_worker_does_the_others_do(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    name, args, settings = call
    own, team, other = list[Call](), Told(), Noted()
    monkeypatch.setattr(Worker, name, lambda worker, *args, **settings: own.append((name, args, settings)))
    getattr(leading(team), name)(*args, **settings)
    [(verb, arguments)] = team.said
    following(other)._obey(verb, 1, arguments)
    assert own == other.calls == [call]


def level_of(worker: LeadingWorker, cache: object) -> LeadingLevel:
    level = LeadingLevel.__new__(LeadingLevel)
    level._worker, level._name, level._record = worker, "draft", None
    level._hidden = None
    level._cache, level._hidden = cache, None  # type: ignore[assignment]
    return level


def test_what_a_level_of_rank_0_forgets_the_others_forget() -> None:
    team, own, other = Told(), Noted(), Noted()
    level_of(leading(team), own).truncate(5)
    [(verb, arguments)] = team.said
    following(SimpleNamespace(levels={"draft": other}))._obey(verb, 1, arguments)
    assert own.calls == other.calls == [("truncate", (5,), {})]


@pytest.mark.parametrize("num_tokens", [None, 2])
def test_the_others_copy_as_many_rows(num_tokens: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a worker of these ranks: of any other they have none."""
    own = list[object]()

    def copies(worker: Worker, other: Worker, number: int | None) -> bool:
        own.append(number)
        return True

    monkeypatch.setattr(Worker, "copy_rows", copies)
    worker, other = leading(team := Told()), leading(team)
    assert not worker.copy_rows(other, num_tokens)  # led by somebody else
    other._lead, other.number = worker._lead, NUMBER + 1
    other._record.append(0, [1, 2, 3])
    assert worker.copy_rows(other, num_tokens)
    [(verb, arguments)] = team.said
    copying, theirs = Noted(), TokenRecord()
    follower = following(copying)
    follower._workers[NUMBER + 1], follower._records[NUMBER + 1] = "theirs", theirs  # type: ignore[assignment]
    theirs.append(0, [1, 2, 3])
    follower._obey(verb, 1, arguments)
    assert copying.calls == [("copy_rows", ("theirs", num_tokens), {})]
    assert own == [num_tokens]
    assert worker._record.digest(3) == follower._records[NUMBER].digest(3)


def test_memory_is_given_back_although_the_others_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    released = list[int]()
    monkeypatch.setattr(Worker, "release", lambda worker: released.append(1))
    leading(Told(lost=True)).release()
    assert released == [1]


def test_nothing_that_was_computed_beside_a_rank_that_died_comes_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU ends its kernels with whatever is there."""
    team, finished = Told(), list[int]()

    def dies(level: Level, passes: object) -> None:
        team.lost = True

    monkeypatch.setattr(Level, "run", dies)
    level = level_of(leading(team), SimpleNamespace(length=0))
    level._decoder = SimpleNamespace(finish=lambda: finished.append(1))  # type: ignore[assignment]
    with pytest.raises(RankFailed, match="rank 1 ended"):
        forward(level, [1, 2], 1)
    assert finished == [1]


def test_a_process_has_its_threads_again_when_the_ranks_have_gone() -> None:
    before = torch.get_num_threads()
    lead = Lead.__new__(Lead)
    lead.team, lead.sums, lead._threads = Told(), Told(), before  # type: ignore[assignment]
    torch.set_num_threads(before + 1)
    lead.close()
    assert torch.get_num_threads() == before


@dataclass(frozen=True)
class Asked:
    device: str


@dataclass(frozen=True)
class Planned:
    request: Asked


@pytest.mark.parametrize(("device", "own"), [("cuda:0", "cuda:2"), ("cuda:3", "cuda:5"), ("cpu", "cpu")])
def test_each_rank_of_a_machine_has_a_gpu_of_its_own(device: str, own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Plan, "from_dict", lambda data: Planned(Asked(data["device"])))
    follower = following(None)
    follower._local_rank = 2
    assert follower._own({"device": device}).request.device == own
