"""Sequences that run at a time and share passes: each layer's weights are read, or cross the link, once for all.

Each sequence has an engine of its own and is decoded as it would be alone; only its passes wait until others want one
of the same level. Everything happens on the caller's thread.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

from offload.decode.build import pass_seconds
from offload.engine.engine import Engine, Step
from offload.engine.request import GenerationRequest
from offload.metrics import Stats
from offload.model.level import Level
from offload.model.passes import Pass, Work
from offload.progress import OnProgress, ignore

Key = TypeVar("Key", bound=Hashable)


class Sequences(Generic[Key]):
    """Requests under way, by keys of the caller's. engine: the first sequence's, and whose plan and models all use; it
    stays the caller's. A context manager: at the end all are broken off and the other engines' memory is given back.

    An error of a pass is raised where passes are run, and so is an error of one sequence; all stay consistent and can
    only be left then.
    """

    def __init__(self, engine: Engine) -> None:
        """Raises DoesNotFit where there is no memory for all sequences of the plan; then nothing stays allocated."""
        self._engines = [engine]
        self._running: dict[Key, _Running] = {}
        self._levels = list(engine.levels)[::-1]  # the cheapest first
        try:
            for _ in range(engine.plan.request.num_sequences - 1):
                self._engines.append(engine.beside())
        except BaseException:
            self.close()
            raise

    @property
    def has_room(self) -> bool:
        return len(self._running) < len(self._engines)

    def __len__(self) -> int:
        """That are running."""
        return len(self._running)

    def join(self, key: Key, request: GenerationRequest, *, on_progress: OnProgress = ignore) -> None:
        """Begin a request where there is room: its prompt is read, while the others wait, and its first pass waits for
        theirs. What its prompt and those of others begin with alike is not read again. After an error, such as one that
        `on_progress` raises, it can only leave."""
        taken = [running.engine for running in self._running.values()]
        idle = [engine for engine in self._engines if engine not in taken]
        engine = max(idle, key=lambda each: each.prefix.num_alike(request.prompt))
        engine.borrow([each for each in self._engines if each is not engine], request.prompt)
        self._running[key] = _Running(engine, engine.in_passes(request, on_progress=on_progress))
        self._running[key].go_on()

    def steps(self) -> list[tuple[Key, Step]]:
        """Run passes until there are steps, at least one, in the order in which the sequences joined. Who has had the
        last step leaves before the next call."""
        while self._running:
            for running in self._running.values():
                running.go_on()
            came = [(key, step) for key, running in self._running.items() if (step := running.taken()) is not None]
            if came:
                return came
            self._run_passes()
        return []

    def leave(self, key: Key) -> Stats:
        """End a request, whether or not it has come to its end. Returns its statistics; the seconds are those that went
        by, the link's bytes those of all who ran meanwhile."""
        running = self._running.pop(key)
        running.work.close()
        return running.engine.stats

    def close(self) -> None:
        for key in list(self._running):
            self.leave(key)
        while len(self._engines) > 1:
            self._engines.pop().worker.release()

    def __enter__(self) -> Sequences[Key]:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _run_passes(self) -> None:
        """One pass of the cheapest level that anybody waits for, so that whoever still drafts is there when the next
        one's turn comes."""
        for part in _parts(self._cheapest(list(self._running.values()))):
            self._run(part)

    def _cheapest(self, some: Sequence[_Running]) -> list[_Running]:
        """Those who wait for a pass of the cheapest level."""
        name = min((each.level_name for each in some), key=self._levels.index)
        return [each for each in some if each.level_name == name]

    def _run(self, part: Sequence[_Running]) -> None:
        """Their passes, as one."""
        start = time.perf_counter()
        part[0].level.run([each.waits_for for each in part])
        seconds = time.perf_counter() - start
        for each, share in zip(part, self._shares(part), strict=True):
            each.ran(seconds * share)

    def _shares(self, part: Sequence[_Running]) -> list[float]:
        """Each one's of a pass's seconds: an equal one of what it takes at any rate, and what the plan says of rows."""
        planned = pass_seconds(self._engines[0].plan, part[0].level_name)
        prices = [planned.fixed / len(part) + planned.slope * len(each.waits_for.tokens) for each in part]
        return [price / sum(prices) for price in prices]


class _Running:
    """A request on its engine. step: what came last and was not taken yet, else asked: the pass that it waits for;
    since: when it began to."""

    def __init__(self, engine: Engine, work: Work[Step]) -> None:
        self.engine, self.work = engine, work
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
        """Of the pass that it waits for."""
        return _level(self.waits_for)

    @property
    def level_name(self) -> str:
        return self.level.stats.name

    def go_on(self) -> None:
        """Up to the next step, or to the next pass, for which it waits from now on."""
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
        """The step that came, once."""
        step, self.step = self.step, None
        return step

    def ran(self, seconds: float) -> None:
        """Its pass has run. seconds: of it that are its own."""
        self.asked, self._answered, self._own = None, self.asked, seconds


def _parts(group: Sequence[_Running]) -> list[list[_Running]]:
    """Those whose passes, all of one level, can be shared, and each other one by itself."""
    together = [each for each in group if each.level.shares(len(each.waits_for.tokens))]
    apart = [[each] for each in group if each not in together]
    return [together, *apart] if together else apart


def _level(asked: Pass) -> Level:
    """The level of a worker."""
    assert isinstance(asked.level, Level)
    return asked.level
