"""How far to draft, and by whom: what a level asks, and the answer that is the same in every round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from offload.decode.verify import Verdict

SURE_MATCH = 3  # the grade of a lookup that fixed lengths trust: 8 tokens and more


def grade_of(rows: Tensor) -> list[int]:
    """Grades of tokens drawn from the laws `rows` [n, V]: 0 to 10, by their largest probability."""
    grades: list[int] = (rows.amax(-1) * 10.0).int().clamp_(max=10).tolist()
    return grades


@dataclass(frozen=True)
class Outlook:
    """What a proposer could do now: at most `num_tokens` tokens (None: any number), of `grade` where it is known.

    expected: (tokens, seconds) of its next step, where more is known of it than of steps in general.
    """

    num_tokens: int | None = None
    grade: int | None = None
    expected: tuple[float, float] | None = None


@dataclass(frozen=True)
class Ask:
    """One step of the proposer at `index`."""

    index: int
    num_tokens: int


class Lookahead(Protocol):
    """One level's. Calls come in this order: start, then ask and drafted in turns, then verified; between rounds
    outlook, wants and readied."""

    def start(self, limit: int) -> None:
        """A round begins, with at most `limit` drafted tokens."""
        ...

    def ask(self, outlooks: Sequence[Outlook]) -> Ask | None:
        """The next step of drafting; None: verify now."""
        ...

    def drafted(self, index: int, grades: Sequence[int], seconds: float) -> None:
        """The proposer at `index` gave tokens of these grades."""
        ...

    def verified(self, verdict: Verdict, num_rows: int, seconds: float) -> None:
        """How it came out; the pass had `num_rows` real rows."""
        ...

    def outlook(self, outlooks: Sequence[Outlook]) -> Outlook:
        """What a round that began now would give to the level above."""
        ...

    def wants(self, index: int) -> bool:
        """Whether it pays to get the proposer at `index` ready for the next."""
        ...

    def readied(self, index: int, seconds: float | None) -> None:
        """It took so long; None: it is not ready, and must not be asked."""
        ...


class Fixed:
    """`gamma` tokens a round: by lookup where it is sure, by the last proposer where that always can."""

    def __init__(self, gamma: int) -> None:
        self.gamma = gamma
        self._left = 0

    def start(self, limit: int) -> None:
        self._left = min(self.gamma, limit)

    def ask(self, outlooks: Sequence[Outlook]) -> Ask | None:
        if self._left <= 0:
            return None
        always = [index for index, outlook in enumerate(outlooks) if outlook.num_tokens is None]
        for index, outlook in enumerate(outlooks):
            if outlook.num_tokens and (not always or (outlook.grade or 0) >= SURE_MATCH):
                return Ask(index, min(self._left, outlook.num_tokens))
        return Ask(always[-1], self._left) if always else None

    def drafted(self, index: int, grades: Sequence[int], seconds: float) -> None:
        self._left -= len(grades)

    def verified(self, verdict: Verdict, num_rows: int, seconds: float) -> None: ...

    def outlook(self, outlooks: Sequence[Outlook]) -> Outlook:
        return Outlook()

    def wants(self, index: int) -> bool:
        return True

    def readied(self, index: int, seconds: float | None) -> None: ...
