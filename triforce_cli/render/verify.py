"""Results of `triforce verify` as text and as a JSON object. Pure functions."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from triforce_cli import __version__
from triforce_cli.ground.text import levels_of

if TYPE_CHECKING:
    from offload.bench.exactness import ExactnessReport
    from offload.decode.sampling import SamplingParams
    from offload.plan.planner import Plan

MOST_SHOWN = 20  # differences
WIDTH = 80


def report(found: ExactnessReport, plan: Plan, sampling: SamplingParams, piece: Callable[[int], str]) -> str:
    """The report, at most 80 columns wide. piece: a token as text."""
    return "".join(f"{line}\n" for line in _lines(found, plan, sampling, piece))


def document(found: ExactnessReport, plan: Plan, sampling: SamplingParams) -> dict[str, Any]:
    """The results as JSON. holds: nothing differs; inexact and intolerable: the tokens that differ."""
    return {
        "holds": found.holds,
        **asdict(found),
        "inexact": [position.index for position in found.inexact],
        "intolerable": [position.index for position in found.intolerable],
        "sampling": asdict(sampling),
        "plan": plan.as_dict(),
        "version": __version__,
    }


def failure(found: ExactnessReport) -> str:
    """The error message for a text that is not exact."""
    parts = []
    if found.inexact:
        parts.append(f"{len(found.inexact)} of {len(found.replayed)} tokens are not what plain decoding gives")
    if found.intolerable:
        most = max(position.difference for position in found.intolerable)
        parts.append(f"recomputed logits differ by up to {most:.2g} standard deviations (at most {found.tolerance:g})")
    return (
        f"{', and '.join(parts)}; run it again: differences that come and go are the machine's (memory, overclocking), "
        "those that stay are a fault of triforce (add --json and --log-file FILE to a report)"
    )


def _lines(found: ExactnessReport, plan: Plan, sampling: SamplingParams, piece: Callable[[int], str]) -> Iterator[str]:
    count, replayed, recomputed = len(found.tokens), found.replayed, found.recomputed
    levels = levels_of(plan.composition)
    yield f"{count:,} tokens after {found.prompt_tokens:,}, {plan.request.dtype} on {plan.request.device}: {levels}"
    likeliest = "the likeliest" if sampling.temperature == 0 else "allowed by the distribution"
    yield f"replayed one by one      {sum(p.possible for p in replayed):>6,} of {count:,} {likeliest}"
    yield f"{'':<25}{sum(p.same_bits for p in replayed):>6,} of {count:,} drawn from the same bits"
    if recomputed:
        most = max(position.difference for position in recomputed)
        tolerable = f"{len(recomputed) - len(found.intolerable):>6,} of {len(recomputed):,}"
        yield f"recomputed by a prefill  {tolerable} within {found.tolerance:g} standard deviations"
        same = sum(position.best == replayed[position.index].best for position in recomputed)
        yield f"{'':<25}{same:>6,} of {len(recomputed):,} with the same likeliest token"
        yield f"{'largest difference':<25}{most:>6.2g} standard deviations"
    yield from _differences(found, piece)
    yield "verified" if found.holds else "DIFFERENT"


def _differences(found: ExactnessReport, piece: Callable[[int], str]) -> Iterator[str]:
    rows = [
        (p.index, p.token, p.best, "" if p.same_bits else f"logits differ by {p.difference:.2g}", p.margin)
        for p in found.inexact
    ]
    rows += [
        (p.index, p.token, p.best, f"recomputed: {p.difference:.2g} standard deviations", p.margin)
        for p in found.intolerable
    ]
    for index, token, best, what, margin in rows[:MOST_SHOWN]:
        line = f"  at {index}: {piece(token)!r}, plain {piece(best)!r} by a margin of {margin:.2g}; {what}".rstrip("; ")
        yield from textwrap.wrap(line, WIDTH, subsequent_indent="    ")
    if len(rows) > MOST_SHOWN:
        yield f"  and {len(rows) - MOST_SHOWN:,} more"
