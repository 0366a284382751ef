"""The kernel that copies chunks, on paper: by torch's operators on the tensors' values. No tests in here."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from offload.cache import low_bits, retrieval
from offload.cache.fetch import CardFetch
from offload.cache.tiles import TileStore
from offload.kernels.card.fetch import ChunkCopy
from offload.kernels.card.packed import PackedChunkCopy
from offload.kernels.packed import unpack_with_torch
from paper.card import Card
from paper.tensors import PaperTensor, launch

Homes = list[list[Tensor]]


def chunks_by_kernel(card: Card, patch: pytest.MonkeyPatch) -> None:
    """Copies of the full cache that are made from now on are filled by the card itself. Homes stand for addresses."""

    def run(
        copy: ChunkCopy, homes: Homes, wanted: Tensor, held: Tensor, *, slot: int = 0, tokens: range = range(2**31)
    ) -> None:
        _launch(card, "copy_chunks", homes, wanted, held)
        with _disable_current_modes():  # it is not the host that reads
            _copy_chunks(copy, homes, _raw(wanted), _raw(held), slot, tokens)

    def run_packed(
        copy: PackedChunkCopy, homes: Homes, wanted: Tensor, held: Tensor, *, slot: int = 0,
        tokens: range = range(2**31),
    ) -> None:  # fmt: skip
        flags = copy._flags()
        _launch(card, "copy_packed_chunks", homes, wanted, held, flags)
        with _disable_current_modes():
            _copy_chunks(copy, _unpacked(copy, homes, _raw(flags)), _raw(wanted), _raw(held), slot, tokens)

    patch.setattr(TileStore, "addresses", lambda store: store._homes)
    patch.setattr(ChunkCopy, "run", run)
    patch.setattr(PackedChunkCopy, "run", run_packed)
    for copies in (retrieval, low_bits):
        patch.setattr(copies, "make_fetch", lambda full, chunk, kernels, num_bytes: CardFetch(full, chunk))


def _launch(card: Card, name: str, homes: Homes, *others: Tensor) -> None:
    """It may read any home, of the card or of the host. others: the second is written to."""
    tiles = [home for layer in homes for home in layer]
    there = [home for home in tiles if isinstance(home, PaperTensor)]
    tensors = [*(cast(PaperTensor, each) for each in others), *there]
    actor = launch(card, name, tensors, {id(others[1])})
    for home in tiles:
        if not isinstance(home, PaperTensor):
            assert card.is_pinned(home)
            card.access_host(home, actor, write=False, what=name)


def _unpacked(copy: PackedChunkCopy, homes: Homes, flags: Tensor) -> Homes:
    """The tiles as they were before they were packed; those that are remainders beside codes are not read."""
    found = [[_raw(home).clone() for home in layer] for layer in homes]
    for layer, half, number in (flags == 1).nonzero().tolist():
        index, page = divmod(number, copy._tile // copy._page)
        block = found[layer][index][half, page]
        block.copy_(unpack_with_torch(block.flatten().view(torch.uint8), copy._packing).view_as(block))
    return found


def _copy_chunks(
    copy: ChunkCopy | PackedChunkCopy, homes: Homes, wanted: Tensor, held: Tensor, slot: int, tokens: range
) -> None:
    num_layers, _, num_heads, _, _ = held.shape
    chunk = copy._chunk
    wanted = wanted.expand(num_layers, num_heads, -1)
    for layer, head, place in torch.cartesian_prod(*map(torch.arange, wanted.shape)).tolist():
        number = int(wanted[layer, head, place])
        for row in range(chunk):
            token = number * chunk + row
            if number >= 0 and token in tokens:
                index, within = divmod(token, copy._tile)
                page, offset = divmod(within, copy._page)
                at = (slot + place) * chunk + row
                held[layer, :, head, at] = _raw(homes[layer][index])[:, page, head, offset]


def _raw(tensor: Tensor) -> Tensor:
    return tensor.raw if isinstance(tensor, PaperTensor) else tensor
