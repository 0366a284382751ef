"""Records that are being answered, as many at a time as the engine's plan has room for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from offload.engine.request import GenerationRequest
from triforce_cli.batch.records import Record
from triforce_cli.deadline import Deadline, TimedOut

if TYPE_CHECKING:
    from offload.engine.engine import Engine, Step
    from offload.metrics import Stats
    from offload.progress import Progress
    from triforce_cli.chat.formats import ChatFormat
    from triforce_cli.chat.thoughts import Opening


@dataclass(frozen=True)
class Formats:
    """Of conversations. bound: of replies under a constraint, which have no thoughts, since they would have to follow
    it."""

    free: ChatFormat
    bound: ChatFormat

    def of(self, record: Record) -> ChatFormat:
        return self.free if record.sampling.constraint is None else self.bound


@dataclass
class Asked:
    """A record and what has come of its answer. A deadline that has passed ends it early."""

    record: Record
    deadline: Deadline
    steps: list[Step] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        return bool(self.steps) and self.steps[-1].finish is not None

    @property
    def is_over(self) -> bool:
        return self.is_complete or self.deadline.has_passed


def answered(
    records: Sequence[Record],
    prompts: Mapping[int, Sequence[int]],
    engine: Engine,
    formats: Formats | None = None,
    openings: Mapping[int, Opening] | None = None,
    *,
    timeout: float | None,
    on_progress: Callable[[Progress], None],
) -> Iterator[tuple[Asked, Stats]]:
    """Each of `records`, with its statistics, as soon as it is over; another one takes its place then.

    prompts: tokens, by the records' numbers. formats, openings: of conversations. timeout: seconds for each from its
    prefill on. on_progress: of prefills. Raises DoesNotFit where there is no memory for so many sequences as planned.
    """
    from offload.engine.sequences import Sequences

    waiting, under_way = deque(records), dict[int, Asked]()
    with Sequences[int](engine) as sequences:
        while waiting or under_way:
            while waiting and sequences.has_room:
                asked = Asked(waiting.popleft(), Deadline(timeout))
                under_way[asked.record.number] = asked
                with suppress(TimedOut):  # within its prefill
                    number = asked.record.number
                    opening = (openings or {}).get(number)
                    request = _request(asked.record, prompts[number], engine, formats, opening)
                    sequences.join(number, request, on_progress=asked.deadline.heard(on_progress))
            if not any(asked.is_over for asked in under_way.values()):
                for number, step in sequences.steps():
                    under_way[number].steps.append(step)
            for asked in [asked for asked in under_way.values() if asked.is_over]:
                del under_way[asked.record.number]
                yield asked, sequences.leave(asked.record.number)


def _request(
    record: Record, prompt: Sequence[int], engine: Engine, formats: Formats | None, opening: Opening | None
) -> GenerationRequest:
    replies = None if formats is None or opening is None else formats.of(record)
    return GenerationRequest(
        list(prompt),
        record.sampling,
        max_tokens=min(record.max_tokens, engine.plan.request.capacity - len(prompt)),
        stop=(*record.stops, *(replies.stops if replies else ())),
        end_tokens=replies.end_tokens if replies else (),
        logprobs=record.logprobs,
        named={} if opening is None else opening.named,
    )
