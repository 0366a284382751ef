"""Comparison of measured times: of different ways of decoding one prompt, and of another program's settings. Nothing
runs here."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from offload.errors import TriforceError
from offload.metrics import LevelStats, Spread, Stats

if TYPE_CHECKING:
    from offload.plan.planner import Plan

WAYS = PLAIN, TRIFORCE, TRANSFORMERS = "plain", "triforce", "transformers"  # the last one is another program
TIE = 0.02  # relative difference of times that counts as equal; then the time to read the prompt decides

Setting = Mapping[str, str | int]


@dataclass(frozen=True, kw_only=True)
class Tried:
    """A short trial of another program's setting after `num_prompt_tokens`: seconds to the first token, including the
    whole prompt, and milliseconds per token after it; or the error that ended the trial."""

    setting: Setting
    num_prompt_tokens: int
    first_token_seconds: float | None = None
    milliseconds_per_token: float | None = None
    error: str | None = None

    @property
    def milliseconds(self) -> float:
        """Milliseconds per token; infinite if the setting did not run."""
        return math.inf if self.milliseconds_per_token is None else self.milliseconds_per_token


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of one way. turn: a turn is one run of every way, back to back, with the same seed.
    milliseconds_per_token: of the tokens after the first. stats: of this program's engine."""

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
    """The comparison of ways on one prompt. prefill_rates: prompt tokens per second by way, measured once; plain
    decoding and TriForce share one. runs: every way in every turn. greedy: all ways have to write the same text. tried:
    settings of the other program; the fastest was used. launches: kernels and copies of a pass of one row, by level;
    nothing on a CPU."""

    plan: Plan
    greedy: bool
    prefill_rates: dict[str, float]
    runs: tuple[Run, ...]
    tried: tuple[Tried, ...] = ()
    launches: Mapping[str, int] = field(default_factory=dict)

    @property
    def predicted_milliseconds(self) -> dict[str, float]:
        """The predicted milliseconds per token of this program's ways."""
        predicted = self.plan.predicted
        return {PLAIN: 1000 * predicted.plain_seconds_per_token, TRIFORCE: 1000 * predicted.seconds_per_token}

    @property
    def ways(self) -> list[str]:
        """The ways that ran."""
        ran = {run.way for run in self.runs}
        return [way for way in WAYS if way in ran]

    def of(self, way: str) -> list[Run]:
        """The runs of a way, ordered by turn."""
        return sorted((run for run in self.runs if run.way == way), key=lambda run: run.turn)

    def milliseconds(self, way: str) -> Spread:
        """The milliseconds per token of a way."""
        return Spread.of([run.milliseconds_per_token for run in self.of(way)])

    def ratio(self, slow: str, fast: str) -> Spread:
        """The time of `slow` over that of `fast`, turn by turn."""
        pairs = zip(self.of(slow), self.of(fast), strict=True)
        return Spread.of([one.milliseconds_per_token / other.milliseconds_per_token for one, other in pairs])

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

    def first_difference(self, way: str) -> int | None:
        """The first token, from 0, at which a text of `way` differs from plain decoding's in the same turn; None if all
        are the same."""
        pairs = zip(self.of(PLAIN), self.of(way), strict=True)
        found = [place for one, other in pairs if (place := first_difference(one.tokens, other.tokens)) is not None]
        return min(found, default=None)

    def _targets(self) -> Iterator[LevelStats]:
        return (run.target for run in self.of(TRIFORCE) if run.target is not None)


def first_difference(first: Sequence[int], second: Sequence[int]) -> int | None:
    """The first position, from 0, at which two texts differ; None if they are the same."""
    pairs = zip(first, second, strict=False)
    end = min(len(first), len(second)) if len(first) != len(second) else None
    return next((place for place, (a, b) in enumerate(pairs) if a != b), end)


def fastest(tried: Sequence[Tried]) -> Tried:
    """The fastest setting among trials with the longest prompt. Raises TriforceError if none ran."""
    ran = [trial for trial in tried if trial.error is None]
    if not ran:
        raise TriforceError(f"no setting ran; the first ended with: {tried[0].error}")
    longest = max(trial.num_prompt_tokens for trial in ran)
    level = [trial for trial in ran if trial.num_prompt_tokens == longest]
    most = (1 + TIE) * min(trial.milliseconds for trial in level)
    same = (trial for trial in level if trial.milliseconds <= most)
    return min(same, key=lambda trial: trial.first_token_seconds or 0.0)


def name_of(setting: Setting, beside: Setting | None = None) -> str:
    """The text of a setting, such as "flash attention off, cache f16"; only the differences from `beside` if that is
    given."""
    parts = {key: value for key, value in setting.items() if beside is None or beside.get(key) != value}
    return ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in parts.items())
