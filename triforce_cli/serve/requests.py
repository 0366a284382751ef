"""The requests under way, as their jobs' reports tell: tokens read and written, rates, and sums over answers.

All of it is of the event loop's thread, in which reports arrive, so the loop of passes waits for nobody who looks.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from offload.metrics import DiskStats, ExpertStats
from offload.progress import Progress
from triforce_cli.answering.answer import Part
from triforce_cli.answering.ending import FAILED
from triforce_cli.apis.api import ApiError
from triforce_cli.serve.job import Finish, Job, Report

GONE = "gone"  # the finish reason of a request whose client went away
RATE_SECONDS = 10.0  # over which rates are taken

Clock = Callable[[], float]


@dataclass(frozen=True)
class Over:
    """The end of a request. api: its path. finish: the finish reason, GONE or "error". finished: None if nothing was
    computed, or it failed. first_token_seconds: since it was asked for, the wait in the queue included; None before a
    token."""

    api: str
    finish: str
    finished: Finish | None
    first_token_seconds: float | None


class Course:
    """A request under way. num_read: tokens of its prompt that have rows; num_cached: those among them that had rows
    before. num_written: tokens of its answer. asked: when it came."""

    def __init__(self, job: Job, api: str, asked: float) -> None:
        self.job, self.api, self.asked = job, api, asked
        self.num_prompt = len(job.prompt.tokens)
        self.num_read = self.num_cached = self.num_written = 0
        self.first_token: float | None = None  # when it came

    @property
    def state(self) -> str:
        if self.job.began is None:
            return "waiting"
        return "reading" if self.first_token is None else "writing"

    def read(self, progress: Progress) -> int:
        """The number of tokens that were read since the last report."""
        self.num_cached = progress.held
        before, self.num_read = max(self.num_read, progress.held), progress.held + progress.done
        return max(self.num_read - before, 0)

    def wrote(self, num_tokens: int, now: float) -> None:
        if self.first_token is None and num_tokens:
            self.first_token, self.num_read = now, self.num_prompt
        self.num_written += num_tokens


class Requests:
    """The requests under way. For the event loop's thread. on_over: called at the end of each. drafts: (drafted,
    accepted) tokens by level, experts: the experts that layers wanted, disk: those that were read from the file, all
    over all answers."""

    def __init__(self, on_over: Callable[[Over], None], clock: Clock = time.monotonic) -> None:
        self._on_over, self._clock = on_over, clock
        self._under_way: dict[Job, Course] = {}
        self._recent = deque[tuple[float, int, int]]()  # (when, tokens read, tokens written)
        self.drafts: dict[str, tuple[int, int]] = {}
        self.experts, self.disk = ExpertStats(), DiskStats()

    def follow(self, job: Job, api: str) -> None:
        """Follow a job that was put into the queue just now. api: its path."""
        course = self._under_way[job] = Course(job, api, self._clock())
        job.on_report = lambda report: self._hear(course, report)

    def left(self, job: Job) -> None:
        """The job's connection has ended: one that is still in the queue is over, one that began goes on to its end."""
        if (course := self._under_way.get(job)) is not None and job.began is None:
            self._end(course, GONE)

    def of(self, *states: str) -> list[Course]:
        """The requests in such states, in the order in which they came."""
        return [course for course in self._under_way.values() if course.state in states]

    def seconds(self, course: Course) -> float:
        """Since a request came."""
        return self._clock() - course.asked

    def rates(self) -> tuple[float, float]:
        """Tokens read, and tokens written, a second, over the last RATE_SECONDS."""
        self._forget_old()
        read, written = (sum(each[place] for each in self._recent) / RATE_SECONDS for place in (1, 2))
        return read, written

    def _hear(self, course: Course, report: Report) -> None:
        if course.job not in self._under_way:
            return
        if isinstance(report, Progress) and report.stage == "prefill":
            self._count(course.read(report), 0)
        elif isinstance(report, Part):
            course.wrote(len(report.tokens), self._clock())
            self._count(0, len(report.tokens))
        elif isinstance(report, Finish):
            self._add(report)
            self._end(course, GONE if course.job.is_gone else report.finish, report)
        elif isinstance(report, ApiError):
            self._end(course, FAILED)

    def _count(self, num_read: int, num_written: int) -> None:
        if num_read or num_written:
            self._forget_old()
            self._recent.append((self._clock(), num_read, num_written))

    def _forget_old(self) -> None:
        while self._recent and self._recent[0][0] < self._clock() - RATE_SECONDS:
            self._recent.popleft()

    def _add(self, finished: Finish) -> None:
        stats = finished.stats
        for level in stats.levels:
            drafted, accepted = self.drafts.get(level.name, (0, 0))
            self.drafts[level.name] = drafted + level.drafted, accepted + level.accepted
        self.experts += stats.prefill_link.experts + stats.decode_link.experts
        self.disk += stats.prefill_link.disk + stats.decode_link.disk

    def _end(self, course: Course, finish: str, finished: Finish | None = None) -> None:
        del self._under_way[course.job]
        waited = None if course.first_token is None else course.first_token - course.asked
        self._on_over(Over(course.api, finish, finished, waited))
