"""The full cache: every token, exact, wherever its tiles live."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from offload.kernels.attention import fold
from offload.kernels.cpu import CpuKernels
from offload.kernels.device import NONE, DeviceKernels
from offload.kernels.gpu.flash import FlashBlock, FlashTiles
from offload.kernels.rope import RopeTable, rotate
from offload.kernels.rows import Blocks
from offload.kernels.spans import Rows
from offload.kv import Phase
from offload.kv.block import Block
from offload.kv.host_attention import HostAttention
from offload.kv.places import Places
from offload.kv.tile_attention import TileAttention
from offload.pages.access import PrefillTiles, StreamedTiles, TileAccess
from offload.pages.codec import PageCodes
from offload.pages.mover import Mover
from offload.pages.packed import PackedPages
from offload.pages.reader import RowReader
from offload.pages.tiles import TileShape, TileStore, write_rows
from offload.pages.traffic import Traffic
from offload.plan.sizing import MAX_ROWS
from offload.transfer.arena import Arena
from offload.transfer.link import Link
from offload.transfer.memory import Memory
from offload.transfer.pace import HostReads


class FullCache:
    """Keys (rotated) and values of all tokens, in tiles.

    In phase "decode" rows are attended in `blocks`, over whole tiles, whatever is hidden in them: so a
    row's bits depend on its position and the tokens before it, and on nothing else. In phase "prefill" blocks may have
    any size. With `mass_chunk` the decode phase also keeps each row's softmax mass per chunk of that many tokens,
    while `record_mass` is set.
    num_resident, num_host: see `TileStore`; in phase "prefill" all tiles are attended to on the device. host_reads: of
    tiles that are attended to on the host. fused_prefill: phase "prefill" attends by torch's fused kernel; flash: by
    this instead. kernels: the device's own, for phase "decode"; host_kernels: the CPU's beside a GPU.
    packs: pages that stream are packed at home, by `host_kernels`, and unpacked by `kernels`; `link` and bf16 alone.
    raw_pages: `reserve` allocates room for so many that are not packed yet.
    arena: phase "prefill" has its turn of it, from `begin` to the next user's.
    """

    def __init__(
        self,
        memory: Memory,
        shape: TileShape,
        *,
        num_layers: int,
        rope: RopeTable,
        blocks: Blocks,
        link: Link | None = None,
        num_resident: int = 0,
        num_host: int = 0,
        host_reads: HostReads | None = None,
        num_staging: int = 2,
        mass_chunk: int | None = None,
        fused_prefill: bool = True,
        flash: FlashTiles | None = None,
        kernels: DeviceKernels = NONE,
        host_kernels: DeviceKernels = NONE,
        packs: bool = False,
        raw_pages: int = 0,
        arena: Arena | None = None,
    ) -> None:
        self.shape, self.num_layers, self.rope, self.mass_chunk = shape, num_layers, rope, mass_chunk
        self.device, self.all_on_device = memory.device, link is None
        resident = None if link is None else num_resident
        most = len(rope.cos)
        self.store = TileStore(memory, shape, num_layers, resident, num_host, packs=packs, most_tokens=most)
        self.host_reads = host_reads or HostReads()
        self.arena = arena or Arena(memory)
        here = TileAccess(self.store)
        self._access: dict[Phase, TileAccess] = {"prefill": here, "decode": here}
        self._traffic = None if link is None else Traffic(link)
        self.packed: PackedPages | None = None
        self._raw_pages = raw_pages
        self._memory, self._staging = memory, list[Tensor]()
        if link is not None:
            assert self._traffic is not None
            for _ in range(num_staging + packs):
                self._staging.append(memory.allocate(shape.shape, shape.dtype, tier="device", purpose="kv staging"))
            if packs:
                assert isinstance(host_kernels, CpuKernels)
                self.packed = PackedPages(self.store, memory, host_kernels, link, self._traffic)
            unpacked = self._staging[-1] if packs else None
            mover = Mover(self.store, link, self._traffic, self.packed, unpacked, kernels)
            self._access = {
                "prefill": PrefillTiles(self.store, link, self.arena, mover),
                "decode": StreamedTiles(self.store, link, self._staging[:num_staging], mover, self.host_reads),
            }
        self._places = Places(rope)
        self.reader = RowReader(self.store, memory, link, self.packed)
        self._fused_prefill, self._flash = fused_prefill, flash
        self._attention = TileAttention(shape, rope, blocks, kernels, mass_chunk)
        self._host_attention: HostAttention | None = None
        if link is not None and num_host and memory.device.type == "cuda":
            on_host = RopeTable(rope.cos.cpu(), rope.sin.cpu())
            host = TileAttention(shape, on_host, blocks, host_kernels, mass_chunk)
            self._host_attention = HostAttention(
                memory, self.store, link, gpu=self._attention, host=host, chunk=mass_chunk
            )
        self.record_mass = mass_chunk is not None  # from the next decode forward on
        self.length = 0
        self.num_ahead = 0  # drafted rows after these, see `AheadCache`
        self._start = 0
        self.stable_length = 0  # tokens that it has had ever since `mark_synced`, for the one cache that asks
        self._phase: Phase | None = None  # of the forward under way
        self._taken = [0] * num_layers
        self._mass: list[Tensor] = []

    def reserve(self, num_tokens: int) -> None:
        """Allocate tiles for that many tokens now: pinning takes time that no forward should."""
        if self.packed is not None:
            self.packed.reserve(self._raw_pages)
        self.store.grow(num_tokens)

    def begin(self, phase: Phase, num_rows: int, *, ahead: bool = False) -> None:
        """A forward of `num_rows` rows starts. ahead: they are drafted, and follow what is drafted already; else they
        take its place."""
        self._end()
        if not ahead:
            self.num_ahead = 0
        self._start = self.length + self.num_ahead
        if phase == "prefill":
            self.arena.begin(self._end)
        self._phase = phase
        for other in self._access.keys() - {phase}:
            self._access[other].forget()
        self._access[phase].begin(self._start, num_rows)
        self._mass.clear()
        if phase == "decode" and self._attention.by_kernels:
            self._places.set(self._start, self._start, num_rows)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `Cache`. In phase "decode" all of the forward's rows come in one call."""
        if self._phase is None:
            raise RuntimeError("attend outside a forward: call begin first")
        start = self._start + self._taken[layer]
        num_rows = q.shape[0]
        self._taken[layer] += num_rows
        if self._phase == "decode":
            return self._decode(layer, Rows(q, k, v, start, start, places=self._places.on_gpu()))
        table = self.rope.rows(start, start + num_rows)
        q, k = rotate(q, *table), rotate(k, *table)
        block = self._prefill_block(q, start)
        access, tokens = self._access["prefill"], self.shape.tokens
        for index in range(self.shape.count(start + num_rows)):
            tile = access.open(layer, index)
            first, stop = write_rows(tile, index * tokens, start, k, v)
            if first < stop:
                access.wrote(layer, index, first, stop)
            if isinstance(block, FlashBlock):
                block.attend(tile, index * tokens)
            else:
                block.attend_used(tile, index * tokens, fused=self._fused_prefill)
            access.close(layer, index)
        access.end_layer()
        return block.attended().to(q.dtype)

    def advance(self, num_tokens: int, *, ahead: bool = False) -> None:
        """The forward that began is over, see `Cache`; ahead: as there."""
        if ahead:
            self.num_ahead += num_tokens
        else:
            self.length += num_tokens
        self._end()

    def truncate(self, length: int) -> None:
        self._cut(length)
        if self.packed is not None:
            self.packed.keep(self.length + MAX_ROWS)

    def mark_synced(self) -> None:
        """From now on `stable_length` counts anew."""
        self.stable_length = self.length

    def truncate_ahead(self, length: int) -> None:
        """Of what is drafted after the tokens, keep no more than `length` tokens in all leave room for."""
        self._end()
        self.num_ahead = max(min(self.num_ahead, length - self.length), 0)

    def fetch_ahead(self) -> None:
        """Start what the next decode forward needs first. Worth it when nothing more urgent waits for the link."""
        self._access["decode"].fetch_ahead(self.length)

    def use_waits(self, meanwhile: Callable[[], bool] | None) -> None:
        """From now on, while a decode forward waits for a tile, call `meanwhile`: see `TileAccess`."""
        self._access["decode"].use_waits(meanwhile)

    @property
    def link_idle(self) -> bool:
        """Whether no tile of a decode forward is on its way."""
        return self._access["decode"].link_idle

    def page(self, layer: int, number: int) -> Tensor:
        """Page `number` of the sequence in `layer`, of a tile that lies as it is: a view of its home, [2, H_kv, S, D],
        each half contiguous. Write to it after `wait_home`, and call `restored` afterwards."""
        index, within = divmod(number, self.shape.num_pages)
        return self.store.home(layer, index)[:, within]

    def page_of_all(self, number: int) -> list[Tensor]:
        """See `PagedRows`: the homes themselves, or what is packed there."""
        return [self._read_page(layer, number) for layer in range(self.num_layers)]

    def page_to_fill(self, number: int) -> list[Tensor]:
        """See `PagedRows`: the homes themselves, or slots for raw pages. Tiles that were fetched ahead may still cross
        the link: the host waits for them, or for what a slot has to."""
        if self.packed is None:
            for access in self._access.values():
                access.settle()
        raw = {} if self.packed is None else self.packed.to_fill(number)
        return [raw[layer] if layer in raw else self.page(layer, number) for layer in range(self.num_layers)]

    def filled(self, number: int, layers: Sequence[Tensor]) -> None:
        """See `PagedRows`: what is raw is packed."""
        if self.packed is not None:
            self.packed.filled(number)

    def restored(self, length: int) -> None:
        """The pages of the first `length` tokens were written from outside: these tokens count, no others."""
        self._cut(0)
        for access in self._access.values():
            access.forget()
        if self.packed is not None:
            self.packed.keep(length)
        self.length = length

    def copy_from(self, other: FullCache, num_tokens: int | None = None) -> None:
        """Copy all rows of `other`, or the first `num_tokens`, in place of its own. The tiles there may have another
        size and live elsewhere."""
        length = other.length if num_tokens is None else num_tokens
        other.wait_home()
        self.wait_home()
        self.restored(0)
        self.reserve(length)
        for number in range(-(-length // self.shape.page_tokens)):
            pages = self.page_to_fill(number)
            for own, theirs in zip(pages, other.page_of_all(number), strict=True):
                own.copy_(theirs)
            self.filled(number, pages)
        self.restored(length)

    def release(self) -> None:
        """Give the tiles back; the cache is not used again."""
        self.truncate(0)
        if self._host_attention is not None:
            self._host_attention.release()
        self.wait_home()
        for access in self._access.values():
            access.settle()
        self.store.release()
        if self.packed is not None:
            self.packed.release()
        self.reader.release()
        for tile in self._staging:
            self._memory.released(tile, tier="device", purpose="kv staging")
        self._staging.clear()

    @property
    def graph_memory(self) -> None:
        """See `Cache`: its tiles come and go."""
        return None

    def nbytes(self) -> int:
        """Of its homes."""
        return self.store.nbytes() + (0 if self.packed is None else self.packed.nbytes())

    def mass(self, num_rows: int) -> Tensor:
        """Softmax mass per chunk of the last decode forward, summed over its first `num_rows` rows and over the query
        heads of each KV head: [L, H_kv, C] fp32 on the device. Raises RuntimeError if that forward recorded none."""
        return torch.stack([per_row[:num_rows].sum(0, dtype=torch.float32) for per_row in self._mass])

    def wait_home(self) -> None:
        """Return when the tiles' homes have all rows, and no kernel reads them."""
        if self._traffic is not None:
            self._traffic.wait()

    def follow_home(self) -> None:
        """What the device computes from now on comes after that: on a GPU the host does not wait."""
        if self._traffic is not None:
            self._traffic.order()

    def lie_beside(self, codes: PageCodes) -> None:
        """From now on pages that lie packed at home may lie there as their residuals beside `codes`."""
        if self.packed is not None:
            self.packed.codec.codes = codes

    def read_home(self) -> None:
        """What the device computes by now reads homes itself: see `wait_home`."""
        if self._traffic is not None:
            self._traffic.read_by_kernel()

    def _read_page(self, layer: int, number: int) -> Tensor:
        if self.packed is not None and self.store.place(layer, number // self.shape.num_pages) == "stream":
            return self.packed.codec.tokens(layer, number)
        return self.page(layer, number)

    def _cut(self, length: int) -> None:
        """No forward is under way, and there are no more than `length` tokens."""
        self._end()
        self.length, self.num_ahead = min(self.length, length), 0
        self.stable_length = min(self.stable_length, self.length)

    def _end(self) -> None:
        if self._phase is not None:
            self._access[self._phase].end()
            self._phase = None
        self._taken = [0] * self.num_layers

    def _prefill_block(self, q: Tensor, start: int) -> Block | FlashBlock:
        """Rows q [T, H, D], rotated, at positions `start` and on."""
        if self._flash is not None:
            return self._flash.block(q, start)
        return Block(fold(q, self.shape.num_kv_heads), start, len(q))

    def _decode(self, layer: int, rows: Rows) -> Tensor:
        """Tiles on the host come first on a CPU: on a GPU they would take their time beside the others, and so they do
        in a rehearsal, since only `end_layer` waits for it."""
        masses = self.mass_chunk is not None and self.record_mass
        access = self._access["decode"]
        tiles = self.store.order(layer, self.shape.count(rows.index + len(rows.q)))
        if self._host_attention is not None:
            out, mass = self._host_attention.attend(access, layer, rows, tiles, masses=masses)
        else:
            self._attention.run(access, layer, rows, tiles, masses=masses)
            access.end_layer()
            out, mass = self._attention.merge()
        if mass is not None:
            self._mass.append(mass)
        return out
