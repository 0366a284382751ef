"""Settings of another program: what was tried, and which is the fastest. Numbers only: nothing runs here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from offload.errors import TriforceError

Setting = Mapping[str, str | int]
TIE = 0.02  # shares of a time that count as the same: the reading of the prompt decides then


@dataclass(frozen=True, kw_only=True)
class Tried:
    """A short trial of a setting after `num_prompt_tokens`: seconds to the first token, with the whole prompt to read,
    and milliseconds a token after it; or the error that it ended with."""

    setting: Setting
    num_prompt_tokens: int
    first_token_seconds: float | None = None
    milliseconds_per_token: float | None = None
    error: str | None = None

    @property
    def milliseconds(self) -> float:
        """A token; infinitely many where it did not run."""
        return math.inf if self.milliseconds_per_token is None else self.milliseconds_per_token


def fastest(tried: Sequence[Tried]) -> Tried:
    """Of those after the longest prompt. Raises TriforceError where none ran."""
    ran = [trial for trial in tried if trial.error is None]
    if not ran:
        raise TriforceError(f"no setting ran; the first ended with: {tried[0].error}")
    longest = max(trial.num_prompt_tokens for trial in ran)
    level = [trial for trial in ran if trial.num_prompt_tokens == longest]
    most = (1 + TIE) * min(trial.milliseconds for trial in level)
    same = (trial for trial in level if trial.milliseconds <= most)
    return min(same, key=lambda trial: trial.first_token_seconds or 0.0)


def name_of(setting: Setting, beside: Setting | None = None) -> str:
    """ "flash attention off, cache f16"; of what differs from `beside`, if that is given."""
    parts = {key: value for key, value in setting.items() if beside is None or beside.get(key) != value}
    return ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in parts.items())
