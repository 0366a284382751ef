"""Running estimates that start from a guess, follow what is seen, and fade back to the guess where nothing is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

_STIFFNESS = 2.0  # of a guessed proportion: as of one observation each at two numbers of rows that lie 2 apart


@dataclass
class Mean:
    """A mean of what was seen lately, worth `weight` observations of `guess` at the start.

    Each observation leaves `kept` of the weight of those before it; so does `fade`, with its own share.
    """

    guess: float
    weight: float = 4.0
    kept: float = 0.995
    _count: float = 0.0
    _total: float = 0.0

    @property
    def value(self) -> float:
        return self.from_guess(self.guess)

    def from_guess(self, guess: float) -> float:
        """The mean, had it started from this guess."""
        return (self.weight * guess + self._total) / (self.weight + self._count)

    def add(self, value: float, times: int = 1) -> None:
        """`value` was seen, as the mean of so many."""
        self.fade(self.kept**times)
        self._count += times
        self._total += value * times

    def fade(self, kept: float) -> None:
        self._count *= kept
        self._total *= kept


class Ratio:
    """What was paid lately for each of something; each observation leaves `kept` of the weight of those before it."""

    def __init__(self, *, kept: float = 0.9) -> None:
        self._kept, self._paid, self._got = kept, 0.0, 0.0

    def add(self, paid: float, got: float) -> None:
        self._paid = self._kept * self._paid + paid
        self._got = self._kept * self._got + got

    def from_guess(self, guess: float, paid: float = 0.0) -> float:
        """The ratio, had `paid` been paid at `guess` as well; `guess` where nothing was paid."""
        got = paid / guess + self._got
        return (paid + self._paid) / got if got else guess


class PassSeconds:
    """What a pass takes by its rows, fixed * blocks + slope * rows, by least squares over what was seen lately; both
    never below 0.

    Starts from the guess (fixed, slope). What is seen of one number of rows alone scales both; only different numbers
    change their proportion, and more so the further they lie apart.
    block: rows that run together; 0: all of a pass do, or what a pass waits for is the same for any number.
    """

    def __init__(self, fixed: float, slope: float, *, block: int = 0, kept: float = 0.95) -> None:
        self._fixed, self._slope, self._block, self._kept = fixed, slope, block, kept
        self._sums = (1.0, 1.0, 1.0, fixed + slope, fixed + slope)  # see `add`: the guess at one row

    def add(self, rows: int, seconds: float) -> None:
        blocks = self._blocks(rows)
        terms = (blocks * blocks, blocks * rows, rows * rows, blocks * seconds, rows * seconds)
        bb, br, rr, bs, rs = (self._kept * total + term for total, term in zip(self._sums, terms, strict=True))
        self._sums = (bb, br, rr, bs, rs)

    def at(self, rows: int) -> float:
        fixed, slope = self.coefficients()
        return fixed * self._blocks(rows) + slope * rows

    @property
    def slope(self) -> float:
        return self.coefficients()[1]

    def steps(self, rows: int) -> Iterator[float]:
        """What each further row adds to a pass of so many: its own share, and at times a block's."""
        fixed, slope = self.coefficients()
        for row in count(rows):
            yield slope + fixed * (self._blocks(row + 1) - self._blocks(row))

    def full_blocks(self, rows: int, most: int) -> range:
        """Up to `most`, the numbers of further rows with which a pass of `rows` ends in a whole block."""
        return range(-rows % self._block, most + 1, self._block) if self._block else range(0)

    def coefficients(self) -> tuple[float, float]:
        """(fixed, slope)."""
        bb, br, rr, bs, rs = self._sums
        guessed = self._fixed * bb + self._slope * br
        slope = self._slope * (bs / guessed if guessed else 1.0)
        spread = rr - br * br / bb
        slope = max((rs - br * bs / bb + _STIFFNESS * slope) / (spread + _STIFFNESS), 0.0)
        return max((bs - slope * br) / bb, 0.0), slope

    def _blocks(self, rows: int) -> int:
        return -(-rows // self._block) if self._block else 1
