"""The turns of models: requests for one model at a time are answered, since one is loaded at a time."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")

_LISTENING_SECONDS = 0.2  # a signal's handler runs between two waits


@dataclass(eq=False)
class _Waiting(Generic[T]):
    """A request that waits for its model. is_in: it has its turn."""

    name: str
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    is_in: bool = False

    def __post_init__(self) -> None:
        self.turn: asyncio.Future[T] = self.loop.create_future()

    def settle(self, settle: Callable[[], None]) -> None:
        """Give the request its turn or an error, from any thread."""
        with suppress(RuntimeError):  # the event loop has ended
            self.loop.call_soon_threadsafe(lambda: None if self.turn.done() else settle())


class Turns(Generic[T]):
    """The requests of one model at a time. A request for another waits until the ones before it have ended, and the
    other model is loaded; requests for the loaded one that come later wait behind it.

    `begin` and `end` are for the event loop's thread; the rest is for the thread that loads models. latest: the model
    that was loaded last. idle_seconds: without a request, after which the model is to be unloaded; None: never.
    """

    def __init__(self, *, idle_seconds: float | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._idle_seconds, self._clock = idle_seconds, clock
        self._changed = threading.Condition()
        self._waiting: list[_Waiting[T]] = []
        self._loaded = ""  # the name of the model
        self._num, self._since = 0, clock()  # requests that have their turn; when there last was one
        self._refusal: Exception | None = None
        self.latest: T | None = None

    @property
    def has_model(self) -> bool:
        """Whether a model is loaded."""
        return bool(self._loaded)

    async def begin(self, name: str) -> T:
        """Wait for the turn of a request for a model, and return the model. `end` is to follow. Raises the error of
        loading it, or that of `close`."""
        with self._changed:
            if self._refusal is not None:
                raise self._refusal
            self._waiting.append(waiting := _Waiting[T](name))
            self._let_in()
            self._changed.notify()
        try:
            return await waiting.turn
        except asyncio.CancelledError:
            self._give_up(waiting)
            raise

    def end(self) -> None:
        """A request has ended."""
        with self._changed:
            self._num, self._since = self._num - 1, self._clock()

    def loaded(self, name: str, model: T) -> None:
        """A model is loaded: all requests that wait for it have their turn, so that few changes serve many."""
        with self._changed:
            self._loaded, self.latest, self._since = name, model, self._clock()
            for waiting in [each for each in self._waiting if each.name == name]:
                self._let(waiting)

    def failed(self, name: str, error: Exception) -> None:
        """A model cannot be loaded: the requests for it fail."""
        with self._changed:
            for waiting in [each for each in self._waiting if each.name == name]:
                self._fail(waiting, error)

    def has_to_leave(self, *, is_busy: bool = False) -> bool:
        """Whether the loaded model is to be unloaded now: another one is waited for, or nobody has asked for long. From
        then on requests wait for the next one. is_busy: it still works for clients that have gone, which only another
        model's requests end."""
        with self._changed:
            if self._loaded and not self._num and (self._waiting or (not is_busy and self._is_idle())):
                self._loaded = ""
            return not self._loaded

    def next(self) -> str | None:
        """The name of the model that is to be loaded next; None if nobody asks within a moment."""
        with self._changed:
            if not self._waiting:
                self._changed.wait(_LISTENING_SECONDS)
            return self._waiting[0].name if self._waiting else None

    def close(self, refusal: Exception) -> None:
        """No request has a turn from now on."""
        with self._changed:
            self._refusal = refusal
            for waiting in list(self._waiting):
                self._fail(waiting, refusal)

    def _is_idle(self) -> bool:
        return self._idle_seconds is not None and self._clock() - self._since >= self._idle_seconds

    def _let_in(self) -> None:
        """The first requests that wait, as far as they are for the loaded model, have their turn."""
        while self._loaded and self._waiting and self._waiting[0].name == self._loaded:
            self._let(self._waiting[0])

    def _let(self, waiting: _Waiting[T]) -> None:
        model = self.latest
        assert model is not None
        self._waiting.remove(waiting)
        self._num, waiting.is_in = self._num + 1, True
        waiting.settle(lambda: waiting.turn.set_result(model))

    def _fail(self, waiting: _Waiting[T], error: Exception) -> None:
        self._waiting.remove(waiting)
        waiting.settle(lambda: waiting.turn.set_exception(error))

    def _give_up(self, waiting: _Waiting[T]) -> None:
        """The client of a request has gone while it waited, or when it just had its turn."""
        with self._changed:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
                self._let_in()
        if waiting.is_in:
            self.end()
