"""One module per command. A command's function parses; the object that it returns does the work."""

from __future__ import annotations

from typing import Protocol


class Command(Protocol):
    """A command line, parsed, and checked as far as possible without a model."""

    def run(self) -> None: ...
