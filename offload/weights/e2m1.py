"""Blocks of 4-bit floats (e2m1), as GGUF has them, from the codes and scales of other files.

In a folder's byte are neighbours, an even number in the low half and the next one in the high half. In a block a group
of numbers has its first half in the low halves of bytes and its second half in the high ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

from offload.formats.encodings import Encoding

_PIECE = 1 << 16  # blocks that are regrouped at once


def rows_in_blocks(codes: Tensor, scales: Tensor, form: Encoding, tail: Tensor | None = None) -> Tensor:
    """Rows of blocks of `form`, uint8 [n, bytes]. codes: uint8 [n, bytes], neighbours. scales: uint8 [n, groups], of
    groups in a block or of several of them. tail: of each row, uint8 [bytes], the same for all."""
    out = torch.empty(len(codes), form.row_bytes(2 * codes.shape[1]), dtype=torch.uint8)
    blocks = out[:, : out.shape[1] - form.tail].unflatten(1, (-1, form.nbytes))
    group, per_block = form.codes.run, form.numbers // (2 * form.codes.run)
    scales = scales.repeat_interleave(blocks.shape[1] * per_block // scales.shape[1], 1)
    step = max(1, _PIECE // blocks.shape[1])
    for piece, own, steps in zip(blocks.split(step), codes.split(step), scales.split(step), strict=True):
        first, second = own.unflatten(1, (-1, per_block, 2, group // 2)).unbind(3)
        halves = torch.stack([first & 15 | second << 4, first >> 4 | second & 0xF0], -1)
        piece[..., form.codes.at :] = halves.flatten(2)
        piece[..., form.scale_at : form.scale_at + per_block] = steps.unflatten(1, (-1, per_block))
    if tail is not None:
        out[:, out.shape[1] - form.tail :] = tail
    return out
