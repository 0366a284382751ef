"""The reports on a request's jobs as a reply in the form of an API: whole, or as events."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
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
from triforce_cli.serve.job import Finish, Job, Report, Reports
from triforce_cli.serve.spoken import Spoken
from triforce_cli.tools.growing import Growth

QUIET_SECONDS = 10.0  # without an event, after which the API's own for it is sent: some clients give up after 15
_PROGRESS_SECONDS = 1.0  # between two comments on the prefill
_NOTHING = 0, None  # no report came


class Telling:
    """A choice being told: the job's pieces, with tool calls taken apart. shows_thoughts: False keeps them from
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
        num_read = progress.held + progress.done
        return Reading(len(self._job.prompt.tokens), num_read, progress.held, seconds, self._job.choice)

    def add(self, part: Part) -> Said:
        """The text, thoughts and pieces of calls that are certain after a part."""
        thoughts = part.thoughts if self._shows_thoughts else ""
        text, growth = self._spoken.push(part.text)
        is_thought = part.thoughts and not (part.text and self._shows_thoughts)
        if is_thought:
            self._held = []
        self._held += () if is_thought else part.scores
        said = Said(text, thoughts, self._scored() if text else (), [*map(self._grown, growth)], self._job.choice)
        self._num_tokens += len(part.tokens)
        self._num_thoughts += len(part.tokens) if part.thoughts and not part.text else 0
        self._thoughts.append(thoughts)
        self._texts.append(said.text)
        return said

    def end(self, finish: Finish) -> tuple[Said, Ended]:
        """The last text, and the whole choice."""
        rest, growth = self._spoken.end()
        pieces = [*map(self._grown, growth)]
        said = Said(rest, "", self._scored() if rest or not self._calls else (), pieces, self._job.choice)
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
            choice=self._job.choice,
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


async def whole(reports: Reports, choices: Sequence[Telling]) -> list[Ended]:
    """The choices of a reply at its end. Raises ApiError."""
    ended = dict[int, Ended]()
    while len(ended) < len(choices):
        number, report = await reports.next() or _NOTHING
        if isinstance(report, ApiError):
            raise report
        if isinstance(report, Finish):
            ended[number] = choices[number].end(report)[1]
        if isinstance(report, Part):
            choices[number].add(report)
    return _in_order(ended)


async def events(
    reports: Reports, choices: Sequence[Telling], reply: Reply, clock: Callable[[], float] = time.monotonic
) -> AsyncIterator[str]:
    """Yield the reply as the text of server-sent events, with comments on the prefill."""
    for event in reply.begin(choices[0].usage):
        yield str(event)
    ended = dict[int, Ended]()
    sent = told = clock()  # when anything was sent, and when an event was
    while len(ended) < len(choices):
        number, report = await reports.next(QUIET_SECONDS - (clock() - told)) or _NOTHING
        telling, now = choices[number], clock()
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
        if isinstance(report, ApiError):
            for event in reply.fail(report):
                yield str(event)
            return
        if isinstance(report, Finish):
            said, ended[number] = telling.end(report)
            for event in (*reply.add(said), *reply.end(ended[number])):
                yield str(event)
    for event in reply.close(_in_order(ended)):
        yield str(event)


def _in_order(ended: Mapping[int, Ended]) -> list[Ended]:
    return [ended[number] for number in sorted(ended)]


def _citations(finish: Finish) -> dict[str, Any]:
    return {} if finish.citations is None else {"citations": [each.as_dict() for each in finish.citations]}


def _told(telling: Telling, reply: Reply, report: Report | None, *, is_due: bool) -> Iterable[Event]:
    """The events of a report before the last. is_due: on the prefill; the end of a span always is."""
    if isinstance(report, Part):
        return reply.add(telling.add(report))
    if isinstance(report, Progress) and report.stage == "prefill" and (is_due or report.stays):
        return reply.reading(telling.reading(report))
    return ()


def _comment(progress: Progress) -> str:
    return f": {progress.stage} {progress.done:,} of {progress.total:,} {progress.unit}\n\n"
