"""Files of units: written from a part's tensors, and read back into them if the checksum is right."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

import torch
import xxhash
from torch import Tensor

from offload.formats.packed import check, pack, unpack, unpack_with_torch
from offload.kernels.cpu import CpuKernels, kernels
from offload.kv.kept import Kept
from offload.kv.parts import Part, Unit
from offload.progress import OnBytes
from offload.session.folder import Folder, read_all, write_all
from offload.session.layout import Format, PageFile, PageFormat, TensorsFormat
from offload.session.manifest import Saved
from offload.session.names import damaged

PIECE_BYTES = 1 << 20  # read or written and hashed at a time
OTHER_CHECKSUM = "its checksum differs from the manifest's: it was changed"
DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int64: "int64"}


def format_of(kept: Kept, part: Part, unit: Unit = ()) -> Format:
    """The format of a unit's file, which most parts have without its name, too."""
    shapes = kept.shapes(part, unit).items()
    return _format(part.in_place, tuple((name, DTYPE_NAMES[dtype], shape) for name, (shape, dtype) in shapes))


@lru_cache(64)
def _format(in_place: bool, tensors: tuple[tuple[str, str, tuple[int, ...]], ...]) -> Format:
    if not in_place or not tensors:
        return TensorsFormat(tensors)
    _, dtype, (_, heads, tokens, dim) = tensors[0]
    return PageFormat(len(tensors), heads, dim, tokens, dtype)


def most_nbytes(kept: Kept, units: Iterable[tuple[Part, Unit]]) -> int:
    """The most bytes of the files of units: a page that can be packed takes less."""
    return sum(format_of(kept, part, unit).nbytes for part, unit in units)


def write_unit(
    folder: Folder, name: str, kept: Kept, part: Part, unit: Unit, on_bytes: OnBytes, *, lasting: bool = True
) -> tuple[str, str]:
    """Write a new file of a unit, a page packed if it can be -> its checksum, and which of its blocks are packed.
    OSError.

    Rows of a page after the unit's last one are written as zeros, so no dropped token is kept and equal sequences give
    equal files. Only a page that may be packed, or is partly used, or a tensor on a GPU, is copied first. on_bytes:
    called with numbers of written bytes, and with the number of bytes saved by packing. lasting: it is synced to the
    disk when this returns.
    """
    form, tensors = format_of(kept, part, unit), kept.tensors(part, unit)
    file: PageFile | TensorsFormat
    if isinstance(form, PageFormat):
        used = (unit[0] - 1) % form.page_tokens + 1
        file, blocks = packed_page(form, tensors, used) or (form.file(), _blocks(tensors, used))
    else:
        file, blocks = form, (tensor.cpu().contiguous() for tensor in tensors)
    if file.packed:
        on_bytes(0, form.nbytes - file.nbytes)
    return write_file(folder, name, _contents(file, blocks), on_bytes, lasting=lasting), file.packed


def write_file(
    folder: Folder, name: str, contents: Iterable[memoryview], on_bytes: OnBytes, *, lasting: bool = True
) -> str:
    """Write a new file of `contents`, one after the other, and return its checksum. OSError. See `write_unit`."""
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


def read_unit(folder: Folder, saved: Saved, kept: Kept, part: Part, on_bytes: OnBytes) -> list[Tensor]:
    """Read a unit's file into tensors of `Kept.to_fill`. Of a part whose units are filled in place the unit is then
    filled; of others a call of `Kept.filled` has to follow. Raises SessionError if the file is damaged: then pages are
    zeros, since attention multiplies hidden rows by zero, so they must be finite. Other tensors with a number that is
    not finite are damaged: it would be in all that follows. on_bytes: called with numbers of bytes of the file.

    Blocks are read into the tensors, and unpacked in place once the checksum is right.
    """
    path, form, tensors = folder.path / saved.file, format_of(kept, part, saved.unit), list[Tensor]()
    try:
        if not form.allows(saved.packed):
            raise ValueError(f"it is not packed as a {part.what} of this session")
        file, fd = form.file(saved.packed), folder.open(saved.file)
        try:
            check_size(fd, file.nbytes, part.what)  # a made-up manifest may name any number of rows
            tensors = kept.to_fill(part, saved.unit)
            homes = [tensor if _on_host(tensor) else torch.empty_like(tensor, device="cpu") for tensor in tensors]
            blocks = [half for home in homes for half in home] if isinstance(file, PageFile) else homes
            parts = [
                piece for block, size in zip(blocks, file.block_bytes, strict=True) for piece in pieces(block, size)
            ]
            if read_file(fd, file.header, parts, on_bytes, part.what) != saved.checksum:
                raise ValueError(OTHER_CHECKSUM)
        finally:
            os.close(fd)
        if isinstance(file, PageFile):
            unpack_page(file, homes)
        elif not all(_is_finite(each) for each in homes):
            raise ValueError("some of its numbers are not finite")
        for tensor, home in zip(tensors, homes, strict=True):
            if home is not tensor:
                tensor.copy_(home)
    except BaseException as error:
        for tensor in tensors:
            tensor.zero_()
        if isinstance(error, OSError | ValueError):
            why = f"it cannot be read ({error.strerror})" if isinstance(error, OSError) else str(error)
            raise damaged(path, why) from error
        raise
    finally:
        if part.in_place and tensors:
            kept.filled(part, saved.unit, tensors)
    return tensors


def check_size(fd: int, expected: int, what: str) -> None:
    """Raises ValueError for a file of another number of bytes than `expected`. what: the file holds."""
    if (num_bytes := os.fstat(fd).st_size) != expected:
        raise ValueError(f"it has {num_bytes} bytes, this {what} has {expected}: it was cut off or changed")


def read_file(fd: int, header: bytes, parts: Sequence[memoryview], on_bytes: OnBytes, what: str) -> str:
    """Fill `parts`, in order, from a file with this header, and return its checksum. Nothing is parsed: the header must
    be exactly the expected one. Each piece is hashed while it is still in the CPU's caches. OSError, ValueError."""
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


def _contents(file: PageFile | TensorsFormat, blocks: Iterable[Tensor]) -> Iterator[memoryview]:
    """The bytes of a unit's file, in order."""
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


def _is_finite(tensor: Tensor) -> bool:
    return not tensor.numel() or all(bool(end.isfinite()) for end in tensor.aminmax())
