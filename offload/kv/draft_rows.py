"""The full cache with drafted rows after its tokens."""

from __future__ import annotations

from collections.abc import Hashable

from torch import Tensor

from offload.kv import Phase
from offload.kv.full import FullCache


class DraftRowsCache:
    """The full cache with drafted rows, for the level at which the target proposes to itself over the whole cache.
    Drafted rows follow the tokens in the same tiles, until the target's own rows overwrite them. All tiles are on the
    device."""

    def __init__(self, full: FullCache) -> None:
        self._full = full

    @property
    def length(self) -> int:
        """Tokens of the full cache, and those drafted after them."""
        return self._full.length + self._full.num_ahead

    def begin(self, phase: Phase, num_rows: int) -> None:
        self._full.begin(phase, num_rows, ahead=True)

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        return self._full.attend(layer, q, k, v)

    def advance(self, num_tokens: int) -> None:
        self._full.advance(num_tokens, ahead=True)

    def truncate(self, length: int) -> None:
        """Forget drafted rows only."""
        self._full.truncate_ahead(length)

    @property
    def graph_key(self) -> Hashable:
        """The key of the full cache."""
        return self._full.graph_key

    def nbytes(self) -> int:
        """0: the memory is the full cache's."""
        return 0
