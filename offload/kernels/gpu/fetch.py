"""Copies of chunks by a GPU's kernel, which reads their homes itself: device memory, and pinned memory of the host."""

from __future__ import annotations

import torch
from torch import Tensor

from offload.kernels.gpu import programs
from offload.kernels.gpu.attention import launch

_BLOCK_WORDS = 2048  # of four bytes: four 16-byte loads of each thread are under way together
_WARP_WORDS = 128  # by one 16-byte load of each thread
NO_TOKENS_LEFT_OUT = range(2**31 - 1)


class ChunkCopy:
    """From tiles [2, P, H_kv, S, D], of `page` tokens S and `tile` tokens P * S, in chunks of `chunk` tokens. All three
    divide the next."""

    def __init__(self, *, chunk: int, page: int, tile: int) -> None:
        self._chunk, self._page, self._tile = chunk, page, tile

    def run(
        self,
        homes: Tensor,
        wanted: Tensor,
        held: Tensor,
        *,
        slot: int = 0,
        tokens: range = NO_TOKENS_LEFT_OUT,
    ) -> None:
        """Copy chunks' keys and values into `held` [L, 2, H_kv, rows, D], contiguous, by one launch.

        homes: int64 [L, number of tiles], addresses of the tiles as the GPU reads them, multiples of 16. wanted: int64
        [L, H_kv, n] or, for all layers and heads, [n]: the chunk for each slot from `slot` on, negative for none.
        tokens: of the sequence; others of the chunks are left out.
        """
        held = held.view(torch.int32)
        num_layers, _, num_heads, num_rows, words = held.shape
        padded = 1 << (words - 1).bit_length()
        rows, num_wanted = rows_at_once(self._chunk, padded), wanted.shape[-1]
        launch(
            programs.copy_chunks,
            (2 * num_wanted, num_heads, num_layers),
            (
                homes, wanted, held, homes.shape[1], num_wanted if wanted.dim() == 3 else 0, num_rows, slot,
                tokens.start, tokens.stop,
            ),
            CHUNK=self._chunk,
            PER_PAGE=self._page // self._chunk,
            PER_TILE=self._tile // self._chunk,
            WORDS=words,
            WORDS_PADDED=padded,
            ROWS=rows,
            num_warps=warps(rows * padded),
        )  # fmt: skip


def rows_at_once(chunk: int, padded: int) -> int:
    """Tokens that a program copies at a time, a power of two. padded: words of a token, to a power of two."""
    return min(1 << (chunk - 1).bit_length(), max(_BLOCK_WORDS // padded, 1))


def warps(num_words: int) -> int:
    """Of a program that copies so many words at a time: no more than 16-byte loads keep busy."""
    return min(max(num_words // _WARP_WORDS, 1), 4)
