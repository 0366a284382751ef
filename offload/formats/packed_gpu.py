"""Unpacking on a GPU, in Triton: of pages and weights that crossed the link, and of chunks read from packed homes. The
format is described in `offload.formats.packed`.

A program unpacks one group of a block, two halves of HALF numbers.
"""

# Triton reads the annotations of programs: they are not postponed.
import torch
import triton
import triton.language as tl
from torch import Tensor

from offload.formats.layout import ALL_TOKENS, PACKED_TOKENS, Packing
from offload.native.launch import launch

_WARP_BYTES = 512  # of a half's signs and mantissas: one 16-byte load per thread


def unpack_tile(tile: Tensor, slot: Tensor, flags: Tensor, starts: Tensor, packing: Packing) -> None:
    """The GPU's `offload.formats.packed.unpack_tile`, in one launch."""
    assert starts.stride(1) == 1
    launch(
        unpack_pages,
        (packing.num_groups, len(flags), 2),
        (slot.view(torch.uint8), tile.view(torch.int16), flags, starts, starts.stride(0), tile.shape[1]),
        **_constants(packing),
    )


def unpack_numbers(content: Tensor, starts: Tensor, out: Tensor, packing: Packing) -> None:
    """The GPU's `offload.formats.packed.unpack_numbers`, in one launch."""
    launch(
        unpack_blocks,
        (packing.num_groups, len(starts) - 1),
        (content, starts, out.view(torch.int16)),
        **_constants(packing),
    )


def packed_chunks(
    blocks: Tensor,
    flags: Tensor,
    wanted: Tensor,
    held: Tensor,
    packing: Packing,
    *,
    chunk: int,
    page: int,
    slot: int = 0,
    tokens: range = ALL_TOKENS,
) -> None:
    """`kernels.gpu.copies.chunks` from pages of `page` tokens of which some are packed, in one launch. chunk: a
    multiple of PACKED_TOKENS. blocks: int64 [L, 2, pages of the sequence], the device addresses of each page's keys and
    values, multiples of 16. flags: uint8 [L, pages], the encoding of each page; chunks of RESIDUAL pages must not be
    requested."""
    assert blocks.is_contiguous()
    assert flags.is_contiguous()
    num_layers, _, num_heads, num_rows, dim = held.shape
    launch(
        copy_packed_chunks,
        (2 * wanted.shape[-1], num_heads, num_layers),
        (
            blocks, flags, wanted, held.view(torch.int16), flags.shape[1],
            wanted.shape[-1] if wanted.dim() == 3 else 0, num_rows, slot, tokens.start, tokens.stop,
        ),
        GROUPS=chunk // PACKED_TOKENS,
        PER_PAGE=page // chunk,
        DIM=dim,
        **_constants(packing),
    )  # fmt: skip


def _constants(packing: Packing) -> dict[str, int]:
    half = packing.group // 2
    return {
        "NUMBERS": packing.numbers,
        "HEADS": packing.heads,
        "ESCAPES": packing.escapes,
        "HALF": half,
        "HALF_PADDED": 1 << (half - 1).bit_length(),
        "num_warps": warps(packing),
    }


def warps(packing: Packing) -> int:
    """The number of warps of a program that unpacks a group."""
    return min(max(packing.group // 2 // _WARP_BYTES, 1), 8)


@triton.jit
def _numbers(
    block,  # uint8, the address of the block
    group,
    is_packed,
    number,  # [HALF_PADDED]: 0, 1, 2, ...
    NUMBERS: tl.constexpr,  # per block
    HEADS: tl.constexpr,  # offsets in bytes of the heads, and of the escapes
    ESCAPES: tl.constexpr,
    HALF: tl.constexpr,
):
    """The two halves of a group, bf16 as int16 [HALF_PADDED]."""
    real = number < HALF
    if is_packed:
        low = tl.multiple_of(block + group * (2 * HALF), 16)
        head = tl.load((block + HEADS + group * 4).to(tl.pointer_type(tl.int32)))
        coded = tl.load(tl.multiple_of(block + NUMBERS + group * HALF, 16) + number, mask=real, other=0).to(tl.int32)
        near, far = coded & 15, coded >> 4
        near_escapes, far_escapes = (near == 15).to(tl.int32), (far == 15).to(tl.int32)
        escapes = block + ESCAPES + (head >> 8)
        rank = tl.cumsum(near_escapes, 0) - near_escapes
        kept = tl.load(escapes + rank, mask=near == 15, other=0).to(tl.int32)
        near = tl.where(near == 15, kept, (head & 255) - near)
        escapes += tl.sum(near_escapes, 0)
        rank = tl.cumsum(far_escapes, 0) - far_escapes
        kept = tl.load(escapes + rank, mask=far == 15, other=0).to(tl.int32)
        far = tl.where(far == 15, kept, (head & 255) - far)
        rest = tl.load(low + number, mask=real, other=0).to(tl.int32)
        first = ((rest & 128) << 8 | near << 7 | rest & 127).to(tl.int16)
        rest = tl.load(tl.multiple_of(low + HALF, 16) + number, mask=real, other=0).to(tl.int32)
        second = ((rest & 128) << 8 | far << 7 | rest & 127).to(tl.int16)
    else:
        plain = tl.multiple_of(block.to(tl.pointer_type(tl.int16)) + group * (2 * HALF), 8)
        first = tl.load(plain + number, mask=real, other=0)
        second = tl.load(tl.multiple_of(plain + HALF, 8) + number, mask=real, other=0)
    return first, second


@triton.jit(do_not_specialize=["flags", "starts", "starts_stride", "num_pages"])
def unpack_pages(
    slot,  # uint8
    tile,  # int16 [2, num_pages, NUMBERS]
    flags,  # uint8, of pages
    starts,  # int64: offsets in the slot of pages' keys; those of values are starts_stride further
    starts_stride,
    num_pages,
    NUMBERS: tl.constexpr,
    HEADS: tl.constexpr,
    ESCAPES: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
):
    """Program (g, p, k): group g of the keys, k = 0, or values of page p, unless that is a residual."""
    group, page, kind = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    flag = tl.load(flags + page)
    if flag == 2:
        return
    block = (kind * num_pages + page).to(tl.int64) * NUMBERS
    is_packed = flag != 0
    number = tl.arange(0, HALF_PADDED)
    real = number < HALF
    source = tl.multiple_of(slot + tl.load(starts + kind * starts_stride + page), 16)
    first, second = _numbers(source, group, is_packed, number, NUMBERS, HEADS, ESCAPES, HALF)
    at = tl.multiple_of(block + group * (2 * HALF), 8)
    tl.store(tile + at + number, first, mask=real)
    tl.store(tile + tl.multiple_of(at + HALF, 8) + number, second, mask=real)


@triton.jit
def unpack_blocks(
    content,  # uint8: block after block, each packed, or raw if packing does not shrink it
    starts,  # int64 [blocks + 1]: offset of each block, a multiple of 16
    out,  # int16 [blocks, NUMBERS]
    NUMBERS: tl.constexpr,
    HEADS: tl.constexpr,
    ESCAPES: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
):
    """Program (g, b): group g of block b."""
    group, block = tl.program_id(0), tl.program_id(1)
    start = tl.load(starts + block)
    is_packed = tl.load(starts + block + 1) - start < 2 * NUMBERS
    number = tl.arange(0, HALF_PADDED)
    source = tl.multiple_of(content + start, 16)
    first, second = _numbers(source, group, is_packed, number, NUMBERS, HEADS, ESCAPES, HALF)
    at = tl.multiple_of(block.to(tl.int64) * NUMBERS + group * (2 * HALF), 8)
    tl.store(out + at + number, first, mask=number < HALF)
    tl.store(out + tl.multiple_of(at + HALF, 8) + number, second, mask=number < HALF)


@triton.jit(do_not_specialize=["num_pages", "wanted_stride", "num_rows", "slot", "start", "stop"])
def copy_packed_chunks(
    blocks,  # int64 [L, 2, num_pages]: addresses of keys and of values
    flags,  # uint8 [L, num_pages]
    wanted,  # as in copies.copy_chunks
    held,  # int16 [L, 2, H_kv, num_rows, DIM], contiguous
    num_pages,  # of the sequence
    wanted_stride,
    num_rows,
    slot,
    start,
    stop,
    GROUPS: tl.constexpr,  # of a chunk
    PER_PAGE: tl.constexpr,  # chunks
    DIM: tl.constexpr,
    NUMBERS: tl.constexpr,
    HEADS: tl.constexpr,
    ESCAPES: tl.constexpr,
    HALF: tl.constexpr,  # 8 tokens
    HALF_PADDED: tl.constexpr,
):
    """Program (2 * s + k, h, l): unpack the keys, k = 0, or values of the chunk for slot s of KV head h in layer l."""
    place, kind = tl.program_id(0) // 2, tl.program_id(0) % 2
    head, layer = tl.program_id(1), tl.program_id(2)
    num_heads = tl.num_programs(1)
    chunk = tl.load(wanted + (layer * num_heads + head).to(tl.int64) * wanted_stride + place)
    if chunk < 0:
        return
    page = chunk // PER_PAGE
    is_packed = tl.load(flags + layer * num_pages + page) != 0
    address = tl.load(blocks + (layer * 2 + kind) * num_pages + page)
    block = tl.multiple_of(address.to(tl.pointer_type(tl.uint8)), 16)
    first_group = (head * PER_PAGE + chunk % PER_PAGE) * GROUPS
    row = ((layer * 2 + kind) * num_heads + head).to(tl.int64) * num_rows + (slot + place) * (16 * GROUPS)
    number = tl.arange(0, HALF_PADDED)
    token = number // DIM
    for group in tl.static_range(GROUPS):
        first, second = _numbers(block, first_group + group, is_packed, number, NUMBERS, HEADS, ESCAPES, HALF)
        out = tl.multiple_of((row + 16 * group) * DIM, 8)
        at = chunk * (16 * GROUPS) + 16 * group + token
        tl.store(held + out + number, first, mask=(number < HALF) & (at >= start) & (at < stop))
        mask = (number < HALF) & (at + 8 >= start) & (at + 8 < stop)
        tl.store(held + tl.multiple_of(out + HALF, 8) + number, second, mask=mask)
