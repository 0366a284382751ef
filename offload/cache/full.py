"""The full cache: every token, exact, wherever its tiles live."""

from __future__ import annotations

import torch
from torch import Tensor

from offload.cache import Phase
from offload.cache.tiles import Homeward, PrefillTiles, Residence, Resident, StreamedTiles, TileShape, TileStore
from offload.kernels.attention import Part, attend, attend_flash, fold, merge, unfold
from offload.kernels.rope import RopeTable, rotate
from offload.transfer.link import Link
from offload.transfer.memory import Memory

class FullCache:
    """Keys (rotated) and values of all tokens, in tiles.

    In phase "decode" rows are attended in blocks of exactly `rows`, over whole tiles, whatever is hidden in them: so a
    row's bits depend on its position and the tokens before it, and on nothing else. In phase "prefill" blocks may have any
    size. With `mass_chunk` the decode phase also keeps each row's softmax mass per chunk of that many tokens.
    """

    def __init__(
        self,
        memory: Memory,
        shape: TileShape,
        *,
        num_layers: int,
        rope: RopeTable,
        rows: int,
        link: Link | None = None,
        num_resident: int = 0,
        num_staging: int = 2,
        mass_chunk: int | None = None,
    ) -> None:
        self.shape, self.num_layers, self.rope, self.mass_chunk = shape, num_layers, rope, mass_chunk
        self._rows, self.link = rows, link
        self.store = TileStore(memory, shape, num_layers, 2**40 if link is None else num_resident)
        self._residences: dict[Phase, Residence] = {"prefill": Resident(self.store), "decode": Resident(self.store)}
        self.homeward: Homeward | None = None
        if link is not None:
            staging = [
                memory.allocate(shape.shape, shape.dtype, tier="device", purpose="kv staging") for _ in range(num_staging)
            ]
            self.homeward = Homeward(self.store, link)
            self._residences = {
                "prefill": PrefillTiles(self.store, link, memory, self.homeward),
                "decode": StreamedTiles(self.store, link, staging, self.homeward),
            }
        self._device = memory.device
        self.length = 0
        self._last_row = 0
        self._phase: Phase | None = None  # of the forward under way
        self._taken = [0] * num_layers
        self._mass: list[Tensor] = []
        self.last_query: list[Tensor] = []

    def begin(self, phase: Phase, num_rows: int) -> None:
        """A forward of `num_rows` rows starts."""
        self._end()
        self._phase = phase
        self._residences[phase].begin(self.length, num_rows)
        self._mass.clear()
        self.last_query.clear()

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `Cache`. In phase "decode" all of the forward's rows come in one call."""
        if self._phase is None:
            raise RuntimeError("attend outside a forward: call begin first")
        start = self.length + self._taken[layer]
        num_rows = q.shape[0]
        self._taken[layer] += num_rows
        table = self.rope.rows(start, start + num_rows)
        q, k = rotate(q, *table), rotate(k, *table)
        block = self._rows if self._phase == "decode" else num_rows
        queries = [fold(rows, self.shape.num_kv_heads) for rows in q.split(block)]
        parts: list[Part | None] = [None] * len(queries)
        masses: list[list[tuple[Tensor, Tensor]]] = [[] for _ in queries]
        residence = self._residences[self._phase]
        for index in range(self.shape.count(start + num_rows)):
            tile = residence.open(layer, index)
            self._write(tile, layer, index, start, k, v)
            for i, query in enumerate(queries):
                part = self._attend_tile(query, tile, index, start + i * block, block)
                if part is None:
                    continue
                if part.mass is not None:
                    masses[i].append((part.mass, part.lse))
                so_far = parts[i]
                parts[i] = part if so_far is None else merge(so_far, part)
            residence.close(layer, index)
        if self._phase == "decode":
            self.last_query.append(q)
            if self.mass_chunk is not None:
                self._mass.append(self._total_mass(masses, parts, block))
        return torch.cat([unfold(part.out, block) for part in parts if part is not None]).to(q.dtype)

    def advance(self, num_tokens: int) -> None:
        self.length += num_tokens
        self._last_row = num_tokens - 1
        self._end()

    def truncate(self, length: int) -> None:
        self._end()
        self.length = min(self.length, length)

    def nbytes(self) -> int:
        return self.store.nbytes()

    def mass(self, num_rows: int) -> Tensor:
        """Softmax mass per chunk of the last decode forward, summed over its first `num_rows` rows and over the query
        heads of each KV head: [L, H_kv, C] fp32 on the device."""
        return torch.stack([per_row[:num_rows].sum(0) for per_row in self._mass])

    def mean_key_scores(self, chunk: int) -> Tensor:
        """The published score of each whole chunk: last query · mean key, summed over the query group: [L, H_kv, C]."""
        num_chunks = self.length // chunk
        scores = []
        for layer, query in enumerate(self.last_query):
            halves = [self.store.home(layer, i)[0] for i in range(self.shape.count(num_chunks * chunk))]
            means = [keys.unflatten(2, (-1, chunk)).float().mean(3) for keys in halves]  # [P, H_kv, S / chunk, D]
            joined = torch.cat([mean.transpose(0, 1).flatten(1, 2) for mean in means], 1)
            row = query[self._last_row].view(self.shape.num_kv_heads, -1, self.shape.head_dim).float().sum(1)
            scores.append((joined @ row.to(joined.device)[..., None]).squeeze(-1))
        return torch.stack(scores)[..., :num_chunks].to(self.last_query[0].device)

    def read_chunks(self, layers: Tensor, heads: Tensor, chunks: Tensor, chunk: int) -> Tensor:
        """Chunk `chunks[i]` (of `chunk` tokens) of KV head `heads[i]` in layer `layers[i]` -> [n, 2, chunk, D].

        Gathered where the tiles live; one copy brings all of them to the device.
        """
        layers_, chunks_ = layers.cpu(), chunks.cpu()
        per_tile, per_page = self.shape.tokens // chunk, self.shape.page_tokens // chunk
        rows = torch.empty((len(layers_), 2, chunk, self.shape.head_dim), dtype=self.shape.dtype)
        key = layers_ * self.shape.count(self.length) + chunks_ // per_tile
        for group in key.unique().tolist():
            (members,) = (key == group).nonzero(as_tuple=True)
            layer, index = divmod(group, self.shape.count(self.length))
            tile = self.store.home(layer, index).unflatten(3, (per_page, chunk))
            within = chunks_[members] % per_tile
            rows[members] = tile[:, within // per_page, heads.cpu()[members], within % per_page].transpose(0, 1)
        return self._bring(rows)

    def read_rows(self, start: int, stop: int) -> Tensor:
        """All layers' keys and values of tokens start to stop -> [L, 2, H_kv, stop - start, D] on the device."""
        page, per_tile = self.shape.page_tokens, self.shape.tokens
        size = (self.num_layers, 2, self.shape.num_kv_heads, stop - start, self.shape.head_dim)
        rows = torch.empty(size, dtype=self.shape.dtype)
        position = start
        while position < stop:
            index, within = divmod(position, per_tile)
            number, offset = divmod(within, page)
            count = min(page - offset, stop - position)
            target = slice(position - start, position - start + count)
            for layer in range(self.num_layers):
                rows[layer, :, :, target] = self.store.home(layer, index)[:, number, :, offset : offset + count]
            position += count
        return self._bring(rows)

    def _bring(self, rows: Tensor) -> Tensor:
        """Gathered rows, to the device: over the link where there is one."""
        if self.link is None:
            return rows.to(self._device)
        arrived = torch.empty_like(rows, device=self._device)
        self.link.to_device(arrived, rows).wait()
        return arrived

    def wait_home(self) -> None:
        """Until the tiles' homes hold all rows."""
        if self.homeward is not None:
            self.homeward.wait()

    def _end(self) -> None:
        if self._phase is not None:
            self._residences[self._phase].end()
            self._phase = None
        self._taken = [0] * self.num_layers

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

    def _attend_tile(self, query: Tensor, tile: Tensor, index: int, first: int, count: int) -> Part | None:
        """Attention of the rows at positions first to first + count over one tile; None if it lies after all of them."""
        base = index * self.shape.tokens
        if base >= first + count:
            return None
        visible = None
        if base + self.shape.tokens > first + 1:
            position = torch.arange(first + 1 - base, first + 1 - base + count, device=query.device)
            visible = position.clamp_(0, self.shape.tokens).repeat(query.shape[1] // count)
        if self._phase == "decode":
            return attend(query, tile[0], tile[1], visible, chunk=self.mass_chunk)
        pages = self.shape.used_pages(index, first + count)
        kernel = attend_flash if query.device.type == "cpu" else attend
        return kernel(query, tile[0, :pages], tile[1, :pages], visible)

    def _total_mass(self, masses: list[list[tuple[Tensor, Tensor]]], parts: list[Part | None], block: int) -> Tensor:
        """Each row's mass per chunk over the whole sequence, summed over the query group: [T, H_kv, C]."""
        num_chunks = max(len(row_masses) for row_masses in masses) * self.shape.tokens // (self.mass_chunk or 1)
        total = torch.zeros(len(parts) * block, self.shape.num_kv_heads, num_chunks, device=self._device)
        for i, (row_masses, part) in enumerate(zip(masses, parts, strict=True)):
            assert part is not None
            scaled = [mass * (lse - part.lse).exp()[..., None] for mass, lse in row_masses]
            joined = torch.cat(scaled, -1)
            grouped = joined.view(self.shape.num_kv_heads, -1, block, joined.shape[-1]).sum(1)
            total[i * block : (i + 1) * block, :, : joined.shape[-1]] = grouped.transpose(0, 1)
        return total
