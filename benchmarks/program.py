"""Another program to measure against, and the search for its fastest setting, which every comparison uses."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from offload.decode.sampling import SamplingParams
from offload.errors import TriforceError

GREEDY = SamplingParams(temperature=0.0)
TRIAL_TOKENS = 24
TRIALS = 2  # per setting, after one prefill of the prompt; the faster one counts
SHORT_PROMPT = 2048  # tokens of the prompt with which every setting is tried
FINALIST = 1.25  # times the fastest with the short prompt: settings within it are tried with the whole prompt, too
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


class Other(Protocol):
    """A program to measure against, such as transformers (`Reference`)."""

    def generate(
        self, prompt: Sequence[int], sampling: SamplingParams, *, max_tokens: int, end_tokens: Collection[int]
    ) -> tuple[list[int], list[float]]:
        """Generate a text -> (tokens, seconds from the start at which each was known). A prompt is prefilled once, when
        it is new."""
        ...


@dataclass(frozen=True, kw_only=True)
class Program:
    """A program to compare with. choices: values of each part of a setting; the first one is tried first. by_length:
    parts whose cost grows with the prompt. start: starts it with a setting and a context size in tokens."""

    name: str
    choices: Mapping[str, Sequence[str | int]]
    by_length: frozenset[str]
    start: Callable[[Setting, int], AbstractContextManager[Other]]


def find_setting(program: Program, prompt: Sequence[int], *, on_trial: Callable[[Setting], None]) -> list[Tried]:
    """All trials of a search; `fastest` picks the setting to use. Part by part each value is tried with the best other
    parts so far, on a short beginning of the prompt. If that is not the whole prompt, settings that were not far behind
    are tried on all of it. Raises TriforceError if the program does not run."""

    def attempt(setting: Setting, num_tokens: int) -> Tried:
        on_trial(setting)
        return _try(program, setting, prompt[:num_tokens])

    short = min(len(prompt), SHORT_PROMPT)
    tried = [attempt({part: values[0] for part, values in program.choices.items()}, short)]
    for part, values in program.choices.items():
        best = dict(fastest(tried).setting)
        tried += [attempt(best | {part: value}, short) for value in values[1:]]
    if short < len(prompt):
        tried += [attempt(setting, len(prompt)) for setting in _finalists(program, tried)]
    return tried


def _try(program: Program, setting: Setting, prompt: Sequence[int]) -> Tried:
    seconds: list[list[float]] = []
    try:
        with program.start(setting, len(prompt) + TRIAL_TOKENS) as other:
            for _ in range(TRIALS):
                seconds.append(other.generate(prompt, GREEDY, max_tokens=TRIAL_TOKENS, end_tokens=())[1])
    except TriforceError as error:
        return Tried(setting=setting, num_prompt_tokens=len(prompt), error=str(error))
    times = [milliseconds for run in seconds if (milliseconds := milliseconds_after_first(run)) is not None]
    if not times:
        return Tried(setting=setting, num_prompt_tokens=len(prompt), error="its text was too short to be timed")
    return Tried(
        setting=setting,
        num_prompt_tokens=len(prompt),
        first_token_seconds=seconds[0][0],
        milliseconds_per_token=min(times),
    )


def _finalists(program: Program, tried: Sequence[Tried]) -> list[Setting]:
    """The settings to try with the whole prompt: the best one, and its variants with the length-dependent parts of each
    trial that was not far behind."""
    best = fastest(tried)
    found = [dict(best.setting)]
    for trial in tried:
        setting = found[0] | {part: trial.setting[part] for part in program.by_length}
        if trial.milliseconds <= FINALIST * best.milliseconds and setting not in found:
            found.append(setting)
    return [*found]


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


def name_of(setting: Setting) -> str:
    """The text of a setting, such as "flash attention off, cache f16"."""
    return ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in setting.items())


def milliseconds_after_first(moments: Sequence[float]) -> float | None:
    """Milliseconds per token after the first round's tokens; tokens of one round arrive together. None if all arrived
    with the first."""
    later = [moment for moment in moments if moment > moments[0]]
    return 1000 * (moments[-1] - moments[0]) / len(later) if later else None
