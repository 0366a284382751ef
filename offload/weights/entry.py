"""A checkpoint's entry for a tensor: its file, and the encoding of its numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from offload.transfer.direct_file import FileState

STORED_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class TensorFile(Protocol):
    """An open file, such as safetensors' `safe_open`."""

    def get_tensor(self, name: str) -> Tensor:
        """The tensor, in mapped memory if possible; a matrix in blocks as its rows, uint8 [outputs, bytes]."""
        ...


Made = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class RowCodes:
    """The codes of a matrix that is made of several tensors: their tensor, with a row for each of the matrix. maker:
    gives the function that makes rows of the matrix from their codes, uint8 [n, bytes], and their numbers, int64 [n].
    It holds the scales, also where the files are closed."""

    entry: Entry
    maker: Callable[[], Made]


@dataclass(frozen=True)
class Entry:
    """One tensor of a file. dtype: safetensors' dtype code, such as BF16, or the name of the encoding of a matrix in
    blocks (formats/encodings.py). shape: of its numbers. unpack: for a matrix in any other format, the function
    from the file's rows, uint8 [n, bytes], to fp32 [n, inputs]. rows: of a file that makes a matrix' blocks as it reads
    them, the function that makes those of some rows, uint8 [n, bytes], and no others. is_gathered: the matrix is made
    of several tensors. codes: of such a matrix, if single rows can be made. state: of the file as it was opened."""

    file: TensorFile
    path: Path
    state: FileState
    stored_name: str
    shape: tuple[int, ...]
    dtype: str
    unpack: Callable[[Tensor], Tensor] | None = None
    rows: Callable[[range], Tensor] | None = None
    is_gathered: bool = False
    codes: RowCodes | None = None
