"""Rows of a checkpoint's tensors as they lie in its files, for those who read them without mapping them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from offload.formats.encodings import ENCODINGS
from offload.transfer.direct_file import FileState
from offload.weights.entry import STORED_DTYPES, Entry, Made
from offload.weights.gguf_file import MappedFile


@dataclass(frozen=True)
class FileRows:
    """Rows that follow each other in the file `path`: `count` rows of `row_bytes` bytes from byte `start` on. state:
    of the file as it was opened. made: of some of these rows, uint8 [n, row_bytes], and their numbers from the first
    one on, int64 [n], what the checkpoint's readers copy: numbers, or blocks of a matrix, [n, columns], or a vector's
    numbers, [n]."""

    path: Path
    state: FileState
    start: int
    count: int
    row_bytes: int
    made: Made

    @property
    def nbytes(self) -> int:
        return self.count * self.row_bytes


def rows_in_file(entry: Entry, num_rows: int, rows: range, columns: range | None) -> FileRows | None:
    """The place of rows of a tensor of `num_rows` rows in its file; None for rows that do not follow each other, or
    that are made of several tensors or in another order. columns: those that are wanted of each, in whole blocks."""
    if entry.rows is not None or entry.is_gathered or rows.step != 1:
        return None
    return _placed(entry, num_rows, rows, partial(_made, entry, columns))


def table_in_file(entry: Entry, num_rows: int) -> FileRows | None:
    """The place of all rows of a table, of which single ones are read; also where they are codes with scales that are
    elsewhere. None where no single row can be read."""
    if entry.codes is None:
        return rows_in_file(entry, num_rows, range(num_rows), None)
    return _placed(entry.codes.entry, num_rows, range(num_rows), entry.codes.maker())


def _placed(entry: Entry, num_rows: int, rows: range, made: Made) -> FileRows | None:
    if isinstance(entry.file, MappedFile):
        start, nbytes = entry.file.extent(entry.stored_name)
    elif isinstance(entry.file, safe_open):
        start, nbytes = extents(entry.path, entry.state)[entry.stored_name]
    else:
        return None
    row_bytes = nbytes // num_rows
    return FileRows(entry.path, entry.state, start + rows.start * row_bytes, len(rows), row_bytes, made)


def columns_of_blocks(blocks: Tensor, encoding: str, columns: range | None) -> Tensor:
    """Some columns of rows in blocks, uint8 [n, bytes], whole blocks of them; each row's tail stays behind them."""
    if columns is None:
        return blocks
    kind = ENCODINGS[encoding]
    start, stop = (kind.row_bytes(column) - kind.tail for column in (columns.start, columns.stop))
    some = blocks[:, start:stop]
    return torch.cat([some, blocks[:, blocks.shape[1] - kind.tail :]], 1) if kind.tail else some


def _made(entry: Entry, columns: range | None, rows: Tensor, numbers: Tensor) -> Tensor:
    if entry.unpack is None and entry.dtype in ENCODINGS:
        return columns_of_blocks(rows, entry.dtype, columns)
    if entry.unpack is not None:
        found = entry.unpack(rows)
    else:
        dtype = STORED_DTYPES[entry.dtype]
        aligned = rows.storage_offset() % dtype.itemsize == 0
        found = (rows if aligned else rows.clone()).view(dtype)
    if found.shape[1] == 1 and columns is None:
        return found[:, 0]
    return found if columns is None else found[:, columns.start : columns.stop]


@lru_cache(maxsize=1 << 10)
def extents(path: Path, state: FileState) -> Mapping[str, tuple[int, int]]:
    """(first byte, number of bytes) of each tensor of a file of safetensors, which the library has checked."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    begins = 8 + size
    return {
        name: (begins + info["data_offsets"][0], info["data_offsets"][1] - info["data_offsets"][0])
        for name, info in header.items()
        if name != "__metadata__"
    }
