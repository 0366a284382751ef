#!/usr/bin/env python3
"""Print every module of the program with the first paragraph of its docstring.

usage: python scripts/module_docs.py [WORD]    # with WORD: only modules whose name or text has it
       python scripts/module_docs.py --check   # print docstrings that name no thing, and exit with 1 if there are any
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("offload", "triforce_cli")
_OPENING = re.compile(r"(those|these|what|of|the same|they|it|its|whose|whom|where|their)\b(?!-)", re.IGNORECASE)
_REFERENCE = re.compile(r"See `[^`]+`\.?")
_FIRST_WORDS = 6


class Fault(NamedTuple):
    """A docstring whose first sentence does not name the thing. name: of the definition, "module" for the module's."""

    line: int
    name: str
    first_words: str


def sources() -> Iterator[tuple[str, str]]:
    """(path, text) of each module, folder by folder. Empty files are left out."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py"), key=lambda path: (path.parent, path.name)):
            if source := path.read_text(encoding="utf-8"):
                yield path.relative_to(ROOT).as_posix(), source


@cache
def parsed(source: str) -> ast.Module:
    """The tree of a module, read once."""
    return ast.parse(source)


def modules() -> Iterator[tuple[str, str]]:
    """(name as a path without suffix, first paragraph in one line). A module without a docstring has an empty text."""
    for path, source in sources():
        about = ast.get_docstring(parsed(source)) or ""
        yield path.removesuffix(".py").removesuffix("/__init__"), " ".join(about.split("\n\n")[0].split())


def faults(source: str) -> Iterator[Fault]:
    """The docstrings of a module's text that begin with a pronoun or another word that names no thing, or that only
    refer to another docstring."""
    yield from _faults(parsed(source), "")


def _faults(node: ast.AST, within: str) -> Iterator[Fault]:
    name = within
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        name = "" if isinstance(node, ast.Module) else f"{within}.{node.name}".removeprefix(".")
        text = ast.get_docstring(node) or ""
        if _OPENING.match(text) or _REFERENCE.fullmatch(text):
            yield Fault(node.body[0].lineno, name or "module", " ".join(text.split()[:_FIRST_WORDS]))
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):  # in which nothing is defined that has a docstring
            continue
        yield from _faults(child, name)


def main() -> int:
    if "--check" in sys.argv[1:]:
        found = [(path, fault) for path, source in sources() for fault in faults(source)]
        for path, fault in found:
            print(f"{path}:{fault.line}: {fault.name}: {fault.first_words}")
        return int(bool(found))
    word = sys.argv[1].lower() if len(sys.argv) > 1 else ""
    for name, about in modules():
        if word in f"{name} {about}".lower():
            print(f"{name}: {about}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
