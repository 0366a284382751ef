"""Numbers, sizes, paths and plans as short texts, shared by several commands. Pure functions."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from offload import units
from offload.units import size

if TYPE_CHECKING:
    from offload.plan.composition import Composition

# C0 without tab and line ends, C1, line separators, marks of a text's direction, halves of surrogate pairs.
_CONTROL = re.compile(r"\r(?!\n)|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_LINE_END = re.compile(r"[\t\r\n]")
NOTHING = "-"  # a number that does not exist in this run


def duration(seconds: float) -> str:
    """A duration: 0.05 s, 4.2 s, 41 s, 3 min 07 s, 1 h 02 min."""
    if seconds < 1:
        return f"{seconds:.2f} s"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def amount(count: float, unit: str) -> str:
    """A count of "bytes" or of "tokens"."""
    return size(count) if unit == "bytes" else f"{count:,.0f} {unit}"


def rate(count: float, unit: str, seconds: float) -> str:
    """A rate: 812 tokens/s, 0.31 tokens/s, 1.2 GB/s. `seconds` is above 0."""
    if unit == "bytes":
        return f"{size(count / seconds)}/s"
    return f"{significant(count / seconds)} {unit}/s"


def latency(seconds: float) -> str:
    """The seconds of a pass or a token: 19.0 ms, 1.78 s."""
    return f"{significant(1000 * seconds)} ms" if seconds < 1 else f"{significant(seconds)} s"


def gigabytes(count: float) -> str:
    """A size of 10^9 bytes: 25.1 GB. Divided by a link's GB/s it gives seconds."""
    return f"{significant(count / 1e9)} GB"


def significant(value: float | None) -> str:
    """A number with significant digits (units.py); "-" for None."""
    return NOTHING if value is None else units.significant(value)


def percent(done: float, total: float) -> int:
    """Percent, rounded down: 100 means done."""
    return int(100 * done / total) if total else 100


def pace(done: float, total: float, unit: str, seconds: float, *, first: float = 0, is_certain: bool = True) -> str:
    """A stage's progress, `seconds` after `first` of it was done: "of 32,768 tokens, 812 tokens/s, 23 s left". A total
    that is not certain is left out."""
    parts = [f"of {amount(total, unit)}"] * is_certain
    if done > first and seconds > 0:
        parts += [rate(done - first, unit, seconds), f"{duration((total - done) * seconds / (done - first))} left"]
    return ", ".join(parts)


def counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def path_text(path: Path) -> str:
    """A path as UTF-8; other bytes become question marks."""
    return str(path).encode("utf-8", "replace").decode("utf-8")


def visible(text: str) -> str:
    r"""`text` with control characters as in JSON (\u001b): text from a file or a model must not move the cursor or
    rename the window. Tabs and line ends stay, and so does the meaning of a JSON text."""
    return _CONTROL.sub(_escaped, text)


def line_text(text: str) -> str:
    r"""`text` on one line, for a name in a table or a message: control characters, tabs and line ends are escaped
    (\n)."""
    return _LINE_END.sub(_escaped, visible(text))


def _escaped(control: re.Match[str]) -> str:
    return json.dumps(control[0])[1:-1]


def indented(text: str, width: int) -> Iterator[str]:
    """Wrapped lines with an indent; paths are not broken."""
    indent = "    "
    yield from textwrap.wrap(
        text,
        max(width, 40),
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def stage_done(stage: str, total: float, unit: str, seconds: float, *, first: float = 0) -> str:
    """The last line of a stage that began after `first`: "prefill: 32,768 tokens in 40 s, 812 tokens/s"."""
    speed = f", {rate(total - first, unit, seconds)}" if seconds > 0 else ""
    return f"{stage}: {amount(total, unit)} in {duration(seconds)}{speed}"


def levels_of(composition: Composition) -> str:
    """The levels in order: "draft -> retrieval -> target, and lookups"."""
    return " -> ".join(composition.levels) + (", and lookups" if composition.lookup else "")


def lengths_of(composition: Composition) -> str:
    """The draft lengths, and the target's budget and bits."""
    if not composition.gamma:
        return "nothing drafted"
    parts = [f"gamma {_most(composition, 'target', composition.gamma)}"]
    if composition.draft_gamma:
        parts.append(f"draft_gamma {_most(composition, composition.inner, composition.draft_gamma)}")
    if composition.budget:
        parts.append(f"budget {composition.budget:,}, chunk {composition.chunk}")
    if composition.weight_bits < 16:
        parts.append(f"weights in {composition.weight_bits} bits")
    if composition.kv_bits < 16:
        parts.append(f"cache in {composition.kv_bits} bits")
    return ", ".join(parts)


def _most(composition: Composition, level: str | None, number: int) -> str:
    return f"up to {number}" if level in composition.adaptive else f"{number}"
