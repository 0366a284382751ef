"""The window cache: keys and values of layers whose rows see their last tokens only.

Its pages are a ring on the device: page n of the sequence is in slot n % P. So a page has the same tokens in every
pass, nothing is moved, and a row's bits do not depend on how much of the sequence is still cached.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

from torch import Tensor

from offload.config.model import ModelConfig
from offload.kernels.device import NONE, DeviceKernels
from offload.kernels.places import write_rows
from offload.kernels.prefill import OperatorTiles, PrefillAttention
from offload.kernels.rope import Scoring
from offload.kernels.runs import Rows, Run, attended
from offload.kv import Phase
from offload.kv.parts import PagedPart, first_page_seen
from offload.kv.places import QKV, Places, in_turn, joined
from offload.pages.tiles import TileShape
from offload.transfer.memory import Memory

PURPOSE = "window cache"


class WindowCache(PagedPart):
    """Keys (rotated) and values of the last tokens, [2, P, H_kv, S, D] for each layer of a window.

    Each row sees the last `windows[layer]` tokens, itself among them. Rows may be drafted: they follow the tokens in
    the same ring, until exact ones take their place. A sequence can be cut as far back as the ring has all pages that
    windows need then.
    """

    name = "windows"
    limit = "windows have lost some that they need"

    def __init__(
        self,
        memory: Memory,
        shape: TileShape,
        *,
        num_pages: int,
        windows: Sequence[int],
        scorings: Sequence[Scoring],
        prefill: PrefillAttention | None = None,
        kernels: DeviceKernels = NONE,
        reads: Sequence[int] = (),
    ) -> None:
        """shape: of a page: a tile of one. num_pages: see `Sizing.window_pages`. windows: of each layer that reads the
        cache. reads, prefill, kernels: see `FullCache`."""
        self.shape, self.scorings, self._windows = shape, scorings, windows
        self._reads = tuple(reads or range(len(windows)))
        self.num_layers = len({*self._reads})
        self._memory, self._num_pages = memory, num_pages
        self._prefilling = prefill or OperatorTiles(shape.num_kv_heads)
        size = (self.num_layers, 2, num_pages, shape.num_kv_heads, shape.page_tokens, shape.head_dim)
        self._ring = memory.allocate(size, shape.dtype, tier="device", purpose=PURPOSE)
        self._attention = kernels.attention(dtype=shape.dtype, page=shape.page_tokens)
        self._places = Places(memory.device)
        self._in_ring = self._places.in_memory and kernels.usable  # kernels of a GPU find the pages that rows see
        self.length = 0
        self._stop = 0  # rows were written up to this position, which is in the ring's last page
        self._oldest = 0  # first page that was filled, where rows came from elsewhere
        self._filled: int | None = None  # first page filled since the last `restored`; None: none
        self._start = 0  # of the forward under way
        self._is_draft = False
        self._phase: Phase | None = None
        self._taken = [0] * len(windows)

    @property
    def last(self) -> int:
        """The reading layer that is the last one with keys and values of its own."""
        return self._reads.index(self.num_layers - 1)

    @property
    def first_page(self) -> int:
        """The first page of the sequence that is still in the ring."""
        return max(self.first_kept(self._stop), self._oldest)

    def first_kept(self, length: int) -> int:
        """The first page that there is room for where `length` tokens are cached."""
        return max(self._num_pages_of(length) - self._num_pages, 0)

    def first_seen(self, length: int) -> int:
        """The first page that rows after `length` tokens see."""
        return first_page_seen(length, max(self._windows), self.shape.page_tokens)

    def reaches(self, length: int) -> bool:
        """Whether the first `length` tokens are cached, with all pages that rows after them see."""
        return length <= self.length and self.first_seen(length) >= self.first_page

    def reachable(self, length: int, stop: int | None = None) -> int:
        return length if self.reaches(length) else 0

    def begin(self, phase: Phase, num_rows: int, start: int | None = None) -> None:
        """A forward of `num_rows` rows starts: after the tokens or, where its rows are drafted, at position `start`.
        Drafted rows of tokens that are cached already are not written."""
        self._is_draft, self._phase = start is not None, phase
        self._start = self.length if start is None else start
        self._taken = [0] * len(self._reads)
        if phase == "decode":
            known = {"first_written": self.length} if self._is_draft else {}
            self._places.set(self._start, self._start, num_rows, **known)
            self._stop = max(self._stop, self._start + num_rows)

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        """See `Cache`; layers are those of a window. In phase "decode" all of the forward's rows come in one call."""
        start = self._start + self._taken[layer]
        self._taken[layer] += len(q)
        qkv, writes = in_turn(q, k, v, self.shape.num_kv_heads)
        if self._phase == "prefill":
            self._stop = max(self._stop, start + len(q))
            return self._prefill(layer, start, qkv, writes=writes)
        if self._in_ring:
            return self._decode_in_ring(layer, qkv, writes=writes)
        known = min(max(self.length - start, 0), len(q)) if self._is_draft else 0
        parts = [(0, known, False), (known, len(q), writes)]
        found = [self._decode(layer, *part, qkv) for part in parts if part[0] < part[1]]
        return joined(found)

    def peek(self, layer: int, q: Tensor, position: int, scoring: Scoring) -> Tensor:
        """The attention [1, H * D] of a row of another model, q [1, H, D], not rotated, over the last tokens of a
        layer's window. Nothing is added. position: of the row. scoring: of its queries."""
        (q, k, v), _ = in_turn(q, None, None, self.shape.num_kv_heads)
        rows = Rows(q, k, v, scoring, position, self.length - 1, self._windows[layer])
        return attended(self._attention, rows, self._runs(layer, self.length - 1, self.length), into=0)

    def advance(self, num_tokens: int) -> None:
        """The forward is over and its first `num_tokens` rows count."""
        if not self._is_draft:
            self.length += num_tokens
        self._end()

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens at most; none where a window would miss some of them."""
        self._end()
        self.length = min(self.length, length)
        if not self.length or not self.reaches(self.length):
            self.restored(0)

    def reserve(self, num_tokens: int) -> None:
        """The ring has all its memory, where pages that are filled take the places of others: no token counts."""
        self.restored(0)

    def page_of_all(self, number: int) -> list[Tensor]:
        return list(self._ring[:, :, number % self._num_pages])

    def page_to_fill(self, number: int) -> list[Tensor]:
        return self.page_of_all(number)

    def page_filled(self, number: int) -> None:
        self._filled = number if self._filled is None else min(self._filled, number)

    def layers_of(self, whole: ModelConfig) -> Sequence[int]:
        return whole.windowed

    def restored(self, length: int) -> None:
        """Set the length to `length` tokens, see `Part`. The ring has the pages that were filled since the last
        call."""
        self._end()
        self.length = self._stop = length
        self._oldest = (self._filled or 0) if length else 0
        self._filled = None

    def release(self) -> None:
        """The cache is not used again."""
        self._memory.released(self._ring, tier="device", purpose=PURPOSE)

    @property
    def graph_key(self) -> Hashable:
        """The key of the forward, see `Cache`. None unless a GPU's kernels find the pages of the ring."""
        return (self._places.number, self._ring.data_ptr()) if self._in_ring else None

    def nbytes(self) -> int:
        return self._ring.nbytes

    def _end(self) -> None:
        self._phase, self._taken = None, [0] * len(self._reads)

    def _num_pages_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self.shape.page_tokens)

    def _seen(self, layer: int, start: int, stop: int) -> Iterator[tuple[Tensor, int]]:
        """The tiles [2, p, H_kv, S, D] that rows at `start` to `stop` see, each with the position of its first token:
        two if the ring ends between their pages, else one. The rows' own pages are among them."""
        page = self.shape.page_tokens
        first, last = max(start + 1 - self._windows[layer], 0) // page, (stop - 1) // page
        while first <= last:
            slot = first % self._num_pages
            count = min(last + 1 - first, self._num_pages - slot)
            yield self._ring[self._reads[layer], :, slot : slot + count], first * page
            first += count

    def _decode(self, layer: int, first: int, stop: int, writes: bool, qkv: QKV) -> Tensor:
        """Rows `first` to `stop` of the forward, written to the ring or, where their tokens are known, not."""
        q, k, v = (each[first:stop] for each in qkv)
        rows = self._places.rows(first, (q, k, v), self.scorings[layer], window=self._windows[layer])
        runs = self._runs(layer, rows.index, rows.index + len(q))
        return attended(self._attention, rows, runs, into=len(runs) if writes else 0)

    def _runs(self, layer: int, start: int, stop: int) -> list[Run]:
        """The runs that rows at `start` to `stop` see."""
        return [
            Run(tile, min(stop - base, tile.shape[1] * self.shape.page_tokens), base, windowed=True)
            for tile, base in self._seen(layer, start, stop)
        ]

    def _decode_in_ring(self, layer: int, qkv: QKV, *, writes: bool) -> Tensor:
        """The forward's rows, of which those that are not known are written to the ring if they are to be."""
        window, page = self._windows[layer], self.shape.page_tokens
        rows = self._places.rows(0, qkv, self.scorings[layer], window=window)
        pages = min(-(-(window + len(rows.q) - 1) // page) + 1, self._num_pages)
        run = Run(self._ring[self._reads[layer]], pages * page, windowed=True, ring=True)
        return attended(self._attention, rows, [run], into=int(writes))

    def _prefill(self, layer: int, start: int, qkv: QKV, *, writes: bool) -> Tensor:
        q, k = self.scorings[layer].rotated(*qkv[:2], start)
        block = self._prefilling.block(q, start, self.scorings[layer], self._windows[layer])
        for tile, base in self._seen(layer, start, start + len(q)):
            if writes:
                write_rows(tile, base, start, k, qkv[2])
            block.attend(tile, base)
        return block.attended().to(q.dtype)
