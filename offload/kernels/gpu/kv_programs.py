"""The program that attends to keys and values in 4 bits on a GPU, in Triton.

Letters as in `programs`. A block is a KV head's codes of 32 tokens, `formats.quantised_kv` in order "matrices": step
and low of the keys' channels, codes of the keys, step and low of the values' tokens by 64 channels, codes of the
values. A byte has the codes of two tokens, 16 apart. So keys and values are two matrices each, of the near tokens and
of the far ones, and codes need not be moved between registers.
"""

# Triton evaluates the annotations, so they are not postponed.
import triton
import triton.language as tl

from offload.kernels.gpu.programs import capped, with_run


@triton.jit
def _numbers(
    codes,  # uint8 [..., N]
    units,  # int32, broadcast over codes: step, in the lower half, and low, both bf16
    like,  # a pointer whose dtype the result is rounded to
    WIDEN: tl.constexpr,
):
    """The numbers of codes: low + step * code, computed in fp32."""
    step = tl.broadcast_to((units << 16).to(tl.float32, bitcast=True), codes.shape)
    low = tl.broadcast_to((units & -65536).to(tl.float32, bitcast=True), codes.shape)
    exact = tl.fma(codes.to(tl.float32), step, low).to(like.dtype.element_ty)
    if WIDEN:
        exact = exact.to(tl.float32)
    return exact


@triton.jit
def _keys(codes, units, like, WIDEN: tl.constexpr):
    """Keys of codes: [BLOCKS, 16, D] and [BLOCKS, D] -> [D, BLOCKS * 16]."""
    exact = _numbers(codes, units[:, None, :], like, WIDEN)
    return tl.trans(tl.reshape(exact, (codes.shape[0] * codes.shape[1], codes.shape[2])))


@triton.jit
def _values(codes, units, like, WIDEN: tl.constexpr):
    """Values of codes: [BLOCKS, D / 64, 64, 16] and [BLOCKS, D / 64, 16] -> [BLOCKS * 16, D]."""
    exact = tl.permute(_numbers(codes, units[:, :, None, :], like, WIDEN), (1, 2, 0, 3))
    shape: tl.constexpr = (codes.shape[1] * codes.shape[2], codes.shape[0] * codes.shape[3])
    return tl.trans(tl.reshape(exact, shape))


@triton.jit
def _query(rows, real, FIRST: tl.constexpr, PART: tl.constexpr, DIM: tl.constexpr, WIDEN: tl.constexpr):
    """A part of the queries at `rows`, [ROWS, 1] pointers to their first numbers -> [ROWS, PART]."""
    dims = FIRST + tl.arange(0, PART)[None, :]
    query = tl.load(rows + dims, mask=real[:, None] & (dims < DIM), other=0.0)
    if WIDEN:
        query = query.to(tl.float32)
    return query


@triton.jit
def _with_keys(
    near,  # [ROWS, BLOCKS * 16]: products with the keys of near tokens so far
    far,
    query,  # [ROWS, PART]
    blocks,
    units,
    at,  # [BLOCKS]: offsets of the blocks in bytes
    held,  # [BLOCKS, 1]: blocks that are there
    like,  # a pointer to the dtype of queries
    FIRST: tl.constexpr,  # of PART numbers of a head
    PART: tl.constexpr,
    DIM: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """The products of rows and keys with those of a part of a head added."""
    dims, token = FIRST + tl.arange(0, PART), tl.arange(0, 16)
    inside = held & (dims < DIM)[None, :]
    key_units = tl.load(units + at[:, None] // 4 + dims[None, :], mask=inside, other=0)
    codes = blocks + (at + 4 * DIM)[:, None, None] + token[None, :, None] * DIM + dims[None, None, :]
    key_codes = tl.load(codes, mask=inside[:, None, :], other=0)
    near = tl.dot(query, _keys(key_codes & 15, key_units, like, WIDEN), near, input_precision="ieee")
    far = tl.dot(query, _keys(key_codes >> 4, key_units, like, WIDEN), far, input_precision="ieee")
    return near, far


@triton.jit
def _with_values(
    out,  # [ROWS, PART]: weighted values so far
    near,  # [ROWS, BLOCKS * 16]: weights of near tokens
    far,
    blocks,
    units,
    at,  # [BLOCKS]: offsets of the blocks' values in bytes
    held,  # [BLOCKS, 1]: blocks that are there
    like,
    FIRST: tl.constexpr,  # of PART numbers of a head, a multiple of CHANNELS
    PART: tl.constexpr,
    DIM: tl.constexpr,
    CHANNELS: tl.constexpr,  # of values that share a step
    WIDEN: tl.constexpr,
):
    """`out` after the tokens of some blocks, of a part of a head."""
    TOKENS: tl.constexpr = 32  # of a block
    HALF: tl.constexpr = 16
    LANES: tl.constexpr = min(CHANNELS, PART)
    token = tl.arange(0, HALF)
    width = FIRST // LANES + tl.arange(0, PART // LANES)
    channel = width[:, None] * LANES + tl.arange(0, LANES)[None, :]
    unit = at[:, None, None] // 4 + width[None, :, None] * TOKENS + token[None, None, :]
    real = held[:, :, None] & (width * LANES < DIM)[None, :, None]
    near_units = tl.load(units + unit, mask=real, other=0)
    far_units = tl.load(units + unit + HALF, mask=real, other=0)
    of_codes = at + 4 * TOKENS * ((DIM + CHANNELS - 1) // CHANNELS)
    codes = tl.load(
        blocks + of_codes[:, None, None, None] + channel[None, :, :, None] * HALF + token[None, None, None, :],
        mask=held[:, :, None, None] & (channel < DIM)[None, :, :, None],
        other=0,
    )
    out += tl.dot(near, _values(codes & 15, near_units, like, WIDEN), input_precision="ieee")
    out += tl.dot(far, _values(codes >> 4, far_units, like, WIDEN), input_precision="ieee")
    return out


@triton.jit(do_not_specialize=["tokens", "num_folded", "num_earlier", "begun"])
def attend_codes(
    queries,  # [T, H_kv * G, D] by the stride; a row contiguous
    blocks,  # [H_kv, groups, BYTES] uint8 by the stride
    units,  # the same memory as int32
    counted,  # int64 [1]: tokens that count, whole groups
    partials,  # [spans, H_kv, R, D]: output of every span, normalised over it
    sums,  # [spans, H_kv, R]: its log-sum-exp
    earlier_partials,  # of the previous run, to be folded
    earlier_sums,
    running,  # [H_kv, R, D]: of the earlier runs, see `programs.with_run`
    tops,  # [H_kv, R]
    totals,  # [H_kv, R]
    query_stride,  # from row to row
    head_stride,  # bytes
    tokens,  # whole groups; all rows attend to all of them that count
    num_folded,  # R
    num_earlier,  # spans of the previous run; 0: no fold
    begun,  # 0: `running` is not initialised yet, 1: it is
    scale,
    CAP: tl.constexpr,  # scores are c tanh(score / c); 0: no cap
    SPAN: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,  # a multiple of 16
    DIM_PADDED: tl.constexpr,
    PART: tl.constexpr,  # numbers of a head at a time: all, or half of them
    ROWS: tl.constexpr,
    COUNTED: tl.constexpr,  # whether there is `counted`; else all tokens count
    BLOCKS: tl.constexpr,  # at a time
    WIDEN: tl.constexpr,  # products of fp32: the interpreter has no bf16
):
    """Program (s, h, b): block b of the folded rows attends to span s of the codes in KV head h. Programs after the
    last span fold the previous run, whose results are complete when this launch begins."""
    TOKENS: tl.constexpr = 32  # of a block
    HALF: tl.constexpr = 16
    CHANNELS: tl.constexpr = 64  # of values that share a step
    VALUE_UNITS: tl.constexpr = 4 * DIM + HALF * DIM  # offset in bytes, behind the keys
    BYTES: tl.constexpr = VALUE_UNITS + 4 * TOKENS * ((DIM + CHANNELS - 1) // CHANNELS) + HALF * DIM
    span, head, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_heads = tl.num_programs(1)
    folded = block * ROWS + tl.arange(0, ROWS)
    real = folded < num_folded
    state = (head * num_folded + folded).to(tl.int64)
    if span * SPAN >= tokens:
        dims = tl.arange(0, DIM_PADDED)
        whole = real[:, None] & (dims < DIM)[None, :]
        out, top, total = with_run(
            running, tops, totals, earlier_partials, earlier_sums, num_earlier, num_heads * num_folded, state, real,
            dims, begun, DIM, 1,
        )  # fmt: skip
        tl.store(running + state[:, None] * DIM + dims[None, :], out, mask=whole)
        tl.store(tops + state, top, mask=real)
        tl.store(totals + state, total, mask=real)
        return
    source = (folded // GROUP * query_stride + (head * GROUP + folded % GROUP) * DIM)[:, None]
    query = _query(queries + source, real, 0, PART, DIM, WIDEN)
    place = head.to(tl.int64) * head_stride + (span * (SPAN // TOKENS)).to(tl.int64) * BYTES
    if COUNTED:
        tokens = tl.minimum(tokens, tl.load(counted).to(tl.int32))
    left = tl.minimum(tokens - span * SPAN, SPAN) // TOKENS  # none in a span after the last that counts
    number = tl.arange(0, BLOCKS)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, PART], tl.float32)
    out_2 = out  # of the second half, where there is one
    for first in range(0, left, BLOCKS):
        at = place + (first + number) * BYTES
        held = (first + number < left)[:, None]
        near = tl.zeros([ROWS, BLOCKS * HALF], tl.float32)
        far = tl.zeros([ROWS, BLOCKS * HALF], tl.float32)
        for part in tl.static_range(DIM_PADDED // PART):
            if PART < DIM_PADDED:  # registers have no room for all of it
                query = _query(queries + source, real, part * PART, PART, DIM, WIDEN)
            near, far = _with_keys(near, far, query, blocks, units, at, held, queries, part * PART, PART, DIM, WIDEN)
        near, far = near * scale, far * scale
        if CAP > 0:
            near = capped(near, CAP)
            far = capped(far, CAP)
        seen = tl.reshape(tl.broadcast_to(held, (BLOCKS, HALF)), (1, BLOCKS * HALF))
        near, far = tl.where(seen, near, float("-inf")), tl.where(seen, far, float("-inf"))
        higher = tl.maximum(top, tl.maximum(tl.max(near, 1), tl.max(far, 1)))
        anchor = tl.where(higher == float("-inf"), 0.0, higher)
        near, far = tl.exp(near - anchor[:, None]), tl.exp(far - anchor[:, None])
        share = tl.exp(top - anchor)
        total = total * share + (tl.sum(near, 1) + tl.sum(far, 1))
        near, far = near.to(queries.dtype.element_ty), far.to(queries.dtype.element_ty)
        if WIDEN:
            near, far = near.to(tl.float32), far.to(tl.float32)
        at += VALUE_UNITS
        out = out * share[:, None]
        out = _with_values(out, near, far, blocks, units, at, held, queries, 0, PART, DIM, CHANNELS, WIDEN)
        if PART < DIM_PADDED:
            out_2 = out_2 * share[:, None]
            out_2 = _with_values(out_2, near, far, blocks, units, at, held, queries, PART, PART, DIM, CHANNELS, WIDEN)
        top = higher
    divisor = tl.where(total > 0.0, total, 1.0)
    target = state + span.to(tl.int64) * (num_heads * num_folded)
    to, dims = target[:, None] * DIM, tl.arange(0, PART)[None, :]
    tl.store(partials + to + dims, out / divisor[:, None], mask=real[:, None] & (dims < DIM))
    if PART < DIM_PADDED:
        tl.store(partials + to + PART + dims, out_2 / divisor[:, None], mask=real[:, None] & (PART + dims < DIM))
    tl.store(sums + target, tl.where(total > 0.0, top + tl.log(divisor), float("-inf")), mask=real)
