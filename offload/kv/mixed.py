"""A cache for models that have layers with a window: each layer attends in the cache of its kind."""

from __future__ import annotations

from collections.abc import Hashable

from torch import Tensor

from offload.config.model import ModelConfig
from offload.kv import Cache, Phase
from offload.kv.window import WindowCache


class MixedCache:
    """growing: of the layers without a window, whichever level it serves. windows: of the others, one for all levels of
    a sequence. drafts: the level's rows are drafted, and follow the exact ones in `windows`."""

    def __init__(self, config: ModelConfig, growing: Cache, windows: WindowCache, *, drafts: bool) -> None:
        self._growing, self._windows, self._drafts = growing, windows, drafts
        self._places: dict[int, tuple[Cache, int]] = {layer: (growing, at) for at, layer in enumerate(config.growing)}
        self._places |= {layer: (windows, at) for at, layer in enumerate(config.windowed)}

    @property
    def length(self) -> int:
        return self._growing.length

    def begin(self, phase: Phase, num_rows: int) -> None:
        self._windows.begin(phase, num_rows, self.length if self._drafts else None)
        self._growing.begin(phase, num_rows)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `Cache`."""
        cache, at = self._places[layer]
        return cache.attend(at, q, k, v)

    def advance(self, num_tokens: int) -> None:
        self._growing.advance(num_tokens)
        self._windows.advance(num_tokens)

    def truncate(self, length: int) -> None:
        """See `Cache`. Where a window has lost tokens that it would need, nothing is kept."""
        if not self._drafts:
            self._windows.truncate(length)
            length = self._windows.length
        self._growing.truncate(length)

    @property
    def graph_key(self) -> Hashable:
        """See `Cache`."""
        keys = self._growing.graph_key, self._windows.graph_key
        return None if None in keys else keys

    def nbytes(self) -> int:
        return self._growing.nbytes() + self._windows.nbytes()
