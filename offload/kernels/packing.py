"""How a block of bf16 numbers is packed, and where its parts lie. Arithmetic without torch."""

from __future__ import annotations

from dataclasses import dataclass

RAW, PACKED, RESIDUAL = range(3)  # how a page lies: as it is, as below, or as what it has beside codes in 4 bits
_HEAD_BYTES = 4  # of a group: its largest exponent and, above 8 bits, the number of escapes before its own


@dataclass(frozen=True)
class Packing:
    """How blocks of `numbers` numbers are packed, in groups of `group`, a multiple of 64, with room for `room` escapes.

    A packed block lies where its numbers were. Its parts, in bytes: signs and mantissas [numbers]; distances
    [numbers / 2], of each group [group / 2], those of its first half in the low halves; heads, int32 [groups]; escapes
    [room]; see native/packed.h.
    """

    numbers: int
    group: int
    room: int

    @property
    def num_groups(self) -> int:
        return self.numbers // self.group

    @property
    def heads(self) -> int:
        """Where they begin."""
        return self.numbers + self.numbers // 2

    @property
    def escapes(self) -> int:
        """Where they begin."""
        return self.heads + _HEAD_BYTES * self.num_groups

    @property
    def nbytes(self) -> int:
        """Of a packed block, a multiple of 16."""
        return self.escapes + self.room

    @classmethod
    def of(cls, numbers: int, group: int, escapes: float) -> Packing:
        """With room for that share of escapes, and so much more that the size is a multiple of 16 bytes."""
        found = cls(numbers, group, 0)
        found = cls(numbers, group, int(numbers * escapes) // 16 * 16 + -found.escapes % 16)
        if numbers % group or group % 64 or found.nbytes > 2 * numbers:
            raise ValueError(f"{numbers} numbers in groups of {group} cannot be packed with {found.room} escapes")
        return found

    @classmethod
    def roomiest(cls, numbers: int, group: int) -> Packing:
        """With as much room for escapes as leaves a packed block shorter than its numbers."""
        found = cls(numbers, group, 0)
        return cls(numbers, group, 2 * numbers - 16 - found.escapes)
