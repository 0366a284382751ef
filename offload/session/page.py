"""Page files: written from the cache's memory and read back into it. A page is used only if its checksum is right."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import torch
import xxhash
from torch import Tensor

from offload.formats.packed import check, pack, unpack, unpack_with_torch
from offload.kernels.cpu import CpuKernels, kernels
from offload.pages.tiles import TileShape
from offload.progress import OnBytes
from offload.session.folder import Folder, read_all, write_all
from offload.session.layout import PageFile, PageFormat
from offload.session.manifest import Page
from offload.session.names import damaged

PIECE_BYTES = 1 << 20  # read or written and hashed at a time
OTHER_CHECKSUM = "its checksum differs from the manifest's: it was changed"
DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


class PagedRows(Protocol):
    """The cache interface that a session saves from and fills: keys and values of one sequence, page by page.
    `FullCache` and `WindowCache` implement it."""

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
        contiguous. Read-only, and valid until the next call."""
        ...

    def page_to_fill(self, number: int) -> list[Tensor]:
        """Page `number` of every layer as in `page_of_all`, for writing. A call of `filled` has to follow."""
        ...

    def filled(self, number: int, layers: Sequence[Tensor]) -> None:
        """Called after every row of `layers`, from `page_to_fill`, was written."""
        ...

    def restored(self, length: int) -> None:
        """Set the cache's length to `length` tokens, whose pages the caller has filled."""
        ...


class WindowRows(PagedRows, Protocol):
    """The cache interface of layers with a window, which keep only their last tokens. Pages before the first one
    present are not needed."""

    @property
    def first_page(self) -> int:
        """The first page present."""
        ...

    def first_kept(self, length: int) -> int:
        """The first page that has room if `length` tokens are cached."""
        ...

    def first_seen(self, length: int) -> int:
        """The first page that rows after `length` tokens see."""
        ...


def format_of(rows: PagedRows) -> PageFormat:
    shape = rows.shape
    return PageFormat(rows.num_layers, shape.num_kv_heads, shape.head_dim, shape.page_tokens, DTYPE_NAMES[shape.dtype])


def write_page(
    folder: Folder,
    name: str,
    page_format: PageFormat,
    layers: Sequence[Tensor],
    used: int,
    on_bytes: OnBytes,
    *,
    lasting: bool = True,
) -> Page:
    """Write a new page file, packed if it can be. OSError.

    used: rows in use; the others are written as zeros, so no dropped token is kept and equal sequences give equal
    files. Only a page that may be packed, or is partly used, or is on a GPU, is copied first. on_bytes: called with
    numbers of written bytes, and with the number of bytes saved by packing. lasting: it is synced to the disk when this
    returns.
    """
    file, blocks = packed_page(page_format, layers, used) or (PageFile(page_format), _blocks(layers, used))
    if file.packed:
        on_bytes(0, page_format.nbytes - file.nbytes)
    checksum = write_file(folder, name, _file_pieces(file, blocks), on_bytes, lasting=lasting)
    return Page(name, checksum, file.packed)


def write_file(
    folder: Folder, name: str, contents: Iterable[memoryview], on_bytes: OnBytes, *, lasting: bool = True
) -> str:
    """Write a new file of `contents`, one after the other, and return its checksum. OSError. See `write_page`."""
    digest = xxhash.xxh3_128()
    fd = folder.create(name)
    try:
        offset = 0
        for content in contents:
            digest.update(content)
            write_all(fd, content, offset)
            offset += len(content)
            on_bytes(len(content))
        if lasting:
            os.fsync(fd)
    finally:
        os.close(fd)
    return digest.hexdigest()


def read_page(folder: Folder, page: Page, page_format: PageFormat, layers: Sequence[Tensor], on_bytes: OnBytes) -> None:
    """Fill `layers` from a page's file. Raises SessionError and sets `layers` to zero if the file is damaged: attention
    multiplies hidden rows by zero, so they must be finite. on_bytes: called with numbers of bytes of the file.

    Blocks are read into `layers`, and unpacked in place once the checksum is right.
    """
    path, file = folder.path / page.file, PageFile(page_format, page.packed)
    homes = [layer if _on_host(layer) else torch.empty_like(layer, device="cpu") for layer in layers]
    try:
        fd = folder.open(page.file)
        try:
            halves = [half for home in homes for half in home]
            parts = [part for half, size in zip(halves, file.block_bytes, strict=True) for part in pieces(half, size)]
            if read_file(fd, file.header, parts, on_bytes) != page.checksum:
                raise damaged(path, OTHER_CHECKSUM)
        finally:
            os.close(fd)
        unpack_page(file, homes)
        for layer, home in zip(layers, homes, strict=True):
            if home is not layer:
                layer.copy_(home)
    except BaseException as error:
        for layer in layers:
            layer.zero_()
        if isinstance(error, OSError):
            raise damaged(path, f"it cannot be read ({error.strerror})") from error
        if isinstance(error, ValueError):
            raise damaged(path, str(error)) from error
        raise


def check_size(fd: int, expected: int, what: str) -> None:
    """Raises ValueError for a file of another number of bytes than `expected`. what: the file holds."""
    if (num_bytes := os.fstat(fd).st_size) != expected:
        raise ValueError(f"it has {num_bytes} bytes, this {what} has {expected}: it was cut off or changed")


def read_file(fd: int, header: bytes, parts: Sequence[memoryview], on_bytes: OnBytes, what: str = "page") -> str:
    """Fill `parts`, in order, from a file with this header, and return its checksum. Nothing is parsed: size and header
    must be exactly the expected ones. Each piece is hashed while it is still in the CPU's caches. what: the file holds.
    OSError, ValueError."""
    check_size(fd, len(header) + sum(map(len, parts)), what)
    found = bytearray(len(header))
    read_all(fd, memoryview(found), 0)
    if found != header:
        raise ValueError(f"its header is not that of a {what} of this session")
    digest, offset = xxhash.xxh3_128(found), len(found)
    for content in parts:
        read_all(fd, content, offset)
        digest.update(content)
        offset += len(content)
        on_bytes(len(content))
    return digest.hexdigest()


def _on_host(layer: Tensor) -> bool:
    return layer.device.type == "cpu"


def _blocks(layers: Sequence[Tensor], used: int) -> Iterator[Tensor]:
    """The unpacked blocks of a page, on the host, with zeros after the first `used` rows."""
    for layer in layers:
        home = layer.cpu()
        if used < home.shape[2]:
            home = home.clone()
            home[:, :, used:] = 0
        yield from home


def _file_pieces(file: PageFile, blocks: Iterable[Tensor]) -> Iterator[memoryview]:
    """The bytes of a page's file, in order."""
    yield memoryview(file.header)
    for block, size in zip(blocks, file.block_bytes, strict=True):
        yield from pieces(block, size)


def pieces(block: Tensor, size: int) -> Iterator[memoryview]:
    """The first `size` bytes of a contiguous host tensor, PIECE_BYTES at a time, without copying."""
    content = block.view(-1).view(torch.uint8).numpy().data
    for start in range(0, size, PIECE_BYTES):
        yield content[start : min(start + PIECE_BYTES, size)]


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
