"""Packed pages at home, in about 12 of a number's 16 bits, or in 9 where their 4-bit codes are on the device. They take
less host memory, and fewer bytes cross the link.

Packing is lossless, so results do not depend on which pages are packed, or when.
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
from offload.transfer.background import BackgroundThread
from offload.transfer.link import Event, Link
from offload.transfer.memory import Memory

_AT_A_TIME = 32  # pages that are packed between two points at which an interrupt may come


@dataclass(frozen=True)
class StagedPages:
    """The first pages of tile `index` of a layer in a staging slot, in their formats at home. flags: format of each
    page, uint8 [pages] on the device. starts: byte offsets of the keys and of the values, int64 [2, pages] on the
    device. kinds: the set of formats among them."""

    layer: int
    index: int
    flags: Tensor
    starts: Tensor
    kinds: frozenset[int]


class PackedPages:
    """The pages of a store's streamed tiles, which are packed at home.

    A written page is raw, in a slot, until it is packed. It can be packed once its last token is written; that happens
    between passes, or when slots run short. Where `codec` has codes, packing waits for the codes of all its tokens, and
    the page is then stored as its residual. A page that was packed without codes is packed anew once it has them. A
    page that would need too many escapes stays raw. If slots run short and no raw page can be packed, more slots are
    allocated. Beside a GPU, which computes meanwhile, pages of a prefill are packed on a thread (`pack_behind`).

    kernels: the CPU's.
    """

    def __init__(self, store: TileStore, memory: Memory, kernels: Library, link: Link, traffic: Traffic) -> None:
        self._store, self._link, self._traffic = store, link, traffic
        self.table = PageTable(store, memory)
        self.codec = PageCodec(store.shape, self.table, kernels)
        self._thread = BackgroundThread[Page, Tensor]("packing") if memory.device.type == "cuda" else None
        self._new: dict[Page, bool] = {}  # raw pages, not tried to pack since they were written: whether whole
        self._without: dict[Page, None] = {}  # pages that were packed before they had codes

    def reserve(self, num_slots: int) -> None:
        """Allocate slots until there are `num_slots`. Raises DoesNotFit."""
        self.table.raw.add(num_slots - self.table.raw.num_slots)

    def write(self, layer: int, index: int, tile: Tensor, start: int, stop: int) -> Event:
        """Begin to copy whole pages of `tile`, on the device, that contain its new tokens `start` to `stop`, to slots.
        Raises DoesNotFit where all slots are taken and there is no memory for more."""
        size, ready = self._store.shape.page_tokens, self._link.record()
        numbers = range(start // size, -(-stop // size))
        pages = [(layer, index * self._store.shape.num_pages + number) for number in numbers]
        if self._thread is not None and not self._thread.items.isdisjoint(pages):
            self._take_packed()
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
        """Begin to copy the first pages of a tile into `slot`, which has the tile's shape, one after the other in their
        formats; the rest of the slot is not written -> (event of completion, the staged pages)."""
        room = slot.view(-1).view(torch.uint8)
        event: Event = All(after)
        for content in self._contents(layer, index, num_pages):
            part, room = room[: content.numel()], room[content.numel() :]
            halves, count, size = content.shape
            for half, to in zip(content, part.view(count, halves, size).unbind(1), strict=True):
                event = self._link.to_device(to, half, after)
        if num_pages:
            self._traffic.reads((layer, index), event)
        first, entries = index * self._store.shape.num_pages, self.table.on_device()
        pages = slice(first, first + num_pages)
        kinds = frozenset(self.table.flags[layer, pages].tolist())
        return event, StagedPages(layer, index, entries.flags[layer, pages], entries.starts[layer, :, pages], kinds)

    def pack_behind(self) -> None:
        """Beside a GPU, begin to pack the oldest whole pages on a thread, as many as a tile has, if there are so many,
        half of the slots are taken and it is not at work: pages of a prefill, whose rows stay as they are."""
        raw = self.table.raw
        if self._thread is None or not self._thread.is_done or 2 * raw.num_free > raw.num_slots:
            return
        self._take_packed()
        pages = [page for page, is_whole in self._new.items() if is_whole and not self.codec.has_codes(page)]
        if len(pages := pages[: self._store.shape.num_pages]) == self._store.shape.num_pages:
            after = self._traffic.pending({self.table.tile(page) for page in pages})
            self._thread.begin(pages, after, self.codec.pack(pages))

    def pack_some(self, num_tokens: int) -> int:
        """Pack some raw whole pages of `num_tokens` tokens, the oldest first. The host waits until they are home and
        nothing reads them -> how many were packed, 0 where none are left."""
        self._take_packed()
        stop = num_tokens // self._store.shape.page_tokens
        whole = [page for page, is_whole in self._new.items() if is_whole and page[1] < stop]
        ready = [page for page in whole if self.codec.has_codes(page) or self.codec.outside_code_range(page)]
        self._pack(ready[:_AT_A_TIME])
        return len(ready[:_AT_A_TIME])

    def due_again(self) -> list[Page]:
        """Pages that were packed without codes and have codes now; first the ones that are raw because they did not
        fit."""
        self._take_packed()
        again = (page for page in self._without if self.codec.has_codes(page))
        return sorted(again, key=lambda page: (page not in self.table.slots, page))

    def pack_again(self, pages: list[Page]) -> list[Page]:
        """Pack some of `pages` anew, as far as free slots allow -> the remaining pages."""
        raw = self.table.raw
        some = pages[: max(min(_AT_A_TIME, raw.num_free), 1)]
        self._lift([page for page in some if page not in self.table.slots][: raw.num_free])
        self._pack([page for page in some if page in self.table.slots])
        return pages[len(some) :]

    def to_fill(self, number: int) -> dict[int, Tensor]:
        """Page `number` of the layers in which it streams, [2, H_kv, S, D] each, for the caller to fill on the host and
        then to call `filled`. Raises DoesNotFit."""
        self._take_packed()
        pages = self.table.streaming(number)
        slots = self._slots_for(pages)
        self._set_raw(pages, slots)
        return {layer: self.table.raw.page(slot) for (layer, _), slot in zip(pages, slots, strict=True)}

    def filled(self, number: int) -> None:
        """Pack page `number` in all layers in which it streams."""
        self._pack([page for page in self.table.streaming(number) if page in self.table.slots])

    def keep(self, num_tokens: int) -> None:
        """Free the slots of the pages after the first `num_tokens` tokens, which have no rows any more."""
        self._take_packed()
        first = -(-num_tokens // self._store.shape.page_tokens)
        if dropped := [page for page in self.table.slots if page[1] >= first]:
            self._settle(dropped)
            self.table.set_packed(dropped)
            self._forget(dropped)

    def nbytes(self) -> int:
        """Bytes of the slots."""
        return self.table.raw.nbytes()

    def release(self) -> None:
        """Release the slots; the pages are not used again."""
        if self._thread is not None:
            self._thread.close()
        self.table.raw.release()

    def _contents(self, layer: int, index: int, num_pages: int) -> Iterator[Tensor]:
        """The bytes of a tile's first pages in as few contiguous pieces as possible: uint8 [1, 1, bytes] of pages at
        home, uint8 [2, n, bytes] of raw pages, keys and then values."""
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
        """Slots for `pages`: their own, or free ones. Where too few are free, other pages are packed first."""
        missing = [page for page in pages if page not in self.table.slots]
        raw = self.table.raw
        if len(missing) > raw.num_free:
            self._take_packed()
        while (short := len(missing) - raw.num_free) > 0:
            if others := [page for page, is_whole in self._new.items() if is_whole and page not in pages]:
                self._pack(others[:short])
            else:
                raw.add(short)
        own = self.table.slots | dict(zip(missing, raw.take(len(missing)), strict=True))
        return [own[page] for page in pages]

    def _lift(self, pages: Sequence[Page]) -> None:
        """Unpack pages from home into slots, to be packed anew."""
        if not pages:
            return
        slots = self._slots_for(pages)
        self.codec.read(pages, [self.table.raw.page(slot) for slot in slots])
        self._set_raw(pages, slots)
        self._new |= dict.fromkeys(pages, True)

    def _pack(self, pages: Sequence[Page]) -> None:
        """Pack raw pages home, as residuals where they have codes. Pages that do not fit stay raw."""
        if not pages:
            return
        self._settle(pages)
        coded = [page for page in pages if self.codec.has_codes(page)]
        done = self.codec.split_off(coded)
        rest = [page for page in pages if page not in done]
        if rest:
            self.codec.entered(rest, self.codec.pack(rest)())
        self._packed(pages, without=[page for page in rest if page not in coded])

    def _take_packed(self) -> None:
        """Enter the pages that the thread was given, when it has packed them."""
        if self._thread is None or not self._thread.items:
            return
        pages, sizes, happened = self._thread.take()
        self._traffic.happened(happened)
        self._settle(pages)  # nothing that began meanwhile reads the slots
        self.codec.entered(pages, sizes)
        self._packed(pages, without=pages)

    def _packed(self, pages: Sequence[Page], *, without: Sequence[Page]) -> None:
        """`pages` were packed now, or tried to; those `without` codes may get some."""
        self._forget(pages)
        self._without |= {page: None for page in without if not self.codec.outside_code_range(page)}

    def _set_raw(self, pages: Sequence[Page], slots: Sequence[int]) -> None:
        self.table.set_raw(pages, slots)
        self._forget(pages)

    def _forget(self, pages: Sequence[Page]) -> None:
        """Drop the packing state of `pages`, whose format has changed."""
        for page in pages:
            self._new.pop(page, None)
            self._without.pop(page, None)

    def _settle(self, pages: Sequence[Page]) -> None:
        self._traffic.settle({self.table.tile(page) for page in pages})


def _together(flags: Sequence[int], end: int, begin: int) -> bool:
    """Whether two successive pages are copied as one piece: both raw, or both at home and adjacent."""
    are_raw = [flag == RAW for flag in flags]
    return all(are_raw) or (not any(are_raw) and end == begin)
