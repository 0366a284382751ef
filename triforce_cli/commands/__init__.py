"""One file per command. A command's function parses; what it returns does the work."""

from __future__ import annotations

from typing import Protocol


class Command(Protocol):
    """A command line, parsed and checked as far as that takes no model."""

    def run(self) -> None: ...
