"""Measured times of different ways of decoding one prompt, and their ratios. Numbers only: nothing runs here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from offload.metrics import LevelStats, Spread, Stats

if TYPE_CHECKING:
    from offload.bench.setting import Tried
    from offload.plan.planner import Plan

WAYS = PLAIN, TRIFORCE, TRANSFORMERS, LLAMA_CPP = "plain", "triforce", "transformers", "llama.cpp"
OTHERS = (TRANSFORMERS, LLAMA_CPP)  # no part of this program


@dataclass(frozen=True, kw_only=True)
class Run:
    """One text, once. turn: runs of the same turn followed each other, and had the same seed. milliseconds_per_token:
    of the tokens after the first. stats: what our own engine counted."""

    way: str
    turn: int
    tokens: tuple[int, ...]
    milliseconds_per_token: float
    stats: Stats | None = None

    @property
    def target(self) -> LevelStats | None:
        levels = self.stats.levels if self.stats is not None else []
        return next((level for level in levels if level.name == "target"), None)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Of one prompt. prefill_rates: prompt tokens per second by way, each measured once; plain decoding and TriForce
    share theirs. runs: every way in every turn. greedy: all are to write the same text. tried: settings of the other
    program, of which it ran in the fastest."""

    plan: Plan
    greedy: bool
    prefill_rates: dict[str, float]
    runs: tuple[Run, ...]
    tried: tuple[Tried, ...] = ()

    @property
    def predicted_milliseconds(self) -> dict[str, float]:
        """Per token, of our own ways."""
        predicted = self.plan.predicted
        return {PLAIN: 1000 * predicted.plain_seconds_per_token, TRIFORCE: 1000 * predicted.seconds_per_token}

    @property
    def ways(self) -> list[str]:
        """Those that ran."""
        ran = {run.way for run in self.runs}
        return [way for way in WAYS if way in ran]

    def of(self, way: str) -> list[Run]:
        """By turn."""
        return sorted((run for run in self.runs if run.way == way), key=lambda run: run.turn)

    def milliseconds(self, way: str) -> Spread:
        """Per token."""
        return Spread.of([run.milliseconds_per_token for run in self.of(way)])

    def ratio(self, slow: str, fast: str) -> Spread:
        """The time of `slow` over that of `fast`, turn by turn."""
        pairs = zip(self.of(slow), self.of(fast), strict=True)
        return Spread.of([one.milliseconds_per_token / other.milliseconds_per_token for one, other in pairs])

    @property
    def acceptance(self) -> float | None:
        """Of what is drafted for the target in all of TriForce's runs; None where nothing is."""
        drafted = sum(level.drafted for level in self._targets())
        return sum(level.accepted for level in self._targets()) / drafted if drafted else None

    @property
    def tokens_per_pass(self) -> float:
        """That a full pass buys, over all of TriForce's runs."""
        rounds = sum(level.rounds for level in self._targets())
        return sum(level.accepted + level.rounds for level in self._targets()) / rounds

    def first_difference(self, way: str) -> int | None:
        """The first token, from 0, at which some text of `way` is not plain decoding's of the same turn; None: all are
        the same."""
        pairs = zip(self.of(PLAIN), self.of(way), strict=True)
        found = [place for one, other in pairs if (place := first_difference(one.tokens, other.tokens)) is not None]
        return min(found, default=None)

    def _targets(self) -> Iterator[LevelStats]:
        return (run.target for run in self.of(TRIFORCE) if run.target is not None)


def first_difference(first: Sequence[int], second: Sequence[int]) -> int | None:
    """The first place, from 0, at which two texts are not the same; None where they are."""
    pairs = zip(first, second, strict=False)
    end = min(len(first), len(second)) if len(first) != len(second) else None
    return next((place for place, (a, b) in enumerate(pairs) if a != b), end)
