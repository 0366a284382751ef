"""The full cache: every token, exact, wherever its tiles live."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from offload.cache import Phase
from offload.cache.block import Block
from offload.cache.places import Places
from offload.cache.reader import RowReader
from offload.cache.residence import PrefillTiles, Residence, StreamedTiles, WriteBack
from offload.cache.tiles import TileShape, TileStore
from offload.kernels.attention import fold
from offload.kernels.card import Card
from offload.kernels.card.flash import FlashBlock, FlashTiles
from offload.kernels.decode_attention import MASS_DTYPE, DecodeAttention, decode_attention
from offload.kernels.native import NONE, Kernels
from offload.kernels.rope import RopeTable, rotate
from offload.kernels.rows import Blocks
from offload.kernels.spans import Rows
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
    this instead. kernels: the device's own, for phase "decode". keep_queries: False where `mean_key_scores` is not
    asked for. arena: phase "prefill" has its turn of it, from `begin` to the next user's.
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
        kernels: Kernels | Card = NONE,
        keep_queries: bool = True,
        arena: Arena | None = None,
    ) -> None:
        self.shape, self.num_layers, self.rope, self.mass_chunk = shape, num_layers, rope, mass_chunk
        self._block_sizes = blocks
        self.store = TileStore(memory, shape, num_layers, None if link is None else num_resident, num_host)
        self.host_reads = host_reads or HostReads()
        self.arena = arena or Arena(memory)
        resident = Residence(self.store)
        self._residences: dict[Phase, Residence] = {"prefill": resident, "decode": resident}
        self._write_back: WriteBack | None = None
        if link is not None:
            staging = [
                memory.allocate(shape.shape, shape.dtype, tier="device", purpose="kv staging")
                for _ in range(num_staging)
            ]
            self._write_back = WriteBack(self.store, link)
            self._residences = {
                "prefill": PrefillTiles(self.store, link, self.arena, self._write_back),
                "decode": StreamedTiles(self.store, link, staging, self._write_back, self.host_reads),
            }
        self._places = Places(rope)
        self.reader = RowReader(self.store, memory, link)
        self._fused_prefill, self._flash = fused_prefill, flash
        self._spans = decode_attention(kernels, rope, dtype=shape.dtype, page=shape.page_tokens, chunk=mass_chunk)
        self.record_mass = mass_chunk is not None  # from the next decode forward on
        self.keep_queries = keep_queries  # likewise
        self.length = 0
        self._last_row = 0
        self._phase: Phase | None = None  # of the forward under way
        self._taken = [0] * num_layers
        self._mass: list[Tensor] = []
        self.last_query: list[Tensor] = []

    def reserve(self, num_tokens: int) -> None:
        """Allocate tiles for that many tokens now: pinning takes time that no forward should."""
        self.store.grow(num_tokens)

    def begin(self, phase: Phase, num_rows: int) -> None:
        """A forward of `num_rows` rows starts."""
        self._end()
        if phase == "prefill":
            self.arena.begin(self._end)
        self._phase = phase
        for other in self._residences.keys() - {phase}:
            self._residences[other].forget()
        self._residences[phase].begin(self.length, num_rows)
        self._mass.clear()
        self.last_query.clear()
        if phase == "decode" and self._spans is not None:
            self._places.set(self.length, self.length, num_rows)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `Cache`. In phase "decode" all of the forward's rows come in one call."""
        if self._phase is None:
            raise RuntimeError("attend outside a forward: call begin first")
        start = self.length + self._taken[layer]
        num_rows = q.shape[0]
        self._taken[layer] += num_rows
        if self._spans is not None and self._phase == "decode":
            return self._attend_spans(self._spans, layer, Rows(q, k, v, start, start, places=self._places.on_card()))
        table = self.rope.rows(start, start + num_rows)
        q, k = rotate(q, *table), rotate(k, *table)
        blocks: Sequence[Block | FlashBlock] = self._blocks(q, start)
        if self._flash is not None and self._phase == "prefill":
            blocks = [self._flash.block(q, start)]
        residence = self._residences[self._phase]
        for index in range(self.shape.count(start + num_rows)):
            tile = residence.open(layer, index)
            self._write(tile, layer, index, start, k, v)
            for block in blocks:
                self._attend_tile(block, tile, index)
            residence.close(layer, index)
        residence.end_layer()
        if self._phase == "decode":
            self.last_query.append(q)
            if chunk := self._recorded_chunk:
                num_chunks = self.shape.count(start + num_rows) * self.shape.tokens // chunk
                masses = [block.total_mass(num_chunks) for block in blocks if isinstance(block, Block)]
                self._mass.append(_kept(_joined(masses)))
        return _joined([block.attended() for block in blocks]).to(q.dtype)

    def advance(self, num_tokens: int) -> None:
        self.length += num_tokens
        self._last_row = num_tokens - 1
        self._end()

    def truncate(self, length: int) -> None:
        self._end()
        self.length = min(self.length, length)

    def fetch_ahead(self) -> None:
        """Start what the next decode forward needs first. Worth it when nothing more urgent waits for the link."""
        residence = self._residences["decode"]
        if isinstance(residence, StreamedTiles):
            residence.fetch_ahead(self.length)

    def page(self, layer: int, number: int) -> Tensor:
        """Page `number` of the sequence in `layer`: a view of its home, [2, H_kv, S, D], each half contiguous.

        Read it after `wait_home`; call `restored` after writing to it.
        """
        index, within = divmod(number, self.shape.num_pages)
        return self.store.home(layer, index)[:, within]

    def page_of_all(self, number: int) -> list[Tensor]:
        """See `PagedRows`: the homes themselves."""
        return [self.page(layer, number) for layer in range(self.num_layers)]

    page_to_fill = page_of_all

    def filled(self, number: int, layers: Sequence[Tensor]) -> None:
        """See `PagedRows`: the homes themselves were filled."""

    def restored(self, length: int) -> None:
        """The homes of the first `length` tokens' pages were written from outside: these tokens count, no others."""
        self.truncate(0)
        for residence in self._residences.values():
            residence.forget()
        self.length = length

    def copy_from(self, other: FullCache) -> None:
        """Copy all rows of `other`, whose tiles may have another size and live elsewhere, in place of its own."""
        other.wait_home()
        self.wait_home()
        self.reserve(other.length)
        for layer in range(self.num_layers):
            for number in range(-(-other.length // self.shape.page_tokens)):
                self.page(layer, number).copy_(other.page(layer, number))
        self.restored(other.length)

    def release(self) -> None:
        """Give the tiles back; the cache is not used again."""
        self.truncate(0)
        self.store.release()

    @property
    def graph_memory(self) -> None:
        """See `Cache`: its tiles come and go."""
        return None

    def nbytes(self) -> int:
        return self.store.nbytes()

    def mass(self, num_rows: int) -> Tensor:
        """Softmax mass per chunk of the last decode forward, summed over its first `num_rows` rows and over the query
        heads of each KV head: [L, H_kv, C] fp32 on the device. Raises RuntimeError if that forward recorded none."""
        return torch.stack([per_row[:num_rows].sum(0, dtype=torch.float32) for per_row in self._mass])

    def mean_key_scores(self, chunk: int) -> Tensor:
        """The published score of each whole chunk: last query · mean key, summed over the query group: [L, H_kv, C]."""
        num_chunks = self.length // chunk
        scores = []
        for layer, query in enumerate(self.last_query):
            halves = [self.store.home(layer, i)[0] for i in range(self.shape.count(num_chunks * chunk))]
            means = [keys.unflatten(2, (-1, chunk)).float().mean(3).cpu() for keys in halves]  # [P, H_kv, S/chunk, D]
            joined = torch.cat([mean.transpose(0, 1).flatten(1, 2) for mean in means], 1)
            row = query[self._last_row].view(self.shape.num_kv_heads, -1, self.shape.head_dim).float().sum(1)
            scores.append((joined @ row.to(joined.device)[..., None]).squeeze(-1))
        return torch.stack(scores)[..., :num_chunks].to(self.last_query[0].device)

    def wait_home(self) -> None:
        """Return when the tiles' homes have all rows."""
        if self._write_back is not None:
            self._write_back.wait()

    @property
    def _recorded_chunk(self) -> int | None:
        """`mass_chunk`; None while no masses are recorded, since they take time."""
        return self.mass_chunk if self.record_mass else None

    def _end(self) -> None:
        if self._phase is not None:
            self._residences[self._phase].end()
            self._phase = None
        self._taken = [0] * self.num_layers

    def _attend_spans(self, spans: DecodeAttention, layer: int, rows: Rows) -> Tensor:
        """By the device's own kernels, tile by tile as they come: every span has its own result until all are merged.

        Tiles on the host come first: on a card they would take their time beside the others, and so they do in a
        rehearsal, since only `end_layer` waits for it."""
        start, stop = rows.index, rows.index + rows.q.shape[0]
        residence, tokens = self._residences["decode"], self.shape.tokens
        spans.begin(rows, -(-stop // spans.span), masses=self._recorded_chunk is not None)
        for index in self.store.order(layer, self.shape.count(stop)):
            base = index * tokens
            tile = residence.open(layer, index)
            used = min(stop - base, tokens)
            run = spans.run(tile, first=base, tokens=used, slot=base // spans.span)
            if base + tokens > start:
                spans.take_in(run)
                residence.wrote(layer, index, max(start - base, 0), used)
            spans.attend(run)
            residence.close(layer, index)
        residence.end_layer()
        out, mass = spans.merge()
        if mass is not None:
            self._mass.append(mass)
        if self.keep_queries:
            self.last_query.append(rotate(rows.q, *self.rope.rows(start, stop)))
        return out

    def _write(self, tile: Tensor, layer: int, index: int, start: int, k: Tensor, v: Tensor) -> None:
        """The new rows that fall into this tile, page by page."""
        page, base = self.shape.page_tokens, index * self.shape.tokens
        first, stop = max(start, base), min(start + k.shape[0], base + self.shape.tokens)
        position = first
        while position < stop:
            number, offset = divmod(position - base, page)
            count = min(page - offset, stop - position)
            rows = slice(position - start, position - start + count)
            tile[0, number, :, offset : offset + count] = k[rows].transpose(0, 1)
            tile[1, number, :, offset : offset + count] = v[rows].transpose(0, 1)
            position += count
        if first < stop:
            assert self._phase is not None
            self._residences[self._phase].wrote(layer, index, first - base, stop - base)

    def _blocks(self, q: Tensor, start: int) -> list[Block]:
        """Rows q [T, H, D] at positions `start` and on, in the blocks that attend together."""
        rows = q.split(self._block_sizes.cut(len(q)) if self._phase == "decode" else len(q))
        starts = accumulate((len(part) for part in rows), initial=start)
        return [
            Block(fold(part, self.shape.num_kv_heads), at, len(part)) for part, at in zip(rows, starts, strict=False)
        ]

    def _attend_tile(self, block: Block | FlashBlock, tile: Tensor, index: int) -> None:
        base = index * self.shape.tokens
        if isinstance(block, FlashBlock):
            block.attend(tile, base)
        elif self._phase == "decode":
            block.attend_fixed(tile, base, chunk=self._recorded_chunk)
        else:
            block.attend_used(tile, base, fused=self._fused_prefill)


def _joined(rows: Sequence[Tensor]) -> Tensor:
    """Rows of blocks, one block after the other."""
    return rows[0] if len(rows) == 1 else torch.cat(list(rows))


def _kept(mass: Tensor) -> Tensor:
    """Masses [T, H_kv, C] fp32 as the device keeps them."""
    return mass.to(MASS_DTYPE) if mass.is_cuda else mass
