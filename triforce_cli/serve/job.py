"""A job: a request for an answer, from the queue to its last event."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from offload.progress import Progress
from triforce_cli.answering.answer import Answer, Part
from triforce_cli.answering.request import Prompt, Wanted
from triforce_cli.apis.api import ApiError
from triforce_cli.ground.deadline import Deadline

if TYPE_CHECKING:
    from offload.metrics import Stats
    from offload.text.tokenizer import Tokenizer
    from triforce_cli.answering.citations import Citation


@dataclass(frozen=True)
class Finish:
    """The end of a reply. finish: the finish reason, see triforce_cli.answering.ending. stop: the stop string that
    ended it, or "". citations: None if none were asked for."""

    finish: str
    stats: Stats
    stop: str = ""
    citations: Sequence[Citation] | None = None


@dataclass(frozen=True)
class Ending:
    """The end of a job, for the log. name: of the job. finish: the finish reason. is_gone: its client went away before.
    num_read: tokens of the prompt that were read, if these are not all."""

    name: str
    finish: str
    stats: Stats
    is_gone: bool = False
    num_read: int | None = None


Report = Progress | Part | Finish | ApiError


class Reports:
    """The reports on the jobs of a request, in the order in which they came, for the connection's task. Made in the
    event loop's thread."""

    def __init__(self) -> None:
        self._queue = asyncio.Queue[tuple[int, Report]]()
        self._loop = asyncio.get_running_loop()

    def put(self, job: Job, report: Report) -> None:
        """Add a report, from any thread."""
        with suppress(RuntimeError):  # the event loop has ended
            self._loop.call_soon_threadsafe(self._take, job, report)

    def _take(self, job: Job, report: Report) -> None:
        job.on_report(report)
        self._queue.put_nowait((job.choice, report))

    async def next(self, seconds: float | None = None) -> tuple[int, Report] | None:
        """The next report with its job's choice; None if there is none within `seconds`."""
        with suppress(asyncio.TimeoutError):
            return await asyncio.wait_for(self._queue.get(), seconds)
        return None


class Job:
    """A prompt and what is wanted of its answer, which is a choice of a request's reply. The thread of passes reports
    on it. name: for the log. choice: its number in the reply. read: how much of its prompt is read and stays. began:
    when its answer began, by time.monotonic; None before. on_report: hears each report in the event loop's thread."""

    def __init__(self, name: str, prompt: Prompt, wanted: Wanted, reports: Reports, choice: int = 0) -> None:
        self.name, self.prompt, self.wanted, self.choice = name, prompt, wanted, choice
        self.is_gone = False
        self.read: Progress | None = None
        self.began: float | None = None
        self.on_report: Callable[[Report], None] = _ignore
        self._reports = reports

    def answer(self, tokenizer: Tokenizer, has_to_end: Callable[[], bool]) -> Answer:
        """The answer before its first part. Its time begins now, and is over once the client has gone, or the server
        has to end."""
        self.began = time.monotonic()
        return Answer(self.prompt, self.wanted, tokenizer, deadline=_Patience(self, has_to_end))

    @property
    def reuse(self) -> bool:
        """Whether its prompt may go on from any rows. A seed's text has to be the same again, so it goes on from those
        of a prefill alone."""
        return self.wanted.sampling.seed is None

    def report(self, report: Report) -> None:
        """Report to the connection's task, from any thread."""
        if isinstance(report, Progress) and report.stays:
            self.read = report
        self._reports.put(self, report)

    def num_read(self, num_reused: int) -> int | None:
        """The number of the prompt's first tokens that have rows, `num_reused` among them, if it was not read to its
        end."""
        return None if self.read is None or self.read.done == self.read.total else num_reused + self.read.done

    def leave(self) -> None:
        """The client has gone, or has all it asked for: an answer under way ends at the next pass, or once its prompt
        is read."""
        self.is_gone = True


def _ignore(report: Report) -> None:
    """An `on_report` that does nothing."""


class _Patience(Deadline):
    """The deadline of a job."""

    def __init__(self, job: Job, has_to_end: Callable[[], bool]) -> None:
        super().__init__(job.wanted.timeout)
        self._job, self._has_to_end = job, has_to_end

    @property
    def has_passed(self) -> bool:
        return self._job.is_gone or self._has_to_end() or super().has_passed
