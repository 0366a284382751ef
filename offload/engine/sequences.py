"""Concurrent sequences that share passes: each layer's weights are read, or cross the link, once for all of them.

Each sequence has its own engine and is decoded as it would be alone, but its passes wait to be run together with others
of the same level. All work runs on the caller's thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

from offload.decode.build import pass_seconds
from offload.decode.sequence import num_common
from offload.engine.engine import Engine
from offload.engine.prefix import COPIES
from offload.engine.request import GenerationRequest
from offload.engine.step import Step
from offload.metrics import Stats
from offload.model.level import Level
from offload.model.passes import Pass, Work
from offload.progress import OnProgress, ignore

Key = TypeVar("Key", bound=Hashable)


class Sequences(Generic[Key]):
    """The running requests, by the caller's keys. engine: of the first sequence; all sequences use its plan and models,
    and the caller still owns it. A context manager: at its end all requests are ended and the other engines released.

    An error in a pass or in a sequence is raised by the call that runs passes. Afterwards all sequences are consistent
    but can only leave.
    """

    def __init__(self, engine: Engine) -> None:
        """Raises DoesNotFit where there is no memory for all sequences of the plan; then all memory is released."""
        self._engines = [engine]
        self._idle: list[Engine] = []  # the one that was used longest ago first
        self._running: dict[Key, _Running] = {}
        self._levels = list(engine.levels)[::-1]  # the cheapest first
        try:
            for _ in range(engine.plan.request.num_sequences - 1):
                self._engines.append(engine.beside())
        except BaseException:
            self.close()
            raise
        self._idle += self._engines

    @property
    def has_room(self) -> bool:
        return bool(self._idle)

    @property
    def may_go_on_in_prefills(self) -> bool:
        """Whether `on_progress` of `join` may call `steps`: one device has all weights, so none cross a link, or are
        changed by a pass, within a prefill."""
        engine = self._engines[0]
        return engine.plan.request.num_devices == 1 and not engine.worker.target.streams

    def __len__(self) -> int:
        """The number of running requests."""
        return len(self._running)

    def join(self, key: Key, request: GenerationRequest, *, on_progress: OnProgress = ignore) -> None:
        """Begin a request where there is room. Its prompt is prefilled while the others wait, unless `on_progress` runs
        their passes; its first pass is run together with theirs. Rows that it may reuse of another sequence are copied,
        not computed again. After an error, such as one that `on_progress` raises, the request can only leave."""
        engine = self._engine_for(request.prompt)
        engine.borrow([each for each in self._engines if each is not engine], request.prompt, reuse=request.reuse)
        self._running[key] = _Running(engine, engine.in_passes(request, on_progress=on_progress))
        self._idle.remove(engine)
        self._running[key].begin()

    def steps(self) -> list[tuple[Key, Step]]:
        """Run passes until there is at least one step. Returns the steps in the order in which the sequences joined.
        The caller must end a sequence with `leave` after its last step and before the next call."""
        while begun := {key: running for key, running in self._running.items() if running.has_begun}:
            for running in begun.values():
                running.go_on()
            if came := [(key, step) for key, running in begun.items() if (step := running.taken()) is not None]:
                return came
            self._run_passes(list(begun.values()))
        return []

    def leave(self, key: Key, *, on_end: Callable[[Stats], None] | None = None) -> Stats:
        """End a request, finished or not, and keep its prompt's rows, see `Engine.keep`. Returns its statistics:
        elapsed seconds, and the link's bytes for all sequences in that time. on_end: gets them before rows are kept,
        which takes a while."""
        engine = self._end(key)
        stats = engine.stats
        if on_end is not None:
            on_end(stats)
        engine.keep()
        return stats

    def drop(self, key: Key) -> None:
        """End a request after an error, if it has begun. Its rows are not kept."""
        if key in self._running:
            self._end(key)

    def close(self) -> None:
        for key in list(self._running):
            self._end(key)
        while len(self._engines) > 1:
            self._engines.pop().worker.release()

    def __enter__(self) -> Sequences[Key]:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _end(self, key: Key) -> Engine:
        running = self._running.pop(key)
        self._idle.append(running.engine)
        running.work.close()
        return running.engine

    def _engine_for(self, prompt: Sequence[int]) -> Engine:
        """The idle engine that loses least: that of the text with which `prompt` goes on, if few of its rows are lost
        or no engine is empty; an empty one; the one that was used longest ago."""

        def common(engine: Engine) -> int:
            return num_common(engine.prefix.tokens, prompt)

        nearest = max(self._idle, key=common)
        count, lost = common(nearest), nearest.num_cached - common(nearest)
        empty = [engine for engine in self._idle if not engine.num_cached]
        if lost * COPIES <= count or (not empty and lost <= count):
            return nearest
        return (empty or self._idle)[0]

    def _run_passes(self, some: Sequence[_Running]) -> None:
        """Run a pass of the cheapest level that any sequence waits for, so that drafting sequences catch up before the
        next level's pass."""
        for part in _parts(self._cheapest(some)):
            self._run(part)

    def _cheapest(self, some: Sequence[_Running]) -> list[_Running]:
        """The sequences that wait for a pass of the cheapest level."""
        name = min((each.level_name for each in some), key=self._levels.index)
        return [each for each in some if each.level_name == name]

    def _run(self, part: Sequence[_Running]) -> None:
        """Run the passes of `part` as one."""
        start = time.perf_counter()
        part[0].level.run([each.waits_for for each in part])
        seconds = time.perf_counter() - start
        for each, share in zip(part, self._shares(part), strict=True):
            each.ran(seconds * share)

    def _shares(self, part: Sequence[_Running]) -> list[float]:
        """Each sequence's share of a pass's seconds, in proportion to its planned cost: an equal part of the fixed
        cost, and the cost of its rows."""
        planned = pass_seconds(self._engines[0].plan, part[0].level_name)
        prices = [planned.fixed / len(part) + planned.slope * len(each.waits_for.tokens) for each in part]
        return [price / sum(prices) for price in prices]


class _Running:
    """A running request on its engine. has_begun: its prompt is prefilled. step: the latest step, until it is taken.
    asked: the pass that it waits for otherwise. since: when the wait began."""

    def __init__(self, engine: Engine, work: Work[Step]) -> None:
        self.engine, self.work, self.has_begun = engine, work, False
        self.step: Step | None = None
        self.asked: Pass | None = None
        self.since = self._own = 0.0
        self._answered: Pass | None = None

    @property
    def waits_for(self) -> Pass:
        assert self.asked is not None
        return self.asked

    @property
    def level(self) -> Level:
        """The level of the pass that the request waits for."""
        return _level(self.waits_for)

    @property
    def level_name(self) -> str:
        return self.level.stats.name

    def begin(self) -> None:
        """Prefill the prompt, and go on to the first pass."""
        self.go_on()
        self.has_begun = True

    def go_on(self) -> None:
        """Continue the request up to its next step, or up to the next pass, for which it then waits."""
        if self.step is not None or self.asked is not None:
            return
        if (answered := self._answered) is not None:
            answered.waited = max(time.perf_counter() - self.since - self._own, 0.0)
            self._answered = None
        item = next(self.work)
        if isinstance(item, Pass):
            self.asked, self.since = item, time.perf_counter()
        else:
            self.step = item

    def taken(self) -> Step | None:
        """Take the latest step, if there is one."""
        step, self.step = self.step, None
        return step

    def ran(self, seconds: float) -> None:
        """Record that the request's pass has run. seconds: the request's share of it."""
        self.asked, self._answered, self._own = None, self.asked, seconds


def _parts(group: Sequence[_Running]) -> list[list[_Running]]:
    """The group of sequences whose passes, all of one level, can be shared; every other sequence by itself."""
    together = [each for each in group if each.level.shares(len(each.waits_for.tokens))]
    apart = [[each] for each in group if each not in together]
    return [together, *apart] if together else apart


def _level(asked: Pass) -> Level:
    """The pass's level, which is a worker's."""
    assert isinstance(asked.level, Level)
    return asked.level
