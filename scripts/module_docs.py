#!/usr/bin/env python3
"""Print every module of the program with the first paragraph of its docstring.

usage: python scripts/module_docs.py [WORD]    # with WORD: only modules whose name or text has it
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("offload", "triforce_cli")


def modules() -> Iterator[tuple[str, str]]:
    """(name as a path without suffix, first paragraph in one line), folder by folder. Empty files are left out; a
    module without a docstring has an empty text."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py"), key=lambda path: (path.parent, path.name)):
            if source := path.read_text(encoding="utf-8"):
                about = ast.get_docstring(ast.parse(source)) or ""
                name = path.relative_to(ROOT).with_suffix("").as_posix().removesuffix("/__init__")
                yield name, " ".join(about.split("\n\n")[0].split())


def main() -> None:
    word = sys.argv[1].lower() if len(sys.argv) > 1 else ""
    for name, about in modules():
        if word in f"{name} {about}".lower():
            print(f"{name}: {about}")


if __name__ == "__main__":
    main()
