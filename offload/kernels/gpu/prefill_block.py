"""A block of a prefill's rows that attends to tiles by a Triton kernel, one launch a tile."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from offload.kernels.rope import Scoring

PAGE_STEP = 64  # a page's tokens are a multiple of this


class TritonBlock(ABC):
    """`PrefillBlock` on a GPU. Memory: the result and, with several tiles, the running result in fp32."""

    def __init__(self, rows: Tensor, first: int, scoring: Scoring, window: int) -> None:
        assert rows.stride(2) == 1
        self._rows, self._first, self._window = rows, first, window
        self._scale, self._cap = scoring.scale or rows.shape[-1] ** -0.5, scoring.cap or 0.0
        self._mean = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
        self._sinks = scoring.sink_logits
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

    @abstractmethod
    def _launch(self, tile: Tensor, own_first: int, begun: int) -> None:
        """Attend to a tile, in which the first row's own token is at place `own_first`. begun: 0 for the first tile."""
