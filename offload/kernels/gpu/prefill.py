"""Attention of a prefill's rows over tiles by a Triton kernel, one launch a tile."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from offload.kernels.gpu.halves import HalvesBlock, HalvesTiling
from offload.kernels.gpu.prefill_block import PAGE_STEP, TritonBlock
from offload.kernels.gpu.prefill_programs import attend_tile
from offload.kernels.gpu.tiling import WIDEST_WHOLE
from offload.kernels.rope import Scoring
from offload.native.launch import launch


@dataclass(frozen=True)
class PrefillTiling:
    """The kernel's tiling for heads of up to 256 numbers of 16 bits, within a program's registers and 99 KiB of shared
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


class HeadBlock(TritonBlock):
    """`PrefillBlock` of rows with heads of up to 256 numbers."""

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


class TritonTiles:
    """`PrefillAttention` over tiles [2, P, H_kv, S, D] with S a multiple of PAGE_STEP, any strides, and contiguous rows
    of D."""

    def block(self, rows: Tensor, first: int, scoring: Scoring, window: int | None = None) -> TritonBlock:
        dim = rows.shape[2]
        if dim > WIDEST_WHOLE:
            return HalvesBlock(rows, first, scoring, window or 0, HalvesTiling.of_heads(dim))
        return HeadBlock(rows, first, scoring, window or 0)
