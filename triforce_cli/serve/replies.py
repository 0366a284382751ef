"""A job's reports as a reply in the form of an API: whole, or as events."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import replace
from typing import Any

from offload.progress import Progress
from triforce_cli.answering.answer import Part
from triforce_cli.answering.ending import of_apis
from triforce_cli.apis.api import (
    ApiError,
    CallPiece,
    Ended,
    Event,
    Reading,
    Reply,
    Said,
    Score,
    ToolCall,
    Usage,
    identifier,
)
from triforce_cli.apis.timings import timings
from triforce_cli.serve.job import Finish, Job, Report
from triforce_cli.serve.spoken import Spoken
from triforce_cli.tools.growing import Growth

QUIET_SECONDS = 10.0  # without an event, after which the API's own for it is sent: some clients give up after 15
_PROGRESS_SECONDS = 1.0  # between two comments on the prefill


class Telling:
    """A reply being told: the job's pieces, with tool calls taken apart. shows_thoughts: False keeps them from
    the client."""

    def __init__(self, job: Job, *, shows_thoughts: bool = True) -> None:
        self._job, self._shows_thoughts = job, shows_thoughts
        self._spoken = Spoken(job.prompt.calls)
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._scores: list[Score] = []
        self._held: list[Score] = []  # of tokens that may belong to thoughts, or to a call
        self._calls: list[ToolCall] = []
        self._num_tokens = self._num_thoughts = 0

    @property
    def usage(self) -> Usage:
        """The usage before anything was computed."""
        return Usage(len(self._job.prompt.tokens))

    def reading(self, progress: Progress) -> Reading:
        """The progress of the prefill."""
        seconds = time.monotonic() - (self._job.began or time.monotonic())
        return Reading(len(self._job.prompt.tokens), progress.held + progress.done, progress.held, seconds)

    def add(self, part: Part) -> Said:
        """The text, thoughts and pieces of calls that are certain after a part."""
        thoughts = part.thoughts if self._shows_thoughts else ""
        text, growth = self._spoken.push(part.text)
        is_thought = part.thoughts and not (part.text and self._shows_thoughts)
        if is_thought:
            self._held = []
        self._held += () if is_thought else part.scores
        said = Said(text, thoughts, self._scored() if text else (), [*map(self._grown, growth)])
        self._num_tokens += len(part.tokens)
        self._num_thoughts += len(part.tokens) if part.thoughts and not part.text else 0
        self._thoughts.append(thoughts)
        self._texts.append(said.text)
        return said

    def end(self, finish: Finish) -> tuple[Said, Ended]:
        """The last text, and the whole reply."""
        rest, growth = self._spoken.end()
        pieces = [*map(self._grown, growth)]
        said = Said(rest, "", self._scored() if rest or not self._calls else (), pieces)
        self._texts.append(rest)
        ended = Ended(
            text="".join(self._texts),
            thoughts="".join(self._thoughts),
            calls=tuple(self._calls),
            scores=self._scores,
            finish=of_apis(finish.finish),
            stop=finish.stop,
            usage=Usage(len(self._job.prompt.tokens), finish.stats.reused_tokens, self._num_tokens, self._num_thoughts),
            more={"timings": timings(finish.stats), **_citations(finish)},
        )
        return said, ended

    def _grown(self, growth: Growth) -> CallPiece:
        """The piece of a call, which is added to it."""
        begins = growth.number == len(self._calls)
        if begins:
            self._calls.append(ToolCall(identifier("call_"), growth.name, ""))
        call = self._calls[growth.number]
        self._calls[growth.number] = replace(call, arguments=call.arguments + growth.arguments)
        return CallPiece(growth.number, call.id, growth.name, growth.arguments, begins)

    def _scored(self) -> list[Score]:
        """The scores of tokens whose text is told now: those of thoughts and of calls never are."""
        told, self._held = self._held, []
        self._scores += told
        return told


async def whole(job: Job, telling: Telling) -> Ended:
    """The reply at its end. Raises ApiError."""
    while True:
        report = await job.next_report()
        if isinstance(report, ApiError):
            raise report
        if isinstance(report, Finish):
            return telling.end(report)[1]
        if isinstance(report, Part):
            telling.add(report)


async def events(
    job: Job, telling: Telling, reply: Reply, clock: Callable[[], float] = time.monotonic
) -> AsyncIterator[str]:
    """Yield the reply as the text of server-sent events, with comments on the prefill."""
    for event in reply.begin(telling.usage):
        yield str(event)
    sent = told = clock()  # when anything was sent, and when an event was
    while True:
        report = await job.next_report(QUIET_SECONDS - (clock() - told))
        now = clock()
        is_due = now - sent >= _PROGRESS_SECONDS
        news = [str(event) for event in _told(telling, reply, report, is_due=is_due)]
        if not news and now - told >= QUIET_SECONDS:  # text may be held back for long
            news = [str(event) for event in reply.keep_alive()]
        if news:
            sent = told = clock()
        elif isinstance(report, Progress) and is_due:
            news, sent = [_comment(report)], now
        for text in news:
            yield text
        if isinstance(report, Finish | ApiError):
            for text in _last(telling, reply, report):
                yield text
            return


def _citations(finish: Finish) -> dict[str, Any]:
    return {} if finish.citations is None else {"citations": [each.as_dict() for each in finish.citations]}


def _told(telling: Telling, reply: Reply, report: Report | None, *, is_due: bool) -> Iterable[Event]:
    """The events of a report before the last. is_due: on the prefill; the end of a span always is."""
    if isinstance(report, Part):
        return reply.add(telling.add(report))
    if isinstance(report, Progress) and report.stage == "prefill" and (is_due or report.stays):
        return reply.reading(telling.reading(report))
    return ()


def _last(telling: Telling, reply: Reply, report: Finish | ApiError) -> list[str]:
    if isinstance(report, ApiError):
        return [str(event) for event in reply.fail(report)]
    said, ended = telling.end(report)
    return [str(event) for event in (*reply.add(said), *reply.end(ended))]


def _comment(progress: Progress) -> str:
    return f": {progress.stage} {progress.done:,} of {progress.total:,} {progress.unit}\n\n"
