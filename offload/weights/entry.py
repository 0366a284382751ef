"""A checkpoint's entry for a tensor: the file that has it, and how its numbers lie there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor


class TensorFile(Protocol):
    """An open file, such as safetensors' `safe_open`."""

    def get_tensor(self, name: str) -> Tensor:
        """The tensor in memory that is mapped, if it can be; of one that is stored in blocks its rows, uint8 [outputs,
        bytes]."""
        ...


@dataclass(frozen=True)
class Entry:
    """One tensor of a file. dtype: safetensors' code of numbers, such as BF16, or the name of the encoding of a matrix
    that is stored in blocks (`formats.layout.encoding`). shape: of its numbers. unpack: of rows as the file has them,
    uint8 [n, bytes] -> fp32 [n, inputs], of a matrix that is in neither."""

    file: TensorFile
    path: Path
    stored_name: str
    shape: tuple[int, ...]
    dtype: str
    unpack: Callable[[Tensor], Tensor] | None = None
