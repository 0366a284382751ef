"""The programs of the gated delta rule, with decays by head or by channel of a key, and of Mamba-2, in Triton.
`offload.kernels.gpu.delta` launches them.

Letters: T new rows, n replayed tokens, H value heads, W taps, M held inputs after the first W - 1. Inputs are told by
their places: those W - 1 before the state, the replayed tokens' from W - 1 on, the new rows' from W - 1 + n on.

All tokens have the same instructions, replayed or new, in a pass or in a prefill, so neither a state nor a row's output
depends on how tokens are divided into launches. What is compiled follows from the model's shape alone, so numbers are
not specialised, nor are pointers to rows of odd sizes, some of which happen to be aligned.
"""

# Triton evaluates the annotations, so they are not postponed.
from collections.abc import Callable
from inspect import signature

import triton
import triton.language as tl

from offload.kernels.gpu.programs import mask_if


@triton.jit
def _silu(x):
    return x / (1 + tl.exp(-x))


@triton.jit
def _gate(x, SIGMOID: tl.constexpr):
    """An activated gate."""
    return (1.0 if SIGMOID else x) / (1 + tl.exp(-x))


@triton.jit
def _softplus(x):
    """log(1 + exp(x)) = max(x, 0) + 2 atanh(e / (2 + e)), where e is exp(-|x|), by a series to fp32's precision."""
    e = tl.exp(-tl.abs(x))
    part = e / (2 + e)  # at most 1/3
    square = part * part
    series = 1 / 11 + square * (1 / 13 + square * (1 / 15))
    series = 1 / 5 + square * (1 / 7 + square * (1 / 9 + square * series))
    return tl.maximum(x, 0.0) + 2 * part * (1 + square * (1 / 3 + square * series))


@triton.constexpr_function
def _are_aligned(kept, out):
    """Whether all rows begin at multiples of 16 numbers, as `delta.is_aligned`. Then programs say so where they choose
    between addresses, since not every version of Triton finds it there."""
    return kept % 16 == out % 16 == 0


@triton.jit
def _inputs(held, rows, row_stride, place, first_new, KEPT: tl.constexpr, OUT: tl.constexpr):
    """Pointers to the inputs at `place`, one or several in a row."""
    new = rows + (place - first_new).to(tl.int64) * row_stride
    found = tl.where(place >= first_new, new, held + place.to(tl.int64) * KEPT)
    if _are_aligned(KEPT, OUT):
        found = tl.multiple_of(found, 16)
    return found


@triton.jit
def _token(
    held, rows, row_stride, token, first_new, head, at_key, at_value, at_time, in_key, in_value, in_time,
    KEY_SIZE: tl.constexpr, CHANNELS: tl.constexpr, KEPT: tl.constexpr, OUT: tl.constexpr,
    WIDTH: tl.constexpr, WIDTH_PADDED: tl.constexpr,
):  # fmt: skip
    """The inputs of a head for a token, in the dtype in which they are stored: query, key and value [WIDTH_PADDED,
    numbers] of W tokens, this token last; its step, of a delta rule, and its time or times."""
    each = _inputs(held, rows, row_stride, token + tl.arange(0, WIDTH_PADDED), first_new, KEPT, OUT)[:, None]
    query = tl.load(each + at_key, mask=in_key, other=0.0)
    key = tl.load(each + KEY_SIZE + at_key, mask=in_key, other=0.0)
    value = tl.load(each + at_value, mask=in_value, other=0.0)
    place = token + WIDTH - 1
    own = _inputs(held, rows, row_stride, place, first_new, KEPT, OUT) + CHANNELS
    own += tl.where(place >= first_new, OUT, 0)  # new rows have their gates there
    return query, key, value, tl.load(own + head), tl.load(own + at_time, mask=in_time, other=0.0)


@triton.jit
def _convolved(inputs, taps, bias):
    """The silu of the convolution's output: [WIDTH_PADDED, numbers] -> [numbers]."""
    return _silu(tl.sum(inputs.to(tl.float32) * taps, 0) + bias)


def advance_states(
    state,  # fp32 [H, KEY_DIM, VALUE_DIM]
    held,  # [W - 1 + M, kept], contiguous
    rows,  # [T, numbers of the parts]; a row contiguous
    taps,  # fp32 [W, CHANNELS]
    taps_bias,  # fp32 [CHANNELS], if BIASED
    decay,  # fp32 [H]
    time_bias,  # fp32 [TIMES]
    skip,  # fp32 [H], if MAMBA
    there,  # int64 [1]: n, where `count` is negative
    out,  # fp32 [T, H, VALUE_DIM]: neither normed nor gated
    row_stride,
    count,  # n
    num_rows,  # T
    settles,  # 1: the state is stored after the last row, 0: after the last replayed token
    KEY_SIZE: tl.constexpr,  # numbers of all keys
    CHANNELS: tl.constexpr,  # of queries, keys and values
    TIMES: tl.constexpr,  # H, or with BY_CHANNEL H * KEY_DIM
    HEADS: tl.constexpr,  # H
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    WIDTH: tl.constexpr,  # W
    TILED: tl.constexpr,  # see `DeltaRule`; negative: each key head serves neighbours
    STEPS: tl.constexpr,
    EPS: tl.constexpr,
    SCALE: tl.constexpr,  # of queries
    MAMBA: tl.constexpr,  # Mamba-2: keys and queries are not normed, and an update does not depend on the state
    BIASED: tl.constexpr,
    BY_CHANNEL: tl.constexpr,  # each channel of a key has a time
    LEAST: tl.constexpr,  # None, or logs of decays are LEAST times a sigmoid
    KEY_PADDED: tl.constexpr,
    WIDTH_PADDED: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Program (c, h): block c of the columns of head h's state, token after token. A token is read while the one before
    it is computed."""
    head, column = tl.program_id(1), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    KEY_HEADS: tl.constexpr = KEY_SIZE // KEY_DIM
    key_head = head * KEY_HEADS // HEADS
    if TILED >= 0:
        key_head = (head + TILED) % KEY_HEADS
    replayed = tl.load(there, mask=count < 0, other=count).to(tl.int32)
    first_new, stop = replayed + WIDTH - 1, replayed + num_rows
    stored = replayed + num_rows * settles  # so many tokens
    if stop == 0:
        return
    dim, tap = tl.arange(0, KEY_PADDED), tl.arange(0, WIDTH_PADDED)[:, None]
    at_key, in_key = key_head * KEY_DIM + dim[None, :], (tap < WIDTH) & (dim < KEY_DIM)[None, :]
    at_value = 2 * KEY_SIZE + head * VALUE_DIM + column[None, :]
    in_value = (tap < WIDTH) & (column < VALUE_DIM)[None, :]
    query_taps = tl.load(taps + tap * CHANNELS + at_key, mask=in_key, other=0.0)
    key_taps = tl.load(taps + tap * CHANNELS + KEY_SIZE + at_key, mask=in_key, other=0.0)
    value_taps = tl.load(taps + tap * CHANNELS + at_value, mask=in_value, other=0.0)
    query_bias, key_bias, value_bias = 0.0, 0.0, 0.0
    if BIASED:
        query_bias = tl.load(taps_bias + key_head * KEY_DIM + dim, mask=dim < KEY_DIM, other=0.0)
        key_bias = tl.load(taps_bias + KEY_SIZE + key_head * KEY_DIM + dim, mask=dim < KEY_DIM, other=0.0)
        at = 2 * KEY_SIZE + head * VALUE_DIM + column
        value_bias = tl.load(taps_bias + at, mask=column < VALUE_DIM, other=0.0)
    NUM_STEPS: tl.constexpr = (1 - MAMBA) * HEADS  # of a row, before its times
    at_time, in_time = head, True
    if BY_CHANNEL:
        at_time, in_time = head * KEY_DIM + dim, dim < KEY_DIM
    rate, bias, passed = tl.load(decay + head), tl.load(time_bias + at_time, mask=in_time, other=0.0), 0.0
    if MAMBA:
        passed = tl.load(skip + head)
    own = (head * KEY_DIM + dim)[:, None] * VALUE_DIM + column[None, :]
    inside = (dim < KEY_DIM)[:, None] & (column < VALUE_DIM)[None, :]
    numbers = tl.load(state + own, mask=inside, other=0.0)
    token = _token(
        held, rows, row_stride, 0, first_new, head, at_key, at_value, NUM_STEPS + at_time, in_key, in_value, in_time,
        KEY_SIZE, CHANNELS, CHANNELS + NUM_STEPS + TIMES, HEADS * VALUE_DIM, WIDTH, WIDTH_PADDED,
    )  # fmt: skip
    begun = 0
    for part in range(2 - settles):  # those before the state is stored, and those after it
        end = tl.where(part == 0, stored, stop)
        for number in range(begun, end):
            query, key, value, step, time = token
            token = _token(
                held, rows, row_stride, tl.minimum(number + 1, stop - 1), first_new, head,
                at_key, at_value, NUM_STEPS + at_time, in_key, in_value, in_time,
                KEY_SIZE, CHANNELS, CHANNELS + NUM_STEPS + TIMES, HEADS * VALUE_DIM, WIDTH, WIDTH_PADDED,
            )  # fmt: skip
            query, key = _convolved(query, query_taps, query_bias), _convolved(key, key_taps, key_bias)
            value, time = _convolved(value, value_taps, value_bias), time.to(tl.float32) + bias
            log = rate * _softplus(time) if LEAST is None else LEAST / (1 + tl.exp(rate * time))
            numbers *= tl.exp(log)[:, None] if BY_CHANNEL else tl.exp(log)
            if MAMBA:
                update = _softplus(time) * value
            else:
                query *= tl.rsqrt(tl.sum(query * query, 0) + EPS) * SCALE
                key *= tl.rsqrt(tl.sum(key * key, 0) + EPS)
                step = STEPS / (1 + tl.exp(-step.to(tl.float32)))
                update = step * (value - tl.sum(key[:, None] * numbers, 0))
            seen = tl.sum(query[:, None] * numbers, 0)
            numbers = tl.fma(key[:, None], update[None, :], numbers)
            result = seen + tl.sum(query * key, 0) * update  # the query times the new state
            if MAMBA:
                result += passed * value
            target = ((number - replayed).to(tl.int64) * HEADS + head) * VALUE_DIM + column
            tl.store(out + target, result, mask=mask_if(number >= replayed, column < VALUE_DIM))
        begun = end
        if (part == 0) & (stored > 0):
            tl.store(state + own, numbers, mask=inside)


def finish_rows(
    seen,  # fp32 [T, H, VALUE_DIM]: what `advance_states` made
    rows,  # [T, numbers of the parts]; a row contiguous
    held,  # [W - 1 + M, kept], contiguous
    norm,  # [VALUE_DIM]; of Mamba-2 [H, VALUE_DIM]
    there,  # int64 [1]: n, where `count` is negative
    out,  # [T, H, VALUE_DIM]
    row_stride,
    count,  # n
    num_rows,  # T
    settles,  # 1: of the last tokens W - 1 inputs are held, 0: of those before the rows, and all rows
    CHANNELS: tl.constexpr,  # of queries, keys and values
    TIMES: tl.constexpr,  # as of `advance_states`
    HEADS: tl.constexpr,  # H
    VALUE_DIM: tl.constexpr,
    WIDTH: tl.constexpr,  # W
    EPS: tl.constexpr,
    MAMBA: tl.constexpr,
    SIGMOID: tl.constexpr,  # the function of a delta rule's gates; else silu
    NORMED: tl.constexpr,
    GROUPS: tl.constexpr,  # parts of a row that are normed: heads, or several of them in one
    GROUP_PADDED: tl.constexpr,
    WIDTH_PADDED: tl.constexpr,
    NUMBERS: tl.constexpr,  # of inputs that a program moves
    ROWS: tl.constexpr,  # of them that it moves at a time
):
    """Program p of the first T * GROUPS: the norm and gate of a part of a row. Each other program: a block of the held
    numbers. It reads before it writes, since source and target of the numbers that move overlap."""
    number, own = tl.program_id(0), num_rows * GROUPS
    SIZE: tl.constexpr = HEADS * VALUE_DIM // GROUPS
    if number < own:
        column, row = tl.arange(0, GROUP_PADDED), (number // GROUPS).to(tl.int64)
        inside, at = column < SIZE, number % GROUPS * SIZE + column
        numbers = tl.load(seen + row * (HEADS * VALUE_DIM) + at, mask=inside, other=0.0)
        gate = tl.load(rows + row * row_stride + CHANNELS + at, mask=inside, other=0.0).to(tl.float32)
        if MAMBA:
            numbers *= _silu(gate)
        if NORMED:
            numbers *= tl.rsqrt(tl.sum(numbers * numbers, 0) / SIZE + EPS)
            factors = tl.load(norm + (at if MAMBA else column), mask=inside, other=0.0).to(tl.float32)
            numbers *= factors if MAMBA else factors * _gate(gate, SIGMOID)
        tl.store(out + row * (HEADS * VALUE_DIM) + at, numbers.to(out.dtype.element_ty), mask=inside)
        return
    KEPT: tl.constexpr = CHANNELS + (1 - MAMBA) * HEADS + TIMES
    channel = (number - own) * NUMBERS + tl.arange(0, NUMBERS)[None, :]
    source = channel + tl.where(channel < CHANNELS, 0, HEADS * VALUE_DIM)  # of a new row, which has gates
    if _are_aligned(KEPT, HEADS * VALUE_DIM):
        source = tl.max_contiguous(tl.multiple_of(source, (1, 16)), (1, 16))
    replayed = tl.load(there, mask=count < 0, other=count).to(tl.int32)
    first_new, tap = replayed + WIDTH - 1, tl.arange(0, WIDTH_PADDED)[:, None]
    place, real = replayed + num_rows * settles + tap, (tap < WIDTH - 1) & (channel < KEPT)
    older, target = place < first_new, (place - first_new).to(tl.int64) * row_stride + source
    before = tl.load(held + place.to(tl.int64) * KEPT + channel, mask=real & older, other=0.0)
    moved = tl.where(older, before, tl.load(rows + target, mask=real & (place >= first_new), other=0.0))
    tl.debug_barrier()
    tl.store(held + tap * KEPT + channel, moved, mask=real)
    for first in range(0, tl.where(settles == 0, num_rows, 0), ROWS):
        row = first + tl.arange(0, ROWS)[:, None]
        own_rows = (row < num_rows) & (channel < KEPT)
        numbers = tl.load(rows + row.to(tl.int64) * row_stride + source, mask=own_rows, other=0.0)
        tl.store(held + (WIDTH - 1 + row) * KEPT + channel, numbers, mask=own_rows)


def _of_any_numbers(program: Callable[..., None], *, aligned: bool):
    """The program, compiled once: for all numbers, and for any pointers or for those to multiples of 16 bytes."""
    numbers = ("count", "num_rows", "settles")
    return triton.jit(program, do_not_specialize=numbers if aligned else [*range(len(signature(program).parameters))])


# By whether all rows begin at multiples of 16.
ADVANCE = {aligned: _of_any_numbers(advance_states, aligned=aligned) for aligned in (False, True)}
FINISH = {aligned: _of_any_numbers(finish_rows, aligned=aligned) for aligned in (False, True)}
