"""The prefix cache: rows that the full cache keeps between requests, and the choice of those that a request reuses."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from offload.decode.sequence import num_common as num_common
from offload.model.decoder import OnHidden
from offload.pages.tiles import tile_tokens
from offload.progress import OnProgress, Progress, bytes_of
from offload.session.prefix_store import PrefixStore
from offload.worker.worker import Worker

if TYPE_CHECKING:
    from offload.plan.planner import Plan
    from offload.session.store import Store

LEAST_TOKENS = 1000  # of a prompt that the prefix store is for: a shorter one is computed at once
SPAN_SECONDS, SPAN_TRANSFERS = 10.0, 2  # of a span of a prefill at least: seconds, and transfers of all weights
COPIES = 64  # rows that are copied in less time than one is computed
OpenStore = Callable[["Plan"], PrefixStore]  # opens the prefix store of a model for a plan


class PrefixCache:
    """The tokens whose rows a worker's full cache holds. A request reuses their longest common prefix with its prompt.

    The last `plan.placement.rows` tokens of a prompt are left to the first pass of the target level, which appends to
    the same cache. Precomputed tokens are not left to it, unless one is the prompt's last token.
    tokens: one for each row. num_precomputed: number of first tokens that were run before the rest of the prompt was
    known, with the levels below prepared; 0: none. open_store: opens the prefix store for a plan; None: there is none.
    num_read: number of tokens whose rows the last prefill has read from the store.
    """

    def __init__(self, worker: Worker, open_store: OpenStore | None = None) -> None:
        self.tokens: list[int] = []
        self.num_precomputed = 0
        self._worker, self._target = worker, worker.levels["target"]
        self._num_own = 0  # first rows whose bits equal those of one prefill of these tokens
        self._num_saved = 0  # first rows that the session on disk has, bit for bit
        self.num_read = 0
        self._open_store = open_store
        self._store: PrefixStore | None = None

    def begin(self, prompt: Sequence[int], *, reuse: bool) -> int:
        """Keep the rows that `prompt` reuses and drop the rest. Returns the number of kept rows.

        reuse: keep rows of the longest common prefix, whichever passes computed them; otherwise only rows that a
        prefill of `prompt` would give bit for bit.
        """
        kept = self.num_kept(prompt, reuse=reuse)
        if not reuse:
            self.num_precomputed = 0
        self.truncate(kept)
        return len(self.tokens)

    def give_way(self, prompt: Sequence[int]) -> None:
        """Drop rows that keep `prefill` from reading the many more that the prefix store has of `prompt`: it reads
        after whole pages of one prefill."""
        kept, rows = self.num_kept(prompt, reuse=True), self._worker.plan.placement.rows
        if self._worth_reading(prompt[: max(len(prompt) - rows, 0)], kept) is None:
            return
        while (whole := self._num_own_pages(kept)) < kept:
            self.truncate(whole)
            kept = len(self.tokens)  # of states and windows perhaps fewer

    def num_prefilled(self, prompt: Sequence[int]) -> int:
        """The number of first tokens of `prompt` that no pass of the target level runs."""
        return max(len(prompt) - self._worker.plan.placement.rows, self._target.length)

    def prefill(self, tokens: Sequence[int], on_progress: OnProgress, on_hidden: OnHidden | None = None) -> None:
        """Add the missing rows of `tokens`, which begin with the cached tokens: those that the prefix store has are
        read, unless computing them is quicker. `on_hidden`: see `Worker.prefill`; with it all rows are computed, in one
        span. An interrupted prefill adds the rows of its whole spans: progress stays at the end of each."""
        self.num_read = 0 if on_hidden is not None else self._read(tokens, on_progress)
        start, total = self._target.length, len(tokens) - self._target.length
        step = span_tokens(self._worker.plan) if on_hidden is None else max(total, 1)
        for first in range(0, total, step):
            stop = min(first + step, total)

            def report(num_tokens: int, first: int = first, stop: int = stop) -> None:
                if first + num_tokens < stop:
                    on_progress(Progress("prefill", first + num_tokens, total, "tokens", held=start))

            self._prefill_span(tokens[: start + stop], report, on_hidden)
            on_progress(Progress("prefill", stop, total, "tokens", stays=True, held=start))

    def _prefill_span(
        self, tokens: Sequence[int], on_tokens: Callable[[int], None], on_hidden: OnHidden | None
    ) -> None:
        """Add the missing rows of `tokens`. After whole blocks of one prefill they are that prefill's, bit for bit."""
        self._worker.prefill(tokens[self._target.length :], on_tokens, on_hidden)
        if len(self.tokens) == self._num_own and self._num_own % self._worker.plan.placement.prefill_block == 0:
            self._num_own = len(tokens)
        self.tokens = list(tokens)

    def generated(self, tokens: Sequence[int]) -> None:
        """Record that the full cache has rows of `tokens`, except the pending ones at the end."""
        self.tokens, self.num_precomputed = list(tokens[: self._target.length]), 0
        self._num_own, self._num_saved = self._own(len(self.tokens)), min(self._num_saved, len(self.tokens))

    def precomputed(self, tokens: Sequence[int]) -> None:
        """Record that the full cache has rows of all `tokens`, and that the levels below are prepared for them."""
        self.tokens, self.num_precomputed = list(tokens), len(tokens)

    def truncate(self, length: int) -> None:
        """Keep at most the first `length` rows."""
        self.tokens = self.tokens[:length]
        self._num_own, self._num_saved = self._own(length), min(self._num_saved, length)
        if length < self.num_precomputed:
            self.num_precomputed = 0
        self._target.truncate(length)
        if (held := self._target.length) < length and self.tokens:  # a window has lost rows that it needs
            self.truncate(held)

    def _own(self, length: int) -> int:
        """The number of the first `length` rows that a prefill of their tokens gives: of a cut one its whole blocks."""
        block = self._worker.plan.placement.prefill_block
        return self._num_own if self._num_own <= length else length // block * block

    def take(self, other: PrefixCache) -> None:
        """Copy the rows of `other`, of the same model. No row is copied where positions are rotated differently. Rows
        that this plan would compute with other bits stay rows of the text, and are none of a prefill."""
        other._settle()
        if self._worker.copy_rows(other._worker):
            self.tokens, self.num_precomputed = list(other.tokens), 0
            is_whole = self._worker.kept.is_whole(len(self.tokens))
            own = other._own(_num_with_the_same_bits(self._worker, other._worker))
            self._num_own, self._num_saved = own if is_whole else 0, other._num_saved

    def take_prefill(self, other: PrefixCache) -> None:
        """Copy the rows of `other` that one prefill gave, and truncate `other` to them."""
        other.truncate(other._num_own)
        self.take(other)

    def num_alike(self, prompt: Sequence[int]) -> int:
        """The number of cached rows that a prefill of `prompt` would give bit for bit: its whole prefill, or the whole
        blocks with which both prompts begin."""
        placement = self._worker.plan.placement
        wanted = max(len(prompt) - placement.rows, 0)
        common = min(num_common(self.tokens, prompt), self._num_own, wanted)
        if not common == wanted == self._num_own:
            common = common // placement.prefill_block * placement.prefill_block
        while (kept := self._worker.reachable(common, len(prompt))) < common:
            common = kept // placement.prefill_block * placement.prefill_block
        return common

    def num_kept(self, prompt: Sequence[int], *, reuse: bool) -> int:
        """The number of cached rows that `begin` keeps."""
        return self._num_reusable(prompt) if reuse else self.num_alike(prompt)

    def borrow(self, others: Sequence[PrefixCache], prompt: Sequence[int], *, reuse: bool = False) -> None:
        """Copy the rows of `num_kept` from the one of `others` that has the most, if it has so many more than this
        cache that copying all is quicker than computing them. Workers of `others` have the same plan. `others` do not
        change; their sequences may be running."""
        counts = [(other.num_kept(prompt, reuse=reuse), other) for other in others]
        count, best = max(counts, key=lambda pair: pair[0], default=(0, self))
        more = count - self.num_kept(prompt, reuse=reuse)
        if more * COPIES > count and self._worker.copy_rows(best._worker, count):
            self.tokens, self.num_precomputed = list(prompt[:count]), 0
            self._num_own, self._num_saved = best._own(count), 0

    def restore(self, store: Store, tokens: Sequence[int], on_progress: OnProgress) -> int:
        """Read the rows of the longest common prefix of `store` and `tokens`, unless the cache has them. Returns the
        number of tokens of the prefix, where layers have states up to the last saved one; 0 if a window or a state that
        the tokens need was not saved. Raises as `Engine.restore`."""
        worker, kept = self._worker, self._worker.kept
        self._settle()
        most = min(num_common(store.tokens, tokens), worker.plan.request.capacity)
        # a request goes on from the last place before the prompt's last token, or leaves some to the first pass
        last = max(len(tokens) - (1 if kept.at_places else worker.plan.placement.rows), 0)
        common, used = (store.num_loadable(kept, count) for count in (most, min(most, last)))
        has = num_common(self.tokens, tokens)
        if kept.at_places:
            can_go_on, is_there = used > 0, used <= worker.reachable(min(has, last))
        else:
            can_go_on, is_there = common == most and used == min(most, last), common <= has
        if not can_go_on:
            return 0
        if is_there:
            return common
        self.truncate(0)
        total = store.bytes_to_read(kept, common)
        report = bytes_of("restore", total, on_progress)
        store.load(kept, common, on_bytes=report)
        report(total)
        self.tokens, self._num_saved = list(tokens[:common]), common
        return common

    def save(self, store: Store, extra: Mapping[str, object], on_progress: OnProgress) -> None:
        """Write the cached rows to `store`, except rows that it has already; see `Engine.save`. An empty cache that
        could not go back to every length replaces `extra` alone."""
        kept, capacity = self._worker.kept, self._worker.plan.request.capacity
        self._settle()
        if not self.tokens and kept.limit:  # the saved rows may still begin the text
            store.keep(extra)
            return
        kept.each("note_length")
        total = store.bytes_to_write(len(self.tokens), self._num_saved, kept)
        report = bytes_of("save", total, on_progress)
        store.save(kept, self.tokens, capacity=capacity, extra=extra, unchanged=self._num_saved, on_bytes=report)
        report(total)
        self._num_saved = len(self.tokens)

    def keep(self, on_progress: OnProgress, documents: Sequence[str]) -> int:
        """Write the first rows that have the bits of one prefill to the prefix store. Returns the number of tokens that
        are kept; see `Engine.keep`."""
        worker, own = self._worker, self.tokens[: self._num_own]
        if (store := self._store_for(own)) is None:
            return 0
        return store.keep(worker.kept, own, on_progress, documents)

    def _read(self, tokens: Sequence[int], on_progress: OnProgress) -> int:
        """Read rows of `tokens` from the prefix store, where all rows in the cache are those of one prefill. Returns
        the number of tokens read."""
        worker, held = self._worker, len(self.tokens)
        if (store := self._worth_reading(tokens, held)) is None or self._num_own_pages(held) < held:
            return 0
        count = store.load(worker.kept, tokens, held, on_progress)
        self.tokens, self._num_own, self._num_saved = list(tokens[:count]), count, min(self._num_saved, count)
        return max(count - held, 0)

    def _num_own_pages(self, length: int) -> int:
        """The number of the first `length` rows that are whole pages of one prefill."""
        page = self._worker.plan.placement.page_tokens
        return min(length, self._num_own) // page * page

    def _worth_reading(self, tokens: Sequence[int], held: int) -> PrefixStore | None:
        """The prefix store, if it has so many more rows of `tokens` than the `held` ones that reading is quicker than
        computing."""
        if (store := self._store_for(tokens)) is None:
            return None
        stored, plan = store.stored(self._worker.kept.parts, tokens), self._worker.plan
        share = (stored.num_tokens - held) / max(plan.request.num_prompt_tokens, 1)
        is_quicker = share > 0 and store.read_seconds(stored) <= share * plan.predicted.first_token_seconds
        return store if is_quicker else None

    def _store_for(self, tokens: Sequence[int]) -> PrefixStore | None:
        """The prefix store, if it may have rows of `tokens`; opened when it is first needed. Pages have to be whole
        blocks of a prefill."""
        placement = self._worker.plan.placement
        if self._open_store is None or len(tokens) < LEAST_TOKENS or placement.page_tokens % placement.prefill_block:
            return None
        if self._store is None:
            self._store = self._open_store(self._worker.plan)
        return self._store

    def _settle(self) -> None:
        """Drop the rows that can no longer be continued: an interrupted prefill overwrites rows that windows need, and
        states."""
        self.truncate(len(self.tokens))

    def _num_reusable(self, prompt: Sequence[int]) -> int:
        precomputed, common = min(self.num_precomputed, len(prompt) - 1), num_common(self.tokens, prompt)
        kept = min(common, max(len(prompt) - self._worker.plan.placement.rows, precomputed))
        if self._worker.kept.at_places and self._worker.reachable(kept) < kept:
            kept = max(kept, self._worker.reachable(min(common, len(prompt) - 1)))  # with fewer rows in the first pass
        return self._worker.reachable(kept, len(prompt))


def _num_with_the_same_bits(*workers: Worker) -> int:
    """The number of first tokens whose rows a prefill of each of the workers gives alike, see `Conditions`."""
    ours, theirs = (each.plan.placement for each in workers)
    if ours.rounding != theirs.rounding or ours.page_tokens != theirs.page_tokens:
        return 0
    tiles = {tile_tokens(each.plan, each.target.config) for each in workers}
    return min(tiles) if len(tiles) > 1 else min(each.plan.request.capacity for each in workers)


def span_tokens(plan: Plan) -> int:
    """The tokens of a span of a prefill, after which its rows stay: whole blocks for SPAN_SECONDS, or for
    SPAN_TRANSFERS times as long as the weights that stream cross the link, which they do once more in each span. Of
    more rows than experts run over at once, a multiple of those."""
    placement, whole = plan.placement, plan.predicted.prefill_seconds
    streamed = sum(placement.host_bytes.get(name, 0) for name in ("target layers", "target experts"))
    each, rate = streamed / plan.request.num_devices, placement.link_bytes_per_second
    seconds = max(SPAN_SECONDS, SPAN_TRANSFERS * each / rate if rate else 0.0)
    share = seconds / whole if whole else 1.0  # over 1 for a prompt that is longer than the planned one
    tokens = share * plan.request.num_prompt_tokens
    step = placement.expert_rows if tokens > placement.expert_rows else placement.prefill_block
    return max(math.ceil(tokens / step), 1) * step
