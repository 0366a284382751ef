"""The program of a GPU's attention over chosen blocks, in Triton. `offload.kernels.gpu.attention` launches it.

Letters are those of gpu/programs.py. Spans are those of each row's list of tokens; their steps are those of a run's
spans, so a row's bits are those of the same tokens in a run.
"""

# Triton evaluates the annotations, so they are not postponed.
import triton
import triton.language as tl

from offload.kernels.gpu.programs import capped, softened


@triton.jit(do_not_specialize=["num_places", "num_folded"])
def attend_chosen(
    queries,  # [T, H_kv * G, D] by the stride; a row contiguous
    blocks,  # int32 [T, num_places]
    counts,  # int32 [T]: tokens of each row's list
    keys,  # [P, H_kv, S, D] by the strides; rows of D contiguous
    values,  # likewise
    partials,  # [spans, H_kv, R, D]: output of every span, normalised over it
    sums,  # [spans, H_kv, R]: its log-sum-exp, -inf for a row without tokens in it
    query_stride,  # from row to row
    page_stride,
    head_stride,
    token_stride,
    num_places,
    num_folded,  # R
    scale,
    CAP: tl.constexpr,  # scores are c tanh(score / c); 0: no cap
    SIZE: tl.constexpr,  # tokens of a block
    PAGE: tl.constexpr,  # tokens of a page
    SPAN: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    WIDEN: tl.constexpr,  # products of fp32: the interpreter has no bf16
):
    """Program (s, h, t * B + b): block b of the B of row t's query heads attends to span s of its list in KV head h."""
    span, head = tl.program_id(0), tl.program_id(1)
    of_row: tl.constexpr = (GROUP + ROWS - 1) // ROWS
    row = tl.program_id(2) // of_row
    member = tl.program_id(2) % of_row * ROWS + tl.arange(0, ROWS)
    part = tl.arange(0, DIM_PADDED)
    real, present = member < GROUP, part < DIM
    asked = real[:, None] & present[None, :]
    at = row * query_stride + (head * GROUP + member) * DIM
    query = tl.load(queries + at[:, None] + part[None, :], mask=asked, other=0.0)
    if WIDEN:
        query = query.to(tl.float32)
    base, tokens = span * SPAN, tl.load(counts + row)
    own = blocks + row.to(tl.int64) * num_places
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, DIM_PADDED], tl.float32)
    for offset in range(0, tl.minimum(tokens - base, SPAN), STEP):
        place = base + offset + tl.arange(0, STEP)
        held = place < tokens
        token = tl.load(own + place // SIZE, mask=held, other=0) * SIZE + place % SIZE
        source = (token // PAGE).to(tl.int64) * page_stride + head.to(tl.int64) * head_stride
        source += (token % PAGE).to(tl.int64) * token_stride
        mask = held[:, None] & present[None, :]
        key = tl.load(keys + source[:, None] + part[None, :], mask=mask, other=0.0)
        value = tl.load(values + source[:, None] + part[None, :], mask=mask, other=0.0)
        if WIDEN:
            key = key.to(tl.float32)
        score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        if CAP > 0:
            score = capped(score, CAP)
        score = tl.where(held[None, :], score, float("-inf"))
        weight, share, top, total = softened(score, top, total)
        rounded = weight.to(values.dtype.element_ty)
        if WIDEN:
            rounded, value = rounded.to(tl.float32), value.to(tl.float32)
        out = out * share[:, None] + tl.dot(rounded, value, input_precision="ieee")
    divisor = tl.where(total > 0.0, total, 1.0)
    target = (span * tl.num_programs(1) + head).to(tl.int64) * num_folded + row * GROUP + member
    tl.store(partials + target[:, None] * DIM + part[None, :], out / divisor[:, None], mask=asked)
    tl.store(sums + target, tl.where(total > 0.0, top + tl.log(divisor), float("-inf")), mask=real)
