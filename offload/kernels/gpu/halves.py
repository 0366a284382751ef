"""Attention of a prefill's rows to heads in halves over tiles, by a Triton kernel, one launch a tile: to latents
(`Scoring.joined`), and to heads of more numbers than a program's registers have room for."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from offload.kernels.gpu.halves_programs import attend_halves
from offload.kernels.gpu.prefill_block import TritonBlock
from offload.kernels.gpu.tiling import WIDEST_WHOLE
from offload.kernels.rope import Scoring
from offload.native.launch import launch


@dataclass(frozen=True)
class HalvesTiling:
    """The kernel's tiling for heads of `parts` * `part` numbers of 16 bits, within a program's registers and 99 KiB of
    shared memory. Of each part the first `turned` numbers are no values. places, widths: of both halves of the values
    in an output row. rows: of a program; step: tokens at a time."""

    parts: int
    part: int
    turned: int
    places: tuple[int, int]
    widths: tuple[int, int]
    warps: int = 8
    stages: int = 2
    rows: int = 64
    step: int = 32

    @classmethod
    def of_latents(cls, half: int, turned: int) -> HalvesTiling:
        """The tiling of latents with halves of `half` numbers, of which the first `turned` are rotated."""
        return cls(2, half, turned, (turned, half + turned), (half - turned,) * 2)

    @classmethod
    def of_heads(cls, head_dim: int) -> HalvesTiling:
        """The tiling of heads of 257 to 512 numbers, whose second halves may have fewer than the first."""
        return cls(1, head_dim, 0, (0, WIDEST_WHOLE), (WIDEST_WHOLE, head_dim - WIDEST_WHOLE))

    @property
    def constants(self) -> dict[str, int]:
        plain = self.part - self.turned
        return {
            "PARTS": self.parts, "PART": self.part, "TURNED": self.turned,
            "TURNED_PADDED": max(16, 1 << (self.turned - 1).bit_length()),
            "SLICE": next(size for size in (64, 32, 16) if plain % size == 0),
            "PLACE": self.places[0], "PLACE_2": self.places[1], "WIDTH": self.widths[0], "WIDTH_2": self.widths[1],
            "WIDTH_PADDED": 1 << (max(self.widths) - 1).bit_length(), "ROWS": self.rows, "STEP": self.step,
        }  # fmt: skip


class HalvesBlock(TritonBlock):
    """`PrefillBlock` of rows that attend to heads in halves."""

    def __init__(self, rows: Tensor, first: int, scoring: Scoring, window: int, tiling: HalvesTiling) -> None:
        super().__init__(rows, first, scoring, window)
        assert rows.shape[2] == tiling.parts * tiling.part
        self._tiling = tiling
        if tiling.turned:
            self._mean.zero_()

    def _launch(self, tile: Tensor, own_first: int, begun: int) -> None:
        (num_rows, heads, _), (_, pages, kv_heads, page, part) = self._rows.shape, tile.shape
        tiling, sinks = self._tiling, self._sinks
        assert tile.stride(4) == 1
        assert part == tiling.part
        assert page % tiling.step == 0
        values, second = (tile[0], tile.stride(0)) if tiling.parts == 2 else (tile[1], WIDEST_WHOLE)
        launch(
            attend_halves,
            (-(-num_rows // tiling.rows), heads),
            (
                self._rows, tile[0], values[..., tiling.turned :], *self._state, self._mean,
                self._mean if sinks is None else sinks, self._rows.stride(0), self._rows.stride(1), tile.stride(0),
                second, tile.stride(1), tile.stride(2), tile.stride(3), num_rows, own_first, pages * page, begun,
                int(self._is_done), self._scale,
            ),
            CAP=self._cap, WINDOW=self._window, SINKS=sinks is not None, PAGE=page, GROUP=heads // kv_heads,
            WIDEN=not tile.is_cuda, num_warps=tiling.warps, num_stages=tiling.stages, **tiling.constants,
        )  # fmt: skip


class LatentTiles:
    """`PrefillAttention` over tiles [2, P, 1, S, D / 2] of latents, with S a multiple of PAGE_STEP, D of 32, a rank of
    32 up to 512, any strides, and contiguous halves. Of the output, numbers where queries are rotated are 0: they are
    no values."""

    def block(self, rows: Tensor, first: int, scoring: Scoring, window: int | None = None) -> HalvesBlock:
        assert scoring.joined
        tiling = HalvesTiling.of_latents(rows.shape[2] // 2, scoring.rope.cos.shape[1] // 2)
        return HalvesBlock(rows, first, scoring, window or 0, tiling)
