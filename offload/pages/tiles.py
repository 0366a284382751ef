"""Tiles: the unit of access, transfer and attention.

A tile holds `tokens` consecutive tokens of one layer at fixed absolute boundaries, as [2, P, H_kv, S, D]: keys then
values, P pages of S tokens. Its *home* is where it lives for good, or where its packed pages do.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from offload.config.model import ModelConfig
from offload.formats.layout import Packing
from offload.kernels.choice import of_attention
from offload.plan.planner import Plan
from offload.plan.sizing import MAX_ROWS, run_tiles
from offload.transfer.memory import Memory, Tier, sent

# "device": a tile lives there. "stream": it lives on the host and crosses the link into a staging slot.
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

    @property
    def packing(self) -> Packing:
        """The packed layout of a page's keys or of its values. Only bf16 pages are packed."""
        return Packing.of_page(self.num_kv_heads, self.page_tokens, self.head_dim)

    def count(self, num_tokens: int) -> int:
        """Tiles that hold `num_tokens` tokens."""
        return -(-num_tokens // self.tokens)

    def used_pages(self, index: int, num_tokens: int) -> int:
        """Pages of tile `index` that a sequence of `num_tokens` tokens reaches into."""
        used = min(max(num_tokens - index * self.tokens, 0), self.tokens)
        return -(-used // self.page_tokens)


def tile_tokens(plan: Plan, config: ModelConfig) -> int:
    """Tokens of a tile of the full cache of the plan's target, or of a shard of it. Where all tiles stay on a GPU with
    kernels, which attend to parts of one, a layer has a single tile."""
    device, tokens = torch.device(plan.request.device), plan.placement.tile_tokens
    offloaded = "kv" in plan.placement.offload
    if device.type == "cpu" or offloaded or not of_attention(device, config.block.attention, ()).usable:
        return tokens
    return -(-(plan.request.capacity + MAX_ROWS) // tokens) * tokens


def run_tokens(plan: Plan, config: ModelConfig) -> int:
    """The most tokens of a tile that a launch of attention takes."""
    tiles = run_tiles(config.block.attention) if plan.request.device != "cpu" and config.block.attends else 1
    return tiles * plan.placement.tile_tokens


class TileStore:
    """The homes of one sequence's tiles: the first ones of each layer on the device, the rest on the host.

    num_resident: number of tiles on the device, of all layers together, spread evenly over the layers; None: all.
    packs: homes of streamed tiles hold packed pages, uint8 [pages, 2, bytes of a packed block], see `PackedPages`; the
    last home holds only the pages that `most_tokens` tokens need.
    """

    def __init__(
        self,
        memory: Memory,
        shape: TileShape,
        num_layers: int,
        num_resident: int | None,
        *,
        packs: bool = False,
        most_tokens: int = sys.maxsize,
    ) -> None:
        self.shape, self.num_layers, self._packs, self._most_tokens = shape, num_layers, packs, most_tokens
        self._memory, self._num_resident = memory, num_resident
        self._homes: list[list[Tensor]] = [[] for _ in range(num_layers)]
        self._addresses: Tensor | None = None  # of the homes, on the device

    @property
    def num_tiles(self) -> int:
        """Tiles that are allocated in each layer."""
        return len(self._homes[-1]) if self._homes else 0  # the last layer grows last

    def num_resident(self, layer: int) -> int:
        """Number of tiles of `layer` on the device; they are its first ones."""
        if self._num_resident is None:
            return sys.maxsize
        share, extra = divmod(self._num_resident, self.num_layers)
        return share + (layer < extra)

    def place(self, layer: int, index: int) -> Place:
        return "device" if index < self.num_resident(layer) else "stream"

    def streamed(self, num_tokens: int, layers: Sequence[int]) -> list[tuple[int, int]]:
        """(layer, index) of all streamed tiles of `num_tokens` tokens, as they are used in the order of `layers`."""
        count = self.shape.count(num_tokens)
        return [(layer, index) for layer in layers for index in range(self.num_resident(layer), count)]

    def grow(self, num_tokens: int) -> None:
        """Allocate tiles until `num_tokens` tokens have room. After an error it can be called again."""
        if self.num_tiles < self.shape.count(num_tokens):
            self._addresses = None
        for index in range(self.num_tiles, self.shape.count(num_tokens)):
            for layer, homes in enumerate(self._homes):
                if index < len(homes):
                    continue
                shape, dtype = self.form(layer, index)
                tier = self._tier(layer, index)
                homes.append(self._memory.allocate(shape, dtype, tier=tier, purpose="kv cache"))

    def release(self) -> None:
        """Release all homes."""
        for layer, homes in enumerate(self._homes):
            for index, home in enumerate(homes):
                self._memory.released(home, tier=self._tier(layer, index), purpose="kv cache")
            homes.clear()
        self._addresses = None

    def _tier(self, layer: int, index: int) -> Tier:
        return "device" if self.place(layer, index) == "device" else "host"

    def form(self, layer: int, index: int) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype of a home."""
        if not self._packs or self.place(layer, index) != "stream":
            return self.shape.shape, self.shape.dtype
        return (self.shape.used_pages(index, self._most_tokens), 2, self.shape.packing.nbytes), torch.uint8

    def home_bytes(self, layer: int, index: int) -> int:
        shape, dtype = self.form(layer, index)
        return math.prod(shape) * dtype.itemsize

    def home(self, layer: int, index: int) -> Tensor:
        return self._homes[layer][index]

    def address(self, layer: int, index: int) -> int:
        """The address of a home."""
        return self._homes[layer][index].data_ptr()

    def addresses(self) -> Tensor:
        """The addresses of all homes, int64 [L, num_tiles] on the device."""
        if self._addresses is None:
            addresses = [[self.address(layer, i) for i in range(self.num_tiles)] for layer in range(self.num_layers)]
            self._addresses = sent(torch.tensor(addresses, dtype=torch.long), self._memory.device)
        return self._addresses

    def nbytes(self) -> int:
        return sum(home.nbytes for homes in self._homes for home in homes)
