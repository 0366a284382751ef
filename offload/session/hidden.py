"""Files of hidden rows, which a next-token head reads: a cache's are written, and read back into it."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from offload.progress import OnBytes
from offload.session.folder import Folder
from offload.session.layout import HiddenFormat
from offload.session.manifest import NO_CHECKSUM, Hidden, hidden_file
from offload.session.page import DTYPE_NAMES
from offload.session.tensors import check_tensors, read_tensors, write_tensors

_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


class HiddenRows(Protocol):
    """The cache interface of the model's last hidden rows, of a sequence's first tokens and of its last ones.
    `LastHidden` implements it."""

    length: int

    @property
    def shape(self) -> tuple[int, torch.dtype]:
        """(numbers of a row, their dtype)."""
        ...

    @property
    def oldest(self) -> int:
        """The position of the first of the last rows."""
        ...

    @property
    def first_rows(self) -> Tensor:
        """Rows of the sequence's first tokens, [n, hidden]."""
        ...

    def read(self, start: int, stop: int) -> Tensor:
        """Rows at positions `start` to `stop`, [n, hidden]."""
        ...

    def fill(self, first_rows: Tensor, start: int, rows: Tensor) -> None:
        """Hold these rows of the sequence's first tokens, and of its last ones, at `start` and on."""
        ...

    def truncate(self, length: int) -> None:
        """Only the first `length` rows still belong to the sequence."""
        ...


def planned_hidden(
    hidden: HiddenRows | None, saved: Hidden | None, num_tokens: int, *, is_same: bool, tag: str
) -> Hidden | None:
    """The hidden rows of a save of `num_tokens` tokens; None if those of the last one are not there. is_same: the
    tokens' rows are those of `saved`, so its file stays if it has as many. Another has no checksum yet; `tag` is in its
    name."""
    if hidden is None or not num_tokens or hidden.length != num_tokens:
        return None
    counts = len(hidden.first_rows), min(hidden.oldest, num_tokens)
    if saved is not None and is_same and counts == (saved.num_first, saved.start):
        return saved
    return Hidden(*counts, hidden.shape[0], hidden_file(tag), NO_CHECKSUM)


def write_hidden(
    folder: Folder, name: str, form: HiddenFormat, rows: Tensor, on_bytes: OnBytes, *, lasting: bool = True
) -> str:
    """Write a new file of `rows` [n, hidden] and return its checksum. OSError. lasting: see `write_page`."""
    return write_tensors(folder, name, form, [rows.cpu().contiguous()], on_bytes, lasting=lasting)


def read_hidden(folder: Folder, name: str, checksum: str, form: HiddenFormat, on_bytes: OnBytes) -> Tensor:
    """The rows of a file, [n, hidden] in new memory. Raises SessionError if it is damaged."""
    check_tensors(folder, name, form, "file of hidden rows")  # a made-up manifest may name any number of rows
    rows = torch.empty(form.num_rows, form.size, dtype=_DTYPES[form.dtype])
    read_tensors(folder, name, checksum, form, [rows], on_bytes, what="file of hidden rows")
    return rows
