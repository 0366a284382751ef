"""ms/token and acceptance against context, as PNG or SVG. matplotlib is an extra, imported here alone."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from offload.errors import TriforceError, UsageError
from triforce_cli.render.bench import NAMES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from offload.bench.comparison import Comparison

KINDS = (".png", ".svg")
SIZE = (7.0, 6.0)  # inches
DOTS_PER_INCH = 150


def check(file: Path) -> None:
    """Check before anything is measured that a plot can be drawn in `file`. Raises UsageError."""
    if file.suffix.lower() not in KINDS:
        raise UsageError(f"plot is {str(file)!r}, it must end in .png or .svg")
    if find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib, which is not installed: pip install matplotlib")
    folder = file.parent
    if file.is_dir() or not folder.is_dir() or not os.access(file if file.exists() else folder, os.W_OK):
        raise UsageError(f"plot is {str(file)!r}, which cannot be written; name a file in a folder that can be")


def draw(comparisons: Sequence[Comparison], file: Path) -> None:
    """Draw the plot, without a display. Raises TriforceError if `file` cannot be written."""
    from matplotlib.figure import Figure  # not pyplot, which looks for a display

    figure = Figure(SIZE, layout="constrained")
    times, share = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    _draw_times(times, comparisons)
    _draw_acceptance(share, comparisons)
    kind = file.suffix.lower().removeprefix(".")
    try:
        figure.savefig(file, format=kind, dpi=DOTS_PER_INCH, metadata={"Date": None} if kind == "svg" else None)
    except OSError as error:
        raise TriforceError(f"the plot cannot be written to {file}: {error.strerror}") from error


def _draw_times(axes: Axes, comparisons: Sequence[Comparison]) -> None:
    """Draw medians, with bars from minimum to maximum."""
    for way in comparisons[0].ways:
        spreads = [comparison.milliseconds(way) for comparison in comparisons]
        medians = [spread.median for spread in spreads]
        below = [spread.median - spread.least for spread in spreads]
        above = [spread.most - spread.median for spread in spreads]
        axes.errorbar(_contexts(comparisons), medians, [below, above], marker="o", capsize=3, label=NAMES[way])
    axes.set(ylabel="ms/token", ylim=(0, None))
    axes.legend()


def _draw_acceptance(axes: Axes, comparisons: Sequence[Comparison]) -> None:
    """Draw TriForce's acceptance at each context; contexts at which nothing was drafted have a gap."""
    contexts = _contexts(comparisons)
    shares = [math.nan if (share := comparison.acceptance) is None else share for comparison in comparisons]
    axes.plot(contexts, shares, marker="o", color="C1")  # TriForce's colour in the plot above
    axes.set(xlabel="context, tokens", ylabel="acceptance", ylim=(0, 1))
    axes.set_xscale("log", base=2)
    axes.set_xticks(contexts, [f"{context:,}" for context in contexts])


def _contexts(comparisons: Sequence[Comparison]) -> list[int]:
    return [comparison.plan.request.capacity for comparison in comparisons]
