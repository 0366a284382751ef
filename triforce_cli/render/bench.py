"""Results of `triforce bench` as text and as JSON. Pure functions."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from offload.bench.comparison import PLAIN, TRANSFORMERS, TRIFORCE, fastest, name_of
from triforce_cli.ground.text import duration, levels_of, significant

if TYPE_CHECKING:
    from offload.bench.comparison import Comparison, Setting, Tried
    from offload.bench.trial import Step, Trial
    from offload.metrics import Spread

NAMES = {PLAIN: "plain", TRIFORCE: "TriForce", TRANSFORMERS: "transformers"}
LABEL_WIDTH, COLUMN_WIDTH = 24, 13  # characters
MIN_WIDTH, MAX_WIDTH = 40, 100  # columns

Cell = Callable[["Comparison"], str]


def report(comparisons: Sequence[Comparison], *, width: int) -> str:
    """A table with a column for each context, split into as many parts as `width` needs, and remarks on it."""
    width = min(max(width, MIN_WIDTH), MAX_WIDTH)
    count = (width - LABEL_WIDTH) // COLUMN_WIDTH
    parts = [comparisons[first : first + count] for first in range(0, len(comparisons), count)]
    tables = ["\n".join(_table(part)) for part in parts]
    remarks = [textwrap.fill(line, width) for line in _remarks(comparisons)]
    return "\n\n".join([*tables, "\n".join(remarks)]) + "\n"


def document(comparison: Comparison) -> dict[str, Any]:
    """The JSON of one context. ratios: each way's time over TriForce's. first_difference_from_plain: the index of the
    token, from 0, or null if all are the same or the text is sampled. other: the other program's setting and all those
    tried, or null."""
    others = [way for way in comparison.ways if way != TRIFORCE]
    return {
        "context": comparison.plan.request.capacity,
        "prefill_tokens_per_second": comparison.prefill_rates,
        "milliseconds_per_token": {way: asdict(comparison.milliseconds(way)) for way in comparison.ways},
        "predicted_milliseconds_per_token": comparison.predicted_milliseconds,
        "ratios": {way: asdict(comparison.ratio(way, TRIFORCE)) for way in others},
        "acceptance": comparison.acceptance,
        "tokens_per_pass": comparison.tokens_per_pass,
        "first_difference_from_plain": _differences(comparison) if comparison.greedy else None,
        "other": _other(comparison.tried),
        "launches": dict(comparison.launches),
        "plan": comparison.plan.as_dict(),
        "runs": [
            {
                "way": run.way,
                "turn": run.turn,
                "milliseconds_per_token": run.milliseconds_per_token,
                "tokens": list(run.tokens),
                "stats": run.stats.as_dict() if run.stats else None,
            }
            for run in comparison.runs
        ],
    }


def _other(tried: Sequence[Tried]) -> dict[str, Any] | None:
    if not tried:
        return None
    return {"setting": dict(fastest(tried).setting), "tried": [asdict(trial) for trial in tried]}


def _differences(comparison: Comparison) -> dict[str, int | None]:
    return {way: comparison.first_difference(way) for way in comparison.ways if way != PLAIN}


def step_line(trial: Trial, step: Step, seconds_left: float | None) -> str:
    """The current step: "8,192 tokens: plain, 2 of 5, 1 min 10 s left"."""
    turn = f"{step.turn} of {trial.repeats}" if step.turn else "warm-up"
    left = "" if seconds_left is None else f", {duration(seconds_left)} left"
    return f"{trial.plan.request.capacity:,} tokens: {NAMES[step.way]}, {turn}{left}"


def trial_line(trial: Trial, program: str, tried: Setting) -> str:
    """The setting that is being tried: "8,192 tokens: trying transformers with attention eager" """
    return f"{trial.plan.request.capacity:,} tokens: trying {program} with {name_of(tried)}"


def summary_line(comparison: Comparison) -> str:
    """The line of one context, printed when it is finished."""
    found = ", ".join(f"{NAMES[way]} {significant(comparison.milliseconds(way).median)}" for way in comparison.ways)
    return f"{comparison.plan.request.capacity:,} tokens: {found} ms/token"


def _table(comparisons: Sequence[Comparison]) -> Iterator[str]:
    for label, cell in _rows(comparisons[0].ways):
        cells = "".join(f"{cell(comparison):>{COLUMN_WIDTH}}" for comparison in comparisons)
        yield f"{label:<{LABEL_WIDTH}}{cells}".rstrip()


def _rows(ways: Sequence[str]) -> Iterator[tuple[str, Cell]]:
    """Yield (label, function from a comparison to a cell) of each row."""
    yield "context", lambda found: f"{found.plan.request.capacity:,}"
    yield "prefill, tokens/s", lambda found: significant(found.prefill_rates.get(PLAIN))
    if TRANSFORMERS in ways:
        yield f"  {NAMES[TRANSFORMERS]}", lambda found: significant(found.prefill_rates.get(TRANSFORMERS))
    for way in ways:
        yield from _spread(f"{NAMES[way]}, ms/token", _milliseconds(way))
        if way != TRANSFORMERS:
            yield "  predicted", _predicted(way)
    for way in (name for name in ways if name != TRIFORCE):
        yield from _spread(f"{NAMES[way]} / TriForce", _ratio(way), "x")
    yield "acceptance", lambda found: significant(found.acceptance)
    yield "tokens per full pass", lambda found: significant(found.tokens_per_pass)


def _predicted(way: str) -> Cell:
    return lambda found: significant(found.predicted_milliseconds[way])


def _milliseconds(way: str) -> Callable[[Comparison], Spread]:
    return lambda found: found.milliseconds(way)


def _ratio(way: str) -> Callable[[Comparison], Spread]:
    return lambda found: found.ratio(way, TRIFORCE)


def _spread(label: str, of: Callable[[Comparison], Spread], unit: str = "") -> Iterator[tuple[str, Cell]]:
    """Yield two lines: the median, and below it minimum and maximum."""
    yield label, lambda found: significant(of(found).median) + unit
    yield "", lambda found: f"{significant(of(found).least)}-{significant(of(found).most)}"


def _remarks(comparisons: Sequence[Comparison]) -> Iterator[str]:
    first = comparisons[0]
    request, offload, turns = first.plan.request, first.plan.placement.offload, len(first.of(PLAIN))
    moved = f"{' and '.join(offload)} offloaded" if offload else "nothing offloaded"
    yield f"{request.dtype} on {request.device} ({request.device_name}), {moved}; {request.max_tokens:,} new tokens."
    yield (
        f"Medians of {turns} runs{', and least to most' if turns > 1 else ''}; ratios are of runs of the same turn. "
        "Prefill was measured once."
    )
    if launches := comparisons[-1].launches:
        yield f"Kernels of a pass of one row: {', '.join(f'{name} {number:,}' for name, number in launches.items())}."
    for comparison in comparisons:
        composition = comparison.plan.composition
        if composition.levels == ("target",):
            how = f"drafts come from {levels_of(composition)}" if composition.gamma else "nothing is drafted"
            yield f"At {comparison.plan.request.capacity:,} tokens {how}: the plan sees nothing to gain from more."
    for comparison in comparisons:
        yield from _settings(comparison)
    if first.greedy:
        yield from (line for way in first.ways if way != PLAIN for line in _texts(comparisons, way))
    else:
        yield "Texts were sampled: each way drew its own, so ratios compare what was drawn, too (--temperature 0)."


def _settings(comparison: Comparison) -> Iterator[str]:
    """Yield the lines on the other program's setting, and the times of the settings not chosen, so that a reader can
    check the choice."""
    if not comparison.tried:
        return
    best, name = fastest(comparison.tried), NAMES[TRANSFORMERS]
    yield f"At {comparison.plan.request.capacity:,} tokens {name} ran with {name_of(best.setting)}."
    for length in dict.fromkeys(trial.num_prompt_tokens for trial in comparison.tried):
        level = [trial for trial in comparison.tried if trial.num_prompt_tokens == length]
        yield f"Tried after {length:,} tokens, ms/token and seconds to the first:"
        yield from (f"{_took(trial)}  {name_of(trial.setting, best.setting) or 'this setting'}" for trial in level)


def _took(trial: Tried) -> str:
    """Two columns: the times of a tried setting."""
    if trial.error is not None:
        return f"{'failed':>16}"
    return f"{significant(trial.milliseconds_per_token):>8}{significant(trial.first_token_seconds):>8}"


def _texts(comparisons: Sequence[Comparison], way: str) -> Iterator[str]:
    """Compare the texts: TriForce's must be equal, another program's may differ by rounding."""
    places = [(comparison.plan.request.capacity, comparison.first_difference(way)) for comparison in comparisons]
    differing = ", ".join(f"from token {place + 1:,} at {context:,}" for context, place in places if place is not None)
    if not differing:
        yield f"{NAMES[way]} wrote the same tokens as plain decoding."
    elif way == TRIFORCE:
        yield f"TRIFORCE WROTE OTHER TOKENS than plain decoding ({differing}): a fault, please report it."
    else:
        yield f"{NAMES[way]} wrote other tokens ({differing}): it rounds otherwise."
