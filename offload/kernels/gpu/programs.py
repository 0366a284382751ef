"""The programs of a GPU's attention, in Triton. `offload.kernels.gpu.attention` launches them and owns their memory.

Letters: T rows, G query heads for each of H_kv KV heads, R = T * G folded rows (row t * G + g), D head dimension.
All scores, weights, sums and partial results are fp32.
"""

# Triton evaluates the annotations, so they are not postponed.
import triton
import triton.language as tl


@triton.jit
def mask_if(condition, mask):
    """The mask, or an empty one unless the scalar condition holds. `mask & condition` is the same on a GPU, but in
    Triton's interpreter a scalar comparison has the type of its operands, and the result is no boolean."""
    return tl.where(condition, mask, False)


@triton.jit
def _folded_in(
    out,  # [ROWS, DIM_PADDED]: weighted values of the spans so far
    top,  # [ROWS]: largest log-sum-exp of the spans so far
    total,  # [ROWS]: sum of the spans' weights, relative to `top`
    partials,  # [spans, H_kv, R, D]
    sums,  # [spans, H_kv, R]
    num_spans,
    stride,  # H_kv * R
    row,  # [ROWS]: indices of the rows among R
    real,
    dims,
    DIM: tl.constexpr,
    UNROLL: tl.constexpr,  # spans whose loads may overlap
):
    """The running result (out, top, total) after folding in the spans of a run, one after the other, so that it does
    not depend on where a run ends. A span without any token for a row does not change the row's bits. Multiplications
    are fused explicitly, not at the compiler's choice."""
    for span in tl.range(0, num_spans, loop_unroll_factor=UNROLL):
        source = row + span * stride
        log = tl.load(sums + source, mask=real, other=float("-inf"))
        part = tl.load(
            partials + source[:, None] * DIM + dims[None, :], mask=real[:, None] & (dims < DIM)[None, :], other=0.0
        )
        higher = tl.maximum(top, log)
        anchor = tl.where(higher == float("-inf"), 0.0, higher)
        share, weight = tl.exp(top - anchor), tl.exp(log - anchor)
        total = tl.fma(total, share, weight)
        shares = tl.broadcast_to(share[:, None], out.shape)
        out = tl.fma(out, shares, part * weight[:, None])
        top = higher
    return out, top, total


@triton.jit
def capped(score, CAP: tl.constexpr):
    """The capped score CAP tanh(score / CAP), as cap_scores of native/attention.h."""
    x = score / CAP
    u = x * x
    far = CAP - 2 * CAP / (1 + tl.exp(2 * tl.minimum(tl.maximum(x, -30.0), 30.0)))
    near = score * (((u + 378) * u + 17325) * u + 135135) / (((28 * u + 3150) * u + 62370) * u + 135135)
    return tl.where(u < 1, near, far)


@triton.jit
def with_run(
    running,  # [H_kv, R, D]: of the earlier runs, see `_folded_in`; not read without one
    tops,  # [H_kv, R]
    totals,  # [H_kv, R]
    partials,  # [spans, H_kv, R, D]: of the run
    sums,  # [spans, H_kv, R]
    num_spans,
    stride,  # H_kv * R
    row,  # [ROWS]: indices of the rows among R
    real,
    dims,
    begun,  # 0: there is no earlier run
    DIM: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """The running result (out, top, total) of the earlier runs, with the spans of a run folded in."""
    valid = mask_if(begun != 0, real)
    top = tl.load(tops + row, mask=valid, other=float("-inf"))
    total = tl.load(totals + row, mask=valid, other=0.0)
    begun_rows = valid[:, None] & (dims < DIM)[None, :]
    out = tl.load(running + row[:, None] * DIM + dims[None, :], mask=begun_rows, other=0.0)
    return _folded_in(out, top, total, partials, sums, num_spans, stride, row, real, dims, DIM, UNROLL)


@triton.jit
def softened(score, top, total):
    """Scores [ROWS, n], -inf for tokens that a row does not attend to, as (weights, the share by which what was summed
    before them is to be multiplied, the largest score, the sum of weights), the last two with those before."""
    higher = tl.maximum(top, tl.max(score, 1))
    anchor = tl.where(higher == float("-inf"), 0.0, higher)
    weight = tl.exp(score - anchor[:, None])
    share = tl.exp(top - anchor)
    return weight, share, higher, total * share + tl.sum(weight, 1)


@triton.jit(
    do_not_specialize=["first", "tokens", "num_pages", "column", "num_columns", "num_folded", "num_earlier", "begun"]
)
def attend_spans(
    queries,  # [T, H_kv * G, D] by the stride; a row contiguous
    places,  # [T] int64, rising: position of every row
    keys,  # [P, H_kv, S, D] by the strides; rows of D contiguous
    values,  # likewise
    partials,  # [spans, H_kv, R, D]: output of every span, normalised over it
    sums,  # [spans, H_kv, R]: its log-sum-exp, -inf for a row that attends to none of it
    earlier_partials,  # of the previous run, to be folded
    earlier_sums,
    running,  # [H_kv, R, D]: of the earlier runs, see `_folded_in`
    tops,  # [H_kv, R]
    totals,  # [H_kv, R]
    masses,  # [H_kv, R, num_columns]: log-sum-exp of every chunk
    query_stride,  # from row to row
    page_stride,
    head_stride,
    token_stride,
    first,  # position of the run's first token
    tokens,  # of the run that count; tokens after the last row are masked
    num_pages,  # P
    column,  # of the run's first chunk
    num_columns,
    num_folded,  # R
    num_earlier,  # spans of the previous run; 0: no fold
    begun,  # 0: `running` is not initialised yet, 1: it is
    scale,
    CAP: tl.constexpr,  # scores are c tanh(score / c); 0: no cap
    WINDOW: tl.constexpr,  # tokens that a row attends to, up to its own; 0: all
    RING: tl.constexpr,  # the run begins with the page of the first row's window; page n is at place n % P
    SPANS_OF_PAGE: tl.constexpr,
    SPAN: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    JOINED: tl.constexpr,  # keys and values are the halves of rows of D that are both
    HELD_PADDED: tl.constexpr,  # of the numbers of a key, D or D / 2
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    CHUNK: tl.constexpr,  # a power of two up to STEP; 0: no masses
    WIDEN: tl.constexpr,  # products of fp32: the interpreter has no bf16
):
    """Program (s, h, b): block b of the folded rows attends to span s of the run in KV head h. Programs after the last
    span fold the previous run, whose results are complete when this launch begins."""
    span, head, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_heads = tl.num_programs(1)
    folded = block * ROWS + tl.arange(0, ROWS)
    dims = tl.arange(0, DIM_PADDED)
    real = folded < num_folded
    inside = dims < DIM
    state = (head * num_folded + folded).to(tl.int64)
    if span * SPAN >= tokens:
        out, top, total = with_run(
            running, tops, totals, earlier_partials, earlier_sums, num_earlier, num_heads * num_folded, state, real,
            dims, begun, DIM, 1,
        )  # fmt: skip
        whole = real[:, None] & inside[None, :]
        tl.store(running + state[:, None] * DIM + dims[None, :], out, mask=whole)
        tl.store(tops + state, top, mask=real)
        tl.store(totals + state, total, mask=real)
        return
    page = span // SPANS_OF_PAGE
    if RING:
        seen_first = tl.maximum(tl.load(places).to(tl.int32) + 1 - WINDOW, 0) // (SPANS_OF_PAGE * SPAN)
        first = seen_first * (SPANS_OF_PAGE * SPAN)
        page = (seen_first + page) % num_pages
    base = span * SPAN  # in the run
    last = tl.load(places + num_folded // GROUP - 1).to(tl.int32) - first
    tokens = tl.minimum(tokens, last + 1)
    if base >= tokens:  # no row attends to any of it
        hidden_at = state + span.to(tl.int64) * (num_heads * num_folded)
        nothing = tl.zeros([ROWS, DIM_PADDED], tl.float32)
        hidden_mask = real[:, None] & inside[None, :]
        tl.store(partials + hidden_at[:, None] * DIM + dims[None, :], nothing, mask=hidden_mask)
        tl.store(sums + hidden_at, tl.full([ROWS], float("-inf"), tl.float32), mask=real)
        if CHUNK > 0:
            for hidden in range(0, SPAN, STEP):
                columns = column + (base + hidden) // CHUNK + tl.arange(0, STEP // CHUNK)
                valid = real[:, None] & (columns[None, :] < num_columns)
                none = tl.full([ROWS, STEP // CHUNK], float("-inf"), tl.float32)
                tl.store(masses + state[:, None] * num_columns + columns[None, :], none, mask=valid)
        return
    HELD: tl.constexpr = DIM // 2 if JOINED else DIM
    part = tl.arange(0, HELD_PADDED)
    present = part < HELD
    row = folded // GROUP
    at = (row * query_stride + (head * GROUP + folded % GROUP) * DIM)[:, None] + part[None, :]
    asked = real[:, None] & present[None, :]
    query = tl.load(queries + at, mask=asked, other=0.0)
    if WIDEN:
        query = query.to(tl.float32)
    if JOINED:
        query_2 = tl.load(queries + at + HELD, mask=asked, other=0.0)
        if WIDEN:
            query_2 = query_2.to(tl.float32)
        out_2 = tl.zeros([ROWS, HELD_PADDED], tl.float32)
    place = page.to(tl.int64) * page_stride + head.to(tl.int64) * head_stride
    start = span % SPANS_OF_PAGE * SPAN  # in its page
    own = tl.load(places + row, mask=real, other=0).to(tl.int32) - first  # place of the row's own token in the run
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, HELD_PADDED], tl.float32)
    for offset in range(0, SPAN, STEP):
        token = offset + tl.arange(0, STEP)
        held = base + token < tokens
        # A masked key may be any finite number; past `tokens` memory may hold anything.
        source = place + (start + token).to(tl.int64)[:, None] * token_stride + part[None, :]
        mask = held[:, None] & present[None, :]
        key = tl.load(keys + source, mask=mask, other=0.0)
        value = tl.load(values + source, mask=mask, other=0.0)
        if WIDEN:
            key = key.to(tl.float32)
        score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        if JOINED:
            if WIDEN:
                value = value.to(tl.float32)
            score += tl.dot(query_2, tl.trans(value), input_precision="ieee") * scale
        if CAP > 0:
            score = capped(score, CAP)
        seen = held[None, :] & (base + token[None, :] <= own[:, None])
        if WINDOW > 0:
            seen = seen & (base + token[None, :] > own[:, None] - WINDOW)
        score = tl.where(seen, score, float("-inf"))
        if CHUNK > 0:
            parts = tl.reshape(score, (ROWS, STEP // CHUNK, CHUNK))
            most = tl.max(parts, 2)
            anchor = tl.where(most == float("-inf"), 0.0, most)
            logs = anchor + tl.log(tl.sum(tl.exp(parts - anchor[:, :, None]), 2))
            at_column = column + (base + offset) // CHUNK + tl.arange(0, STEP // CHUNK)
            where = state[:, None] * num_columns + at_column[None, :]
            tl.store(masses + where, logs, mask=real[:, None] & (at_column[None, :] < num_columns))
        weight, share, top, total = softened(score, top, total)
        rounded = weight.to(values.dtype.element_ty)
        if WIDEN:
            rounded, value = rounded.to(tl.float32), value.to(tl.float32)
        if JOINED:
            out = out * share[:, None] + tl.dot(rounded, key, input_precision="ieee")
            out_2 = out_2 * share[:, None] + tl.dot(rounded, value, input_precision="ieee")
        else:
            out = out * share[:, None] + tl.dot(rounded, value, input_precision="ieee")
    divisor = tl.where(total > 0.0, total, 1.0)
    target = state + span.to(tl.int64) * (num_heads * num_folded)
    to = target[:, None] * DIM + part[None, :]
    tl.store(partials + to, out / divisor[:, None], mask=asked)
    if JOINED:
        tl.store(partials + to + HELD, out_2 / divisor[:, None], mask=asked)
    tl.store(sums + target, tl.where(total > 0.0, top + tl.log(divisor), float("-inf")), mask=real)


@triton.jit(do_not_specialize=["num_spans", "num_folded", "begun"])
def merge_spans(
    partials,  # [spans, H_kv, R, D], of the last run
    sums,  # [spans, H_kv, R]
    running,  # [H_kv, R, D]: of the earlier runs, see `_folded_in`
    tops,  # [H_kv, R]
    totals,  # [H_kv, R]
    out,  # [T, H_kv * G, D], contiguous
    logs,  # [H_kv, R]: log-sum-exp over all spans and the sink logit
    sink_logits,  # [H_kv * G]; not read if not SINKS
    num_spans,
    num_folded,  # R
    begun,  # 0: there is no earlier run
    SINKS: tl.constexpr,  # each head has a sink logit
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    NUMBERS: tl.constexpr,  # of a part
    ROWS: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Program (h, b, n): fold the last run of block b of the folded rows in KV head h, of each row the numbers of part
    n, then the sink logits of its query heads, and divide."""
    head, block, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_heads = tl.num_programs(0)
    folded = block * ROWS + tl.arange(0, ROWS)
    dims = part * NUMBERS + tl.arange(0, NUMBERS)
    real = folded < num_folded
    whole = real[:, None] & (dims < DIM)[None, :]
    state = (head * num_folded + folded).to(tl.int64)
    merged, top, total = with_run(
        running, tops, totals, partials, sums, num_spans, num_heads * num_folded, state, real, dims, begun, DIM, UNROLL
    )
    if SINKS:
        sink = tl.load(sink_logits + head * GROUP + folded % GROUP, mask=real, other=0.0)
        higher = tl.maximum(top, sink)
        share = tl.exp(top - higher)
        total = tl.fma(total, share, tl.exp(sink - higher))
        merged = merged * share[:, None]
        top = higher
    divisor = tl.where(total > 0.0, total, 1.0)
    target = ((folded // GROUP) * num_heads + head) * GROUP + folded % GROUP
    mean = (merged / divisor[:, None]).to(out.dtype.element_ty)
    tl.store(out + target[:, None] * DIM + dims[None, :], mean, mask=whole)
    log = tl.where(total > 0.0, top + tl.log(divisor), float("-inf"))
    tl.store(logs + state, log, mask=mask_if(part == 0, real))


@triton.jit(do_not_specialize=["num_columns", "num_folded"])
def join_masses(
    masses,  # [H_kv, R, num_columns]: log-sum-exp of every chunk
    logs,  # [H_kv, R]: log-sum-exp over all chunks, finite for rows that attend to any token
    joined,  # [T, H_kv, num_columns]
    num_columns,
    num_folded,  # R
    GROUP: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Program (t, h, c): row t's softmax masses in block c of the chunks, summed over KV head h's query group."""
    row, head, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < num_columns
    mass = tl.zeros([COLUMNS], tl.float32)
    for member in tl.static_range(GROUP):
        folded = (head * num_folded + row * GROUP + member).to(tl.int64)
        log = tl.load(masses + folded * num_columns + column, mask=inside, other=float("-inf"))
        mass += tl.exp(log - tl.load(logs + folded))
    target = (row * tl.num_programs(1) + head).to(tl.int64) * num_columns + column
    tl.store(joined + target, mass.to(joined.dtype.element_ty), mask=inside)
