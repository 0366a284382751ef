"""Packing of a page's blocks for its file, and unpacking: of bf16 blocks that pack well, if there are kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from offload.formats.packed import check, pack, unpack, unpack_with_torch
from offload.kernels.cpu import CpuKernels, kernels
from offload.session.layout import PageFile, PageFormat


def packed_page(form: PageFormat, layers: Sequence[Tensor], used: int) -> tuple[PageFile, list[Tensor]] | None:
    """A copy of `layers`, [2, H_kv, S, D] each, with zeros after the first `used` tokens, packed by the CPU's kernels
    -> the description of the file, and its blocks as bytes on the host. None: the page has to be written unpacked,
    since no block can be packed here, or the file would not be smaller."""
    packing, found = form.packing, kernels()
    if packing is None or not isinstance(found, CpuKernels):
        return None
    page = torch.empty((form.num_layers, *form.shape), dtype=torch.bfloat16)
    for home, layer in zip(page, layers, strict=True):
        home[:, :, :used].copy_(layer[:, :, :used])
    page[:, :, :, used:] = 0
    blocks = page.view(form.num_blocks, packing.numbers)
    sizes = pack(blocks.data_ptr() + torch.arange(len(blocks)) * blocks.stride(0) * 2, packing, found)
    file = PageFile(form, "".join("01"[size > 0] for size in sizes.tolist()))
    if file.nbytes >= form.nbytes:
        return None
    return file, [block[:size] for block, size in zip(blocks.view(torch.uint8), file.block_bytes, strict=True)]


def unpack_page(file: PageFile, layers: Sequence[Tensor]) -> None:
    """Unpack the packed blocks of `file` in place in `layers`, [2, H_kv, S, D] each on the host. Raises ValueError if a
    block is not a valid packed block; files are not trusted."""
    packing, found = file.form.packing, kernels()
    if packing is None or not file.packed:
        return
    held = torch.zeros(packing.nbytes + packing.group, dtype=torch.uint8)  # as much as the kernel may read, see `check`
    halves = [half.view(-1) for layer in layers for half in layer]
    for half, is_packed in zip(halves, file.are_packed, strict=True):
        if is_packed:
            held[: packing.nbytes] = half.view(torch.uint8)[: packing.nbytes]
            check(held, packing)
            if isinstance(found, CpuKernels):
                unpack(torch.tensor([[held.data_ptr(), half.data_ptr(), 0, packing.num_groups, 1]]), packing, found)
            else:
                half.copy_(unpack_with_torch(held, packing))
