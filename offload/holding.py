"""The full cache and whose rows it holds, from one request to the next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from offload.cache.full import FullCache
from offload.decode.held import Held, num_common
from offload.errors import DoesNotFit
from offload.model.decoder import Decoder
from offload.model.level import prefill
from offload.plan.planner import Plan
from offload.plan.sizing import MAX_ROWS
from offload.progress import OnProgress, Progress, bytes_of

if TYPE_CHECKING:
    from offload.session.store import Store


class Holding:
    """What was computed is held: a request goes on from the rows of what it has in common with what came before.

    The last `plan.rows` tokens of a prompt are left to the first pass of the target level, which appends to the same
    cache.
    """

    def __init__(self, cache: FullCache, decoder: Decoder, plan: Plan) -> None:
        self.cache = cache
        self._decoder, self._plan = decoder, plan
        self._held = Held()

    def reserve(self) -> None:
        """Allocate the cache. Raises DoesNotFit, with the context that the memory had so far is enough for."""
        plan = self._plan
        try:
            self.cache.reserve(plan.capacity + MAX_ROWS)
        except DoesNotFit as error:
            held = self.cache.nbytes()
            planned = sum(tier.get("kv cache", 0) for tier in (plan.device_bytes, plan.host_bytes))
            raise DoesNotFit(f"{error} to {plan.capacity * held // planned}") from error

    @property
    def tokens(self) -> list[int]:
        """One for each row that is held."""
        return self._held.tokens

    @property
    def is_settled(self) -> bool:
        """Are the levels below ready for a prompt that begins with what is held?"""
        return self._held.num_settled > 0

    def begin(self, prompt: Sequence[int], *, reuse: bool) -> int:
        """Keep what `prompt` may go on from, and forget the rest. Returns how many rows that are.

        reuse: whichever passes computed them; else only those that a prefill of `prompt` would give bit for bit.
        """
        held, plan = self._held, self._plan
        kept = held.reusable(prompt, plan.rows) if reuse else held.own(prompt, plan.rows, plan.walk)
        if not reuse:
            held.num_settled = 0
        self.truncate(kept)
        return kept

    def num_prefilled(self, prompt: Sequence[int]) -> int:
        """Tokens of it that no pass of the target level runs."""
        return max(len(prompt) - self._plan.rows, self.cache.length)

    def prefill(self, tokens: Sequence[int], on_progress: OnProgress) -> None:
        """Add what is not held yet of `tokens`, which begin with what is. Broken off, it leaves what was held."""
        held = self.cache.length
        if len(tokens) == held:
            return

        def report(num_tokens: int) -> None:
            on_progress(Progress("prefill", num_tokens, len(tokens) - held, "tokens"))

        prefill(self._decoder, self.cache, tokens[held:], prefill_block=self._plan.walk, on_tokens=report)
        self._held.prefilled(tokens, self._plan.walk)

    def generated(self, tokens: Sequence[int]) -> None:
        """The cache has rows of the first of `tokens` now, what is pending left out."""
        self._held.generated(tokens[: self.cache.length])

    def settled(self, tokens: Sequence[int]) -> None:
        """The cache has rows of all `tokens`, and the levels below are ready for what begins with them."""
        self._held.tokens, self._held.num_settled = list(tokens), len(tokens)

    def unsettle(self) -> None:
        """The levels below are no longer ready."""
        self._held.num_settled = 0

    def truncate(self, length: int) -> None:
        self._held.truncate(length)
        self.cache.truncate(length)

    def take(self, other: Holding) -> None:
        """Hold a copy of the rows of `other`, of the same model, where positions turn as there; else nothing."""
        if not self.cache.rope.starts_like(other.cache.rope):
            return
        self.cache.copy_from(other.cache)
        self._held = other._held.copy()
        self.unsettle()

    def take_prefill(self, other: Holding) -> None:
        """The same of one prefill, which is all that `other` holds afterwards too."""
        other.truncate(other._held.num_own)
        self.take(other)

    def restore(self, store: Store, tokens: Sequence[int], on_progress: OnProgress) -> int:
        """See `Engine.restore`."""
        common = min(num_common(store.tokens, tokens), self._plan.capacity)
        if common <= num_common(self._held.tokens, tokens):
            return common
        self._held = Held()
        total = store.bytes_to_write(common, 0)
        report = bytes_of("restore", total, on_progress)
        store.load(self.cache, common, on_bytes=report)
        report(total)
        self._held = Held(list(tokens[:common]), num_saved=common)
        return common

    def save(self, store: Store, extra: Mapping[str, object], on_progress: OnProgress) -> None:
        """See `Engine.save`."""
        held = self._held
        total = store.bytes_to_write(len(held.tokens), held.num_saved)
        report = bytes_of("save", total, on_progress)
        store.save(
            self.cache,
            held.tokens,
            capacity=self._plan.capacity,
            extra=extra,
            unchanged=held.num_saved,
            on_bytes=report,
        )
        report(total)
        held.num_saved = len(held.tokens)
