"""The program that gives pages of keys and values back from their codes and their residuals, in Triton.

`offload.kernels.gpu.kv_residuals` launches it. The rule is in native/intervals.h, the order of the parts in
native/kv_residuals.h, that of codes in `offload.kernels.kv_codes`, "matrices".
"""

# Triton reads the annotations: they are not postponed.
import triton
import triton.language as tl

from offload.kernels.gpu.residual_programs import restored


@triton.jit(do_not_specialize=["flags", "starts", "starts_stride", "num_pages", "head_stride", "first_group"])
def restore_pages(
    slot,  # uint8
    tile,  # int16 [2, num_pages, H_kv, PAGE, DIM]
    flags,  # uint8, of pages
    starts,  # int64: in the slot, of pages' keys, and starts_stride further of their values
    codes,  # uint8 [H_kv, groups, bytes] by the stride: a layer's
    starts_stride,
    num_pages,
    head_stride,  # bytes of codes, a multiple of 16
    first_group,  # of a head's codes, page 0 begins with; less than 0 where its first tokens have none
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
