"""Copies of a table's rows by a GPU's kernel, which reads them from pinned memory of the host itself."""

from __future__ import annotations

import torch
from torch import Tensor

from offload.kernels.gpu import attention, row_programs

_WORDS = 1024  # of a program: of four bytes, two 16-byte loads of each of its threads
_WARPS = 4


def copy_rows(address: Tensor, tokens: Tensor, out: Tensor) -> None:
    """Row tokens[t] of the table at `address`, int64 [1] on the GPU, to row t of out [T, width], contiguous, whose
    rows are whole words of four bytes: one launch. tokens: int64 [T]."""
    words = out.view(torch.int32)
    attention.launch(
        row_programs.copy_rows,
        (len(tokens), -(-words.shape[1] // _WORDS)),
        (address, tokens, words, words.shape[1]),
        WORDS=_WORDS,
        ALIGNMENT=16 if words.shape[1] % 4 == 0 else 4,
        num_warps=_WARPS,
    )
