"""The program of a GPU's attention of a prefill to heads in halves, in Triton: of latents and of wide heads.
`offload.kernels.gpu.halves` launches it.

A latent is a token's row that is both key and value, see `Scoring.joined`. It is in two parts, and of each part the
first numbers are rotated; the others are values. A wide head has a key, which is one part, and a value of its own. One
row of scores takes all numbers of a head, which no GPU has room for at once, so they are summed over slices that pass
through shared memory, of queries and of keys alike. Values are added up in two halves.
Letters: T rows, H query heads, H_kv KV heads, P pages of S tokens, D numbers of a head. Scores, weights, their sums and
running results are fp32. Logarithms are to the base 2.
"""

# Triton evaluates the annotations, so they are not postponed.
import triton
import triton.language as tl

from offload.kernels.gpu.prefill_programs import begun_with, steps_of, weighed
from offload.kernels.gpu.programs import mask_if


@triton.jit
def _with_slice(
    score,  # [ROWS, STEP]
    queries,  # [ROWS, 1]: the first number of each row
    keys,  # [STEP, 1]: the first number of each token
    held,  # [STEP, 1]: tokens that are there
    first,
    count: tl.constexpr,  # of SLICE numbers
    MASKED: tl.constexpr,
    SLICE: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """The products of rows and tokens with those of numbers `first` to `first` + `count` added."""
    dims = tl.arange(0, SLICE)[None, :]
    if count == SLICE:
        query = tl.load(queries + first + dims)
    else:
        query = tl.load(queries + first + dims, mask=dims < count, other=0.0)
    if MASKED:
        key = tl.load(keys + first + dims, mask=held & (dims < count), other=0.0)
    elif count == SLICE:
        key = tl.load(keys + first + dims)
    else:
        key = tl.load(keys + first + dims, mask=dims < count, other=0.0)
    if WIDEN:
        query, key = query.to(tl.float32), key.to(tl.float32)
    return tl.dot(query, tl.trans(key), score, input_precision="ieee")


@triton.jit
def _scores(
    queries,  # [ROWS, 1]: the first number of each row
    keys,  # [STEP, 1]: the first number of each token
    held,  # [STEP, 1]: tokens that are there
    part_stride,
    MASKED: tl.constexpr,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
    TURNED: tl.constexpr,
    TURNED_PADDED: tl.constexpr,
    SLICE: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """The products [ROWS, STEP] of rows and tokens: those of the parts' first numbers, then slice by slice."""
    score = tl.zeros([ROWS, STEP], tl.float32)
    if TURNED > 0:
        for part in tl.static_range(PARTS):
            query, key = queries + part * PART, keys + part * part_stride
            score = _with_slice(score, query, key, held, 0, TURNED, MASKED, TURNED_PADDED, WIDEN)
    for part in tl.static_range(PARTS):
        query, key = queries + part * PART, keys + part * part_stride
        for first in range(TURNED, PART, SLICE):
            score = _with_slice(score, query, key, held, first, SLICE, MASKED, SLICE, WIDEN)
    return score


@triton.jit
def _mixed(
    out,  # [ROWS, WIDTH_PADDED]: weighted values so far
    weight,  # [ROWS, STEP]
    share,  # [ROWS]: of what is so far
    values,  # [STEP, 1]: the first value of each token in one half
    held,
    MASKED: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_PADDED: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """`out` after the tokens of a step, of one half."""
    dims = tl.arange(0, WIDTH_PADDED)[None, :]
    if MASKED:
        value = tl.load(values + dims, mask=held & (dims < WIDTH), other=0.0)
    elif WIDTH == WIDTH_PADDED:
        value = tl.load(values + dims)
    else:
        value = tl.load(values + dims, mask=dims < WIDTH, other=0.0)
    rounded = weight.to(value.dtype)
    if WIDEN:
        rounded, value = rounded.to(tl.float32), value.to(tl.float32)
    return tl.dot(rounded, value, out * share[:, None], input_precision="ieee")


@triton.jit
def _over_steps(
    out,  # [ROWS, WIDTH_PADDED]: weighted values of the first half so far, relative to `top`
    out_2,  # of the second half
    top,  # [ROWS]: the largest score so far; -inf: no token so far
    total,  # [ROWS]: the sum of weights so far, relative to `top`
    queries,  # [ROWS, 1]: the first number of each row
    own,  # [ROWS]: places of the rows' own tokens in the tile
    keys,  # of the KV head
    values,
    part_stride,
    second,
    page_stride,
    token_stride,
    start,  # a multiple of STEP
    stop,
    factor,  # of products of queries and keys, or of capped scores
    scale,  # of products that are capped
    MASKED: tl.constexpr,  # some rows do not attend to some tokens, or tokens from `stop` on may not be finite
    CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    PAGE: tl.constexpr,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
    TURNED: tl.constexpr,
    TURNED_PADDED: tl.constexpr,
    SLICE: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_2: tl.constexpr,
    WIDTH_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """The running result (out, out_2, top, total) after tokens `start` to `stop` of the tile."""
    for base in range(start, stop, STEP):
        page = tl.cast(base // PAGE, tl.int64) * page_stride
        token = (base % PAGE + tl.arange(0, STEP))[:, None] * token_stride  # within a page
        place = base + tl.arange(0, STEP)
        held = (place < stop)[:, None]
        score = _scores(
            queries, keys + page + token, held, part_stride, MASKED, PARTS, PART, TURNED, TURNED_PADDED, SLICE, ROWS,
            STEP, WIDEN,
        )  # fmt: skip
        weight, share, top, total = weighed(score, place, own, top, total, factor, scale, MASKED, CAP, WINDOW)
        value = values + page + token
        out = _mixed(out, weight, share, value, held, MASKED, WIDTH, WIDTH_PADDED, WIDEN)
        out_2 = _mixed(out_2, weight, share, value + second, held, MASKED, WIDTH_2, WIDTH_PADDED, WIDEN)
    return out, out_2, top, total


@triton.jit(do_not_specialize=["num_rows", "own_first", "tokens", "begun", "last"])
def attend_halves(
    queries,  # [T, H, D] by the strides; a head contiguous
    keys,  # [P, H_kv, S, PART] by the strides, of the first part; parts contiguous
    values,  # by the same strides: the first value of the first half
    running,  # [T, H, D]: weighted values of the earlier tiles, relative to `tops`; not read without any
    tops,  # [T, H]: the largest scores
    totals,  # [T, H]: sums of weights
    mean,  # [T, H, D]: attention over all tiles. Numbers that are no values stay as they are, here as in running
    sink_logits,  # [H]; not read if not SINKS
    query_stride,  # from row to row
    query_head_stride,
    part_stride,  # from part to part of a key
    second,  # from the first half to the second of a token's values
    page_stride,
    head_stride,
    token_stride,
    num_rows,
    own_first,  # place of the first row's own token in the tile; negative if it is before the tile
    tokens,  # of the tile
    begun,  # 0: this is the first tile
    last,  # 1: this is the last tile, and `mean` is written
    scale,
    CAP: tl.constexpr,  # scores are c tanh(score / c); 0: no cap
    WINDOW: tl.constexpr,  # tokens that a row attends to, up to its own; 0: all
    SINKS: tl.constexpr,  # each head has a sink logit
    PAGE: tl.constexpr,
    GROUP: tl.constexpr,
    PARTS: tl.constexpr,  # D is PARTS * PART
    PART: tl.constexpr,
    TURNED: tl.constexpr,  # numbers at the beginning of a part whose products are summed first
    TURNED_PADDED: tl.constexpr,
    SLICE: tl.constexpr,  # PART - TURNED is a multiple
    PLACE: tl.constexpr,  # of the first half in a row of `mean`
    PLACE_2: tl.constexpr,
    WIDTH: tl.constexpr,  # of the first half
    WIDTH_2: tl.constexpr,
    WIDTH_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,  # PAGE is a multiple
    WIDEN: tl.constexpr,  # products of fp32: the interpreter has no bf16
):
    """Program (b, h): block b of the rows attends in query head h to a tile. Steps without any token for its rows are
    skipped, and steps in which all rows attend to all tokens are not masked."""
    block, head = tl.program_id(0), tl.program_id(1)
    row, dims = block * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH_PADDED)[None, :]
    real = row < num_rows
    whole, whole_2 = real[:, None] & (dims < WIDTH), real[:, None] & (dims < WIDTH_2)
    asked = tl.minimum(row, num_rows - 1).to(tl.int64)[:, None] * query_stride + head * query_head_stride
    state = row.to(tl.int64) * tl.num_programs(1) + head
    top, total = begun_with(tops, totals, sink_logits + head, state, mask_if(begun != 0, real), SINKS)
    place = state[:, None] * (PARTS * PART) + dims
    out = tl.load(running + place + PLACE, mask=mask_if(begun != 0, whole), other=0.0)
    out_2 = tl.load(running + place + PLACE_2, mask=mask_if(begun != 0, whole_2), other=0.0)

    own = own_first + row
    kv_head = (head // GROUP).to(tl.int64) * head_stride
    factor = scale * 1.4426950408889634
    if CAP > 0:
        factor = 1.4426950408889634
    start, stop = steps_of(own_first + block * ROWS, own_first + num_rows, tokens, WINDOW, ROWS, STEP)
    if WINDOW == 0:
        out, out_2, top, total = _over_steps(
            out, out_2, top, total, queries + asked, own, keys + kv_head, values + kv_head, part_stride, second,
            page_stride, token_stride, 0, start, factor, scale, False, CAP, WINDOW, PAGE, PARTS, PART, TURNED,
            TURNED_PADDED, SLICE, WIDTH, WIDTH_2, WIDTH_PADDED, ROWS, STEP, WIDEN,
        )  # fmt: skip
    out, out_2, top, total = _over_steps(
        out, out_2, top, total, queries + asked, own, keys + kv_head, values + kv_head, part_stride, second,
        page_stride, token_stride, start, stop, factor, scale, True, CAP, WINDOW, PAGE, PARTS, PART, TURNED,
        TURNED_PADDED, SLICE, WIDTH, WIDTH_2, WIDTH_PADDED, ROWS, STEP, WIDEN,
    )  # fmt: skip

    if last != 0:
        divisor = tl.where(total > 0.0, total, 1.0)[:, None]
        tl.store(mean + place + PLACE, (out / divisor).to(mean.dtype.element_ty), mask=whole)
        tl.store(mean + place + PLACE_2, (out_2 / divisor).to(mean.dtype.element_ty), mask=whole_2)
    else:
        tl.store(running + place + PLACE, out, mask=whole)
        tl.store(running + place + PLACE_2, out_2, mask=whole_2)
        tl.store(tops + state, top, mask=real)
        tl.store(totals + state, total, mask=real)
