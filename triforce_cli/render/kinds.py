"""The kinds of encoding that a model's matrices are stored in, as text and as JSON. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload.formats.encodings import ENCODINGS
from offload.units import size
from triforce_cli import __version__
from triforce_cli.ground.text import line_text, path_text, significant

if TYPE_CHECKING:
    from offload.config.kinds import Kind

_MARK = "*"  # behind a kind that is unpacked


def table(path: Path, kinds: Sequence[Kind]) -> str:
    """The model's path, and a line for each kind."""
    total = sum(kind.nbytes for kind in kinds)
    rows = [("kind", "tensors", "bytes", "share", "bits", "here"), *(_cells(kind, total) for kind in kinds)]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    lines = [f"{line_text(path_text(path))}: {size(total)} of matrices"]
    for name, *numbers, held in rows:
        cells = [name.ljust(widths[0]), *(cell.rjust(wide) for cell, wide in zip(numbers, widths[1:], strict=True))]
        lines.append("  ".join([*cells, held]))
    return "\n".join(lines) + "\n"


def footnote(kinds: Sequence[Kind]) -> str:
    """The bytes that all matrices take in memory, where some are unpacked; otherwise ""."""
    if not any(kind.unpacked for kind in kinds):
        return ""
    return f"in memory: {size(sum(kind.held_bytes for kind in kinds))}, with what is unpacked to 16 bits"


def document(path: Path, kinds: Sequence[Kind]) -> dict[str, Any]:
    """The JSON of `models show`."""
    return {
        "model": path_text(path),
        "bytes": sum(kind.nbytes for kind in kinds),
        "held_bytes": sum(kind.held_bytes for kind in kinds),
        "kinds": documents(kinds),
        "version": __version__,
    }


def documents(kinds: Sequence[Kind]) -> list[dict[str, Any]]:
    """The kinds as JSON. held_bytes: in memory, of those that are unpacked in 16 bits."""
    return [
        {
            "kind": kind.name,
            "tensors": kind.num_tensors,
            "numbers": kind.num_numbers,
            "bytes": kind.nbytes,
            "bits": kind.bits,
            "unpacked": kind.unpacked,
            "held_bytes": kind.held_bytes,
        }
        for kind in kinds
    ]


def shares(kinds: Sequence[Kind], width: int) -> str:
    """The kinds with their percent of the bytes, as many as have room: "Q4_K 81, Q6_K 19"."""
    total = sum(kind.nbytes for kind in kinds)
    found = ""
    for number, kind in enumerate(kinds):
        piece = f"{', ' * bool(number)}{kind.name}{_MARK * kind.unpacked} {_percent(kind.nbytes, total)}"
        more = ", ..." if number < len(kinds) - 1 else ""
        if number and len(found) + len(piece) + len(more) > width:
            return f"{found}, ..."
        found += piece
    return found


def _cells(kind: Kind, total: int) -> tuple[str, ...]:
    held = "as stored" if kind.name in ENCODINGS else "plain numbers"
    held = f"unpacked to {size(kind.held_bytes)}" if kind.unpacked else held
    share = f"{_percent(kind.nbytes, total)} %"
    return (kind.name, f"{kind.num_tensors:,}", size(kind.nbytes), share, significant(kind.bits), held)


def _percent(part: int, total: int) -> str:
    """A share in percent, "<1" for a small one."""
    percent = 100 * part / total if total else 0
    return f"{percent:.0f}" if percent >= 1 or not part else "<1"
