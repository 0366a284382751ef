"""Packed numbers on a GPU: pages and weights are unpacked where they came, chunks read from packed homes. See
`offload.kernels.packed`."""

from __future__ import annotations

import torch
from torch import Tensor

from offload.kernels.gpu import attention, packed_programs
from offload.kernels.gpu.fetch import NO_TOKENS_LEFT_OUT
from offload.kernels.packing import Packing
from offload.plan.sizing import PACKED_TOKENS

_WARP_BYTES = 512  # of a half's signs and mantissas: one 16-byte load of each thread


def unpack_pages(tile: Tensor, slot: Tensor, flags: Tensor, starts: Tensor, packing: Packing) -> None:
    """See `offload.kernels.packed.unpack_tile`: one launch."""
    assert starts.stride(1) == 1
    attention.launch(
        packed_programs.unpack_pages,
        (packing.num_groups, len(flags), 2),
        (slot.view(torch.uint8), tile.view(torch.int16), flags, starts, starts.stride(0), tile.shape[1]),
        **_constants(packing),
    )


def unpack_numbers(content: Tensor, starts: Tensor, out: Tensor, packing: Packing) -> None:
    """See `offload.kernels.packed.unpack_numbers`: one launch."""
    attention.launch(
        packed_programs.unpack_blocks,
        (packing.num_groups, len(starts) - 1),
        (content, starts, out.view(torch.int16)),
        **_constants(packing),
    )


class PackedChunkCopy:
    """`ChunkCopy` from pages of which some are packed. chunk: a multiple of PACKED_TOKENS."""

    def __init__(self, packing: Packing, *, chunk: int, page: int) -> None:
        self._packing, self._chunk, self._page = packing, chunk, page

    def run(
        self,
        blocks: Tensor,
        flags: Tensor,
        wanted: Tensor,
        held: Tensor,
        *,
        slot: int = 0,
        tokens: range = NO_TOKENS_LEFT_OUT,
    ) -> None:
        """See `ChunkCopy.run`. blocks: int64 [L, 2, pages of the sequence], the addresses of each page's keys and
        values as the GPU reads them, multiples of 16. flags: uint8 [L, pages], how each lies: no chunk of a residual
        is wanted."""
        assert blocks.is_contiguous()
        assert flags.is_contiguous()
        num_layers, _, num_heads, num_rows, dim = held.shape
        attention.launch(
            packed_programs.copy_packed_chunks,
            (2 * wanted.shape[-1], num_heads, num_layers),
            (
                blocks, flags, wanted, held.view(torch.int16), flags.shape[1],
                wanted.shape[-1] if wanted.dim() == 3 else 0, num_rows, slot, tokens.start, tokens.stop,
            ),
            GROUPS=self._chunk // PACKED_TOKENS,
            PER_PAGE=self._page // self._chunk,
            DIM=dim,
            **_constants(self._packing),
        )  # fmt: skip


def _constants(packing: Packing) -> dict[str, int]:
    half = packing.group // 2
    return {
        "NUMBERS": packing.numbers,
        "HEADS": packing.heads,
        "ESCAPES": packing.escapes,
        "HALF": half,
        "HALF_PADDED": 1 << (half - 1).bit_length(),
        "num_warps": warps(packing),
    }


def warps(packing: Packing) -> int:
    """Of a program that takes a group."""
    return min(max(packing.group // 2 // _WARP_BYTES, 1), 4)
