"""The program of a GPU's attention of a prefill, in Triton. `offload.kernels.gpu.prefill` launches it.

Letters: T rows, H query heads, H_kv KV heads, P pages of S tokens, D head dimension. Scores, weights, their sums and
running results are fp32. Logarithms are to the base 2, since a GPU computes powers of 2.
"""

# Triton evaluates the annotations, so they are not postponed.
import triton
import triton.language as tl

from offload.kernels.gpu.programs import capped, mask_if


@triton.jit
def weighed(
    score,  # [ROWS, STEP]: products of rows and tokens
    place,  # [STEP]: of the tokens in the tile
    own,  # [ROWS]: places of the rows' own tokens in the tile
    top,  # [ROWS]: the largest score so far; -inf: no token so far
    total,  # [ROWS]: the sum of weights so far, relative to `top`
    factor,  # of products, or of capped scores
    scale,  # of products that are capped
    MASKED: tl.constexpr,  # some rows do not attend to some tokens
    CAP: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """The tokens' weights [ROWS, STEP], the share [ROWS] of what was so far, and the running (top, total)."""
    if CAP > 0:
        score = capped(score * scale, CAP)
    if MASKED:
        seen = place[None, :] <= own[:, None]
        if WINDOW > 0:
            seen = seen & (place[None, :] > own[:, None] - WINDOW)
        score = tl.where(seen, score, float("-inf"))
    higher = tl.maximum(top, tl.max(score, 1) * factor)
    anchor = higher
    if MASKED:
        anchor = tl.where(higher == float("-inf"), 0.0, higher)
    weight = tl.exp2(score * factor - anchor[:, None])
    share = tl.exp2(top - anchor)
    return weight, share, higher, total * share + tl.sum(weight, 1)


@triton.jit
def begun_with(tops, totals, sink_logit, state, valid, SINKS: tl.constexpr):
    """The running (top, total) of the earlier tiles, or of the sink logit, with which the first tile's rows begin."""
    top = tl.load(tops + state, mask=valid, other=float("-inf"))
    total = tl.load(totals + state, mask=valid, other=0.0)
    if SINKS:
        sink = tl.load(sink_logit) * 1.4426950408889634
        top, total = tl.where(valid, top, sink), tl.where(valid, total, 1.0)
    return top, total


@triton.jit
def steps_of(
    lowest,  # place of the block's first row
    rows_end,  # place behind the last row
    tokens,  # of the tile
    WINDOW: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
):
    """(start, stop) of the tokens that some rows of a block do not attend to; with a window, of all that some do."""
    stop = tl.minimum(tl.minimum(lowest + ROWS, rows_end), tokens)
    if WINDOW > 0:
        start = tl.maximum(lowest - WINDOW + 1, 0) // STEP * STEP
    else:
        start = tl.maximum(tl.minimum(lowest + 1, stop), 0) // STEP * STEP
    return start, stop


@triton.jit
def _over_steps(
    out,  # [ROWS, DIM_PADDED]: weighted values so far, relative to `top`
    top,  # [ROWS]: the largest score so far; -inf: no token so far
    total,  # [ROWS]: the sum of weights so far, relative to `top`
    query,  # [ROWS, DIM_PADDED]
    own,  # [ROWS]: places of the rows' own tokens in the tile
    keys,  # of the KV head
    values,
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
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    STEP: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """The running result (out, top, total) after tokens `start` to `stop` of the tile."""
    dims, inside = tl.arange(0, DIM_PADDED), tl.arange(0, DIM_PADDED) < DIM
    for base in range(start, stop, STEP):
        token = base % PAGE + tl.arange(0, STEP)
        page = tl.cast(base // PAGE, tl.int64) * page_stride
        source = page + token.to(tl.int64)[:, None] * token_stride + dims[None, :]
        if MASKED:
            held = (base + tl.arange(0, STEP) < stop)[:, None] & inside[None, :]
            key = tl.load(keys + source, mask=held, other=0.0)
            value = tl.load(values + source, mask=held, other=0.0)
        elif DIM == DIM_PADDED:
            key, value = tl.load(keys + source), tl.load(values + source)
        else:
            key = tl.load(keys + source, mask=inside[None, :], other=0.0)
            value = tl.load(values + source, mask=inside[None, :], other=0.0)
        if WIDEN:
            key, value = key.to(tl.float32), value.to(tl.float32)
        score = tl.dot(query, tl.trans(key), input_precision="ieee")
        place = base + tl.arange(0, STEP)
        weight, share, top, total = weighed(score, place, own, top, total, factor, scale, MASKED, CAP, WINDOW)
        out = tl.dot(weight.to(value.dtype), value, out * share[:, None], input_precision="ieee")
    return out, top, total


@triton.jit(do_not_specialize=["num_rows", "own_first", "tokens", "begun", "last"])
def attend_tile(
    queries,  # [T, H, D] by the strides; a head contiguous
    keys,  # [P, H_kv, S, D] by the strides; rows of D contiguous
    values,  # likewise
    running,  # [T, H, D]: weighted values of the earlier tiles, relative to `tops`; not read without any
    tops,  # [T, H]: the largest scores
    totals,  # [T, H]: sums of weights
    mean,  # [T, H, D]: attention over all tiles
    sink_logits,  # [H]; not read if not SINKS
    query_stride,  # from row to row
    query_head_stride,
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
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,  # PAGE is a multiple
    WIDEN: tl.constexpr,  # products of fp32: the interpreter has no bf16
):
    """Program (b, h): block b of the rows attends in query head h to a tile. Steps without any token for its rows are
    skipped, and steps in which all rows attend to all tokens are not masked."""
    block, head = tl.program_id(0), tl.program_id(1)
    row, dims = block * ROWS + tl.arange(0, ROWS), tl.arange(0, DIM_PADDED)
    real = row < num_rows
    whole = real[:, None] & (dims < DIM)[None, :]
    at = row.to(tl.int64)[:, None] * query_stride + head * query_head_stride + dims[None, :]
    query = tl.load(queries + at, mask=whole, other=0.0)
    if WIDEN:
        query = query.to(tl.float32)
    state = row.to(tl.int64) * tl.num_programs(1) + head
    valid = mask_if(begun != 0, real)
    top, total = begun_with(tops, totals, sink_logits + head, state, valid, SINKS)
    place = state[:, None] * DIM + dims[None, :]
    out = tl.load(running + place, mask=mask_if(begun != 0, whole), other=0.0)

    own = own_first + row
    kv_head = (head // GROUP).to(tl.int64) * head_stride
    factor = scale * 1.4426950408889634
    if CAP > 0:
        factor = 1.4426950408889634
    start, stop = steps_of(own_first + block * ROWS, own_first + num_rows, tokens, WINDOW, ROWS, STEP)
    if WINDOW == 0:
        out, top, total = _over_steps(
            out, top, total, query, own, keys + kv_head, values + kv_head, page_stride, token_stride, 0, start, factor,
            scale, False, CAP, WINDOW, PAGE, DIM, DIM_PADDED, STEP, WIDEN,
        )  # fmt: skip
    out, top, total = _over_steps(
        out, top, total, query, own, keys + kv_head, values + kv_head, page_stride, token_stride, start, stop, factor,
        scale, True, CAP, WINDOW, PAGE, DIM, DIM_PADDED, STEP, WIDEN,
    )  # fmt: skip

    if last != 0:
        divisor = tl.where(total > 0.0, total, 1.0)
        tl.store(mean + place, (out / divisor[:, None]).to(mean.dtype.element_ty), mask=whole)
    else:
        tl.store(running + place, out, mask=whole)
        tl.store(tops + state, top, mask=real)
        tl.store(totals + state, total, mask=real)
