"""The loop of a server's main thread: it loads the model of the next requests, and answers them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import psutil

from offload.engine.scores import give_memory_back
from offload.errors import TriforceError
from offload.units import size
from triforce_cli.serve.catalogue import Catalogue
from triforce_cli.serve.scheduler import Scheduler, failed, stopping
from triforce_cli.serve.served import Loader, Served
from triforce_cli.serve.turns import Turns


@dataclass(frozen=True)
class Loop:
    """Answers requests model by model, until the server is to stop. note: takes lines for the log. begin: begins to
    take requests, once the first model is loaded."""

    catalogue: Catalogue
    loader: Loader
    turns: Turns[Served]
    scheduler: Scheduler
    note: Callable[[str], None]
    begin: Callable[[Served], None]

    def run(self) -> None:
        """Raises the errors of loading the first model, and those that end the server."""
        name: str | None = self.catalogue.names[0]
        try:
            while name is not None:
                self._answer(name)
                give_memory_back()
                if not self.scheduler.is_stopping:
                    self.note(f"{name} is unloaded: {_resident()} of memory in use")
                name = self._next()
        finally:
            self.turns.close(stopping())

    def _next(self) -> str | None:
        """The name of the next model, once a request needs one; None once the server is to stop."""
        name = None
        while name is None and not self.scheduler.is_stopping:
            name = self.turns.next()
        return None if self.scheduler.is_stopping else name

    def _answer(self, name: str) -> None:
        """Answer the requests for a model for as long as it has the turn."""
        is_first = self.turns.latest is None
        with ExitStack() as stack:
            try:
                opening = self.loader.loaded(self.catalogue.setup_of(name), self.catalogue.names_of(name))
                served, answers = stack.enter_context(opening)
            except (TriforceError, MemoryError) as error:
                if is_first:
                    raise
                self.turns.failed(name, failed(error))
                return
            self.catalogue.loaded(name, served.context)
            self.turns.loaded(name, served)
            if is_first:
                self.begin(served)
            else:
                self.note(f"{name} is loaded: {served.context:,} tokens of context, {_resident()} of memory in use")
            self.scheduler.run(answers, self.turns.has_to_leave)


def _resident() -> str:
    """The memory of this process that is in use."""
    return size(psutil.Process().memory_info().rss)
