"""The prefix store as a table and as a JSON object. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload.plan.options import PAGE_TOKENS
from offload.units import size
from triforce_cli import __version__
from triforce_cli.render.sessions import moment, timestamp
from triforce_cli.render.text import NOTHING, line_text, path_text

if TYPE_CHECKING:
    from offload.session.store_files import Summary


def table(found: Sequence[Summary]) -> str:
    """One line for each model and dtype, and for each change of what its numbers depend on."""
    rows = [("tokens", "size", "last used", "dtype", "model"), *map(_cells, found)]
    return "".join(f"{row[0]:>9}  {row[1]:>7}  {row[2]:<16}  {row[3]:<5}  {row[4]}\n" for row in rows)


def document(folder: Path, found: Sequence[Summary]) -> dict[str, Any]:
    """The JSON of `store show`. num_tokens: in whole pages; bytes: of their files."""
    return {
        "folder": path_text(folder),
        "bytes": sum(each.nbytes for each in found),
        "kept": [
            {
                "model": each.model_name,
                "dtype": each.dtype,
                "num_tokens": each.num_pages * PAGE_TOKENS,
                "bytes": each.nbytes,
                "used": timestamp(each.used),
            }
            for each in found
        ],
        "version": __version__,
    }


def footnote(folder: Path, found: Sequence[Summary]) -> str:
    return f"{size(sum(each.nbytes for each in found))}, in {path_text(folder)}; 'triforce store clear' removes it"


def _cells(each: Summary) -> tuple[str, ...]:
    tokens = f"{each.num_pages * PAGE_TOKENS:,}"
    return tokens, size(each.nbytes), moment(each.used), each.dtype, line_text(each.model_name) or NOTHING
