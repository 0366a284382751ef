"""Running estimates that start from a guess, follow what is seen, and fade back to the guess where nothing is."""

from __future__ import annotations

from dataclasses import dataclass

_STIFFNESS = 2.0  # of a line's guessed proportion: as of one observation each at two n that lie 2 apart


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


class Line:
    """seconds = fixed + slope * n, by least squares over what was seen lately; both never below 0.

    Starts from the guess (fixed, slope). What is seen at one n alone scales both; only different n change their
    proportion, and more so the further they lie apart.
    """

    def __init__(self, fixed: float, slope: float, *, kept: float = 0.95) -> None:
        self._fixed, self._slope, self._kept = fixed, slope, kept
        self._sums = (1.0, 1.0, 1.0, fixed + slope, fixed + slope)  # of 1, n, n * n, y, n * y: the guess at n = 1

    def add(self, n: float, seconds: float) -> None:
        terms = (1.0, n, n * n, seconds, n * seconds)
        count, ns, squares, ys, products = (
            self._kept * total + term for total, term in zip(self._sums, terms, strict=True)
        )
        self._sums = (count, ns, squares, ys, products)

    def at(self, n: float) -> float:
        fixed, slope = self.coefficients()
        return fixed + slope * n

    @property
    def slope(self) -> float:
        return self.coefficients()[1]

    def coefficients(self) -> tuple[float, float]:
        """(fixed, slope)."""
        count, n, nn, y, ny = self._sums
        guessed = self._fixed * count + self._slope * n
        slope = self._slope * (y / guessed if guessed else 1.0)
        spread = nn - n * n / count
        slope = max((ny - n * y / count + _STIFFNESS * slope) / (spread + _STIFFNESS), 0.0)
        return max((y - slope * n) / count, 0.0), slope
