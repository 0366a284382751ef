"""The program of a GPU's attention of a prefill to latents, in Triton. `offload.kernels.gpu.latents` launches it.

A latent is a token's row that is both key and value, see `Scoring.joined`. It has D numbers in two halves, and of each
half the first R are rotated; the others are values. One row of scores takes all of D, which no GPU has room for at
once, so they are summed over slices that pass through shared memory, of queries and of latents alike.
Letters: T rows, H query heads, P pages of S tokens, D numbers of a latent, R rotated ones of a half. Scores, weights,
their sums and running results are fp32. Logarithms are to the base 2.
"""

# Triton evaluates the annotations, so they are not postponed.
import triton
import triton.language as tl

from offload.kernels.gpu.programs import mask_if


@triton.jit
def _with_slice(
    score,  # [ROWS, STEP]
    queries,  # [ROWS, 1]: the first number of each row
    latents,  # [STEP, 1]: the first number of each token
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
        key = tl.load(latents + first + dims, mask=held & (dims < count), other=0.0)
    elif count == SLICE:
        key = tl.load(latents + first + dims)
    else:
        key = tl.load(latents + first + dims, mask=dims < count, other=0.0)
    if WIDEN:
        query, key = query.to(tl.float32), key.to(tl.float32)
    return tl.dot(query, tl.trans(key), score, input_precision="ieee")


@triton.jit
def _scores(
    queries,  # [ROWS, 1]: the first number of each row
    latents,  # [STEP, 1]: the first number of each token
    held,  # [STEP, 1]: tokens that are there
    half_stride,
    MASKED: tl.constexpr,
    HALF: tl.constexpr,
    PLAIN: tl.constexpr,
    TURNED_PADDED: tl.constexpr,
    SLICE: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """The products [ROWS, STEP] of rows and tokens: those of rotated numbers, then slice by slice."""
    score = tl.zeros([ROWS, STEP], tl.float32)
    for half in tl.static_range(2):
        query, key = queries + half * HALF, latents + half * half_stride
        score = _with_slice(score, query, key, held, 0, HALF - PLAIN, MASKED, TURNED_PADDED, WIDEN)
    for half in tl.static_range(2):
        query, key = queries + half * HALF, latents + half * half_stride
        for first in range(HALF - PLAIN, HALF, SLICE):
            score = _with_slice(score, query, key, held, first, SLICE, MASKED, SLICE, WIDEN)
    return score


@triton.jit
def _mixed(
    out,  # [ROWS, PLAIN_PADDED]: weighted values so far
    weight,  # [ROWS, STEP]
    share,  # [ROWS]: of what is so far
    values,  # [STEP, 1]: the first value of each token in one half
    held,
    MASKED: tl.constexpr,
    PLAIN: tl.constexpr,
    PLAIN_PADDED: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """`out` after the tokens of a step, of one half."""
    dims = tl.arange(0, PLAIN_PADDED)[None, :]
    if MASKED:
        value = tl.load(values + dims, mask=held & (dims < PLAIN), other=0.0)
    elif PLAIN == PLAIN_PADDED:
        value = tl.load(values + dims)
    else:
        value = tl.load(values + dims, mask=dims < PLAIN, other=0.0)
    rounded = weight.to(value.dtype)
    if WIDEN:
        rounded, value = rounded.to(tl.float32), value.to(tl.float32)
    return tl.dot(rounded, value, out * share[:, None], input_precision="ieee")


@triton.jit
def _over_steps(
    out,  # [ROWS, PLAIN_PADDED]: weighted values of the first half so far, relative to `top`
    out_2,  # of the second half
    top,  # [ROWS]: the largest score so far; -inf: no token so far
    total,  # [ROWS]: the sum of weights so far, relative to `top`
    queries,  # [ROWS, 1]: the first number of each row
    own,  # [ROWS]: places of the rows' own tokens in the tile
    latents,
    half_stride,
    page_stride,
    token_stride,
    start,  # a multiple of STEP
    stop,
    factor,  # of products of queries and latents
    MASKED: tl.constexpr,  # some rows do not attend to some tokens, or tokens from `stop` on may not be finite
    PAGE: tl.constexpr,
    HALF: tl.constexpr,
    PLAIN: tl.constexpr,
    PLAIN_PADDED: tl.constexpr,
    TURNED_PADDED: tl.constexpr,
    SLICE: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """The running result (out, out_2, top, total) after tokens `start` to `stop` of the tile."""
    for base in range(start, stop, STEP):
        token = (base % PAGE + tl.arange(0, STEP)).to(tl.int64)[:, None] * token_stride
        step = latents + tl.cast(base // PAGE, tl.int64) * page_stride + token
        place = base + tl.arange(0, STEP)
        held = (place < stop)[:, None]
        score = _scores(queries, step, held, half_stride, MASKED, HALF, PLAIN, TURNED_PADDED, SLICE, ROWS, STEP, WIDEN)
        if MASKED:
            score = tl.where(place[None, :] <= own[:, None], score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1) * factor)
        anchor = higher
        if MASKED:
            anchor = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp2(score * factor - anchor[:, None])
        share = tl.exp2(top - anchor)
        total = total * share + tl.sum(weight, 1)
        value = step + (HALF - PLAIN)
        out = _mixed(out, weight, share, value, held, MASKED, PLAIN, PLAIN_PADDED, WIDEN)
        out_2 = _mixed(out_2, weight, share, value + half_stride, held, MASKED, PLAIN, PLAIN_PADDED, WIDEN)
        top = higher
    return out, out_2, top, total


@triton.jit(do_not_specialize=["num_rows", "own_first", "tokens", "begun", "last"])
def attend_latents(
    queries,  # [T, H, D] by the strides; a head contiguous
    latents,  # [2, P, S, D / 2] by the strides; halves contiguous
    running,  # [T, H, D]: weighted values of the earlier tiles, relative to `tops`; not read without any
    tops,  # [T, H]: the largest scores
    totals,  # [T, H]: sums of weights
    mean,  # [T, H, D]: attention over all tiles. Numbers where queries are rotated stay as they are, here as in running
    query_stride,  # from row to row
    query_head_stride,
    half_stride,
    page_stride,
    token_stride,
    num_rows,
    own_first,  # place of the first row's own token in the tile; negative if it is before the tile
    tokens,  # of the tile
    begun,  # 0: this is the first tile
    last,  # 1: this is the last tile, and `mean` is written
    scale,
    PAGE: tl.constexpr,
    HALF: tl.constexpr,  # D / 2
    PLAIN: tl.constexpr,  # of a half, D / 2 - R
    PLAIN_PADDED: tl.constexpr,
    TURNED_PADDED: tl.constexpr,  # of R
    SLICE: tl.constexpr,  # PLAIN is a multiple
    ROWS: tl.constexpr,
    STEP: tl.constexpr,  # PAGE is a multiple
    WIDEN: tl.constexpr,  # products of fp32: the interpreter has no bf16
):
    """Program (b, h): block b of the rows attends in query head h to a tile. Steps without any token for its rows are
    skipped, and steps in which all rows attend to all tokens are not masked."""
    block, head = tl.program_id(0), tl.program_id(1)
    row, dims = block * ROWS + tl.arange(0, ROWS), tl.arange(0, PLAIN_PADDED)
    real = row < num_rows
    whole = real[:, None] & (dims < PLAIN)[None, :]
    asked = tl.minimum(row, num_rows - 1).to(tl.int64)[:, None] * query_stride + head * query_head_stride
    state = row.to(tl.int64) * tl.num_programs(1) + head
    valid = mask_if(begun != 0, real)
    top = tl.load(tops + state, mask=valid, other=float("-inf"))
    total = tl.load(totals + state, mask=valid, other=0.0)
    place = state[:, None] * (2 * HALF) + (HALF - PLAIN) + dims[None, :]
    out = tl.load(running + place, mask=mask_if(begun != 0, whole), other=0.0)
    out_2 = tl.load(running + place + HALF, mask=mask_if(begun != 0, whole), other=0.0)

    own = own_first + row
    lowest = own_first + block * ROWS  # place of the block's first row
    stop = tl.minimum(tl.minimum(lowest + ROWS, own_first + num_rows), tokens)
    start = tl.maximum(tl.minimum(lowest + 1, stop), 0) // STEP * STEP
    factor = scale * 1.4426950408889634
    out, out_2, top, total = _over_steps(
        out, out_2, top, total, queries + asked, own, latents, half_stride, page_stride, token_stride, 0, start, factor,
        False, PAGE, HALF, PLAIN, PLAIN_PADDED, TURNED_PADDED, SLICE, ROWS, STEP, WIDEN,
    )  # fmt: skip
    out, out_2, top, total = _over_steps(
        out, out_2, top, total, queries + asked, own, latents, half_stride, page_stride, token_stride, start, stop,
        factor, True, PAGE, HALF, PLAIN, PLAIN_PADDED, TURNED_PADDED, SLICE, ROWS, STEP, WIDEN,
    )  # fmt: skip

    if last != 0:
        divisor = tl.where(total > 0.0, total, 1.0)[:, None]
        tl.store(mean + place, (out / divisor).to(mean.dtype.element_ty), mask=whole)
        tl.store(mean + place + HALF, (out_2 / divisor).to(mean.dtype.element_ty), mask=whole)
    else:
        tl.store(running + place, out, mask=whole)
        tl.store(running + place + HALF, out_2, mask=whole)
        tl.store(tops + state, top, mask=real)
        tl.store(totals + state, total, mask=real)
