"""The programs of a card's attention, in Triton. `offload.kernels.card.attention` launches them and owns their memory.

Letters: T rows, G query heads for each of H_kv KV heads, R = T * G folded rows (row t * G + g), D head dimension.
All scores, weights, sums and partial results are fp32.
"""

# Triton reads the annotations: they are not postponed.
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["first", "tokens", "index", "slot", "num_columns", "num_folded"])
def attend_spans(
    queries,  # [T, H_kv * G, D], contiguous
    keys,  # [P, H_kv, S, D] by the strides; rows of D contiguous
    values,  # likewise
    partials,  # [slots, H_kv, R, D]: out of every span, normalised over it
    sums,  # [slots, H_kv, R]: its log-sum-exp, -inf for a row that sees nothing of it
    masses,  # [H_kv, R, num_columns]: log-sum-exp of every chunk
    page_stride,
    head_stride,
    token_stride,
    first,  # position of the run's first token
    tokens,  # of the run that count
    index,  # position of the first row
    slot,  # of the run's first span
    num_columns,
    num_folded,  # R
    scale,
    WINDOW: tl.constexpr,  # tokens that a row sees up to itself; 0: all
    SPANS_OF_PAGE: tl.constexpr,
    SPAN: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    CHUNK: tl.constexpr,  # a power of two up to STEP; 0: no masses
    WIDEN: tl.constexpr,  # products of fp32: the interpreter knows no bf16
):
    """Program (s, h, b): block b of the folded rows attends to span s of the run in KV head h."""
    span, head, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_heads = tl.num_programs(1)
    folded = block * ROWS + tl.arange(0, ROWS)
    dims = tl.arange(0, DIM_PADDED)
    real = folded < num_folded
    inside = dims < DIM
    row = folded // GROUP
    at = (row * num_heads + head) * GROUP + folded % GROUP
    query = tl.load(queries + at[:, None] * DIM + dims[None, :], mask=real[:, None] & inside[None, :], other=0.0)
    if WIDEN:
        query = query.to(tl.float32)
    place = (span // SPANS_OF_PAGE).to(tl.int64) * page_stride + head.to(tl.int64) * head_stride
    start = span % SPANS_OF_PAGE * SPAN  # in its page
    base = span * SPAN  # in the run
    own = index + row - first  # the row's own place in the run
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, DIM_PADDED], tl.float32)
    for offset in range(0, SPAN, STEP):
        token = offset + tl.arange(0, STEP)
        held = base + token < tokens
        # A hidden key of a row may be anything finite; past `tokens` there may be anything.
        source = place + (start + token).to(tl.int64)[:, None] * token_stride + dims[None, :]
        mask = held[:, None] & inside[None, :]
        key = tl.load(keys + source, mask=mask, other=0.0)
        value = tl.load(values + source, mask=mask, other=0.0)
        if WIDEN:
            key = key.to(tl.float32)
        score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        seen = held[None, :] & (base + token[None, :] <= own[:, None])
        if WINDOW > 0:
            seen = seen & (base + token[None, :] > own[:, None] - WINDOW)
        score = tl.where(seen, score, float("-inf"))
        if CHUNK > 0:
            parts = tl.reshape(score, (ROWS, STEP // CHUNK, CHUNK))
            most = tl.max(parts, 2)
            anchor = tl.where(most == float("-inf"), 0.0, most)
            logs = anchor + tl.log(tl.sum(tl.exp(parts - anchor[:, :, None]), 2))
            column = (slot + span) * (SPAN // CHUNK) + offset // CHUNK + tl.arange(0, STEP // CHUNK)
            where = (head * num_folded + folded).to(tl.int64)[:, None] * num_columns + column[None, :]
            tl.store(masses + where, logs, mask=real[:, None] & (column[None, :] < num_columns))
        higher = tl.maximum(top, tl.max(score, 1))
        anchor = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp(score - anchor[:, None])
        share = tl.exp(top - anchor)
        total = total * share + tl.sum(weight, 1)
        rounded = weight.to(value.dtype)
        if WIDEN:
            rounded, value = rounded.to(tl.float32), value.to(tl.float32)
        out = out * share[:, None] + tl.dot(rounded, value, input_precision="ieee")
        top = higher
    divisor = tl.where(total > 0.0, total, 1.0)
    target = (((slot + span) * num_heads + head) * num_folded + folded).to(tl.int64)
    tl.store(
        partials + target[:, None] * DIM + dims[None, :], out / divisor[:, None], mask=real[:, None] & inside[None, :]
    )
    tl.store(sums + target, tl.where(total > 0.0, top + tl.log(divisor), float("-inf")), mask=real)


@triton.jit(do_not_specialize=["num_slots", "num_folded"])
def merge_spans(
    partials,  # [slots, H_kv, R, D]
    sums,  # [slots, H_kv, R]
    out,  # [T, H_kv * G, D], contiguous
    totals,  # [H_kv, R]: log-sum-exp over all spans
    num_slots,
    num_folded,  # R
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Program (r, h): the spans of folded row r in KV head h, SLOTS at a time from the first one on, so that spans
    after those that the row sees change none of its bits."""
    folded, head = tl.program_id(0), tl.program_id(1)
    num_heads = tl.num_programs(1)
    dims = tl.arange(0, DIM_PADDED)
    inside = dims < DIM
    top = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    merged = tl.zeros([DIM_PADDED], tl.float32)
    for begin in range(0, num_slots, SLOTS):
        slot = begin + tl.arange(0, SLOTS)
        there = slot < num_slots
        source = ((slot * num_heads + head) * num_folded + folded).to(tl.int64)
        log = tl.load(sums + source, mask=there, other=float("-inf"))
        part = tl.load(
            partials + source[:, None] * DIM + dims[None, :], mask=there[:, None] & inside[None, :], other=0.0
        )
        higher = tl.maximum(top, tl.max(log, 0))
        anchor = tl.where(higher == float("-inf"), 0.0, higher)
        share = tl.exp(top - anchor)
        weight = tl.exp(log - anchor)
        total = total * share + tl.sum(weight, 0)
        merged = merged * share + tl.sum(part * weight[:, None], 0)
        top = higher
    divisor = tl.where(total > 0.0, total, 1.0)
    target = ((folded // GROUP) * num_heads + head) * GROUP + folded % GROUP
    tl.store(out + target * DIM + dims, (merged / divisor).to(out.dtype.element_ty), mask=inside)
    row = head * num_folded + folded + tl.arange(0, 1)
    tl.store(totals + row, tl.where(total > 0.0, top + tl.log(divisor), float("-inf")))


@triton.jit(do_not_specialize=["num_columns", "num_folded"])
def join_masses(
    masses,  # [H_kv, R, num_columns]: log-sum-exp of every chunk
    totals,  # [H_kv, R], of a row that sees something
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
        logs = tl.load(masses + folded * num_columns + column, mask=inside, other=float("-inf"))
        mass += tl.exp(logs - tl.load(totals + folded))
    tl.store(joined + (row * tl.num_programs(1) + head).to(tl.int64) * num_columns + column, mass, mask=inside)
