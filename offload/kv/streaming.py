"""The draft's cache: attention sinks and a recent window (StreamingLLM, Xiao et al. 2023, arXiv 2309.17453)."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from offload.kernels.device import NONE, DeviceKernels
from offload.kernels.rope import Scoring
from offload.kernels.runs import Rows, Run, attended
from offload.kv import Phase
from offload.kv.places import Places, in_turn, joined
from offload.transfer.memory import Memory


class StreamingCache:
    """Each row sees the first `sinks` tokens and the last `window` tokens up to itself, at in-cache positions.

    In-cache positions number what is seen without a gap. Attention depends on distances only, so the window is rotated
    at absolute positions, and a row far from the start meets the sinks with its query rotated to the in-cache position
    `sinks + window - 1`. Nothing is ever rotated again, and what a row sees depends on its position alone.

    The window's buffer has room for `slack` more tokens, so that rejected rows overwrite nothing a shorter sequence
    needs. Truncation past what it still has empties the cache: the tokens become pending again.
    """

    def __init__(
        self,
        memory: Memory,
        *,
        shapes: Sequence[tuple[int, int]],
        dtype: torch.dtype,
        scorings: Sequence[Scoring],
        sinks: int,
        window: int,
        slack: int,
        kernels: DeviceKernels = NONE,
        sources: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        """shapes: (KV heads, head_dim) of each layer. sources: for a layer without keys and values of its own the layer
        whose it reads."""
        self.sinks, self.window, self._scorings, self._memory = sinks, window, scorings, memory
        self._num_slots = 2 * (window + slack)
        self._blocks, self._shapes = list[Tensor](), shapes
        self._sources = [sources.get(layer, layer) for layer in range(len(shapes))]
        self._sink_rows = self._allocate(shapes, max(sinks, 1), dtype)
        self._rows = self._allocate(shapes, self._num_slots, dtype)
        self._windows = self._blocks[len(self._blocks) // 2 :]
        self._attention = kernels.attention(dtype=dtype)
        self.length = 0
        self._first = sinks  # absolute position of slot 0
        self._places = Places(memory.device)
        self._taken = [0] * len(shapes)

    def _allocate(self, shapes: Sequence[tuple[int, int]], num_rows: int, dtype: torch.dtype) -> list[Tensor]:
        """[2, H_kv, num_rows, D] of each layer, those that are alike in one block."""
        own = dict[int, Tensor]()
        for heads, dim in dict.fromkeys(shapes):
            layers = [at for at, shape in enumerate(shapes) if shape == (heads, dim) and self._sources[at] == at]
            size = (len(layers), 2, heads, num_rows, dim)
            self._blocks.append(self._memory.allocate(size, dtype, tier="device", purpose="draft cache"))
            own |= dict(zip(layers, self._blocks[-1], strict=True))
        return [own[source] for source in self._sources]

    @property
    def max_rows(self) -> int:
        """Rows that one forward may take."""
        return self._num_slots - self.window

    def skip(self, num_pending: int, *, least: int = 0) -> int:
        """The number of `num_pending` tokens, from the first on, that no later row sees: these need no forward. least:
        tokens that cannot have one.

        Only after the sinks are in. Jumping over them loses what they would have told the first rows of the window; a
        draft that is fed its last window only is the price of not running the whole prompt through it.
        """
        if self.length < self.sinks:
            return 0
        skipped = max(num_pending - self.window, least)
        if skipped:
            self.length += skipped
            self._first = self.length
        return skipped

    def begin(self, phase: Phase, num_rows: int) -> None:
        """A forward starts: make room, keeping the last `window` tokens and as many more as there is room for."""
        self._taken = [0] * len(self._taken)
        if num_rows > self.max_rows:
            raise ValueError(f"{num_rows} rows, the streaming cache takes {self.max_rows} at a time")
        held = max(self.length - self._first, 0)
        if held + num_rows > self._num_slots:
            kept = self._num_slots // 2 if num_rows <= self._num_slots // 2 else self.window
            kept = min(kept, held)
            for rows in self._windows:
                rows[:, :, :, :kept] = rows[:, :, :, held - kept : held].clone()
            self._first = self.length - kept
        self._places.set(self.length, self.length - self._first, num_rows)

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        """Attention over the sinks and each row's window; see `Cache`."""
        taken = self._taken[layer]
        self._taken[layer] += len(q)
        qkv, writes = in_turn(q, k, v, self._shapes[layer][0])
        blocks = self._places.blocks(taken, qkv, self._scorings[layer], window=self.window)
        return joined([self._attend(layer, rows, writes=writes) for rows in blocks])

    def advance(self, num_tokens: int) -> None:
        self.length += num_tokens
        self._taken = [0] * len(self._taken)

    def truncate(self, length: int) -> None:
        self._taken = [0] * len(self._taken)
        if length >= self.length:
            return
        oldest_needed = max(length + 1 - self.window, self.sinks)
        if length > self.sinks and oldest_needed < self._first:
            length = 0
        self.length = length
        if length <= self.sinks:
            self._first = self.sinks

    def release(self) -> None:
        """Give its memory back; the cache is not used again."""
        for rows in self._blocks:
            self._memory.released(rows, tier="device", purpose="draft cache")

    @property
    def graph_key(self) -> Hashable:
        """The key of the forward, see `Cache`. None unless sinks and window are full."""
        full = self.length >= self.sinks and self.length - self._first >= self.window
        return self._places.number if full else None

    def nbytes(self) -> int:
        return sum(rows.nbytes for rows in self._blocks)

    def _attend(self, layer: int, rows: Rows, *, writes: bool) -> Tensor:
        """The window's run, then that of the sinks, which have queries of their own. Places are numbered by slots of
        the window's buffer."""
        stop = rows.position + len(rows.q)
        held, known = max(stop - self._first, 0), min(self.sinks, stop)
        if rows.places is not None:
            held = self._num_slots  # a graph is used when there are more
        runs = [Run(self._rows[layer], held, windowed=True)]
        if self.sinks:
            runs.append(Run(self._sink_rows[layer], known, -self._first, query=1))
        lasts = (stop, self.sinks + self.window - 1)
        into = 0 if not writes else len(runs) if rows.position < self.sinks else 1
        return attended(self._attention, rows, runs, into=into, lasts=lasts)
