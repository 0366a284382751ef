"""The whole full cache in 4 bits, on the device: the target proposes to itself over all of it.

Nothing is chosen and nothing is fetched again: whole groups of tokens are encoded once, and stay. The first group and
the last tokens, which attention needs most, are exact, and so are the rows drafted after them.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from offload.formats.quantised_kv import GROUP, KVCodes, Order
from offload.kernels.device import DeviceKernels
from offload.kv import Phase
from offload.kv.fetch import Tail, make_fetch
from offload.kv.full import FullCache
from offload.kv.places import Places, in_turn
from offload.kv.quantised_attention import EXACT, QuantisedAttention
from offload.plan.sizing import FETCH_BYTES, KV_TAIL, low_bit_tail
from offload.transfer.memory import Memory

_PURPOSE = "quantised cache"


class QuantisedCache:
    """Codes of the tokens `EXACT` to `coded` of the full cache, and exact rows of the others, per layer:
    [2, H_kv, first | tail, D].

    Codes depend on the full cache's rows alone, so they outlive requests, as far as these begin alike.
    """

    def __init__(
        self,
        full: FullCache,
        memory: Memory,
        *,
        num_tokens: int,
        drafted: int,
        kernels: DeviceKernels,
        beside: bool = False,
    ) -> None:
        """num_tokens: room for them. drafted: rows, at most, after the full cache's tokens. kernels: that encode and
        attend. beside: pages of the full cache may be stored at home as residuals of the codes."""
        self.full, self._memory, self._kernels = full, memory, kernels
        shape = full.shape
        self._attention = QuantisedAttention(kernels, full.scorings, shape.dtype, Places(full.device), full.reads)
        blocks = KVCodes.shape_of_blocks(full.num_layers, shape.num_kv_heads, num_tokens, shape.head_dim)
        self._codes = KVCodes(self._allocate(blocks, torch.uint8), shape.head_dim, kernels.order)
        self._held = self._room_for(low_bit_tail(drafted))
        self._fetch = make_fetch(full, GROUP, kernels, self._held.nbytes)
        self.coded = EXACT  # tokens up to here have codes, and the tail begins
        self._exact = 0  # tokens up to here are the full cache's, not drafted
        self.length = 0
        self._taken = [0] * len(full.reads)
        if beside:
            full.pages.lie_beside(self)

    @property
    def order(self) -> Order:
        """The order of the codes. With the next four members the cache implements `PageCodes`."""
        return self._codes.order

    @property
    def covered(self) -> int:
        return min(self.coded, self.full.stable_length)

    def first_group(self, page: int) -> int:
        return (page * self.full.shape.page_tokens - EXACT) // GROUP

    def of_layer(self, layer: int) -> Tensor:
        return self._codes.blocks[layer]

    def of_page(self, layer: int, page: int) -> Tensor:
        first = self.first_group(page)
        return self._codes.blocks[layer, :, first : first + self.full.shape.page_tokens // GROUP].cpu()

    def begin(self, phase: Phase, num_rows: int) -> None:
        self._taken = [0] * len(self.full.reads)
        self._reserve(self._place(self.length + num_rows))
        self._attention.begin(self.length, self._place(self.length), num_rows, self.coded - EXACT, self._codes)

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        """Attention over the codes and the exact rows, the new ones among them; see `Cache`."""
        taken, held = self._taken[layer], self._held[self.full.reads[layer]]
        self._taken[layer] += len(q)
        qkv, writes = in_turn(q, k, v, self.full.shape.num_kv_heads)
        return self._attention.attend(layer, taken, qkv, held, [held] if writes else [])

    def advance(self, num_tokens: int) -> None:
        self.length += num_tokens

    def truncate(self, length: int) -> None:
        """Codes stay: the next `refresh` drops those that the full cache has no longer. Below them the cache is empty
        until then."""
        self._taken = [0] * len(self.full.reads)
        has_codes = self.coded > EXACT
        self.length = 0 if has_codes and length < self.coded else min(self.length, length)
        self._exact = min(self._exact, length)

    def release(self) -> None:
        """The cache is not used again."""
        for held in (self._codes.blocks, self._held):
            self._memory.released(held, tier="device", purpose=_PURPOSE)

    @property
    def graph_key(self) -> Hashable:
        """The key of the memory of codes and exact rows, and of attention over them; see `Cache`."""
        return self._codes.blocks.data_ptr(), self._held.data_ptr(), self._held.shape, self._attention.graph_key

    def nbytes(self) -> int:
        return self._codes.blocks.nbytes + self._held.nbytes

    def prepare(self, num_rows: int, *, wanted: bool) -> bool:
        """After a verification: hold all tokens of the full cache, if that is wanted. Returns whether it does."""
        if wanted:
            self.refresh(num_rows)
        return wanted

    @torch.inference_mode()
    def refresh(self, num_rows: int = 0) -> None:
        """Hold all tokens of the full cache, whatever `num_rows` of them are new. Which of them are codes depends on
        their number alone: with a seed a text does not depend on what the engine was asked before."""
        length = self.full.length
        coded = max((length - KV_TAIL) // GROUP * GROUP, EXACT)
        self._forget_after(self.full.stable_length, coded)
        self.full.mark_synced()
        self._encode(coded)
        if self._exact < min(EXACT, length):
            self._fetch.fetch(self._held, Tail(0, self._exact, min(EXACT, length), 0))
        start = max(self._exact, self.coded)
        self._fetch.fetch(self._held, Tail(self.coded, start, max(length, start), EXACT))
        self.length = self._exact = length

    def _forget_after(self, kept: int, most: int) -> None:
        """Keep the rows that were taken from the full cache's first `kept` tokens, with codes of the first `most`
        tokens at most.

        The codes of later tokens stay in memory, for the pages that are residuals of them: encoded again an unchanged
        token has the same codes, and a page that gets other rows is raw from then on.
        """
        coded = max(min(self.coded, kept // GROUP * GROUP, most), EXACT)
        moved = coded < self.coded  # then the tail begins elsewhere
        self._exact = min(self._exact, kept, coded if moved else kept)
        self.coded = coded

    def _encode(self, stop: int) -> None:
        """Have codes up to token `stop`, if there are fewer, of rows in the tail or else of the full cache's. Broken
        off, none are new, and the tail is fetched again."""
        start, exact = self.coded, self._exact
        if stop <= start:
            return
        tail = self._held[..., EXACT:, :]
        parts = self._parts(start, stop)
        self._exact = min(exact, start)
        for first, last in parts:
            rows = tail[..., first - start : last - start, :]
            if last > exact:
                rows = self._fetch.tokens(first, last)
            self._kernels.quantise_kv(rows, self._codes.groups((first - EXACT) // GROUP, (last - EXACT) // GROUP))
        if (stay := exact - stop) > 0:
            tail[..., :stay, :] = tail[..., stop - start : stop - start + stay, :].clone()
        self.coded = stop
        self._exact = exact

    def _parts(self, start: int, stop: int) -> Sequence[tuple[int, int]]:
        """Whole groups from `start` to `stop`: those in the tail, then as many at a time as a fetch may move."""
        most = max(FETCH_BYTES // (self._held[..., 0, :].numel() * self._held.itemsize) // GROUP, 1) * GROUP
        within = max(min(self._exact // GROUP * GROUP, stop), start)
        cuts = sorted({start, within, *range(within, stop, most), stop})
        return list(pairwise(cuts))

    def _place(self, position: int) -> int:
        """The row of the token at `position` among the exact rows. It must be one of the first EXACT tokens or of the
        tail."""
        return position if position < EXACT else position - self.coded + EXACT

    def _reserve(self, num_rows: int) -> None:
        """Have room for so many exact rows; more than usual come where a prompt follows what was precomputed."""
        if num_rows > self._held.shape[3]:
            old = self._held
            self._held = self._room_for(num_rows - EXACT)
            self._held[..., : old.shape[3], :] = old
            self._memory.released(old, tier="device", purpose=_PURPOSE)

    def _room_for(self, tail: int) -> Tensor:
        shape = self.full.shape
        rows = EXACT + -(-tail // GROUP) * GROUP
        return self._allocate((self.full.num_layers, 2, shape.num_kv_heads, rows, shape.head_dim), shape.dtype)

    def _allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self._memory.allocate(shape, dtype, tier="device", purpose=_PURPOSE)
