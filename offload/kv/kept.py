"""The parts of what a sequence keeps, in order: they are copied, saved and restored together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from torch import Tensor

from offload.kv.parts import Part, Shapes, Unit

Call = Literal["reserve", "wait_home", "note_length", "restored", "truncate"]


class Kept:
    """The parts of what a sequence keeps, rows first: those of one rank, each in its caches."""

    def __init__(self, *parts: Part) -> None:
        self.parts = parts
        self._by_name = {part.name: part for part in parts}

    def get(self, name: str) -> Part | None:
        return self._by_name.get(name)

    def __getitem__(self, name: str) -> Part:
        return self._by_name[name]

    @property
    def length(self) -> int:
        """The sequence's tokens, which are those of its rows."""
        return self.parts[0].length

    @property
    def at_places(self) -> bool:
        """Whether a sequence can go back to few lengths only."""
        return any(part.at_places for part in self.parts)

    @property
    def limit(self) -> str:
        """The reason why a sequence cannot go back to every length; "": it can."""
        return next((part.limit for part in reversed(self.parts) if part.limit), "")

    def reach(self, units: Mapping[str, Sequence[Unit]], length: int) -> int:
        """The most tokens, up to `length`, after which a sequence can go on with `units`, those of each part by its
        name."""
        return self._most(lambda part, most: part.reach(units.get(part.name, ()), most), length)

    def reachable(self, length: int, stop: int | None = None) -> int:
        """The most tokens, up to `length`, that all parts can be truncated to. stop: see `Worker.reachable`."""
        return self._most(lambda part, most: part.reachable(most, stop), length)

    def is_whole(self, length: int) -> bool:
        """Whether all parts have what a prefill of `length` tokens leaves in them."""
        return all(part.is_whole(length) for part in self.parts)

    def copy_from(self, other: Kept, length: int) -> None:
        """Hold the first `length` tokens that `other` holds, which can be truncated to them: rows last, whose length is
        the sequence's. A part that `other` does not have stays as it is."""
        for part in reversed(self.parts):
            if (theirs := other.get(part.name)) is not None:
                part.copy_from(theirs, length)

    def each(self, call: Call, *numbers: int) -> None:
        """Call a method of every part."""
        for part in self.parts:
            getattr(part, call)(*numbers)

    def clear(self) -> None:
        """Drop the contents, before all of them are filled again. Rows may still be on their way to their pages, after
        an interrupted forward."""
        self.each("restored", 0)
        self.each("wait_home")

    def shapes(self, part: Part, unit: Unit) -> Shapes:
        return part.shapes(unit)

    def tensors(self, part: Part, unit: Unit) -> list[Tensor]:
        return part.tensors(unit)

    def to_fill(self, part: Part, unit: Unit) -> list[Tensor]:
        return part.to_fill(unit)

    def filled(self, part: Part, unit: Unit, tensors: Sequence[Tensor]) -> None:
        part.filled(unit, tensors)

    def _most(self, reached: Callable[[Part, int], int], length: int) -> int:
        """The most tokens, up to `length`, that every part reaches."""
        while (most := min(reached(part, length) for part in self.parts)) < length:
            length = most
        return length
