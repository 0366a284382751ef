"""The ids of a sequence: whatever was truncated, copied or restored, a pass gets the ids before it of its own text."""

from __future__ import annotations

import random
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
import torch

from offload.kv import recent_ids
from offload.kv.parts import PlacedPart
from offload.plan.shards import Shard
from test_delta import with_a_bug

EOS, CONTEXT = 2, 3
ACTS = ("pass", "prefill", "cut", "copy", "session")


class Script:
    """A sequence of random acts beside its text."""

    def __init__(self, module: ModuleType, seed: int) -> None:
        self.module, self.draw = module, random.Random(seed)
        self.states = SimpleNamespace(places=list[int](), most=3)
        self.ids, self.text = self.made(), list[int]()
        self.known = True  # of all of the text, not of places alone

    def made(self) -> Any:
        return self.module.RecentIds(CONTEXT, EOS, cast("PlacedPart", self.states))

    def some(self, count: int) -> list[int]:
        return [self.draw.choice((EOS, 5, 7, 11)) for _ in range(count)]

    def before(self, place: int) -> list[int]:
        return ([EOS] * CONTEXT + self.text[:place])[-CONTEXT:]

    def run(self, count: int, kept: int) -> None:
        noted = self.some(count)
        found = self.ids.note(torch.tensor(noted) if self.draw.random() < 0.5 else noted)
        assert found.dtype == torch.int64
        assert found.tolist() == self.before(len(self.text)) + noted
        if self.draw.random() < 0.5:
            self.ids.advance(kept)
        else:
            self.ids.advance(count)
            self.ids.truncate(len(self.text) + kept)
        self.text += noted[:kept]

    def do(self, act: str) -> None:
        length = len(self.text)
        if act == "pass":
            count = self.draw.randint(1, 5)
            self.run(count, self.draw.randint(0, count))
        elif act == "prefill":
            count = self.draw.randint(1, 9)
            self.run(count, count)
            self.states.places = sorted({*self.states.places, len(self.text)})[-3:]
        elif act == "cut":
            self.ids.note(self.some(4))  # broken off
            wanted = self.draw.randint(0, length)
            reached = self.ids.reachable(wanted)
            assert reached == wanted if self.known else reached <= wanted
            self.ids.truncate(wanted)
            assert self.ids.length == reached
            self.cut(reached)
        elif act == "copy":
            other = self.made()
            other.note(self.some(3))
            other.advance(3)
            count = self.ids.reachable(self.draw.randint(0, length))
            other.copy_from(self.ids, count)
            self.run(2, 2)  # the other goes on
            self.ids, self.text = other, self.text[:count]
            self.cut(count)
        else:
            self.restore()

    def cut(self, length: int) -> None:
        del self.text[length:]
        self.states.places = [place for place in self.states.places if place <= length]

    def restore(self) -> None:
        """Go on with a session of the sequence, up to one of its places."""
        if not self.states.places:
            return
        stop, other = self.draw.choice(self.states.places), self.made()
        units = self.ids.units(stop)
        assert self.ids.reach(units, len(self.text)) == stop
        other.note(self.some(9))
        other.advance(9)
        other.restored(0)
        for unit in self.draw.sample(units, len(units)):
            tensors = self.ids.tensors(unit)
            [(shape, dtype)] = self.ids.shapes(unit).values()
            assert [(tuple(each.shape), each.dtype) for each in tensors] == [(shape, dtype)]
            other.filled(unit, tensors)
        other.restored(stop)
        self.ids, self.known = other, False
        self.cut(stop)
        assert all(other.reachable(place) == place for place in self.states.places)


def check(module: ModuleType) -> None:
    for seed in range(10):
        script = Script(module, seed)
        for _ in range(40):
            script.do(script.draw.choice(ACTS))
            assert script.ids.length == len(script.text)


def test_a_pass_gets_the_ids_before_it_of_its_own_text() -> None:
    check(recent_ids)


def test_all_ranks_have_all_ids() -> None:
    [split] = Script(recent_ids, 0).ids.splits(None, [Shard(0, 2), Shard(1, 2)])
    assert split.whole((CONTEXT,)) == (CONTEXT,)
    assert all(torch.arange(CONTEXT)[split.of_rank(rank)].tolist() == [*range(CONTEXT)] for rank in (0, 1))


BUGS = {
    "rejected tokens stay": ("del self._ids[self.reachable(length) :]", "pass"),
    "all noted tokens count": ("self._noted[:num_tokens]", "self._noted"),
    "the text begins with other ids": ("[self._eos] * (", "[0] * ("),
    "ids of another sequence": ("self._ids, self._noted = other._ids[:length]", "self._noted, self._ids = array('q')"),
    "a copy shares the ids": ("other._ids[:length]", "other._ids"),
    "a restored sequence keeps its own": ("        del self._ids[length:]\n", ""),
    "a restored sequence can be cut anywhere": ("while _UNKNOWN in self._ids", "while False and self._ids"),
    "restored ids are a place late": ("first = max(place - self._context, 0)", "first = max(place - self._context, 1)"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_mistakes_are_found(bug: str) -> None:
    broken = with_a_bug(recent_ids, *BUGS[bug])
    with pytest.raises((AssertionError, IndexError, KeyError)):
        check(broken)
