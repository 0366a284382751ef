"""Vector clocks: who has seen how much of whom. No tests in here."""

from __future__ import annotations

from collections.abc import Callable

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


class Block:
    """Memory whose accesses have to be ordered: of a device tensor and all its views, or a pinned range of the host.

    kind: "device" or "pinned". owner: the stream it was allocated on, the host. freed: called when nothing refers to it
    any more. wrote: the last write. reads: after it, the last of each actor.
    """

    def __init__(
        self, kind: str, owner: Actor, num_bytes: int, freed: Callable[[Block], None] = lambda block: None
    ) -> None:
        self.kind, self.owner, self.num_bytes, self._freed = kind, owner, num_bytes, freed
        self.wrote: tuple[str, int] | None = None
        self.reads: Clock = {}

    def __del__(self) -> None:
        self._freed(self)

    def access(self, actor: Actor, *, write: bool) -> list[str]:
        """`actor` reads or writes it in its latest step. Returns the earlier accesses that conflict, in words."""
        earlier = [("write", *self.wrote)] if self.wrote is not None else []
        if write:
            earlier += [("read", *read) for read in self.reads.items()]
        found = [f"{kind} by {name}" for kind, name, seq in earlier if not actor.knows(name, seq)]
        if write:
            self.wrote, self.reads = (actor.name, actor.seq), {}
        else:
            self.reads[actor.name] = actor.seq
        return found

    def users(self, *actors: Actor) -> list[str]:
        """Who may be using it still, as far as none of `actors` knows better."""
        accesses = [*self.reads.items(), *([self.wrote] if self.wrote is not None else [])]
        return sorted({name for name, seq in accesses if not any(actor.knows(name, seq) for actor in actors)})
