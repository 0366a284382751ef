"""The README's table and plot of results, from the files in benchmarks/results/.

usage: python benchmarks/figure.py [--plot docs/results.svg]

Prints the table as Markdown and draws milliseconds a token against the prompt's length, plain decoding against the
default: medians of the seeds, with the range behind them. Needs matplotlib. The background is transparent and the text
grey, for light and dark pages.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from report import Document, read

from offload.metrics import Spread

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PANELS = {
    "nothing offloaded": ("demo-on-chip",),
    "KV over 1 GB/s": ("demo-offloaded", "demo-offloaded-32k"),
}
COLORS = {"plain": "#d9822b", "default": "#2f81f7"}
LABELS = {"plain": "one token at a time", "default": "triforce"}
TEXT = "#808890"


@dataclass(frozen=True)
class Point:
    """Milliseconds per token at one prompt length; ratio of plain over default, seed by seed."""

    length: int
    plain: Spread
    default: Spread
    ratio: Spread


def points(files: Sequence[str]) -> list[Point]:
    runs = [run for name in files for run in read((RESULTS / f"{name}.jsonl").read_text(encoding="utf-8"))[1]]
    return [point(length, runs) for length in sorted({run["length"] for run in runs})]


def point(length: int, runs: Sequence[Document]) -> Point:
    plain, default = (
        [run["milliseconds_per_token"] for run in runs if (run["length"], run["setting"]) == (length, setting)]
        for setting in ("plain", "default")
    )
    ratios = [before / now for before, now in zip(plain, default, strict=True)]
    return Point(length, Spread.of(plain), Spread.of(default), Spread.of(ratios))


def table(panels: dict[str, list[Point]]) -> list[str]:
    """The table as Markdown: a row for each prompt length; for each panel plain, default and their ratio."""
    lines = ["| prompt | " + " | ".join(f"{name}: plain | triforce | ratio" for name in panels) + " |"]
    lines.append("|---" * (1 + 3 * len(panels)) + "|")
    for row in zip(*panels.values(), strict=True):
        cells = [f"{at.plain.median:.1f} | {at.default.median:.1f} | {at.ratio.median:.2f}x" for at in row]
        lines.append(f"| {row[0].length:,} | " + " | ".join(cells) + " |")
    return lines


def draw(panels: dict[str, list[Point]], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    style = dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color", "axes.edgecolor"), TEXT)
    fixed = {"svg.fonttype": "none", "svg.hashsalt": "results", "font.family": "sans-serif", "font.size": 10}
    with pyplot.rc_context({**style, **fixed}):
        figure, axes = pyplot.subplots(1, len(panels), figsize=(9, 3.4), layout="constrained")
        for axis, (title, found) in zip(axes, panels.items(), strict=True):
            lengths = [at.length for at in found]
            for name, color in COLORS.items():
                spreads: list[Spread] = [getattr(at, name) for at in found]
                axis.fill_between(
                    lengths, [s.least for s in spreads], [s.most for s in spreads], color=color, alpha=0.25, linewidth=0
                )
                axis.plot(lengths, [s.median for s in spreads], "o-", color=color, label=LABELS[name], markersize=4)
            most = max(at.plain.most for at in found)
            for at in found:
                offset = (0, -13 if at.default.median > 0.15 * most else 6)  # below the line if there is room
                axis.annotate(
                    f"{at.ratio.median:.1f}x", (at.length, at.default.median), offset, textcoords="offset points",
                    ha="center", color=COLORS["default"],
                )  # fmt: skip
            axis.set(title=title, xlabel="prompt, tokens", xscale="log", ylim=(0, None))
            axis.set_xticks(lengths, [f"{length:,}" for length in lengths])
            axis.xaxis.set_minor_locator(matplotlib.ticker.NullLocator())
            axis.spines[["top", "right"]].set_visible(False)
            axis.margins(x=0.1)
        axes[0].set_ylabel("ms a token")
        axes[0].legend(frameon=False)
        figure.savefig(path, transparent=True, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", type=Path, default=ROOT / "docs" / "results.svg")
    args = parser.parse_args()
    panels = {title: points(files) for title, files in PANELS.items()}
    draw(panels, args.plot)
    print("\n".join(table(panels)))


if __name__ == "__main__":
    main()
