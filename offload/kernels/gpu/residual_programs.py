"""The program that gives weights back from their codes and their residuals, in Triton, and what it shares with that of
keys and values.

`offload.kernels.gpu.residuals` launches it. The rule is in native/intervals.h, the order of the parts in
native/residuals.h, that of codes in native/codes.h.
"""

# Triton reads the annotations: they are not postponed.
import triton
import triton.language as tl


@triton.jit
def restored(
    low,  # int32 [M, N]: low bytes of a group's numbers
    step,  # fp32 [M, N]
    middle,  # fp32 [M, N]: what their codes stand for
    real,  # bool [M, N]: the others are no numbers
    fours,  # uint8, where the group's begin
    before,  # of these, those of numbers before these ones
    escapes,  # uint8, where those of these numbers begin
):
    """(bf16 as int32 [M, N], of which 16 bits count; how many are near zero; how many escape)."""
    sign = (middle.to(tl.int32, bitcast=True) >> 16) & 0x8000
    size, half = tl.abs(middle), 0.5 * step
    least = ((size - half).to(tl.int32, bitcast=True) >> 16) - 2
    most = ((size + half).to(tl.int32, bitcast=True) >> 16) + 2
    near = real & ((size <= half) | (most - least >= 256) | (step == 0.0))
    bits = (least + ((low - least) & 255)) | sign
    # Those near zero: what is theirs alone comes in their order.
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
    content,  # uint8: low bytes [groups, 16 outputs, 64 inputs], heads, 4 bits each, escapes
    blocks,  # uint8 [num_tiles, num_groups, bytes]: the codes
    out,  # int16 [16 * num_tiles, 64 * num_groups]
    num_groups,  # of 64 inputs
    escapes_at,  # where the escapes begin
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
