"""Vector clocks: who has seen how much of whom. No tests in here."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import NamedTuple

Clock = dict[str, int]  # actor -> its latest step that is known


class Actor:
    """Something that acts in an order of its own: the host or a stream. seq: its steps so far."""

    def __init__(self, name: str) -> None:
        self.name, self.seq = name, 0
        self.clock: Clock = {}

    def step(self) -> int:
        """Act once more."""
        self.seq += 1
        self.clock[self.name] = self.seq
        return self.seq

    def learn(self, clock: Clock) -> None:
        """All that `clock` knows happens before the next step."""
        for name, seq in clock.items():
            if seq > self.clock.get(name, 0):
                self.clock[name] = seq

    def knows(self, name: str, seq: int) -> bool:
        """True where step `seq` of `name` happens before the next step."""
        return self.clock.get(name, 0) >= seq


class _Access(NamedTuple):
    """Bytes `first` to `stop` of a block, in step `seq` of an actor."""

    name: str
    seq: int
    first: int
    stop: int
    write: bool


class Block:
    """Memory whose accesses have to be ordered: of a device tensor and all its views, or a pinned range of the host.

    kind: "device" or "pinned". owner: the stream it was allocated on, the host. freed: called when nothing refers to it
    any more. number: no other block's, ever.
    """

    _numbers = count()

    def __init__(
        self, kind: str, owner: Actor, num_bytes: int, freed: Callable[[Block], None] = lambda block: None
    ) -> None:
        self.kind, self.owner, self.num_bytes, self._freed = kind, owner, num_bytes, freed
        self.number = next(Block._numbers)
        self._accesses: list[_Access] = []  # those that a later one may have to know of

    def __del__(self) -> None:
        self._freed(self)

    def access(self, actor: Actor, first: int, stop: int, *, write: bool) -> list[str]:
        """`actor` reads or writes these bytes in its latest step. Returns the earlier accesses that conflict, in
        words."""
        found, kept, known, own = [], [], actor.clock.get, actor.name
        for each in self._accesses:
            name, seq, begun, end, written = each
            if (write or written) and begun < stop and first < end and known(name, 0) < seq:
                found.append(f"{'write' if written else 'read'} by {name}")
            inside = first <= begun and end <= stop
            if not (inside and (write or (not written and name == own))):
                kept.append(each)
        self._accesses = [*kept, _Access(actor.name, actor.seq, first, stop, write)]
        return found

    def users(self, *actors: Actor) -> list[str]:
        """Who may be using it still, as far as none of `actors` knows better."""
        return sorted(
            {each.name for each in self._accesses if not any(actor.knows(each.name, each.seq) for actor in actors)}
        )
