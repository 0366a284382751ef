"""A long real text that is on every machine: sources of Python's standard library."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from offload.errors import UsageError

MODULES = ("argparse", "typing", "inspect", "doctest", "tarfile", "pathlib", "subprocess", "ast", "configparser")
DESCRIPTION = "sources of Python's standard library"


def library_text() -> str:
    """About 700,000 characters, the same for one version of Python. Raises UsageError where it came without sources."""
    return "\n\n".join(_source(name) for name in MODULES)


def _source(module: str) -> str:
    found = find_spec(module)
    file = Path(found.origin) if found is not None and found.origin else None
    if file is None or file.suffix != ".py" or not file.is_file():
        raise UsageError(f"this Python has no source of its module {module} to make a prompt of; give --prompt-file")
    return file.read_text(encoding="utf-8")
