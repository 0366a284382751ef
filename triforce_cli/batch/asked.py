"""Records answered on one engine, as many at a time as its plan has room for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from triforce_cli.answering.request import Prompt
from triforce_cli.answering.several import Answers, Asked
from triforce_cli.batch.records import Record

if TYPE_CHECKING:
    from offload.engine.engine import Engine
    from offload.metrics import Stats
    from offload.progress import Progress
    from offload.text.tokenizer import Tokenizer


def answered(
    records: Sequence[Record],
    prompts: Mapping[int, Prompt],
    engine: Engine,
    tokenizer: Tokenizer,
    *,
    on_progress: Callable[[Progress], None],
) -> Iterator[tuple[Record, Asked, Stats]]:
    """Answer the records; yield each with its statistics as soon as it ends, and then start another one.

    prompts: by the records' numbers. A record's deadline starts with its prefill. on_progress: called during prefills.
    Raises DoesNotFit if there is no memory for as many sequences as planned.
    """
    waiting, by_number = deque(records), {record.number: record for record in records}
    with Answers[int](engine) as answers:
        while waiting or len(answers):
            while waiting and answers.has_room:
                record = waiting.popleft()
                asked = Asked.of(prompts[record.number], record.wanted, tokenizer)
                answers.begin(record.number, asked, on_progress=asked.deadline.heard(on_progress))
            answers.go_on()
            for number in answers.ended():
                yield by_number[number], *answers.finish(number)
