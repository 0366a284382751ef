"""Products of few rows with stored experts in fixed point, in Triton: integer sums on tensor cores, then fp32
operations in a fixed sequence, so that a CPU gives the same bits. `offload.kernels.gpu.experts` launches them.

Numbers of a row are integers of 16 bits times the unit of their group of 32: two planes of int8. The sums of a part's
products with codes, 32 or 16 of them, are exact. A lane adds up the parts that have its place among those of 256
inputs; the lanes are added at the end.
"""

# Triton evaluates the annotations, so they are not postponed.
import triton
import triton.language as tl

from offload.formats.fixed_gpu import as_bytes, codes_of_groups, pairs_of, spare_of, steps_of_parts, sums_of
from offload.formats.stored_gpu import tail_of
from offload.kernels.gpu.activation import activated, opened
from offload.kernels.gpu.expert_programs import ended, lines_of, numbers_at, place_of


@triton.jit(do_not_specialize=["num_rows"])
def fix_rows(
    rows,  # [num_rows, 32 * num_groups] of 16 bits, contiguous
    chosen,  # int32 [num_rows]: the expert that each row is for, if CHOSEN
    places,  # int32 [E]: of experts; the rows of others than these are left out
    planes,  # int8 [2, num_rows, 32 * num_groups]: number = 256 * first + second, in units
    units,  # fp32 [num_rows, num_groups]: powers of two; NaN where a number is not finite
    sums,  # fp32 [num_rows, parts]: of a part's numbers, if SUMS
    num_rows,
    num_groups,
    EXPERTS: tl.constexpr,  # E
    CHOSEN: tl.constexpr,
    FORM: tl.constexpr,  # the Encoding of the matrix that multiplies them
    GROUPS: tl.constexpr,  # at a time
):
    """Program (t, b): block b of row t in fixed point, in the order of `FORM`'s codes. A group's unit is the least
    power of two, at least 2^-64, that leaves its numbers at most 127 * 257; they are rounded to the nearest integer, of
    two the even one."""
    row = tl.program_id(0)
    if CHOSEN:
        expert = tl.load(chosen + row)
        if tl.load(places + expert, mask=expert < EXPERTS, other=-1) < 0:
            return
    group, place = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS), tl.arange(0, 32)
    held = (group < num_groups)[:, None]
    RUN: tl.constexpr = pairs_of(FORM)
    source = place
    if RUN:  # bits of `place` from the highest on: the run, its upper half, words, a byte of a half word, its part
        source = place // (2 * RUN) * (2 * RUN) + place % 2 * RUN
        source += place % RUN // 4 * 4 + place // RUN % 2 * 2 + place % 4 // 2
    target = row.to(tl.int64) * num_groups + group
    x = tl.load(rows + target[:, None] * 32 + source[None, :], mask=held, other=0.0).to(tl.float32)
    most = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    finite = most < 0x7F800000
    # The largest number has to be at most 127 * 257 / 2^14 times its power of two, or the next one counts.
    exponent = tl.maximum((most + 0x101FF >> 23) - 14, 63)
    inverse = tl.where(finite, 254 - exponent, 0) << 23
    scaled = tl.where(finite[:, None], x, 0.0) * inverse.to(tl.float32, bitcast=True)[:, None]
    number = (scaled + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000  # 1.5 * 2^23: rounded to an integer
    first = number + 128 >> 8
    at = target[:, None] * 32 + place[None, :]
    tl.store(planes + at, first.to(tl.int8), mask=held)
    at += num_rows.to(tl.int64) * num_groups * 32
    tl.store(planes + at, (number - first * 256).to(tl.int8), mask=held)
    unit = (exponent << 23).to(tl.float32, bitcast=True)
    unit = tl.where(finite, unit, float("nan"))
    tl.store(units + target, unit, mask=group < num_groups)
    if sums_of(FORM):
        PARTS: tl.constexpr = 32 // sums_of(FORM)
        total = tl.sum(tl.reshape(number, (GROUPS, PARTS, 32 // PARTS)), 2).to(tl.float32) * unit[:, None]
        tl.store(sums + (target * PARTS)[:, None] + tl.arange(0, PARTS)[None, :], total, mask=held)


@triton.jit
def _halved(lanes):
    """The sum of both halves of lanes [2 * L, N, T]: [L, N, T]."""
    apart = tl.reshape(lanes, (2, lanes.shape[0] // 2, lanes.shape[1], lanes.shape[2]))
    first, second = tl.split(tl.permute(apart, (1, 2, 3, 0)))
    return first + second


@triton.jit
def folded(lanes):
    """The sum of eight lanes [8, N, T], of which halves are added until one is left: [N, T]."""
    return tl.reshape(_halved(_halved(_halved(lanes))), (lanes.shape[1], lanes.shape[2]))


@triton.jit
def _sum_groups(
    planes, units, sums, num_rows, row, real, stored, book, counts, output, num_groups,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """The products of rows with some outputs: fp32 [OUTPUTS, ROWS]. row, output: int32 [ROWS] and [OUTPUTS]; rows that
    are not real are not read."""
    BY_16: tl.constexpr = FORM.group == 16
    SUMS: tl.constexpr = sums_of(FORM)
    HALVES: tl.constexpr = 2 if BY_16 else 1
    num_blocks = num_groups * 32 // FORM.numbers
    at = output.to(tl.int64) * (num_blocks * FORM.nbytes + FORM.tail)
    home, odd = (stored.to(tl.pointer_type(tl.int32)) + at // 4)[None, :], (at % 4).to(tl.int32)[None, :]
    tail = tail_of(stored, output, num_blocks, FORM) if FORM.tail else 0.0
    group, number = tl.arange(0, 8), tl.arange(0, 32)
    own = row.to(tl.int64) * num_groups
    inputs = planes + (own * 32)[None, None, :] + (group * 32)[:, None, None] + number[None, :, None]
    second = num_rows.to(tl.int64) * num_groups * 32
    of_units, of_sums = units + own[None, :] + group[:, None], sums + own[None, :] * HALVES
    lanes = tl.zeros([8, OUTPUTS, ROWS], tl.float32)
    upper_lanes, least_lanes, upper_leasts = lanes, lanes, lanes
    for begun in tl.range(0, num_groups, 8):
        rest, first = num_groups - begun, begun * 32 // FORM.numbers * FORM.nbytes
        held = (group < rest)[:, None]
        near = held & real[None, :]
        words = codes_of_groups(home[:, :, None], odd[:, :, None], first, rest, book, counts, OUTPUTS, FORM)
        codes = as_bytes(words)
        unit = tl.load(of_units + begun, mask=near, other=1.0)
        for half in tl.static_range(HALVES):
            there = near[:, None, :]
            if BY_16:
                there = there & (number // 16 == half)[None, :, None]
            high = tl.load(inputs + begun * 32, mask=there, other=0)
            low = tl.load(inputs + begun * 32 + second, mask=there, other=0)
            total = tl.dot(codes, high, out_dtype=tl.int32) * 256 + tl.dot(codes, low, out_dtype=tl.int32)
            total = (total >> spare_of(FORM)).to(tl.float32)
            part = (group * HALVES + half)[:, None]
            step, least = steps_of_parts(home, odd, first, part, held, tail, FORM)
            scale = step[:, :, None] * unit[:, None, :]
            if half == 0:
                lanes = tl.fma(total, scale, lanes)
            else:
                upper_lanes = tl.fma(total, scale, upper_lanes)
            if SUMS:
                added = tl.load(of_sums + begun * HALVES + part, mask=near, other=0.0)[:, None, :]
                added, least = tl.broadcast_to(added, lanes.shape), tl.broadcast_to(least[:, :, None], lanes.shape)
                if half == 0:
                    least_lanes = tl.fma(least, added, least_lanes)
                else:
                    upper_leasts = tl.fma(least, added, upper_leasts)
    made = folded(lanes)
    if BY_16:
        made += folded(upper_lanes)
    if SUMS:
        leasts = folded(least_lanes)
        if BY_16:
            leasts += folded(upper_leasts)
        made += leasts
    return made


@triton.jit(do_not_specialize=["num_rows"])
def multiply_fixed(
    planes,  # from fix_rows, of any rows
    units,
    sums,
    pair_of,  # as `expert_programs.multiply_plain`
    expert_of,
    places,
    content,
    book,  # from stored_codes_gpu.book_of
    counts,  # from fixed_gpu.counts_of
    out,
    num_rows,  # in `planes`
    per_row,
    num_groups,  # of an output
    num_outputs,
    step,
    gate_at,
    weight_at,
    bias_at,
    out_stride,
    GATED: tl.constexpr,
    ADDED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    FORM: tl.constexpr,  # an Encoding with integers
):
    """Program (t, c): as `expert_programs.multiply_plain`, with matrices as they are stored, gate and up in one
    encoding. A launch must fuse no product with a sum."""
    tile = tl.program_id(0)
    place = place_of(expert_of, places, tile)
    if place < 0:
        return
    pair, row, real = lines_of(pair_of, tile, per_row, ROWS)
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    valid = output < num_outputs
    row_of = tl.where(valid, output, 0)
    home = content + place.to(tl.int64) * step
    bias, made = numbers_at(home + bias_at, out), tl.zeros([ROWS, OUTPUTS], out.dtype.element_ty)
    up = made
    for part in tl.range(0, 1 + GATED, num_stages=1):  # one copy of the loop
        up = made
        total = _sum_groups(
            planes, units, sums, num_rows, row, real, home + tl.where(part == 0, weight_at, gate_at), book, counts,
            row_of, num_groups, ROWS, OUTPUTS, FORM,
        )  # fmt: skip
        made = ended(tl.trans(total), bias - part * num_outputs, output, valid, ADDED)
    if GATED:
        made = opened(made, up, ACTIVATION)
    elif ACTIVATION >= 0:
        made = activated(made.to(tl.float32), ACTIVATION).to(made.dtype)
    target = (pair.to(tl.int64) * out_stride)[:, None] + output[None, :]
    tl.store(out + target, made, mask=real[:, None] & valid[None, :])
