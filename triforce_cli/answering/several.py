"""Answers under way on one engine, which share passes: as many at a time as the engine's plan has room for."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Generic, TypeVar

from triforce_cli.answering.answer import Answer, Part
from triforce_cli.answering.ending import TIMEOUT
from triforce_cli.answering.request import Prompt, Wanted
from triforce_cli.ground.deadline import Deadline, TimedOut

if TYPE_CHECKING:
    from offload.engine.engine import Engine
    from offload.metrics import Stats
    from offload.progress import Progress
    from offload.text.tokenizer import Tokenizer

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Asked:
    """A prompt and its answer so far. The answer ends early once the deadline has passed. reuse: see
    GenerationRequest."""

    prompt: Prompt
    wanted: Wanted
    deadline: Deadline
    answer: Answer
    reuse: bool = False

    @classmethod
    def of(
        cls,
        prompt: Prompt,
        wanted: Wanted,
        tokenizer: Tokenizer,
        deadline: Deadline | None = None,
        *,
        reuse: bool = False,
    ) -> Asked:
        """A prompt without an answer yet. deadline: by default that of `wanted`, from now on."""
        return cls(prompt, wanted, deadline or Deadline(wanted.timeout), Answer(prompt, wanted, tokenizer), reuse)

    @property
    def is_complete(self) -> bool:
        return bool(self.answer.finish)

    @property
    def is_over(self) -> bool:
        return self.is_complete or self.deadline.has_passed


class Answers(Generic[Key]):
    """Answers under way, by the caller's keys. A context manager: at its end all of them are dropped.

    Raises DoesNotFit if there is no memory for as many sequences as planned. After an error in a prefill its answer can
    only be dropped, after one in a pass all of them.
    """

    def __init__(self, engine: Engine) -> None:
        from offload.engine.sequences import Sequences

        self._capacity = engine.plan.request.capacity
        self._under_way: dict[Key, Asked] = {}
        self._sequences = Sequences[Key](engine)

    @property
    def has_room(self) -> bool:
        return self._sequences.has_room

    def __len__(self) -> int:
        """The number of answers under way."""
        return len(self._under_way)

    def under_way(self) -> list[Key]:
        """The keys of the answers under way."""
        return list(self._under_way)

    def asked(self, key: Key) -> Asked:
        return self._under_way[key]

    def begin(self, key: Key, asked: Asked, *, on_progress: Callable[[Progress], None]) -> None:
        """Prefill a prompt while the others wait. on_progress: called during the prefill, which ends where it raises
        TimedOut; the deadline has passed then."""
        room = self._capacity - len(asked.prompt.tokens)
        request = asked.prompt.request(asked.wanted, max_tokens=room, reuse=asked.reuse)
        self._under_way[key] = asked
        with suppress(TimedOut):
            self._sequences.join(key, request, on_progress=on_progress)

    def go_on(self) -> list[tuple[Key, Part]]:
        """The parts of the next steps; none while `ended` has an answer."""
        if any(asked.is_over for asked in self._under_way.values()):
            return []
        return [(key, self._under_way[key].answer.add(step)) for key, step in self._sequences.steps()]

    def ended(self) -> list[Key]:
        """The keys of the answers that are complete, or whose deadlines have passed. Each is to be taken by
        `finish`."""
        return [key for key, asked in self._under_way.items() if asked.is_over]

    def finish(self, key: Key, *, on_end: Callable[[Stats], None] | None = None) -> tuple[Asked, Stats]:
        """Take an answer off, with the text that was held back, and its statistics. on_end: gets them before its
        prompt's rows are kept, which takes a while."""
        asked = self._under_way[key]
        asked.answer.end(TIMEOUT)
        stats = self._sequences.leave(key, on_end=on_end)
        del self._under_way[key]  # after an error it is to be dropped
        return asked, stats

    def drop(self, key: Key) -> None:
        """Take an answer off that failed, wherever it did."""
        self._under_way.pop(key, None)
        self._sequences.drop(key)

    def __enter__(self) -> Answers[Key]:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._under_way.clear()
        self._sequences.close()
