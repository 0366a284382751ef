"""Attention of a prefill's rows to latents (`Scoring.joined`) over tiles, by a Triton kernel, one launch a tile."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from offload.kernels.gpu.latent_programs import attend_latents
from offload.kernels.gpu.prefill import TritonBlock
from offload.kernels.rope import Scoring
from offload.native.launch import launch


@dataclass(frozen=True)
class LatentTiling:
    """The kernel's tiling for latents with halves of `half` numbers of 16 bits, of which the first `turned` are
    rotated, within a program's registers and 99 KiB of shared memory. rows: of a program; step: tokens at a time."""

    half: int
    turned: int
    warps: int = 8
    stages: int = 2
    rows: int = 64
    step: int = 32

    @property
    def plain(self) -> int:
        return self.half - self.turned

    @property
    def padded(self) -> int:
        return 1 << (self.plain - 1).bit_length()

    @property
    def padded_turned(self) -> int:
        return max(16, 1 << (self.turned - 1).bit_length())

    @property
    def slice(self) -> int:
        """Numbers of a product of scores, of those that are not rotated."""
        return next(size for size in (64, 32, 16) if self.plain % size == 0)


class LatentTiles:
    """`PrefillAttention` over tiles [2, P, 1, S, D / 2] of latents, with S a multiple of PAGE_STEP, D of 32, a rank of
    32 up to 512, any strides, and contiguous halves. Of the output, numbers where queries are rotated are 0: they are
    no values."""

    def block(self, rows: Tensor, first: int, scoring: Scoring, window: int | None = None) -> LatentBlock:
        assert scoring.joined
        assert window is None
        assert scoring.cap is None
        assert scoring.sink_logits is None
        return LatentBlock(rows, first, scoring, 0)


class LatentBlock(TritonBlock):
    """`PrefillBlock` of rows that attend to latents."""

    def __init__(self, rows: Tensor, first: int, scoring: Scoring, window: int) -> None:
        super().__init__(rows, first, scoring, window)
        self._tiling = LatentTiling(rows.shape[2] // 2, scoring.rope.cos.shape[1] // 2)
        self._mean.zero_()

    def _launch(self, tile: Tensor, own_first: int, begun: int) -> None:
        (num_rows, heads, _), (_, pages, _, page, half), tiling = self._rows.shape, tile.shape, self._tiling
        assert tile.stride(4) == 1
        assert half == tiling.half
        assert page % tiling.step == 0
        launch(
            attend_latents,
            (-(-num_rows // tiling.rows), heads),
            (
                self._rows, tile, *self._state, self._mean, self._rows.stride(0), self._rows.stride(1),
                tile.stride(0), tile.stride(1), tile.stride(3), num_rows, own_first, pages * page, begun,
                int(self._is_done), self._scale,
            ),
            PAGE=page, HALF=half, PLAIN=tiling.plain, PLAIN_PADDED=tiling.padded,
            TURNED_PADDED=tiling.padded_turned, SLICE=tiling.slice, ROWS=tiling.rows, STEP=tiling.step,
            WIDEN=not tile.is_cuda,
            num_warps=tiling.warps, num_stages=tiling.stages,
        )  # fmt: skip
