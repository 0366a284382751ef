"""Pages that lie packed at home, in about 12 of a number's 16 bits: they take less of the host's memory, and fewer
bytes of them cross the link.

Nothing is lost, so it never matters to what is computed which pages are packed, and when that was done.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from offload.cache.page_table import Page, PageTable
from offload.cache.tiles import TileStore
from offload.cache.traffic import All, Traffic
from offload.kernels.native import Kernels
from offload.kernels.packed import pack, unpack
from offload.plan.sizing import PACKED_TOKENS
from offload.transfer.link import Event, Link
from offload.transfer.memory import Memory

UNINTERRUPTED = True  # a page lies where the table says

_AT_A_TIME = 32  # pages that are packed between two moments in which an interrupt may come


class PackedPages:
    """Pages of a store's streamed tiles, on their way home and back.

    A page is raw from when it is written until it is packed: once its last token was written, and either a pass is over
    or slots for others are short. One that would take too many escapes stays raw. Where nothing that is raw can be
    packed, there are more slots from then on.

    kernels: the processor's, which pack, and unpack what the host reads.
    """

    def __init__(self, store: TileStore, memory: Memory, kernels: Kernels, link: Link, traffic: Traffic) -> None:
        assert store.shape.dtype == torch.bfloat16
        self._store, self._kernels, self._link, self._traffic = store, kernels, link, traffic
        self.packing, self.table = store.shape.packing, PageTable(store, memory)
        self._new: dict[Page, bool] = {}  # raw ones that nobody tried to pack since they were written: whether whole

    def reserve(self, num_slots: int) -> None:
        """Have so many slots. Raises DoesNotFit."""
        self.table.raw.add(num_slots - self.table.raw.num_slots)

    def write(self, layer: int, index: int, tile: Tensor, start: int, stop: int) -> Event:
        """Tokens `start` to `stop` of `tile`, on the device, are new: send their pages, with all that these hold, to
        slots. Raises DoesNotFit where all are taken and there is no memory for more."""
        size, ready = self._store.shape.page_tokens, self._link.record()
        numbers = range(start // size, -(-stop // size))
        pages = [(layer, index * self._store.shape.num_pages + number) for number in numbers]
        slots = self._slots_for(pages)
        for run, raw in self.table.raw.runs(slots):
            own = slice(numbers.start + run.start, numbers.start + run.stop)
            for half in range(2):
                event = self._link.to_host(raw[half], tile[half, own], (ready,))
        self._traffic.writes((layer, index), event)
        self.table.lie_raw(pages, slots)
        for page, number in zip(pages, numbers, strict=True):
            self._new.pop(page, None)
            self._new[page] = (number + 1) * size <= stop
        return event

    def fetch(
        self, slot: Tensor, layer: int, index: int, num_pages: int, after: tuple[Event, ...]
    ) -> tuple[Event, Tensor]:
        """Bring the first pages of a tile to `slot` [2, P, H_kv, S, D], one after the other as they lie, and no more
        than they fill -> (when they came, which are packed: uint8 [num_pages] on the device)."""
        first, home, there = index * self._store.shape.num_pages, self._store.home(layer, index), slot.view(-1)
        event: Event = All(after)
        for pages, is_packed in _runs(self.table.flags[layer, first : first + num_pages].tolist()):
            if is_packed:
                content = home[pages].flatten().view(slot.dtype)
                event = self._link.to_device(there[: len(content)], content, after)
                there = there[len(content) :]
                continue
            slots = [self.table.slots[layer, first + number] for number in range(pages.start, pages.stop)]
            for _, raw in self.table.raw.runs(slots):
                part, there = there[: raw.numel()], there[raw.numel() :]
                for half, own in zip(raw.flatten(2), part.view(raw.shape[1], 2, -1).unbind(1), strict=True):
                    event = self._link.to_device(own, half, after)
        if num_pages:
            self._traffic.reads((layer, index), event)
        return event, self.table.flags_there()[layer, first : first + num_pages]

    def are_due(self, num_tokens: int) -> bool:
        """Whether whole pages of `num_tokens` tokens may be packed that are not."""
        return bool(self._due(num_tokens))

    def pack_some(self, num_tokens: int) -> None:
        """Pack some of these, those that were written first. The host waits until they are home and nobody reads
        them."""
        self._pack(self._due(num_tokens)[:_AT_A_TIME])

    def to_fill(self, number: int) -> dict[int, Tensor]:
        """Page `number` of the layers in which it streams, [2, H_kv, S, D] each, to be written to on the host. `filled`
        has to follow. Raises DoesNotFit."""
        pages = self.table.streaming(number)
        slots = self._slots_for(pages)
        self.table.lie_raw(pages, slots)
        for page in pages:
            self._new.pop(page, None)
        return {layer: self.table.raw.page(slot) for (layer, _), slot in zip(pages, slots, strict=True)}

    def filled(self, number: int) -> None:
        """Pack that page, in all layers."""
        self._pack([page for page in self.table.streaming(number) if page in self.table.slots])

    def keep(self, num_tokens: int) -> None:
        """Pages after these tokens have no rows any more: they need no slots."""
        first = -(-num_tokens // self._store.shape.page_tokens)
        self._settle(dropped := [page for page in self.table.slots if page[1] >= first])
        for page in dropped:
            self._at_home(page)

    def nbytes(self) -> int:
        """Of slots."""
        return self.table.raw.nbytes()

    def release(self) -> None:
        """Give the slots back; the pages are not used again."""
        self.table.raw.release()

    def tokens(self, layer: int, number: int, start: int = 0, stop: int | None = None) -> Tensor:
        """Tokens `start` to `stop` of a page as bf16 [2, H_kv, stop - start, D] on the host, in memory of their own."""
        shape = self._store.shape
        stop = shape.page_tokens if stop is None else stop
        first, last = start // PACKED_TOKENS, -(-stop // PACKED_TOKENS)
        count, per_head = last - first, shape.page_tokens // PACKED_TOKENS
        out = torch.empty((2, shape.num_kv_heads, count * PACKED_TOKENS, shape.head_dim), dtype=shape.dtype)
        blocks, is_packed = self.table.blocks[layer, :, number].tolist(), int(self.table.flags[layer, number])
        parts = [
            (blocks[half], out[half, head].data_ptr(), head * per_head + first, count, is_packed)
            for half in range(2)
            for head in range(shape.num_kv_heads)
        ]
        unpack(torch.tensor(parts), self.packing, self._kernels)
        return out[:, :, start - first * PACKED_TOKENS : stop - first * PACKED_TOKENS]

    def read(self, layer: int, number: int, start: int, stop: int, out: Tensor) -> None:
        """The same in `out`."""
        out.copy_(self.tokens(layer, number, start, stop))

    def chunks(self, layer: int, index: int, half: int, runs: Tensor, out: Tensor) -> None:
        """Runs of tokens of a tile's keys (half 0) or values, each in one head, to the rows of `out` [n, tokens * D] on
        the host. runs int64 [n]: number of each in the half, which is cut into such runs; the tokens of one are a
        multiple of PACKED_TOKENS."""
        per_run = out.shape[1] // self.packing.group
        page, run = runs // (per_page := self.packing.num_groups // per_run), runs % per_page
        page = page + index * self._store.shape.num_pages
        parts = torch.stack(
            [
                self.table.blocks[layer, half, page],
                out.data_ptr() + torch.arange(len(runs)) * out.stride(0) * out.itemsize,
                run * per_run,
                torch.full_like(runs, per_run),
                self.table.flags[layer, page].long(),
            ],
            1,
        )
        unpack(parts, self.packing, self._kernels)

    def _slots_for(self, pages: Sequence[Page]) -> list[int]:
        """Where these pages will be raw: their own slots, or free ones, for which others are packed first."""
        missing = [page for page in pages if page not in self.table.slots]
        raw = self.table.raw
        while (short := len(missing) - raw.num_free) > 0:
            if others := [page for page, is_whole in self._new.items() if is_whole and page not in pages]:
                self._pack(others[:short])
            else:
                raw.add(short)
        own = self.table.slots | dict(zip(missing, raw.take(len(missing)), strict=True))
        return [own[page] for page in pages]

    def _due(self, num_tokens: int) -> list[Page]:
        stop = num_tokens // self._store.shape.page_tokens
        return [page for page, is_whole in self._new.items() if is_whole and page[1] < stop]

    def _pack(self, pages: Sequence[Page]) -> None:
        """Pack these raw pages home. Those that do not fit there stay."""
        if not pages:
            return
        self._settle(pages)
        numbers = self.table.raw.addresses([self.table.slots[page] for page in pages])
        homes = self.table.homes(pages)
        sizes = pack(numbers.flatten(), self.packing, self._kernels, to=homes.flatten()).view(-1, 2)
        for page, fits in zip(pages, (sizes > 0).all(1).tolist(), strict=True):
            if fits:
                self._at_home(page)
            else:
                self._new.pop(page, None)

    def _at_home(self, page: Page) -> None:
        self._new.pop(page, None)
        self.table.lie_at_home(page)

    def _settle(self, pages: Sequence[Page]) -> None:
        self._traffic.settle({self.table.tile(page) for page in pages})


def _runs(flags: Sequence[int]) -> Iterator[tuple[slice, int]]:
    """Slices of equal flags, with these."""
    start = 0
    for stop in range(1, len(flags) + 1):
        if stop == len(flags) or flags[stop] != flags[start]:
            yield slice(start, stop), flags[start]
            start = stop
