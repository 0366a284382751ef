"""Attention of a prefill's rows over a tile by flash-attn, the extra `flash`, where it is installed.

Its paged cache is [blocks, page, H_kv, D] with any strides and contiguous rows of D, so a tile can be passed directly.
A block table numbers the pages of one tensor, and each tile is its own tensor, so a call takes one tile, not all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from offload.kernels.cpu import OFF, VARIABLE, wanted
from offload.kernels.rope import Scoring
from offload.machine import installed_version

PAGE_STEP = 256  # a page's tokens are a multiple of this
WIDEST_HEAD = 256
_OLDEST = (8, 0)  # least compute capability


@dataclass(frozen=True)
class Flash:
    """The availability of flash-attn: its version, or the reason why it is not used. avoidable: installing it would
    help."""

    version: str = ""
    reason: str = ""
    avoidable: bool = False
    call: Callable[..., Any] | None = None  # flash_attn_with_kvcache

    @property
    def usable(self) -> bool:
        return self.call is not None


@cache
def flash(device: torch.device) -> Flash:
    """The flash-attn that this process can use on `device`; imports the package. Raises UsageError if TRIFORCE_KERNELS
    is neither on nor off."""
    if not wanted(VARIABLE):
        return Flash(reason=OFF)
    if device.type != "cuda":
        return Flash(reason=f"flash-attn is for CUDA devices, not for {device.type}")
    if torch.version.cuda is None:
        return Flash(reason="torch was built without CUDA")
    if torch.cuda.get_device_capability(device) < _OLDEST:
        return Flash(reason="flash-attn needs a GPU of compute capability 8.0 or later")
    if (version := installed_version("flash_attn")) is None:
        return Flash(reason="flash-attn is not installed; pip install 'triforce[flash]'", avoidable=True)
    try:
        from flash_attn import flash_attn_with_kvcache
    except (ImportError, OSError, RuntimeError) as error:
        said = str(error).strip().partition("\n")[0]
        return Flash(reason=f"flash-attn {version} cannot be loaded ({said}); install it anew", avoidable=True)
    return Flash(version, call=flash_attn_with_kvcache)


@dataclass(frozen=True)
class _Piece:
    """Rows `start` to `stop` of a block, and the first `tokens` tokens of the tile. causal: the last row attends to all
    of them and each row before it to one token less; otherwise every row attends to all."""

    start: int
    stop: int
    tokens: int
    causal: bool


def _pieces(first: int, count: int, base: int, tokens: int) -> Iterator[_Piece]:
    """The pieces of rows at positions `first` to first + count over the `tokens` tokens from position `base` on. Rows
    that attend to none of them are in no piece."""
    start = min(max(base - first, 0), count)
    stop = min(max(base + tokens - first, start), count) if first + 1 < base + tokens else start
    if start < stop:
        yield _Piece(start, stop, first + stop - base, True)
    if stop < count:
        yield _Piece(stop, count, tokens, False)


class FlashTiles:
    """Attention over tiles [2, P, H_kv, S, D] of 16 bits, S a multiple of PAGE_STEP, D of 8, at most WIDEST_HEAD."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call
        self._numbers = torch.empty(0, dtype=torch.int32)

    def block(self, rows: Tensor, first: int, scoring: Scoring, window: int | None = None) -> FlashBlock:
        """See `PrefillAttention`; without a window."""
        assert window is None
        return FlashBlock(self, rows, first, scoring)

    def numbers(self, most: int, device: torch.device) -> Tensor:
        """The numbers 0, 1, ... `most`, perhaps more, int32. Lengths and page tables are views of it, not copies."""
        if len(self._numbers) <= most:
            self._numbers = torch.arange(most + 1, dtype=torch.int32, device=device)
        return self._numbers


class FlashBlock:
    """A block of rows that attend to tiles, which are given in order. Each tile's result is kept in 16 bits until the
    end."""

    def __init__(self, tiles: FlashTiles, rows: Tensor, first: int, scoring: Scoring) -> None:
        self._tiles, self._rows, self._first = tiles, rows, first
        self._scale, self._cap = scoring.scale or rows.shape[-1] ** -0.5, scoring.cap or 0.0
        self._sinks = scoring.sink_logits
        self._outs: list[Tensor] = []  # [T, H, D] of each tile
        self._sums: list[Tensor] = []  # [H, T] fp32: log-sum-exp of each

    def attend(self, tile: Tensor, base: int) -> None:
        """Attend to the tile whose first token is at position `base`; a row attends to tokens up to its own."""
        count, heads = self._rows.shape[:2]
        pieces = list(_pieces(self._first, count, base, tile.shape[1] * tile.shape[3]))
        parts = [self._attend(tile, piece) for piece in pieces]
        if [(piece.start, piece.stop) for piece in pieces] == [(0, count)]:
            [(out, lse)] = parts
        else:
            out = torch.zeros_like(self._rows)
            lse = torch.full((heads, count), -torch.inf, device=out.device)
            for piece, part in zip(pieces, parts, strict=True):
                out[piece.start : piece.stop], lse[:, piece.start : piece.stop] = part
        if pieces:
            self._outs.append(out)
            self._sums.append(lse)

    def attended(self) -> Tensor:
        """The attention's output [T, H * D] fp32, over all tiles."""
        sums = every = torch.stack(self._sums)
        if self._sinks is not None:
            every = torch.cat([sums, self._sinks[None, :, None].expand_as(sums[:1])])
        shares = (sums - every.logsumexp(0)).exp().transpose(1, 2)[..., None]  # [tiles, T, H, 1]
        total = self._outs[0] * shares[0]
        for out, share in zip(self._outs[1:], shares[1:], strict=True):
            total.addcmul_(out, share)
        return total.flatten(1)

    def _attend(self, tile: Tensor, piece: _Piece) -> tuple[Tensor, Tensor]:
        """(out [n, H, D] of 16 bits, lse [H, n] fp32) of the piece's rows."""
        rows = self._rows[piece.start : piece.stop]
        numbers = self._tiles.numbers(tile.shape[1] * tile.shape[3], tile.device)
        out, lse = self._tiles.call(
            rows[None],
            tile[0].transpose(1, 2),
            tile[1].transpose(1, 2),
            cache_seqlens=numbers[piece.tokens : piece.tokens + 1],
            block_table=numbers[None, : -(-piece.tokens // tile.shape[3])],
            softmax_scale=self._scale,
            softcap=self._cap,
            causal=piece.causal,
            num_splits=1,  # one order of sums on every GPU
            return_softmax_lse=True,
        )
        return out[0], lse[0]
