"""Another program to measure against, and the search for its fastest setting, which every comparison uses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from offload.bench.comparison import Setting, Tried, fastest
from offload.bench.trial import Other, milliseconds_after_first
from offload.decode.sampling import SamplingParams
from offload.errors import TriforceError

GREEDY = SamplingParams(temperature=0.0)
TRIAL_TOKENS = 24
TRIALS = 2  # per setting, after one prefill of the prompt; the faster one counts
SHORT_PROMPT = 2048  # tokens of the prompt with which every setting is tried
FINALIST = 1.25  # times the fastest with the short prompt: settings within it are tried with the whole prompt, too


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


@contextmanager
def at_its_best(
    program: Program, prompt: Sequence[int], *, context: int, on_trial: Callable[[Setting], None]
) -> Iterator[tuple[Other, list[Tried]]]:
    """The program in its fastest setting for `prompt`, which it has not read yet, and all trials. context: tokens of
    prompt and output. Raises TriforceError."""
    tried = find_setting(program, prompt, on_trial=on_trial)
    with program.start(fastest(tried).setting, context) as other:
        yield other, tried


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
