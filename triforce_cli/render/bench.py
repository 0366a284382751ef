"""Results of `triforce bench` as text and as JSON. Pure functions."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from offload.bench.comparison import PLAIN, TRIFORCE, WAYS
from triforce_cli.ground.text import duration, levels_of, significant

if TYPE_CHECKING:
    from offload.bench.comparison import Comparison
    from offload.bench.trial import Step, Trial
    from offload.metrics import Spread

NAMES = {PLAIN: "plain", TRIFORCE: "TriForce"}
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
    """The JSON of one context. ratios: plain decoding's time over TriForce's. first_difference_from_plain: the index of
    the token, from 0, or null if all are the same or the text is sampled."""
    return {
        "context": comparison.plan.request.capacity,
        "prefill_tokens_per_second": comparison.prefill_rates,
        "milliseconds_per_token": {way: asdict(comparison.milliseconds(way)) for way in WAYS},
        "predicted_milliseconds_per_token": comparison.predicted_milliseconds,
        "ratios": {PLAIN: asdict(comparison.ratio)},
        "acceptance": comparison.acceptance,
        "tokens_per_pass": comparison.tokens_per_pass,
        "first_difference_from_plain": {TRIFORCE: comparison.first_difference} if comparison.greedy else None,
        "launches": dict(comparison.launches),
        "plan": comparison.plan.as_dict(),
        "runs": [
            {
                "way": run.way,
                "turn": run.turn,
                "milliseconds_per_token": run.milliseconds_per_token,
                "tokens": list(run.tokens),
                "stats": run.stats.as_dict(),
            }
            for run in comparison.runs
        ],
    }


def step_line(trial: Trial, step: Step, seconds_left: float | None) -> str:
    """The current step: "8,192 tokens: plain, 2 of 5, 1 min 10 s left"."""
    turn = f"{step.turn} of {trial.repeats}" if step.turn else "warm-up"
    left = "" if seconds_left is None else f", {duration(seconds_left)} left"
    return f"{trial.plan.request.capacity:,} tokens: {NAMES[step.way]}, {turn}{left}"


def summary_line(comparison: Comparison) -> str:
    """The line of one context, printed when it is finished."""
    found = ", ".join(f"{NAMES[way]} {significant(comparison.milliseconds(way).median)}" for way in WAYS)
    return f"{comparison.plan.request.capacity:,} tokens: {found} ms/token"


def _table(comparisons: Sequence[Comparison]) -> Iterator[str]:
    for label, cell in _rows():
        cells = "".join(f"{cell(comparison):>{COLUMN_WIDTH}}" for comparison in comparisons)
        yield f"{label:<{LABEL_WIDTH}}{cells}".rstrip()


def _rows() -> Iterator[tuple[str, Cell]]:
    """Yield (label, function from a comparison to a cell) of each row."""
    yield "context", lambda found: f"{found.plan.request.capacity:,}"
    yield "prefill, tokens/s", lambda found: significant(found.prefill_rates.get(PLAIN))
    for way in WAYS:
        yield from _spread(f"{NAMES[way]}, ms/token", _milliseconds(way))
        yield "  predicted", _predicted(way)
    yield from _spread("plain / TriForce", lambda found: found.ratio, "x")
    yield "acceptance", lambda found: significant(found.acceptance)
    yield "tokens per full pass", lambda found: significant(found.tokens_per_pass)


def _predicted(way: str) -> Cell:
    return lambda found: significant(found.predicted_milliseconds[way])


def _milliseconds(way: str) -> Callable[[Comparison], Spread]:
    return lambda found: found.milliseconds(way)


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
    if first.greedy:
        yield _texts(comparisons)
    else:
        yield "Texts were sampled: each way drew its own, so ratios compare what was drawn, too (--temperature 0)."


def _texts(comparisons: Sequence[Comparison]) -> str:
    """Compare the texts, which must be equal."""
    places = [(comparison.plan.request.capacity, comparison.first_difference) for comparison in comparisons]
    differing = ", ".join(f"from token {place + 1:,} at {context:,}" for context, place in places if place is not None)
    if differing:
        return f"TRIFORCE WROTE OTHER TOKENS than plain decoding ({differing}): a fault, please report it."
    return "TriForce wrote the same tokens as plain decoding."
