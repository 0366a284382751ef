"""Attention of a prefill's rows over tiles by a Triton kernel, one launch a tile."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from offload.kernels.gpu.prefill_programs import attend_tile
from offload.kernels.rope import Scoring
from offload.native.launch import launch

PAGE_STEP = 64  # a page's tokens are a multiple of this


@dataclass(frozen=True)
class PrefillTiling:
    """The kernel's tiling for heads of `head_dim` numbers of 16 bits, within a program's registers and 99 KiB of shared
    memory. rows: of a program; step: keys at a time."""

    head_dim: int
    warps: int = 8
    stages: int = 2

    @property
    def padded(self) -> int:
        return 1 << (self.head_dim - 1).bit_length()

    @property
    def rows(self) -> int:
        return 128 if self.padded <= 128 else 64

    @property
    def step(self) -> int:
        """Keys at a time; fewer for padded heads, whose masked loads take more registers."""
        return PAGE_STEP if self.padded == self.head_dim <= 128 else PAGE_STEP // 2


class TritonTiles:
    """`PrefillAttention` over tiles [2, P, H_kv, S, D] with S a multiple of PAGE_STEP, any strides, and contiguous rows
    of D."""

    def block(self, rows: Tensor, first: int, scoring: Scoring, window: int | None = None) -> TritonBlock:
        return TritonBlock(rows, first, scoring, window or 0)


class TritonBlock:
    """`PrefillBlock` on a GPU. Memory: the result and, with several tiles, the running result in fp32."""

    def __init__(self, rows: Tensor, first: int, scoring: Scoring, window: int) -> None:
        assert rows.stride(2) == 1
        self._rows, self._first, self._window = rows, first, window
        self._scale, self._cap = scoring.scale or rows.shape[-1] ** -0.5, scoring.cap or 0.0
        self._sinks = scoring.sink_logits
        self._mean = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
        self._state: tuple[Tensor, ...] = ()  # running [T, H, D], tops and totals [T, H], fp32
        self._is_done = False

    def attend(self, tile: Tensor, base: int) -> None:
        if self._is_done:
            return
        num_rows, tokens = len(self._rows), tile.shape[1] * tile.shape[3]
        begun, self._is_done = bool(self._state), self._first + num_rows <= base + tokens
        if not begun:
            self._state = self._gathered(0 if self._is_done else num_rows)
        self._launch(tile, self._first - base, int(begun))

    def attended(self) -> Tensor:
        assert self._is_done, "the tile of the last row did not come"
        return self._mean.flatten(1)

    def _gathered(self, num_rows: int) -> tuple[Tensor, ...]:
        """Uninitialised memory for the running result of `num_rows` rows."""
        _, heads, dim = self._rows.shape
        sizes = (num_rows, heads, dim), (num_rows, heads), (num_rows, heads)
        return tuple(torch.empty(size, dtype=torch.float32, device=self._rows.device) for size in sizes)

    def _launch(self, tile: Tensor, own_first: int, begun: int) -> None:
        (num_rows, heads, dim), (_, pages, kv_heads, page, _) = self._rows.shape, tile.shape
        assert tile.stride(4) == 1
        assert page % PAGE_STEP == 0
        tiling, sinks = PrefillTiling(dim), self._sinks
        launch(
            attend_tile,
            (-(-num_rows // tiling.rows), heads),
            (
                self._rows, tile[0], tile[1], *self._state, self._mean, self._mean if sinks is None else sinks,
                self._rows.stride(0), self._rows.stride(1), tile.stride(1), tile.stride(2), tile.stride(3),
                num_rows, own_first, pages * page, begun, int(self._is_done), self._scale,
            ),
            CAP=self._cap, WINDOW=self._window, SINKS=sinks is not None, PAGE=page, GROUP=heads // kv_heads, DIM=dim,
            DIM_PADDED=tiling.padded, ROWS=tiling.rows, STEP=tiling.step, WIDEN=not tile.is_cuda,
            num_warps=tiling.warps, num_stages=tiling.stages,
        )  # fmt: skip
