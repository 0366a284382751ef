"""Pages that lie packed at home, in about 12 of a number's 16 bits, or in 9 where their codes in 4 bits are on the
device: they take less of the host's memory, and fewer bytes of them cross the link.

Nothing is lost, so it never matters to what is computed which pages are packed, and when that was done.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from offload.formats.layout import RAW
from offload.native.interface import Library
from offload.pages.codec import PageCodec
from offload.pages.table import Page, PageTable
from offload.pages.tiles import TileStore
from offload.pages.traffic import All, Traffic
from offload.transfer.link import Event, Link
from offload.transfer.memory import Memory

_AT_A_TIME = 32  # pages that are packed between two moments in which an interrupt may come


@dataclass(frozen=True)
class StagedPages:
    """The first pages of tile `index` of a layer in a staging slot, as they lay at home: of each how it lay, uint8
    [pages], and where its keys and its values begin, int64 [2, pages] bytes, both on the device. kinds: all that there
    are of the former."""

    layer: int
    index: int
    flags: Tensor
    starts: Tensor
    kinds: frozenset[int]


class PackedPages:
    """Pages of a store's streamed tiles, on their way home and back.

    A page is raw from when it is written until it is packed: once its last token was written, and either a pass is over
    or slots for others are short. Where `codec` has codes, it waits for those of all its tokens, and then is what its
    numbers have beside them; was it packed without them before, it is packed anew. One that would take too many escapes
    stays raw. Where nothing that is raw can be packed, there are more slots from then on.

    kernels: the CPU's.
    """

    def __init__(self, store: TileStore, memory: Memory, kernels: Library, link: Link, traffic: Traffic) -> None:
        self._store, self._link, self._traffic = store, link, traffic
        self.table = PageTable(store, memory)
        self.codec = PageCodec(store.shape, self.table, kernels)
        self._new: dict[Page, bool] = {}  # raw ones that nobody tried to pack since they were written: whether whole
        self._without: dict[Page, None] = {}  # those that were packed while they had no codes

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
        self._set_raw(pages, slots)
        for page, number in zip(pages, numbers, strict=True):
            self._new[page] = (number + 1) * size <= stop
        return event

    def fetch(
        self, slot: Tensor, layer: int, index: int, num_pages: int, after: tuple[Event, ...]
    ) -> tuple[Event, StagedPages]:
        """Bring the first pages of a tile to `slot`, of the tile's shape, one after the other as they lie, and no more
        than they fill -> (when they came, what did)."""
        there = slot.view(-1).view(torch.uint8)
        event: Event = All(after)
        for content in self._contents(layer, index, num_pages):
            part, there = there[: content.numel()], there[content.numel() :]
            halves, count, size = content.shape
            for half, to in zip(content, part.view(count, halves, size).unbind(1), strict=True):
                event = self._link.to_device(to, half, after)
        if num_pages:
            self._traffic.reads((layer, index), event)
        first, entries = index * self._store.shape.num_pages, self.table.on_device()
        pages = slice(first, first + num_pages)
        kinds = frozenset(self.table.flags[layer, pages].tolist())
        return event, StagedPages(layer, index, entries.flags[layer, pages], entries.starts[layer, :, pages], kinds)

    def pack_some(self, num_tokens: int) -> int:
        """Pack some raw whole pages of `num_tokens` tokens, those that were written first. The host waits until they
        are home and nobody reads them. -> How many, 0 where none are left."""
        stop = num_tokens // self._store.shape.page_tokens
        whole = [page for page, is_whole in self._new.items() if is_whole and page[1] < stop]
        ready = [page for page in whole if self.codec.has_codes(page) or self.codec.outside_code_range(page)]
        self._pack(ready[:_AT_A_TIME])
        return len(ready[:_AT_A_TIME])

    def due_again(self) -> list[Page]:
        """Pages that have codes since they were packed without; first those that are raw, since they did not fit."""
        again = (page for page in self._without if self.codec.has_codes(page))
        return sorted(again, key=lambda page: (page not in self.table.slots, page))

    def pack_again(self, pages: list[Page]) -> list[Page]:
        """Pack some of these anew, as far as there are free slots for them. -> Those that are left."""
        raw = self.table.raw
        some = pages[: max(min(_AT_A_TIME, raw.num_free), 1)]
        self._lift([page for page in some if page not in self.table.slots][: raw.num_free])
        self._pack([page for page in some if page in self.table.slots])
        return pages[len(some) :]

    def to_fill(self, number: int) -> dict[int, Tensor]:
        """Page `number` of the layers in which it streams, [2, H_kv, S, D] each, to be written to on the host. `filled`
        has to follow. Raises DoesNotFit."""
        pages = self.table.streaming(number)
        slots = self._slots_for(pages)
        self._set_raw(pages, slots)
        return {layer: self.table.raw.page(slot) for (layer, _), slot in zip(pages, slots, strict=True)}

    def filled(self, number: int) -> None:
        """Pack that page, in all layers."""
        self._pack([page for page in self.table.streaming(number) if page in self.table.slots])

    def keep(self, num_tokens: int) -> None:
        """Pages after these tokens have no rows any more: they need no slots."""
        first = -(-num_tokens // self._store.shape.page_tokens)
        if dropped := [page for page in self.table.slots if page[1] >= first]:
            self._settle(dropped)
            self.table.set_packed(dropped)
            self._forget(dropped)

    def nbytes(self) -> int:
        """Of slots."""
        return self.table.raw.nbytes()

    def release(self) -> None:
        """Give the slots back; the pages are not used again."""
        self.table.raw.release()

    def _contents(self, layer: int, index: int, num_pages: int) -> Iterator[Tensor]:
        """What the first pages of a tile have, in as few pieces as they lie in: uint8 [1, 1, bytes] of pages at home,
        [2, n, bytes] of raw ones, keys and then values."""
        first, at = index * self._store.shape.num_pages, self._store.address(layer, index)
        own, table = slice(first, first + num_pages), self.table
        flags = table.flags[layer, own].tolist()
        begin = (table.blocks[layer, 0, own] - at).tolist()
        end = (table.blocks[layer, 1, own] + table.sizes[layer, 1, own] - at).tolist()
        start = 0
        for stop in range(1, num_pages + 1):
            if stop < num_pages and _together(flags[stop - 1 : stop + 1], end[stop - 1], begin[stop]):
                continue
            if flags[start] == RAW:
                slots = [table.slots[layer, first + number] for number in range(start, stop)]
                yield from (raw.flatten(2).view(torch.uint8) for _, raw in table.raw.runs(slots))
            else:
                yield self._store.home(layer, index).view(1, 1, -1)[..., begin[start] : end[stop - 1]]
            start = stop

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

    def _lift(self, pages: Sequence[Page]) -> None:
        """Have these pages, which are at home, in slots, to be packed otherwise."""
        if not pages:
            return
        slots = self._slots_for(pages)
        self.codec.read(pages, [self.table.raw.page(slot) for slot in slots])
        self._set_raw(pages, slots)
        self._new |= dict.fromkeys(pages, True)

    def _pack(self, pages: Sequence[Page]) -> None:
        """Pack these raw pages home, beside their codes where they have some. Those that do not fit there stay."""
        if not pages:
            return
        self._settle(pages)
        coded = [page for page in pages if self.codec.has_codes(page)]
        done = self.codec.split_off(coded)
        rest = [page for page in pages if page not in done]
        self.codec.pack(rest)
        self._forget(pages)
        self._without |= {page: None for page in rest if page not in coded and not self.codec.outside_code_range(page)}

    def _set_raw(self, pages: Sequence[Page], slots: Sequence[int]) -> None:
        self.table.set_raw(pages, slots)
        self._forget(pages)

    def _forget(self, pages: Sequence[Page]) -> None:
        """What was known of these when they lay otherwise."""
        for page in pages:
            self._new.pop(page, None)
            self._without.pop(page, None)

    def _settle(self, pages: Sequence[Page]) -> None:
        self._traffic.settle({self.table.tile(page) for page in pages})


def _together(flags: Sequence[int], end: int, begin: int) -> bool:
    """Whether two pages cross in one piece: raw ones, or such at home as lie one behind the other."""
    are_raw = [flag == RAW for flag in flags]
    return all(are_raw) or (not any(are_raw) and end == begin)
