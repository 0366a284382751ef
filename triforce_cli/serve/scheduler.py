"""The scheduler: the queue of jobs, and the loop of passes that answers them, several at a time."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Protocol

from offload.errors import DoesNotFit, TriforceError, UsageError
from triforce_cli.answering.answer import Answer
from triforce_cli.answering.several import Answers
from triforce_cli.apis.api import ApiError
from triforce_cli.ground.deadline import TimedOut
from triforce_cli.ground.errors import describe
from triforce_cli.serve.job import Ending, Finish, Job

if TYPE_CHECKING:
    from offload.metrics import Stats
    from offload.progress import Progress

STOP_SECONDS = 30.0  # for answers under way, once the server is to stop
SHARE = 4  # answers under way have one in so many seconds of a prefill (docs/measured.md)
_LISTENING_SECONDS = 0.2  # a signal's handler runs between two waits
_TO_RETRY = {"retry-after": "1"}

OnEnd = Callable[[Ending], None]


class HasToLeave(Protocol):
    """Whether the model has to leave; see `Turns.has_to_leave`."""

    def __call__(self, *, is_busy: bool) -> bool: ...


def _never(*, is_busy: bool) -> bool:
    return False


class Scheduler:
    """Answers jobs in the order in which they came. `submit` and `forget` are for the event loop's thread, `run` for
    the main thread, `stop` for any; `hear` is for handlers of signals. on_end: called after each answer."""

    def __init__(self, *, most_waiting: int, on_end: OnEnd) -> None:
        self._waiting = deque[Job]()
        self._bell = SimpleQueue[None]()  # rings when there is something to do
        self._most_waiting, self._on_end = most_waiting, on_end
        self._stops_at: float | None = None
        self._has_to_leave: HasToLeave = _never
        self.signal: int | None = None  # the first that was heard
        self.num_dropped = 0  # answers under way that were ended because the server stopped

    @property
    def is_stopping(self) -> bool:
        return self._stops_at is not None

    def check_open(self) -> None:
        """Raises ApiError if the server stops."""
        if self.is_stopping:
            raise stopping()

    def submit(self, jobs: Sequence[Job]) -> None:
        """Put the jobs of a request into the queue. Raises ApiError if it has no room for all, or the server stops."""
        if len(self._waiting) + len(jobs) > self._most_waiting and not self.is_stopping:
            full = f"{len(self._waiting)} of {self._most_waiting} places in the queue are taken"
            raise ApiError(429, f"{full}; try again later", "rate_limit_exceeded", _TO_RETRY)
        self._waiting.extend(jobs)
        if self.is_stopping:  # after the jobs were put there: `run` refuses what it finds once it has stopped
            self._remove(jobs)
            raise stopping()
        self._bell.put(None)

    def forget(self, jobs: Sequence[Job]) -> None:
        """Drop the jobs of a client that has gone, or has all it asked for."""
        for job in jobs:
            job.leave()
        self._remove(jobs)

    def _remove(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            with suppress(ValueError):
                self._waiting.remove(job)

    def stop(self) -> None:
        """Refuse jobs from now on. Answers under way have STOP_SECONDS to end."""
        self._stop_in(STOP_SECONDS)

    def hear(self, number: int) -> None:
        """Stop because of a signal; at a second one answers under way end at the next pass."""
        self._stop_in(0.0 if self.signal is not None else STOP_SECONDS)
        self.signal = self.signal or number

    def _stop_in(self, seconds: float) -> None:
        self._stops_at = min(self._stops_at or math.inf, time.monotonic() + seconds)
        self._bell.put(None)

    def run(self, answers: Answers[Job], has_to_leave: HasToLeave = _never) -> None:
        """Answer jobs until the server is to stop, or the model has to leave: no job waits then, and answers under way
        are those of clients that have gone. An error of a request, or of memory, ends the answers that it concerns; any
        other error is raised, after the clients were told."""
        self._has_to_leave = has_to_leave
        try:
            while not self._is_over(answers):
                self._begin_next(answers)
                self._go_on(answers)
        except BaseException as error:
            self._stop_in(0.0)
            self._fail_all(answers, _ended_by(error))
            raise
        finally:
            self.refuse_waiting()

    def refuse_waiting(self) -> None:
        """Tell the clients of waiting jobs that the server stops."""
        while self._waiting:
            self._waiting.popleft().report(stopping())

    def _is_over(self, answers: Answers[Job]) -> bool:
        if self._has_to_end():
            self._fail_all(answers, stopping())
        return not len(answers) and (self.is_stopping or self._has_to_leave(is_busy=False))

    def _has_to_end(self) -> bool:
        """Whether the time of answers under way is over, because the server stops."""
        return self._stops_at is not None and time.monotonic() >= self._stops_at

    def _begin_next(self, answers: Answers[Job]) -> None:
        """Begin a waiting job if there is room: one, since its prefill holds up the answers under way. Waits for a job
        if nothing is under way."""
        if not answers.has_room or self.is_stopping or (job := self._next(waits=not len(answers))) is None:
            return
        try:
            self._begin(answers, job, job.answer(answers.tokenizer, self._has_to_end))
        except (TriforceError, MemoryError) as error:
            answers.drop(job)
            job.report(failed(error))
        except BaseException as error:
            job.report(_ended_by(error))
            raise

    def _next(self, *, waits: bool) -> Job | None:
        """The next job whose client is there."""
        with suppress(Empty):
            while True:
                self._bell.get_nowait()
        if waits and not self._waiting:
            with suppress(Empty):
                self._bell.get(timeout=_LISTENING_SECONDS)
        with suppress(IndexError):  # the event loop's thread may have taken it off
            while (job := self._waiting.popleft()).is_gone:
                pass
            return job
        return None

    def _begin(self, answers: Answers[Job], job: Job, answer: Answer) -> None:
        others = _Share(lambda: self._go_on(answers)) if answers.may_go_on_in_prefills else None

        def hear(progress: Progress) -> None:
            job.report(progress)
            if answer.deadline.has_passed and not self._reads_on(answers, job, progress):
                raise TimedOut("the time is over, or the client has gone")
            if others is not None and len(answers):
                others.offer()

        answers.begin(job, answer, on_progress=hear, reuse=job.reuse)

    def _reads_on(self, answers: Answers[Job], job: Job, progress: Progress) -> bool:
        """Whether the prompt of a job whose time is over is read further: up to a place whose rows stay, and, as a
        client that has gone may ask again, to its end if nobody else waits."""
        if self._has_to_end() or (job.is_gone and (self.is_stopping or self._has_to_leave(is_busy=True))):
            return False
        return not progress.stays or (job.is_gone and not self._waiting and not len(answers))

    def _go_on(self, answers: Answers[Job]) -> None:
        if not len(answers) or self._has_to_end():
            return
        try:
            self._tell(answers)
        except (TriforceError, MemoryError) as error:
            self._fail_all(answers, failed(error))

    def _tell(self, answers: Answers[Job]) -> None:
        """Run passes, and report what they gave."""
        for job, part in answers.go_on():
            job.report(part)
        for job in answers.ended():
            if self._has_to_end() and not (job.is_gone or answers.answer(job).finish):
                return  # its time is over because the server stops
            self._finish(answers, job)

    def _finish(self, answers: Answers[Job], job: Job) -> None:
        answer = answers.answer(job)
        num_parts = len(answer.parts)

        def tell(stats: Stats) -> None:
            for part in answer.parts[num_parts:]:  # text that was held back
                job.report(part)
            is_gone = job.is_gone  # once it has the end, the connection's task leaves, too
            job.report(Finish(answer.finish, stats, answer.stop, answer.citations))
            self._on_end(Ending(job.name, answer.finish, stats, is_gone, job.num_read(stats.reused_tokens)))

        answers.finish(job, on_end=tell)

    def _fail_all(self, answers: Answers[Job], error: ApiError) -> None:
        for job in answers.under_way():
            answers.drop(job)
            self.num_dropped += not job.is_gone
            job.report(error)


class _Share:
    """A share of the time of a prefill, for the answers under way. go_on: runs a step of them."""

    def __init__(self, go_on: Callable[[], None]) -> None:
        self._go_on, self._due = go_on, 0.0

    def offer(self) -> None:
        """Run a step if it is due: after SHARE - 1 times the seconds of the last one."""
        if (start := time.monotonic()) < self._due:
            return
        self._go_on()
        end = time.monotonic()
        self._due = end + (SHARE - 1) * (end - start)


def failed(error: Exception) -> ApiError:
    """The refusal of a request because of an error."""
    status = 400 if isinstance(error, UsageError) else 503 if isinstance(error, DoesNotFit | MemoryError) else 500
    return ApiError(status, describe(error, debug=False).message)


def _ended_by(error: BaseException) -> ApiError:
    """The refusal of answers that end because of `error`, which ends the server."""
    return failed(error) if isinstance(error, Exception) else stopping()


def stopping() -> ApiError:
    """The refusal of a request because the server stops."""
    return ApiError(503, "the server is stopping", "server_stopping", _TO_RETRY)
