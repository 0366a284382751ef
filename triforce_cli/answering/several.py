"""Answers under way on one engine, which share passes: as many at a time as the engine's plan has room for."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Generic, TypeVar

from triforce_cli.answering.answer import Answer, Part
from triforce_cli.answering.ending import TIMEOUT
from triforce_cli.ground.deadline import TimedOut

if TYPE_CHECKING:
    from offload.engine.engine import Engine
    from offload.metrics import Stats
    from offload.progress import Progress
    from offload.text.tokenizer import Tokenizer

Key = TypeVar("Key", bound=Hashable)


class Answers(Generic[Key]):
    """Answers under way, by the caller's keys. A context manager: at its end all of them are dropped.

    Raises DoesNotFit if there is no memory for as many sequences as planned. After an error in a prefill its answer can
    only be dropped, after one in a pass all of them.
    """

    def __init__(self, engine: Engine) -> None:
        from offload.engine.sequences import Sequences

        self._capacity = engine.plan.request.capacity
        self._engine = engine
        self._under_way: dict[Key, Answer] = {}
        self._sequences = Sequences[Key](engine)

    @property
    def tokenizer(self) -> Tokenizer:
        return self._engine.tokenizer

    @property
    def has_room(self) -> bool:
        return self._sequences.has_room

    @property
    def may_go_on_in_prefills(self) -> bool:
        """Whether `on_progress` of `begin` may call `go_on`."""
        return self._sequences.may_go_on_in_prefills

    def __len__(self) -> int:
        """The number of answers under way."""
        return len(self._under_way)

    def under_way(self) -> list[Key]:
        """The keys of the answers under way."""
        return list(self._under_way)

    def answer(self, key: Key) -> Answer:
        return self._under_way[key]

    def each(
        self, waiting: Iterable[tuple[Key, Answer]], *, on_progress: Callable[[Progress], None]
    ) -> Iterator[tuple[Key, Answer, Stats]]:
        """Yield answers with their statistics as they end. waiting: taken one by one, as there is room. on_progress:
        called during prefills."""
        rest = iter(waiting)
        while True:
            while self.has_room and (begun := next(rest, None)) is not None:
                key, answer = begun
                self.begin(key, answer, on_progress=answer.deadline.heard(on_progress))
            if not len(self):
                return
            self.go_on()
            for key in self.ended():
                yield key, self.answer(key), self.finish(key)

    def begin(self, key: Key, answer: Answer, *, on_progress: Callable[[Progress], None], reuse: bool = False) -> None:
        """Prefill a prompt while the others wait; its answer is under way from then on. on_progress: called during the
        prefill, which ends where it raises TimedOut; the deadline has passed then. reuse: see GenerationRequest."""
        room = self._capacity - len(answer.prompt.tokens)
        request = answer.prompt.request(answer.wanted, max_tokens=room, reuse=reuse)
        with suppress(TimedOut):
            self._sequences.join(key, request, on_progress=on_progress)
        self._under_way[key] = answer

    def go_on(self) -> list[tuple[Key, Part]]:
        """The parts of the next steps; none while `ended` has an answer."""
        if any(answer.is_over for answer in self._under_way.values()):
            return []
        return [(key, self._under_way[key].add(step)) for key, step in self._sequences.steps()]

    def ended(self) -> list[Key]:
        """The keys of the answers that are complete, or whose deadlines have passed. Each is to be taken by
        `finish`."""
        return [key for key, answer in self._under_way.items() if answer.is_over]

    def finish(self, key: Key, *, on_end: Callable[[Stats], None] | None = None) -> Stats:
        """Take an answer off, which gets the text that was held back, and return its statistics. on_end: gets them
        before its prompt's rows are kept, which takes a while."""
        self._under_way[key].end(TIMEOUT)
        stats = self._sequences.leave(key, on_end=on_end)
        del self._under_way[key]  # after an error it is to be dropped
        return stats

    def drop(self, key: Key) -> None:
        """Take an answer off that failed, wherever it did."""
        self._under_way.pop(key, None)
        self._sequences.drop(key)

    def __enter__(self) -> Answers[Key]:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._under_way.clear()
        self._sequences.close()
