"""The prefix store as a table and as a JSON object. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload.plan.options import PAGE_TOKENS
from offload.units import size
from triforce_cli import __version__
from triforce_cli.ground.text import NOTHING, line_text, path_text
from triforce_cli.render.sessions import moment, named, timestamp

if TYPE_CHECKING:
    from offload.session.store_files import Summary


def table(found: Sequence[Summary]) -> str:
    """One line for each model and dtype, and for each change of what its numbers depend on; below it the documents."""
    lines = [_line("tokens", "size", "last used", "dtype", "model")]
    for each in found:
        lines.append(_line(*_cells(each)))
        lines += [f"{'':>20}of {line_text(named(each.documents))}"] * bool(each.documents)
    return "".join(f"{line}\n" for line in lines)


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
                "documents": list(each.documents),
                "used": timestamp(each.used),
            }
            for each in found
        ],
        "version": __version__,
    }


def footnote(folder: Path, found: Sequence[Summary]) -> str:
    return f"{size(sum(each.nbytes for each in found))}, in {path_text(folder)}; 'triforce store clear' removes it"


def _line(*cells: str) -> str:
    tokens, size, used, dtype, model = cells
    return f"{tokens:>9}  {size:>7}  {used:<16}  {dtype:<5}  {model}"


def _cells(each: Summary) -> tuple[str, ...]:
    tokens = f"{each.num_pages * PAGE_TOKENS:,}"
    return tokens, size(each.nbytes), moment(each.used), each.dtype, line_text(each.model_name) or NOTHING
