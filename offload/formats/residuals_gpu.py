"""Restoring of weights, and of pages of keys and values, from codes and residuals on a GPU, in Triton. See
`offload.formats.residuals`.

The rule is in native/intervals.h, the layout of residuals in native/residuals.h and native/kv_residuals.h. The layout
of codes is in native/codes.h and, as order "matrices", in `offload.formats.quantised_kv`.
"""

# Triton reads the annotations of programs: they are not postponed.
import torch
import triton
import triton.language as tl
from torch import Tensor

from offload.formats.layout import KV_CODE_GROUP, PageShape, kv_code_bytes
from offload.formats.quantised import Codes
from offload.native.launch import launch

WEIGHT_WARPS = 4  # of a program that restores weights
_AT_A_TIME = 2048  # numbers of a page that a program restores at a time
_ELEMENTS_PER_THREAD = 8  # numbers per thread: 16 bytes are stored at once


def restore(content: Tensor, escapes: int, codes: Codes, out: Tensor) -> None:
    """Fill out, bf16 [outputs, inputs], in one launch; all tensors are on the GPU."""
    num_tiles, num_groups, _ = codes.blocks.shape
    arguments = content, codes.blocks, out.view(torch.int16), num_groups, escapes
    launch(restore_weights, (num_groups, num_tiles), arguments, BITS=codes.bits, num_warps=WEIGHT_WARPS)


def restore_tile(
    tile: Tensor,
    slot: Tensor,
    flags: Tensor,
    starts: Tensor,
    codes: Tensor,
    first_group: int,
    shape: PageShape,
) -> None:
    """The GPU's `offload.formats.residuals.restore_tile`, in one launch. codes: in order "matrices"."""
    assert tile.is_contiguous()
    assert slot.is_contiguous()
    assert tile.shape == slot.shape == (2, tile.shape[1], shape.num_kv_heads, shape.page_tokens, shape.head_dim)
    assert starts.stride(1) == 1
    assert codes.stride()[1:] == (kv_code_bytes(shape.head_dim), 1)
    launch(
        restore_pages,
        (shape.num_groups, len(flags), 2),
        (
            slot.view(torch.uint8), tile.view(torch.int16), flags, starts, codes, starts.stride(0), tile.shape[1],
            codes.stride(0), first_group,
        ),
        PAGE=shape.page_tokens,
        **constants(shape.head_dim),
    )  # fmt: skip


def constants(head_dim: int) -> dict[str, int]:
    """The constants of programs that restore one group each."""
    padded = 1 << (head_dim - 1).bit_length()
    step = min(_AT_A_TIME // padded, KV_CODE_GROUP)
    warps = step * padded // (32 * _ELEMENTS_PER_THREAD)
    return {"DIM": head_dim, "DIM_PADDED": padded, "STEP": step, "num_warps": warps}


@triton.jit
def restored(
    low,  # int32 [M, N]: low bytes of a group's numbers
    step,  # fp32 [M, N]
    middle,  # fp32 [M, N]: the decoded numbers
    real,  # bool [M, N]: False for padding
    fours,  # uint8 pointer to the group's 4-bit parts
    before,  # number of 4-bit parts of the group before these numbers
    escapes,  # uint8 pointer to the escapes of these numbers
):
    """Restore numbers -> (bf16 as int32 [M, N], of which the low 16 bits are valid; the number near zero; the number of
    escapes)."""
    sign = (middle.to(tl.int32, bitcast=True) >> 16) & 0x8000
    size, half = tl.abs(middle), 0.5 * step
    least = ((size - half).to(tl.int32, bitcast=True) >> 16) - 2
    most = ((size + half).to(tl.int32, bitcast=True) >> 16) + 2
    near = real & ((size <= half) | (most - least >= 256) | (step == 0.0))
    bits = (least + ((low - least) & 255)) | sign
    # Numbers near zero: their 4-bit parts are stored in order.
    numbers: tl.constexpr = low.shape[0] * low.shape[1]
    flags = tl.reshape(near, [numbers]).to(tl.int32)
    num_near = tl.sum(flags, 0)
    rank = before + tl.reshape(tl.cumsum(flags, 0) - flags, low.shape)
    four = tl.load(fours + rank // 2, mask=near, other=0).to(tl.int32) >> rank % 2 * 4 & 15
    kind = four & 7
    escaped = near & (kind == 7)
    flags = tl.reshape(escaped, [numbers]).to(tl.int32)
    rank = tl.reshape(tl.cumsum(flags, 0) - flags, low.shape)
    upper = tl.load(escapes + rank, mask=escaped, other=0).to(tl.int32)
    close = tl.where(kind == 6, low, most - ((most - low) & 255) - 256 * kind) | (four & 8) << 12
    close = tl.where(escaped, upper << 8 | low, close)
    return tl.where(near, close, bits), num_near, tl.sum(flags, 0)


@triton.jit(do_not_specialize=["num_groups", "escapes_at"])
def restore_weights(
    content,  # uint8: low bytes [groups, 16 outputs, 64 inputs], heads, 4-bit parts, escapes
    blocks,  # uint8 [num_tiles, num_groups, bytes]: the codes
    out,  # int16 [16 * num_tiles, 64 * num_groups]
    num_groups,  # of 64 inputs
    escapes_at,  # offset of the escapes
    BITS: tl.constexpr,  # of a code, 4 or 6
):
    """Program (g, t): the block of tile t and group g."""
    group, tile, num_tiles = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    number = tile.to(tl.int64) * num_groups + group
    output, place = tl.arange(0, 16)[:, None], tl.arange(0, 64)[None, :]
    block = tl.multiple_of(blocks + number * (64 + 128 * BITS), 16)
    scale = tl.load((block + output * 4).to(tl.pointer_type(tl.int32)))
    step = (scale << 16).to(tl.float32, bitcast=True)
    lowest = (scale >> 16 << 16).to(tl.float32, bitcast=True)
    both = tl.load(block + 64 + place % 32 // 4 * 64 + output * 4 + place % 4).to(tl.int32)
    code = (both >> place // 32 * 4) & 15
    if BITS == 6:
        four = tl.load(block + 576 + place % 32 // 4 * 32 + output * 2 + place % 4 // 2).to(tl.int32)
        code = code << 2 | ((four >> (place % 2 * 4 + place // 32 * 2)) & 3)
    middle = tl.fma(code.to(tl.float32), step, lowest)
    low = tl.load(tl.multiple_of(content + number * 1024, 16) + output * 64 + place).to(tl.int32)
    num_blocks = num_tiles.to(tl.int64) * num_groups
    heads = (content + num_blocks * 1024 + number * 8).to(tl.pointer_type(tl.int32))
    fours = content + num_blocks * (1024 + 8) + tl.load(heads)
    escapes = content + escapes_at + tl.load(heads + 1)
    bits, _, _ = restored(low, step, middle, (output < 16) & (place < 64), fours, 0, escapes)
    at = (tile.to(tl.int64) * 16 + output) * (num_groups * 64) + group * 64 + place
    tl.store(out + at, bits.to(tl.int16))


@triton.jit(do_not_specialize=["flags", "starts", "starts_stride", "num_pages", "head_stride", "first_group"])
def restore_pages(
    slot,  # uint8
    tile,  # int16 [2, num_pages, H_kv, PAGE, DIM]
    flags,  # uint8, of pages
    starts,  # int64: offsets in the slot of pages' keys; those of values are starts_stride further
    codes,  # uint8 [H_kv, groups, bytes] by the stride: of one layer
    starts_stride,
    num_pages,
    head_stride,  # bytes of codes, a multiple of 16
    first_group,  # with which page 0 begins; less than 0 if its first tokens have no codes
    PAGE: tl.constexpr,  # tokens, a multiple of 32
    DIM: tl.constexpr,  # a multiple of 16
    DIM_PADDED: tl.constexpr,
    STEP: tl.constexpr,  # tokens at a time
):
    """Program (g, p, k): group g of the keys, k = 0, or values of page p, if that is a residual."""
    TOKENS: tl.constexpr = 32  # of a group
    SHARING: tl.constexpr = 64  # channels of values that share a step
    KEYS: tl.constexpr = 4 * DIM  # bytes of a group's codes before those of keys
    VALUE_UNITS: tl.constexpr = KEYS + 16 * DIM
    CHANNELS: tl.constexpr = min(SHARING, DIM_PADDED)
    WIDTH: tl.constexpr = DIM_PADDED // CHANNELS
    VALUES: tl.constexpr = VALUE_UNITS + 4 * TOKENS * ((DIM + SHARING - 1) // SHARING)
    BYTES: tl.constexpr = VALUES + 16 * DIM
    group, page, kind = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_groups = tl.num_programs(0)
    if tl.load(flags + page) != 2:
        return
    of_head: tl.constexpr = PAGE // TOKENS
    number = first_group + page * of_head + group % of_head
    place = (group // of_head).to(tl.int64) * head_stride + number.to(tl.int64) * BYTES
    code = tl.multiple_of(codes + place, 16)
    scales = tl.multiple_of(code.to(tl.pointer_type(tl.int32)), 16)  # of keys
    block = (kind * num_pages + page).to(tl.int64) * num_groups * (TOKENS * DIM)
    content = slot + tl.load(starts + kind * starts_stride + page)
    heads = (content + num_groups.to(tl.int64) * (TOKENS * DIM)).to(tl.pointer_type(tl.int32))
    fours = (heads + 2 * num_groups + 2).to(tl.pointer_type(tl.uint8))
    escapes = fours + tl.load(heads + 2 * num_groups) + tl.load(heads + 2 * group + 1)
    fours += tl.load(heads + 2 * group)
    numbers = group.to(tl.int64) * (TOKENS * DIM)
    lows = tl.multiple_of(content + numbers, 16)
    out = tl.multiple_of(block + numbers, 16)
    channel = tl.arange(0, DIM_PADDED)[None, :]
    before = 0
    for first in range(0, TOKENS, STEP):
        token = first + tl.arange(0, STEP)[:, None]
        real = (token < TOKENS) & (channel < DIM)
        if kind == 0:
            units = tl.broadcast_to(tl.load(scales + channel, mask=channel < DIM, other=0), (STEP, DIM_PADDED))
            both = tl.load(code + KEYS + token % 16 * DIM + channel, mask=real, other=0)
        else:
            width = tl.arange(0, WIDTH)[None, :]
            inside = (token < TOKENS) & (width * CHANNELS < DIM)
            units = tl.load(scales + VALUE_UNITS // 4 + width * TOKENS + token, mask=inside, other=0)
            units = tl.reshape(tl.broadcast_to(units[:, :, None], (STEP, WIDTH, CHANNELS)), (STEP, DIM_PADDED))
            both = tl.load(code + VALUES + channel * 16 + token % 16, mask=real, other=0)
        step = (units << 16).to(tl.float32, bitcast=True)
        lowest = (units & -65536).to(tl.float32, bitcast=True)
        middle = tl.fma(((both >> token // 16 * 4) & 15).to(tl.float32), step, lowest)
        at = token * DIM + channel
        low = tl.load(lows + at, mask=real, other=0).to(tl.int32)
        bits, num_near, num_escaped = restored(low, step, middle, real, fours, before, escapes)
        before += num_near
        escapes += num_escaped
        tl.store(tile + out + at, bits.to(tl.int16), mask=real)
