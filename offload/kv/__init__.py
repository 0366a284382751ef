"""Caches: keys and values of earlier tokens, and attention over them. The model knows this protocol and no class behind
it."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Literal, Protocol

from torch import Tensor

Phase = Literal["prefill", "decode"]


class Cache(Protocol):
    """Keys and values of one sequence in every layer. A layer is named by its place among those that read this cache.

    A forward calls `begin`, then `attend` for each layer (once, or in phase "prefill" block by block, in order), then
    `advance`.
    """

    @property
    def length(self) -> int:
        """Tokens whose keys and values are in the cache, or were and are no longer needed."""
        ...

    def begin(self, phase: Phase, num_rows: int) -> None:
        """A forward of `num_rows` rows starts."""
        ...

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        """Add new rows, and return the attention of each over all that it may see.

        q [T, H, D], k, v [T, H_kv, D], not rotated: positions are the cache's affair. -> [T, H * D], q's dtype.
        k, v: None in a layer that reads the rows that an earlier one added in this forward.
        """
        ...

    def advance(self, num_tokens: int) -> None:
        """The forward is over and the first `num_tokens` of its rows count; later ones were padding."""
        ...

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens at most. Also ends a forward that was broken off."""
        ...

    @property
    def graph_key(self) -> Hashable:
        """The key of the forward that began, if its pass may be a graph on a GPU; None if it may not. Forwards of equal
        numbers of rows with equal keys differ in nothing but the contents of memory."""
        ...

    def nbytes(self) -> int:
        """Bytes on the compute device and the host together."""
        ...
