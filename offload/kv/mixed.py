"""A cache for models whose layers are of several kinds: each layer mixes its rows in the cache of its kind."""

from __future__ import annotations

from collections.abc import Hashable

from torch import Tensor

from offload.config.model import ModelConfig
from offload.kernels.pooled import IndexRows
from offload.kernels.recurrence import RecurrenceWeights
from offload.kv import Cache, Phase
from offload.kv.indexed import IndexedCache
from offload.kv.parts import Part
from offload.kv.recent_ids import RecentIds
from offload.kv.states import DraftStates, StateCache
from offload.kv.window import WindowCache


class MixedCache:
    """The caches of one level, one for each kind of layers, as one `Cache`. growing: of the layers that attend without
    a window, whichever level it serves. windows: of the layers with a window, one cache for all levels of a sequence.
    states: of the layers with a state. drafts: the level's rows are drafted, and follow the exact ones. convolved, ids:
    of the layers with n-grams."""

    def __init__(
        self,
        config: ModelConfig,
        growing: Cache,
        windows: WindowCache | None = None,
        states: StateCache | DraftStates | None = None,
        *,
        drafts: bool,
        convolved: StateCache | None = None,
        ids: RecentIds | None = None,
    ) -> None:
        assert not drafts or (convolved is None and ids is None), "a head that drafts has no n-grams"
        self.growing, self.windows, self.states, self._drafts = growing, windows, states, drafts
        self._convolved, self._ids = convolved, ids
        self._beside = [each for each in (windows, states, convolved) if each is not None]
        exact = (None, None, None) if drafts else (windows, states, convolved)
        self._exact = [each for each in exact if isinstance(each, WindowCache | StateCache)]
        readers = config.readers(config.growing)
        self._places: dict[int, tuple[Cache, int]] = {layer: (growing, at) for at, layer in enumerate(readers)}
        if windows is not None:
            self._places |= {layer: (windows, at) for at, layer in enumerate(config.readers(config.windowed))}
        self._stateful = {layer: at for at, layer in enumerate(config.stateful)}
        self._of_ngrams = {layer: at for at, layer in enumerate(config.with_ngrams)}

    @property
    def length(self) -> int:
        return self.growing.length

    def begin(self, phase: Phase, num_rows: int) -> None:
        for each in self._beside:
            each.begin(phase, num_rows, self.length if self._drafts else None)
        self.growing.begin(phase, num_rows)

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        cache, at = self._places[layer]
        return cache.attend(at, q, k, v)

    def attend_chosen(self, layer: int, q: Tensor, k: Tensor, v: Tensor, index: IndexRows) -> Tensor:
        assert isinstance(self.growing, IndexedCache), "a model with an indexer has an indexed cache"
        return self.growing.attend_chosen(self._places[layer][1], q, k, v, index)

    def recur(self, layer: int, rows: Tensor, weights: RecurrenceWeights) -> Tensor:
        assert self.states is not None, "a model with states has a cache of them"
        return self.states.recur(self._stateful[layer], rows, weights)

    def with_earlier(self, ids: Tensor) -> Tensor:
        assert self._ids is not None, "a model with n-grams has the ids of its tokens"
        return self._ids.note(ids)

    def convolve(self, layer: int, rows: Tensor, weights: RecurrenceWeights) -> Tensor:
        assert self._convolved is not None, "a model with n-grams has a cache of their convolutions"
        return self._convolved.recur(self._of_ngrams[layer], rows, weights)

    def advance(self, num_tokens: int) -> None:
        self.growing.advance(num_tokens)
        if self._ids is not None:
            self._ids.advance(num_tokens)
        for each in self._beside:
            each.advance(num_tokens)

    def reachable(self, length: int) -> int:
        """The most tokens, up to `length`, that the exact caches can be truncated to: windows lose what they need,
        states are at few places, and an index knows the last tokens alone."""
        found: list[Part] = [*self._exact]
        found += [self.growing.index] if isinstance(self.growing, IndexedCache) else []
        found += [] if self._ids is None else [self._ids]
        while (kept := min((each.reachable(length) for each in found), default=length)) < length:
            length = kept
        return length

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens at most, and no more than the exact caches can be truncated to."""
        if not self._drafts:
            length = self.reachable(min(length, self.length))
            for each in self._exact:
                each.truncate(length)
            if self._ids is not None:
                self._ids.truncate(length)
        self.growing.truncate(length)

    @property
    def graph_key(self) -> Hashable:
        """The keys of all caches; None if one of them has none."""
        keys = tuple(each.graph_key for each in (self.growing, *self._beside))
        return None if None in keys else keys

    def nbytes(self) -> int:
        return self.growing.nbytes() + sum(each.nbytes() for each in self._beside)
