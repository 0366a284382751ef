"""Records being answered, as many at a time as the engine's plan has room for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from triforce_cli.answering.answer import Answer
from triforce_cli.answering.request import Prompt
from triforce_cli.batch.records import Record
from triforce_cli.deadline import Deadline, TimedOut

if TYPE_CHECKING:
    from offload.decode.tokenizer import Tokenizer
    from offload.engine.engine import Engine
    from offload.metrics import Stats
    from offload.progress import Progress


@dataclass(frozen=True)
class Asked:
    """A record and its answer so far. The answer ends early once the deadline has passed."""

    record: Record
    deadline: Deadline
    answer: Answer

    @property
    def is_complete(self) -> bool:
        return self.answer.finish is not None

    @property
    def is_over(self) -> bool:
        return self.is_complete or self.deadline.has_passed


def answered(
    records: Sequence[Record],
    prompts: Mapping[int, Prompt],
    engine: Engine,
    tokenizer: Tokenizer,
    *,
    on_progress: Callable[[Progress], None],
) -> Iterator[tuple[Asked, Stats]]:
    """Answer the records; yield each with its statistics as soon as it ends, and then start another one.

    prompts: by the records' numbers. A record's deadline starts with its prefill. on_progress: called during prefills.
    Raises DoesNotFit if there is no memory for as many sequences as planned.
    """
    from offload.engine.sequences import Sequences

    waiting, under_way = deque(records), dict[int, Asked]()
    with Sequences[int](engine) as sequences:
        while waiting or under_way:
            while waiting and sequences.has_room:
                record = waiting.popleft()
                prompt = prompts[record.number]
                asked = Asked(record, Deadline(record.wanted.timeout), Answer(prompt, record.wanted, tokenizer))
                under_way[record.number] = asked
                room = engine.plan.request.capacity - len(prompt.tokens)
                with suppress(TimedOut):  # the deadline passed during prefill
                    on_prefill = asked.deadline.heard(on_progress)
                    request = prompt.request(record.wanted, max_tokens=room)
                    sequences.join(record.number, request, on_progress=on_prefill)
            if not any(asked.is_over for asked in under_way.values()):
                for number, step in sequences.steps():
                    under_way[number].answer.add(step)
            for asked in [asked for asked in under_way.values() if asked.is_over]:
                del under_way[asked.record.number]
                asked.answer.break_off()
                yield asked, sequences.leave(asked.record.number)
