"""Where all pages of one sequence are, and all that moves or reads them: what a cache attends over."""

from __future__ import annotations

from collections.abc import Mapping
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
    """Which tiles are on the host, and how they come to the device over `link`.

    num_resident: see `TileStore`. num_staging: tiles of the device through which others stream. packs: the CPU's
    kernels, by which pages that stream lie packed at home, bf16 alone; None: they lie as they are. raw_pages: room for
    so many that are not packed yet, allocated by `reserve`.
    """

    link: Link
    num_resident: int = 0
    num_staging: int = 2
    packs: CpuKernels | None = None
    raw_pages: int = 0


class PageStorage:
    """store: the homes. reader: rows from wherever they are. packed: None where all pages lie as they are.
    access: to tiles, by the phase of a forward. num_tokens: the most that there will ever be. arena: a prefill's tiles
    are from it. kernels: the device's, which unpack. offload: None, all is on the device."""

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
    ) -> None:
        self.shape, self.num_layers, self.all_on_device = shape, num_layers, offload is None
        self._memory, self._offload, self._staging = memory, offload, list[Tensor]()
        self._traffic: Traffic | None = None
        self.packed: PackedPages | None = None
        if offload is None:
            self.store = TileStore(memory, shape, num_layers, None, most_tokens=num_tokens)
            here = TileAccess(self.store)
            self.access: Mapping[Literal["prefill", "decode"], TileAccess] = {"prefill": here, "decode": here}
            self.reader = RowReader(self.store, memory, None)
            return
        link, packs, num_staging = offload.link, offload.packs is not None, offload.num_staging
        self.store = TileStore(memory, shape, num_layers, offload.num_resident, packs=packs, most_tokens=num_tokens)
        for _ in range(num_staging + packs):
            self._staging.append(memory.allocate(shape.shape, shape.dtype, tier="device", purpose=_STAGING))
        self._traffic = Traffic(link)
        if offload.packs is not None:
            self.packed = PackedPages(self.store, memory, offload.packs, link, self._traffic)
        unpacked = self._staging[-1] if packs else None
        mover = Mover(self.store, link, self._traffic, self.packed, unpacked, kernels)
        self.access = {
            "prefill": PrefillTiles(self.store, link, arena, mover),
            "decode": StreamedTiles(self.store, link, self._staging[:num_staging], mover),
        }
        self.reader = RowReader(self.store, memory, link, self.packed)

    def reserve(self, num_tokens: int) -> None:
        """Allocate tiles for that many tokens now: pinning takes time that no forward should. Raises DoesNotFit."""
        if self.packed is not None and self._offload is not None:
            self.packed.reserve(self._offload.raw_pages)
        self.store.grow(num_tokens)

    def lie_beside(self, codes: PageCodes) -> None:
        """From now on pages that lie packed at home may lie there as their residuals beside `codes`."""
        if self.packed is not None:
            self.packed.codec.codes = codes

    def page(self, layer: int, number: int) -> Tensor:
        """Page `number` of the sequence in `layer`, of a tile that lies as it is: a view of its home, [2, H_kv, S, D],
        each half contiguous. To be written to after `wait_home` only."""
        index, within = divmod(number, self.shape.num_pages)
        return self.store.home(layer, index)[:, within]

    def read(self, number: int) -> list[Tensor]:
        """That page of all layers: the homes themselves, or what is packed there."""
        return [self._read(layer, number) for layer in range(self.num_layers)]

    def to_fill(self, number: int) -> list[Tensor]:
        """That page of all layers, to be written to: the homes themselves, or slots for raw pages. `filled` has to
        follow. Tiles that were fetched ahead may still cross the link: the host waits for them, or for what a slot has
        to."""
        if self.packed is None:
            for access in self.access.values():
                access.settle()
        raw = {} if self.packed is None else self.packed.to_fill(number)
        return [raw[layer] if layer in raw else self.page(layer, number) for layer in range(self.num_layers)]

    def filled(self, number: int) -> None:
        """What is raw of that page is packed."""
        if self.packed is not None:
            self.packed.filled(number)

    def keep(self, num_tokens: int) -> None:
        """Later pages than those of so many tokens are not used again as they are."""
        if self.packed is not None:
            self.packed.keep(num_tokens)

    def changed(self) -> None:
        """Homes were written from outside: what was fetched ahead is stale."""
        for access in self.access.values():
            access.forget()

    def wait_home(self) -> None:
        """Return when the tiles' homes have all rows, and no kernel reads them."""
        if self._traffic is not None:
            self._traffic.wait()

    def follow_home(self) -> None:
        """What the device computes from now on comes after that: on a GPU the host does not wait."""
        if self._traffic is not None:
            self._traffic.order()

    def read_home(self) -> None:
        """What the device computes by now reads homes itself: see `wait_home`."""
        if self._traffic is not None:
            self._traffic.read_by_kernel()

    def release(self) -> None:
        """Give all memory back; nothing is used again."""
        self.wait_home()
        for access in self.access.values():
            access.settle()
        self.store.release()
        if self.packed is not None:
            self.packed.release()
        self.reader.release()
        for tile in self._staging:
            self._memory.released(tile, tier="device", purpose=_STAGING)
        self._staging.clear()

    def nbytes(self) -> int:
        """Of the homes."""
        return self.store.nbytes() + (0 if self.packed is None else self.packed.nbytes())

    def _read(self, layer: int, number: int) -> Tensor:
        if self.packed is not None and self.store.place(layer, number // self.shape.num_pages) == "stream":
            return self.packed.codec.tokens(layer, number)
        return self.page(layer, number)
