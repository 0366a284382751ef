"""Tiles: the unit of residence, transfer and attention.

A tile holds `tokens` consecutive tokens of one layer at fixed absolute boundaries, as [2, P, H_kv, S, D]: keys then
values, P pages of S tokens. Its *home* is where it lives for good.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from offload.transfer.memory import Memory, Tier

# How a tile is attended to. "device": it lives there. "stream": it lives on the host and crosses the link into a
# staging slot.
Place = Literal["device", "stream"]


@dataclass(frozen=True)
class TileShape:
    num_kv_heads: int
    head_dim: int
    page_tokens: int
    num_pages: int
    dtype: torch.dtype

    @property
    def tokens(self) -> int:
        return self.page_tokens * self.num_pages

    @property
    def shape(self) -> tuple[int, ...]:
        return (2, self.num_pages, self.num_kv_heads, self.page_tokens, self.head_dim)

    @property
    def nbytes(self) -> int:
        return 2 * self.tokens * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    def count(self, num_tokens: int) -> int:
        """Tiles that hold `num_tokens` tokens."""
        return -(-num_tokens // self.tokens)

    def used_pages(self, index: int, num_tokens: int) -> int:
        """Pages of tile `index` that a sequence of `num_tokens` tokens reaches into."""
        used = min(max(num_tokens - index * self.tokens, 0), self.tokens)
        return -(-used // self.page_tokens)


class TileStore:
    """The homes of one sequence's tiles: the first ones of each layer on the device, the rest on the host.

    num_resident: how many are on the device, of all layers together, spread evenly; None: all.
    """

    def __init__(self, memory: Memory, shape: TileShape, num_layers: int, num_resident: int | None) -> None:
        self.shape, self.num_layers = shape, num_layers
        self._memory, self._num_resident = memory, num_resident
        self._homes: list[list[Tensor]] = [[] for _ in range(num_layers)]

    @property
    def num_tiles(self) -> int:
        """Tiles of each layer that are allocated."""
        return len(self._homes[0])

    def num_resident(self, layer: int) -> int:
        """Tiles of `layer` on the device: the first so many."""
        if self._num_resident is None:
            return sys.maxsize
        share, extra = divmod(self._num_resident, self.num_layers)
        return share + (layer < extra)

    def place(self, layer: int, index: int) -> Place:
        return "device" if index < self.num_resident(layer) else "stream"

    def streamed(self, num_tokens: int) -> list[tuple[int, int]]:
        """(layer, index) of all tiles of `num_tokens` tokens that stream, in the order in which layers want them."""
        count = self.shape.count(num_tokens)
        return [(layer, index) for layer in range(self.num_layers) for index in range(self.num_resident(layer), count)]

    def grow(self, num_tokens: int) -> None:
        """Allocate tiles until `num_tokens` tokens have room."""
        for index in range(self.num_tiles, self.shape.count(num_tokens)):
            for layer, homes in enumerate(self._homes):
                shape, tier = self.shape, self._tier(layer, index)
                homes.append(self._memory.allocate(shape.shape, shape.dtype, tier=tier, purpose="kv cache"))

    def release(self) -> None:
        """Give all homes back."""
        for layer, homes in enumerate(self._homes):
            for index, home in enumerate(homes):
                self._memory.released(home, tier=self._tier(layer, index), purpose="kv cache")
            homes.clear()

    def _tier(self, layer: int, index: int) -> Tier:
        return "device" if self.place(layer, index) == "device" else "host"

    def home(self, layer: int, index: int) -> Tensor:
        return self._homes[layer][index]

    def nbytes(self) -> int:
        return sum(len(homes) for homes in self._homes) * self.shape.nbytes
