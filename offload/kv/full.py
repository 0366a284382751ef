"""The full cache: every token, exact, wherever its tiles live."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from offload.config.model import ModelConfig
from offload.kernels.device import NONE, DeviceKernels
from offload.kernels.places import write_rows
from offload.kernels.prefill import OperatorTiles, PrefillAttention
from offload.kernels.rope import Scoring
from offload.kernels.rows import rounded_up
from offload.kernels.runs import MASS_DTYPE, Rows, Run, attended
from offload.kv import Phase
from offload.kv.parts import PagedPart
from offload.kv.places import Places, in_turn
from offload.pages.storage import Offload, PageStorage
from offload.pages.tiles import TileShape
from offload.plan.sizing import MAX_ROWS
from offload.transfer.arena import Arena
from offload.transfer.memory import Memory


class FullCache(PagedPart):
    """Keys (rotated) and values of all tokens, in tiles, wherever `pages` has them.

    In phase "decode" a tile is a run (`kernels.runs`), or several of at most `run_tokens`: so a row's bits depend on
    its position and the tokens before it, and on nothing else. In phase "prefill" blocks may have any size. With
    `mass_chunk` the decode phase also keeps each row's softmax mass per chunk of that many tokens, while `record_mass`
    is set, or `keep_mass`. Where all rows of a layer are in one tile on a GPU, a pass may be a graph.
    num_layers: with keys and values of their own, whose rows see all tokens; there may be none. reads: for each layer
    that reads the cache the one of these whose keys and values it reads; (): each its own. scorings: of the reading
    layers.
    offload: None, all tiles are on the device; in phase "prefill" all are attended to there. prefill: attends in phase
    "prefill"; None: torch's operators do. kernels: the device's own, for phase "decode". arena: phase "prefill" has its
    turn of it, from `begin` to the next user's.
    """

    name = "rows"

    def __init__(
        self,
        memory: Memory,
        shape: TileShape,
        *,
        num_layers: int,
        scorings: Sequence[Scoring],
        offload: Offload | None = None,
        mass_chunk: int | None = None,
        run_tokens: int | None = None,
        prefill: PrefillAttention | None = None,
        kernels: DeviceKernels = NONE,
        arena: Arena | None = None,
        reads: Sequence[int] = (),
    ) -> None:
        self.shape, self.num_layers, self.scorings, self.mass_chunk = shape, num_layers, scorings, mass_chunk
        self.reads = tuple(reads or range(num_layers))
        self.device, self.arena = memory.device, arena or Arena(memory)
        most = len(scorings[0].rope.cos) if scorings else 0
        more: dict[str, Any] = {"arena": self.arena, "offload": offload, "kernels": kernels}
        self.pages = PageStorage(memory, shape, num_layers, most, reads=self.reads, **more)
        self._places = Places(memory.device)
        self._run_pages = (run_tokens or shape.tokens) // shape.page_tokens
        self._prefill = prefill or OperatorTiles(shape.num_kv_heads)
        self._attention = kernels.attention(dtype=shape.dtype, page=shape.page_tokens, chunk=mass_chunk)
        self.record_mass = mass_chunk is not None  # from the next decode forward on, to choose chunks by
        self.keep_mass = False  # as `record_mass`, for other readers of masses
        self.length = 0
        self.num_ahead = 0  # drafted rows after the tokens, see `DraftRowsCache`
        self._start = 0
        self.stable_length = 0  # first tokens that stayed since `mark_synced`; `QuantisedCache` reads it
        self._phase: Phase | None = None  # of the forward under way
        self._taken = [0] * len(self.reads)
        self._reach = 0  # tokens that the forward's attention may reach: see `_reached`
        self._records = False  # whether the forward under way keeps masses
        self._mass: Sequence[Tensor] = []  # of the last forward's layers
        self._kept: Tensor | None = None  # where graphs leave them

    def reserve(self, num_tokens: int) -> None:
        """Allocate tiles for `num_tokens` tokens. Raises DoesNotFit."""
        self.pages.reserve(num_tokens)

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
        for other in self.pages.access.keys() - {phase}:
            self.pages.access[other].forget()
        self.pages.access[phase].begin(self._start, num_rows)
        self._mass = []
        if phase == "decode":
            self._places.set(self._start, self._start, num_rows)
            self._reach = self._reached(self._start + num_rows)
            self._records = self.mass_chunk is not None and (self.record_mass or self.keep_mass)
            if self._records and self._is_whole:
                self._mass = self._room_for_masses(num_rows)

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        """See `Cache`. In phase "decode" all of the forward's rows come in one call."""
        if self._phase is None:
            raise RuntimeError("attend outside a forward: call begin first")
        start = self._start + self._taken[layer]
        num_rows = q.shape[0]
        self._taken[layer] += num_rows
        qkv, writes = in_turn(q, k, v, self.shape.num_kv_heads)
        if self._phase == "decode":
            rows = self._places.rows(0, qkv, self.scorings[layer])
            return self._decode(layer, replace(rows, moving=True) if self._is_whole else rows, writes=writes)
        (q, keys), values = self.scorings[layer].rotated(*qkv[:2], start), qkv[2]
        block = self._prefill.block(q, start, self.scorings[layer])
        access, tokens, held = self.pages.access["prefill"], self.shape.tokens, self.reads[layer]
        for index in range(self.shape.count(start + num_rows)):
            tile = access.open(held, index)
            if writes:
                first, stop = write_rows(tile, index * tokens, start, *self.scorings[layer].cached(keys, values))
                if first < stop:
                    access.wrote(held, index, first, stop)
            block.attend(tile, index * tokens)
            access.close(held, index)
        return block.attended().to(q.dtype)

    def peek(self, layer: int, q: Tensor, position: int, scoring: Scoring) -> Tensor:
        """The attention [1, H * D] of a row of another model, q [1, H, D], not rotated, over all tokens of a layer.
        Nothing is added. All tiles must be on the device. position: of the row. scoring: of its queries."""
        assert self.pages.all_on_device
        (q, k, v), _ = in_turn(q, None, None, self.shape.num_kv_heads)
        rows, tokens = Rows(q, k, v, scoring, position, self.length - 1), self.shape.tokens
        tiles = ((index, index * tokens) for index in range(self.shape.count(self.length)))
        runs = (Run(self.pages.store.home(layer, index), min(self.length - at, tokens), at) for index, at in tiles)
        return attended(self._attention, rows, [part for run in runs for part in self._parts(run)], into=0)

    def advance(self, num_tokens: int, *, ahead: bool = False) -> None:
        """The forward that began is over, see `Cache`. ahead: see `begin`."""
        if ahead:
            self.num_ahead += num_tokens
        else:
            self.length += num_tokens
        self._end()

    def truncate(self, length: int) -> None:
        self._cut(length)
        self.pages.keep(self.length + MAX_ROWS)

    def mark_synced(self) -> None:
        """Count all cached tokens as stable from now on, see `stable_length`."""
        self.stable_length = self.length

    def truncate_ahead(self, length: int) -> None:
        """Drop the drafted rows after the first `length` tokens; the cache's own tokens all stay. Also ends a forward
        that was broken off."""
        self._end()
        self.num_ahead = max(min(self.num_ahead, length - self.length), 0)

    def fetch_ahead(self) -> None:
        """Start what the next decode forward needs first. Worth it when nothing more urgent waits for the link."""
        self.pages.access["decode"].fetch_ahead(self.length)

    def page_of_all(self, number: int) -> list[Tensor]:
        return self.pages.read(number)

    def page_to_fill(self, number: int) -> list[Tensor]:
        return self.pages.to_fill(number)

    def page_filled(self, number: int) -> None:
        self.pages.filled(number)

    def layers_of(self, whole: ModelConfig) -> Sequence[int]:
        return whole.growing

    def restored(self, length: int) -> None:
        """Set the length to `length` tokens, whose pages were written from outside. No other token counts."""
        self._cut(0)
        self.pages.changed()
        self.pages.keep(length)
        self.length = length

    def release(self) -> None:
        """Give the tiles back; the cache is not used again."""
        self.truncate(0)
        self._mass, self._kept = [], None
        self.pages.release()

    @property
    def graph_key(self) -> Hashable:
        """The key of the forward, see `Cache`. None unless all rows of a layer are in one tile on the GPU."""
        if not self._is_whole:
            return None
        kept = (self._kept.data_ptr(), self._kept.shape) if self._records and self._kept is not None else None
        return self._places.number, self._reach, kept

    def nbytes(self) -> int:
        """Bytes of the pages' homes."""
        return self.pages.nbytes()

    def mass(self, num_rows: int, *, after: int = 0) -> Tensor:
        """Softmax mass per chunk of the last decode forward, summed over its first `num_rows` rows, or those after so
        many, and over the query heads of each KV head, in each reading layer: [L, H_kv, C] fp32 on the device. Raises
        RuntimeError if that forward recorded none."""
        rows = slice(after, after + num_rows)
        assert self.mass_chunk is not None
        stop = max(self._start + rows.stop, self.length)
        seen = -(-stop // self.mass_chunk)  # chunks after them are 0, and would change the order of sums
        masses = [per_row[rows, :, :seen] for per_row in self._mass]
        if self.device.type == "cpu":  # whose order depends on strides, too; on a GPU one thread sums a chunk's rows
            masses = [mass.contiguous() for mass in masses]
        return torch.stack([mass.sum(0, dtype=torch.float32) for mass in masses])

    def wait_home(self) -> None:
        """Wait until the tiles' homes have all rows and no kernel reads them."""
        self.pages.wait_home()

    def _cut(self, length: int) -> None:
        """End the forward under way, and keep at most the first `length` tokens."""
        self._end()
        self.length, self.num_ahead = min(self.length, length), 0
        self.stable_length = min(self.stable_length, self.length)

    def _end(self) -> None:
        if self._phase is not None:
            self.pages.access[self._phase].end()
            self._phase = None
        self._taken = [0] * len(self.reads)

    @property
    def _is_whole(self) -> bool:
        """Whether all rows of a layer are in one tile, on a GPU, where it stays as long as the cache is used."""
        is_one = self.pages.store.num_tiles == 1 or not self.num_layers
        return self._places.in_memory and self.pages.all_on_device and is_one

    def _reached(self, stop: int) -> int:
        """The tokens that attention may reach where rows end before token `stop`. On a GPU more are hidden by places,
        and a graph serves until there are more."""
        if not self._is_whole:
            return stop
        page = self.shape.page_tokens
        return rounded_up(-(-stop // page), self.shape.num_pages) * page

    def _room_for_masses(self, num_rows: int) -> Sequence[Tensor]:
        """Memory for the masses of a pass that may be a graph, for each layer [T, H_kv, C]: the same in every pass."""
        assert self.mass_chunk is not None
        if self._kept is None or self._kept.shape[1] < num_rows:
            size = len(self.reads), num_rows, self.shape.num_kv_heads, -(-self.shape.tokens // self.mass_chunk)
            self._kept = None
            self._kept = torch.zeros(size, dtype=MASS_DTYPE, device=self.device)
        return self._kept[:, :num_rows].unbind()

    def _decode(self, layer: int, rows: Rows, *, writes: bool) -> Tensor:
        """A run for each tile, or for parts of it; new rows go to the tiles that they fall into."""
        access, attention, tokens = self.pages.access["decode"], self._attention, self.shape.tokens
        stop, held = rows.index + len(rows.q), self.reads[layer]
        attention.begin(rows, self._counts(), masses=self._records)
        for index in range(self.shape.count(stop)):
            base = index * tokens
            run = Run(access.open(held, index), min(self._reach - base, tokens), base)
            if writes and base + tokens > rows.index:
                attention.append_rows(run)
                access.wrote(held, index, max(rows.index - base, 0), min(stop - base, tokens))
            for part in self._parts(run):
                attention.attend(part)
            access.close(held, index)
        out, mass = attention.merge()
        if mass is not None:
            self._keep(layer, mass)
        return out

    def _counts(self) -> list[int]:
        """Tokens of each run of the forward."""
        tokens, page = self.shape.tokens, self.shape.page_tokens
        tiles = (min(self._reach - base, tokens) for base in range(0, self._reach, tokens))
        step = self._run_pages * page
        return [min(count - first, step) for count in tiles for first in range(0, count, step)]

    def _parts(self, run: Run) -> Sequence[Run]:
        """The run in parts of so many pages that their results have room; itself where it is one."""
        if run.pages.shape[1] <= self._run_pages:
            return [run]
        step = self._run_pages * self.shape.page_tokens
        return [
            Run(pages, min(run.tokens - first, step), run.first + first)
            for pages, first in zip(run.pages.split(self._run_pages, 1), range(0, run.tokens, step), strict=False)
        ]

    def _keep(self, layer: int, mass: Tensor) -> None:
        """Keep a layer's masses [T, H_kv, C]."""
        if self._is_whole:
            self._mass[layer][:, :, : mass.shape[2]].copy_(mass)
        else:
            self._mass = [*self._mass, mass]
