"""Comparison of the measured times of plain decoding and of TriForce on one prompt. Nothing runs here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from offload.metrics import LevelStats, Spread, Stats

if TYPE_CHECKING:
    from offload.plan.planner import Plan

WAYS = PLAIN, TRIFORCE = "plain", "triforce"


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of one way. turn: a turn is one run of each way, back to back, with the same seed.
    milliseconds_per_token: of the tokens after the first."""

    way: str
    turn: int
    tokens: tuple[int, ...]
    milliseconds_per_token: float
    stats: Stats

    @property
    def target(self) -> LevelStats:
        return next(level for level in self.stats.levels if level.name == "target")


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The comparison on one prompt. prefill_rates: prompt tokens per second, measured once, with plain decoding. runs:
    each way in every turn. greedy: both ways have to write the same text. launches: kernels and copies of a pass of one
    row, by level; nothing on a CPU."""

    plan: Plan
    greedy: bool
    prefill_rates: dict[str, float]
    runs: tuple[Run, ...]
    launches: Mapping[str, int] = field(default_factory=dict)

    @property
    def predicted_milliseconds(self) -> dict[str, float]:
        """The predicted milliseconds per token by way."""
        predicted = self.plan.predicted
        return {PLAIN: 1000 * predicted.plain_seconds_per_token, TRIFORCE: 1000 * predicted.seconds_per_token}

    def of(self, way: str) -> list[Run]:
        """The runs of a way, ordered by turn."""
        return sorted((run for run in self.runs if run.way == way), key=lambda run: run.turn)

    def milliseconds(self, way: str) -> Spread:
        """The milliseconds per token of a way."""
        return Spread.of([run.milliseconds_per_token for run in self.of(way)])

    @property
    def ratio(self) -> Spread:
        """The time of plain decoding over TriForce's, turn by turn."""
        return Spread.of([plain.milliseconds_per_token / ours.milliseconds_per_token for plain, ours in self._turns()])

    @property
    def acceptance(self) -> float | None:
        """The acceptance at the target over all of TriForce's runs; None if nothing was drafted."""
        drafted = sum(level.drafted for level in self._targets())
        return sum(level.accepted for level in self._targets()) / drafted if drafted else None

    @property
    def tokens_per_pass(self) -> float:
        """Tokens per full pass over all of TriForce's runs."""
        rounds = sum(level.rounds for level in self._targets())
        return sum(level.accepted + level.rounds for level in self._targets()) / rounds

    @property
    def first_difference(self) -> int | None:
        """The first token, from 0, at which a text of TriForce differs from plain decoding's in the same turn; None if
        all are the same."""
        places = (first_difference(plain.tokens, ours.tokens) for plain, ours in self._turns())
        return min((place for place in places if place is not None), default=None)

    def _turns(self) -> Iterator[tuple[Run, Run]]:
        """Yield the runs of each turn, plain decoding's first."""
        return zip(self.of(PLAIN), self.of(TRIFORCE), strict=True)

    def _targets(self) -> Iterator[LevelStats]:
        return (run.target for run in self.of(TRIFORCE))


def first_difference(first: Sequence[int], second: Sequence[int]) -> int | None:
    """The first position, from 0, at which two texts differ; None if they are the same."""
    pairs = zip(first, second, strict=False)
    end = min(len(first), len(second)) if len(first) != len(second) else None
    return next((place for place, (a, b) in enumerate(pairs) if a != b), end)
