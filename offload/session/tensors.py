"""Files of whole tensors, as safetensors: written from memory and read into it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor

from offload.progress import OnBytes
from offload.session.folder import Folder
from offload.session.names import damaged
from offload.session.page import OTHER_CHECKSUM, check_size, pieces, read_file, write_file


class TensorsFormat(Protocol):
    """The format of a file, which follows from shapes and dtypes."""

    @property
    def header(self) -> bytes: ...

    @property
    def block_bytes(self) -> list[int]:
        """The bytes of each tensor."""
        ...


def write_tensors(
    folder: Folder,
    name: str,
    form: TensorsFormat,
    tensors: Sequence[Tensor],
    on_bytes: OnBytes,
    *,
    lasting: bool = True,
) -> str:
    """Write a new file of `tensors`, contiguous and on the host, and return its checksum. OSError. lasting: see
    `write_page`."""
    contents = [memoryview(form.header), *_parts(form, tensors)]
    return write_file(folder, name, contents, on_bytes, lasting=lasting)


def check_tensors(folder: Folder, name: str, form: TensorsFormat, what: str) -> None:
    """Raises SessionError for a file that has not the bytes of its format, before memory is taken for it."""
    with _file(folder, name) as fd:
        check_size(fd, len(form.header) + sum(form.block_bytes), what)


def read_tensors(
    folder: Folder,
    name: str,
    checksum: str,
    form: TensorsFormat,
    tensors: Sequence[Tensor],
    on_bytes: OnBytes,
    *,
    what: str,
) -> None:
    """Fill `tensors` from a file. Raises SessionError if it is damaged, or has a number that is not finite: it would be
    in all that follows. what: the file holds."""
    path = folder.path / name
    with _file(folder, name) as fd:
        if read_file(fd, form.header, [*_parts(form, tensors)], on_bytes, what) != checksum:
            raise damaged(path, OTHER_CHECKSUM)
    if not all(_is_finite(each) for each in tensors):
        raise damaged(path, "some of its numbers are not finite")


@contextmanager
def _file(folder: Folder, name: str) -> Iterator[int]:
    """A file's descriptor. What is wrong with the file is raised as SessionError."""
    path = folder.path / name
    try:
        fd = folder.open(name)
        try:
            yield fd
        finally:
            os.close(fd)
    except OSError as error:
        raise damaged(path, f"it cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise damaged(path, str(error)) from error


def _parts(form: TensorsFormat, tensors: Sequence[Tensor]) -> Iterator[memoryview]:
    """The bytes of the tensors, in order, without copying."""
    for tensor, size in zip(tensors, form.block_bytes, strict=True):
        yield from pieces(tensor, size)


def _is_finite(tensor: Tensor) -> bool:
    return not tensor.numel() or all(bool(end.isfinite()) for end in tensor.aminmax())
