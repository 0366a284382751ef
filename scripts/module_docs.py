#!/usr/bin/env python3
"""Write docs/modules.md: every module of the program with the first paragraph of its docstring.

usage: python scripts/module_docs.py
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "docs" / "modules.md"
HEAD = """# Modules
Written by `python scripts/module_docs.py` from the modules' docstrings. Which package may import which, and why the
parts are cut as they are: [design.md](design.md).
"""


def document() -> str:
    """The content of docs/modules.md."""
    return "\n".join([HEAD, "| module | |", "|---|---|", *_rows()]) + "\n"


def _rows() -> Iterator[str]:
    for package in ("offload", "triforce_cli"):
        for path in sorted((ROOT / package).rglob("*.py"), key=lambda path: (path.parent, path.name)):
            if about := ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))):
                name = path.relative_to(ROOT).with_suffix("").as_posix().removesuffix("/__init__")
                yield f"| {name} | {' '.join(about.split(chr(10) * 2)[0].split())} |"


if __name__ == "__main__":
    FILE.write_text(document(), encoding="utf-8")
