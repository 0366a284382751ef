"""The engine of a chat: its capacity grows with the conversation, and no KV row is computed twice."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from offload.errors import DoesNotFit
from triforce_cli.answering.request import Prompt, Wanted
from triforce_cli.setup.engine import Prepared, open_engine, open_session

if TYPE_CHECKING:
    from offload.engine.engine import Engine
    from offload.engine.step import Step
    from offload.metrics import Stats
    from offload.plan.planner import Plan
    from offload.progress import OnProgress
    from offload.session.store import Store

LEAST_CAPACITY = 4096  # tokens: room for the first turns; from there it doubles


class ChatEngine:
    """The engine of a chat, as a context manager. It is loaded at its first use, with capacity for the tokens needed
    then.

    session: the folder of the session, locked while it is open. limit: tokens that a conversation may have: the model's
    context, --context, or the number that fits in memory.

    The capacity grows by replanning if everything is on one device. If weights or cache are offloaded, the engine is
    planned for `limit` at once, since pinned memory and resident tiles are laid out for it.
    """

    def __init__(
        self,
        prepared: Prepared,
        *,
        session: Path | None = None,
        read_only: bool = False,
        on_note: Callable[[str], None],
    ) -> None:
        self._prepared, self._request = prepared, prepared.request
        self.limit = self._request.largest_context()
        if not self.limit:
            self._plan(2)  # raises, naming the missing memory
        if self.limit < self._request.context:
            on_note(f"context: {self.limit:,} of {self._request.context:,} tokens, what fits in memory")
        self._engine: Engine | None = None
        self._last_stats: Stats | None = None
        self._close = ExitStack()
        self.store: Store | None = None
        if session is not None:
            store = open_session(prepared, self._plan(self.limit), session, read_only=read_only)
            self.store = self._close.enter_context(store)
        self._least = max(LEAST_CAPACITY, self.store.capacity if self.store else 0)

    @property
    def plan(self) -> Plan | None:
        return None if self._engine is None else self._engine.plan

    @property
    def stats(self) -> Stats | None:
        """Statistics of the last reply."""
        return self._last_stats

    def ready(self, num_tokens: int, on_progress: OnProgress) -> Engine:
        """An engine with room for `num_tokens`. Raises DoesNotFit if they exceed `limit`."""
        if num_tokens > self.limit:
            raise DoesNotFit(f"{num_tokens:,} tokens are needed and the context ends at {self.limit:,}")
        if self._engine is None:
            plan = self._plan(self._capacity(num_tokens))
            self._engine = self._close.enter_context(open_engine(self._prepared, plan, on_progress=on_progress))
        elif num_tokens > self._engine.plan.request.capacity:
            self._engine.replan(self._plan(self._capacity(num_tokens)))
        return self._engine

    def answer(self, prompt: Prompt, wanted: Wanted, on_progress: OnProgress) -> Generator[Step, None, None]:
        """Generate a reply; see `Engine.generate`. Only new tokens are prefilled. The context needs room for one token
        of reply."""
        num_tokens = len(prompt.tokens)
        engine = self.ready(num_tokens + 1, on_progress)
        request = prompt.request(wanted, max_tokens=self.limit - num_tokens, reuse=True)
        engine = self.ready(num_tokens + request.max_tokens, on_progress)
        self.restore(prompt.tokens, on_progress)
        self._last_stats = None
        try:
            yield from engine.generate(request, on_progress=on_progress)
        finally:
            self._last_stats = engine.stats

    def precompute(self, tokens: Sequence[int], on_progress: OnProgress) -> None:
        """Prefill `tokens`, which the next message is certain to begin with. Does nothing if they do not fit."""
        if tokens and len(tokens) < self.limit:
            engine = self.ready(len(tokens), on_progress)
            self.restore(tokens, on_progress)
            engine.precompute(tokens, on_progress=on_progress)

    def keep(self, extra: Mapping[str, object], documents: Sequence[str], on_progress: OnProgress) -> None:
        """Save the engine's rows in the session; without one, keep those of a prefill in the prefix store. documents:
        names of those in the conversation."""
        if self.store is None and self._engine is not None:
            self._engine.keep(on_progress=on_progress, documents=documents)
        if self.store is not None and not self.store.read_only and self._engine is not None:
            self._engine.save(self.store, extra, on_progress=on_progress)

    def __enter__(self) -> ChatEngine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._close.close()

    def restore(self, tokens: Sequence[int], on_progress: OnProgress) -> None:
        """Load the session's rows for the beginning of `tokens`, if they are more than the engine has."""
        if self.store is not None and self._engine is not None:
            self._engine.restore(self.store, tokens, on_progress=on_progress)

    def _capacity(self, num_tokens: int) -> int:
        """The capacity for `num_tokens`: a power of two; `limit` if anything would be offloaded, or experts left in
        their file, or if RoPE frequencies depend on the capacity."""
        if self._request.target.rope.depends_on_capacity or self._plan(self.limit).placement.is_for_one_capacity:
            return self.limit
        return min(max(self._least, 1 << (num_tokens - 1).bit_length()), self.limit)

    def _plan(self, capacity: int) -> Plan:
        return self._request.plan(num_prompt_tokens=capacity - 1, max_tokens=1)
