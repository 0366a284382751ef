"""Packed numbers on a card: pages and weights are unpacked where they came, chunks read from packed homes. See
`offload.kernels.packed`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from offload.kernels.card import attention, packed_programs
from offload.kernels.card.fetch import NO_TOKENS_LEFT_OUT
from offload.kernels.packing import Packing
from offload.plan.sizing import PACKED_TOKENS

_WARP_BYTES = 512  # of a half's signs and mantissas: one 16-byte load of each thread


def unpack_pages(tile: Tensor, slot: Tensor, flags: Tensor, num_pages: int, packing: Packing) -> None:
    """The first `num_pages` pages of `slot` in `tile`, both bf16 [2, P, H_kv, S, D] on the card, by one launch: a
    page's keys are a block, its values another, packed where flags, uint8 [2, P] on the card, are 1, as they are where
    these are 0, and else left alone: `kv_remainders` restores them."""
    assert flags.stride(1) == 1
    attention.launch(
        packed_programs.unpack_pages,
        (packing.num_groups, num_pages, 2),
        (slot.view(torch.uint8), tile.view(torch.int16), flags, flags.stride(0), tile.shape[1]),
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
    """`ChunkCopy` from homes of which some blocks are packed. chunk: a multiple of PACKED_TOKENS. flags: uint8 [L, 2,
    pages of the sequence] on the card, 1 where a block is."""

    def __init__(self, packing: Packing, flags: Callable[[], Tensor], *, chunk: int, page: int, tile: int) -> None:
        self._packing, self._flags = packing, flags
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
        """See `ChunkCopy.run`."""
        flags = self._flags()
        assert flags.is_contiguous()
        num_layers, _, num_heads, num_rows, dim = held.shape
        attention.launch(
            packed_programs.copy_packed_chunks,
            (2 * wanted.shape[-1], num_heads, num_layers),
            (
                homes, flags, wanted, held.view(torch.int16), homes.shape[1], flags.shape[2],
                wanted.shape[-1] if wanted.dim() == 3 else 0, num_rows, slot, tokens.start, tokens.stop,
            ),
            GROUPS=self._chunk // PACKED_TOKENS,
            PER_PAGE=self._page // self._chunk,
            PAGES=self._tile // self._page,
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
