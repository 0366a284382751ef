"""Write a page's file from the cache's host memory, and read it back. A page is used only if its checksum is right."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
import xxhash
from torch import Tensor

from offload.cache.tiles import TileShape
from offload.session.folder import Folder, read_all, write_all
from offload.session.identity import PageFormat
from offload.session.manifest import Page
from offload.session.names import damaged

OnBytes = Callable[[int], None]
PIECE_BYTES = 1 << 20  # read or written and hashed at a time
_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


class PagedRows(Protocol):
    """Keys and values of one sequence, page by page, which a session saves and fills. `FullCache` is one."""

    @property
    def num_layers(self) -> int: ...

    @property
    def shape(self) -> TileShape: ...

    @property
    def length(self) -> int:
        """Number of cached tokens."""
        ...

    def reserve(self, num_tokens: int) -> None:
        """Allocate pages for `num_tokens` tokens."""
        ...

    def wait_home(self) -> None:
        """Wait until the pages hold all rows and no copy to them is in flight."""
        ...

    def page_of_all(self, number: int) -> list[Tensor]:
        """Page `number` of every layer, [2, H_kv, S, D] each, first layer first, on the host or the device, each half
        contiguous. To be read, and not after the next page was asked for."""
        ...

    def page_to_fill(self, number: int) -> list[Tensor]:
        """The same, to be written. `filled` has to follow."""
        ...

    def filled(self, number: int, layers: Sequence[Tensor]) -> None:
        """Every row of `layers`, which `page_to_fill` gave, was written."""
        ...

    def restored(self, length: int) -> None:
        """Set the cached tokens to the first `length`, whose pages the caller has filled."""
        ...


def format_of(rows: PagedRows) -> PageFormat:
    shape = rows.shape
    return PageFormat(rows.num_layers, shape.num_kv_heads, shape.head_dim, shape.page_tokens, _DTYPES[shape.dtype])


def write_page(
    folder: Folder, name: str, page_format: PageFormat, layers: Sequence[Tensor], used: int, on_bytes: OnBytes
) -> Page:
    """Write a new page file, synced to the disk when this returns. OSError.

    used: rows in use; the others are written as zeros, so no dropped token is kept and equal sequences give equal
    files. Only a partly used page, or a page on a GPU, is copied first.
    """
    digest = xxhash.xxh3_128()
    fd = folder.create(name)
    try:
        offset = 0
        for content in _file_pieces(page_format, layers, used):
            digest.update(content)
            write_all(fd, content, offset)
            offset += len(content)
            on_bytes(len(content))
        os.fsync(fd)
    finally:
        os.close(fd)
    return Page(name, digest.hexdigest())


def read_page(folder: Folder, page: Page, page_format: PageFormat, layers: Sequence[Tensor], on_bytes: OnBytes) -> None:
    """Fill `layers` from a page's file. Raises SessionError and sets `layers` to zero if the file is damaged: attention
    multiplies hidden rows by zero, so they must be finite."""
    path = folder.path / page.file
    try:
        fd = folder.open(page.file)
        try:
            if _fill(fd, page_format, layers, on_bytes) != page.checksum:
                raise damaged(path, "its checksum differs from the manifest's: it was changed")
        finally:
            os.close(fd)
    except BaseException as error:
        for layer in layers:
            layer.zero_()
        if isinstance(error, OSError):
            raise damaged(path, f"it cannot be read ({error.strerror})") from error
        if isinstance(error, ValueError):
            raise damaged(path, str(error)) from error
        raise


def _fill(fd: int, page_format: PageFormat, layers: Sequence[Tensor], on_bytes: OnBytes) -> str:
    """Read the file into `layers` and return its checksum. Nothing in it is parsed: size and header must be exactly the
    expected ones. Each piece is hashed while it is still in the processor's caches."""
    num_bytes = os.fstat(fd).st_size
    if num_bytes != page_format.nbytes:
        raise ValueError(f"it has {num_bytes} bytes, a page has {page_format.nbytes}: it was cut off or changed")
    header = bytearray(len(page_format.header))
    read_all(fd, memoryview(header), 0)
    if header != page_format.header:
        raise ValueError("its header is not that of a page of this session")
    digest, offset = xxhash.xxh3_128(header), len(header)
    for layer in layers:
        home = layer if _on_host(layer) else torch.empty_like(layer, device="cpu")
        for content in _pieces(home):
            read_all(fd, content, offset)
            digest.update(content)
            offset += len(content)
            on_bytes(len(content))
        if home is not layer:
            layer.copy_(home)
    return digest.hexdigest()


def _on_host(layer: Tensor) -> bool:
    return layer.device.type == "cpu"


def _file_pieces(page_format: PageFormat, layers: Sequence[Tensor], used: int) -> Iterator[memoryview]:
    """The bytes of a page's file, in order."""
    yield memoryview(page_format.header)
    for layer in layers:
        home = layer.cpu()
        if used < page_format.page_tokens:
            home = home.clone()
            home[:, :, used:] = 0
        yield from _pieces(home)


def _pieces(layer: Tensor) -> Iterator[memoryview]:
    """The bytes of a host tensor [2, H_kv, S, D], keys first, PIECE_BYTES at a time, without copying."""
    for half in layer:
        content = memoryview(half.view(-1).view(torch.uint8).numpy())
        for start in range(0, len(content), PIECE_BYTES):
            yield content[start : start + PIECE_BYTES]
