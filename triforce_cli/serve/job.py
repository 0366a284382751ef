"""A job: a request for an answer, from the queue to its last event."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from offload.progress import Progress
from triforce_cli.answering.request import Prompt, Wanted
from triforce_cli.answering.together import Asked
from triforce_cli.apis.api import ApiError, Score
from triforce_cli.deadline import Deadline, TimedOut

if TYPE_CHECKING:
    from offload.decode.tokenizer import Tokenizer
    from offload.metrics import Stats


@dataclass(frozen=True)
class Piece:
    """A piece of a reply as it is generated. text: with tool calls as the model wrote them."""

    text: str
    thoughts: str
    num_tokens: int
    scores: Sequence[Score]


@dataclass(frozen=True)
class Finish:
    """The end of a reply. finish: the finish reason, see triforce_cli.answering.ending."""

    finish: str
    stats: Stats


Report = Progress | Piece | Finish | ApiError


class Job:
    """A prompt and what is wanted of its answer. The thread of passes reports on it, the connection's task reads the
    reports. name: for the log. It is made in the event loop's thread."""

    def __init__(self, name: str, prompt: Prompt, wanted: Wanted) -> None:
        self.name, self.prompt, self.wanted = name, prompt, wanted
        self.is_gone = False
        self._reports = asyncio.Queue[Report]()
        self._loop = asyncio.get_running_loop()

    def asked(self, tokenizer: Tokenizer, has_to_end: Callable[[], bool]) -> Asked:
        """The prompt for the engine. Its time begins now, and is over once the client has gone, or the server has to
        end."""
        return Asked.of(self.prompt, self.wanted, tokenizer, _Patience(self, has_to_end))

    def report(self, report: Report) -> None:
        """Report to the connection's task, from any thread."""
        with suppress(RuntimeError):  # the event loop has ended
            self._loop.call_soon_threadsafe(self._reports.put_nowait, report)

    async def next_report(self, seconds: float | None = None) -> Report | None:
        """The next report; None if there is none within `seconds`."""
        with suppress(asyncio.TimeoutError):
            return await asyncio.wait_for(self._reports.get(), seconds)
        return None

    def leave(self) -> None:
        """The client has gone, or has all it asked for: an answer under way ends at the next pass."""
        self.is_gone = True


class _Patience(Deadline):
    """The deadline of a job."""

    def __init__(self, job: Job, has_to_end: Callable[[], bool]) -> None:
        super().__init__(job.wanted.timeout)
        self._job, self._has_to_end = job, has_to_end

    @property
    def has_passed(self) -> bool:
        return self._job.is_gone or self._has_to_end() or super().has_passed

    def check(self) -> None:
        if self.has_passed:
            raise TimedOut("the time is over, or the client has gone")
