"""The storage of one sequence's KV pages: their homes, and the access, copies and readers over them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from offload.kernels.cpu import CpuKernels
from offload.kernels.device import NONE, DeviceKernels
from offload.pages.access import PrefillTiles, StreamedTiles, TileAccess
from offload.pages.codec import PageCodes
from offload.pages.mover import Mover
from offload.pages.packed import PackedPages
from offload.pages.reader import RowReader
from offload.pages.tiles import TileShape, TileStore
from offload.pages.traffic import Traffic
from offload.transfer.arena import Arena
from offload.transfer.link import Link
from offload.transfer.memory import Memory

_STAGING = "kv staging"


@dataclass(frozen=True)
class Offload:
    """The offload of tiles to the host, from which they cross `link`.

    num_resident: see `TileStore`. num_staging: number of staging slots on the device. packs: the CPU's kernels, which
    pack the pages of streamed tiles at home, bf16 alone; None: pages are stored raw. raw_pages: number of slots for
    pages that are not packed yet, allocated by `reserve`. by_blocks: in phase "decode" no tiles are used: the cache
    fetches parts of them, and writes rows home.
    """

    link: Link
    num_resident: int = 0
    num_staging: int = 2
    packs: CpuKernels | None = None
    raw_pages: int = 0
    by_blocks: bool = False


class PageStorage:
    """The KV pages of one sequence, with their homes and everything that moves or reads them.

    store: the homes. reader: reads rows from any home. packed: the packed pages; None where all pages are raw.
    access: to tiles, by the phase of a forward. num_tokens: the capacity. arena: allocates a prefill's tiles.
    kernels: the device's, which unpack. offload: None where all tiles are on the device. reads: the layers as a forward
    uses their tiles, one that others share several times; (): each once."""

    def __init__(
        self,
        memory: Memory,
        shape: TileShape,
        num_layers: int,
        num_tokens: int,
        *,
        arena: Arena,
        offload: Offload | None = None,
        kernels: DeviceKernels = NONE,
        reads: Sequence[int] = (),
    ) -> None:
        self.shape, self.num_layers, self.all_on_device = shape, num_layers, offload is None
        self._memory, self._offload, self._staging = memory, offload, list[Tensor]()
        self._traffic: Traffic | None = None
        self._mover: Mover | None = None
        self.packed: PackedPages | None = None
        if offload is None:
            self.store = TileStore(memory, shape, num_layers, None, most_tokens=num_tokens)
            here = TileAccess(self.store)
            self.access: Mapping[Literal["prefill", "decode"], TileAccess] = {"prefill": here, "decode": here}
            self.reader = RowReader(self.store, memory, None)
            return
        link, packs = offload.link, offload.packs is not None
        num_staging = 0 if offload.by_blocks else offload.num_staging
        self.store = TileStore(memory, shape, num_layers, offload.num_resident, packs=packs, most_tokens=num_tokens)
        for _ in range(num_staging + packs):
            self._staging.append(memory.allocate(shape.shape, shape.dtype, tier="device", purpose=_STAGING))
        self._traffic = Traffic(link)
        if offload.packs is not None:
            self.packed = PackedPages(self.store, memory, offload.packs, link, self._traffic)
        unpacked = self._staging[-1] if packs else None
        mover = Mover(self.store, link, self._traffic, self.packed, unpacked, kernels)
        self._mover = mover
        order = reads or range(num_layers)
        streamed = StreamedTiles(self.store, link, self._staging[:num_staging], mover, order)
        self.access = {
            "prefill": PrefillTiles(self.store, link, arena, mover),
            "decode": TileAccess(self.store) if offload.by_blocks else streamed,
        }
        self.reader = RowReader(self.store, memory, link, self.packed)

    def reserve(self, num_tokens: int) -> None:
        """Allocate tiles for `num_tokens` tokens, so that no forward has to wait for pinning. Raises DoesNotFit."""
        if self.packed is not None and self._offload is not None:
            self.packed.reserve(self._offload.raw_pages)
        self.store.grow(num_tokens)

    def lie_beside(self, codes: PageCodes) -> None:
        """Allow packed pages to be stored at home as residuals of `codes` from now on."""
        if self.packed is not None:
            self.packed.codec.codes = codes

    def page(self, layer: int, number: int) -> Tensor:
        """Page `number` of the sequence in `layer`, whose tile must be raw: a view of its home, [2, H_kv, S, D], each
        half contiguous. Write to it only after `wait_home`."""
        index, within = divmod(number, self.shape.num_pages)
        return self.store.home(layer, index)[:, within]

    def read(self, number: int) -> list[Tensor]:
        """Page `number` of all layers: views of the homes, or unpacked copies."""
        return [self._read(layer, number) for layer in range(self.num_layers)]

    def to_fill(self, number: int) -> list[Tensor]:
        """Page `number` of all layers, for the caller to fill: views of the homes, or slots for raw pages. The caller
        must call `filled` afterwards. Waits on the host for tiles that are being fetched ahead, and for copies that use
        the slots."""
        if self.packed is None:
            for access in self.access.values():
                access.settle()
        raw = {} if self.packed is None else self.packed.to_fill(number)
        return [raw[layer] if layer in raw else self.page(layer, number) for layer in range(self.num_layers)]

    def filled(self, number: int) -> None:
        """Pack page `number` in all layers where it is raw and its tile streams."""
        if self.packed is not None:
            self.packed.filled(number)

    def keep(self, num_tokens: int) -> None:
        """Drop the pages after the first `num_tokens` tokens: their contents are not used again."""
        if self.packed is not None:
            self.packed.keep(num_tokens)

    def changed(self) -> None:
        """Drop tiles that were fetched ahead, since their homes were written from outside."""
        for access in self.access.values():
            access.forget()

    def wait_home(self) -> None:
        """Wait until the tiles' homes have all rows and no kernel reads them."""
        if self._traffic is not None:
            self._traffic.wait()

    def follow_home(self) -> None:
        """Make the device's later work wait until the homes have all rows. On a GPU the host does not wait."""
        if self._traffic is not None:
            self._traffic.order()

    def write_rows(self, layer: int, start: int, rows: Tensor) -> None:
        """Begin to copy rows [2, H_kv, n, D] of the tokens at `start` and on home, from the device."""
        assert self._mover is not None
        self._mover.write_rows(layer, start, rows)

    def wrote_home(self, start: int, stop: int) -> None:
        """Note that kernels launched so far read homes directly, and write rows of the tokens from `start` to `stop`
        there."""
        tiles = range(start // self.shape.tokens, -(-stop // self.shape.tokens))
        assert self._traffic is not None
        self._traffic.written_by_kernel((layer, index) for layer in range(self.num_layers) for index in tiles)

    def read_home(self) -> None:
        """Note that kernels launched so far read homes directly: `wait_home` waits for them."""
        if self._traffic is not None:
            self._traffic.read_by_kernel()

    def release(self) -> None:
        """Release all memory; the storage is not used again."""
        self.wait_home()
        for access in self.access.values():
            access.settle()
        if self.packed is not None:
            self.packed.release()  # first: its thread writes homes
        self.store.release()
        self.reader.release()
        for tile in self._staging:
            self._memory.released(tile, tier="device", purpose=_STAGING)
        self._staging.clear()

    def nbytes(self) -> int:
        """Bytes of the homes, with the slots for raw pages."""
        return self.store.nbytes() + (0 if self.packed is None else self.packed.nbytes())

    def _read(self, layer: int, number: int) -> Tensor:
        if self.packed is not None and self.store.place(layer, number // self.shape.num_pages) == "stream":
            return self.packed.codec.tokens(layer, number)
        return self.page(layer, number)
