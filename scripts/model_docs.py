#!/usr/bin/env python3
"""Write the table of families in docs/models.md from the program itself.

usage: python scripts/model_docs.py
"""

from __future__ import annotations

from pathlib import Path

from offload.config.families import KNOWN

FILE = Path(__file__).resolve().parent.parent / "docs" / "models.md"
BEGIN, END = "<!-- families: written by scripts/model_docs.py -->\n", "<!-- end of families -->\n"


def families_table() -> str:
    """The families as a table of docs/models.md."""
    rows = [f"| `{each.name}` | {each.about} | {each.refuses or '-'} |" for each in KNOWN]
    return "\n".join(["| model_type | models | refused |", "|---|---|---|", *rows]) + "\n"


def document(text: str) -> str:
    """The text of docs/models.md with the current table of families."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{families_table()}{END}{after}"


if __name__ == "__main__":
    FILE.write_text(document(FILE.read_text(encoding="utf-8")), encoding="utf-8")
