"""The program that rotates new rows, in Triton. `offload.kernels.gpu.rotation` launches it.

Letters: T rows, H query heads, H_kv KV heads, D head dimension, P pages of S tokens.
"""

# Triton evaluates the annotations, so they are not postponed.
import triton
import triton.language as tl

from offload.kernels.gpu.programs import mask_if


@triton.jit
def _rotated(
    x,  # a head's numbers, contiguous
    cos,  # of the position
    sin,
    dims,
    DIM: tl.constexpr,
    TABLE: tl.constexpr,
):
    """The head's numbers rotated: (x cos) + (x' sin), each rounded to their dtype, where x' is x moved by half. Of each
    half those after the first TABLE / 2 stay."""
    inside, at, turns = dims < DIM, dims, dims < DIM
    if TABLE < DIM:
        within = dims % (DIM // 2)
        turns = inside & (within < TABLE // 2)
        at = tl.where(dims < DIM // 2, within, within + TABLE // 2)
    kind = x.dtype.element_ty
    own = tl.load(x + dims, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(x + (dims + DIM // 2) % DIM, mask=inside, other=0.0).to(tl.float32)
    along = (own * tl.load(cos + at, mask=turns, other=1.0).to(tl.float32)).to(kind)
    across = (other * tl.load(sin + at, mask=turns, other=0.0).to(tl.float32)).to(kind)
    return (along.to(tl.float32) + across.to(tl.float32)).to(kind)


@triton.jit
def _times(x, factor):
    """x times a factor, rounded to its dtype."""
    return (x.to(tl.float32) * factor.to(tl.float32)).to(x.dtype)


@triton.jit(do_not_specialize=["num_pages", "page", "first", "first_last", "second_last"])
def rotate_rows(
    q,  # [T, H, D] by the stride; a row contiguous, as of k and v
    k,  # [T, H_kv, D]
    v,  # [T, H_kv, D]
    cos,  # [positions, TABLE], in the dtype of the rows, as `sin` and `growth`
    sin,
    growth,  # [positions]
    query_weights,  # [D]
    key_weights,  # [D]
    positions,  # [T] int64: of the rows
    slots,  # [T] int64: of the rows among the run's positions
    bounds,  # int64 [2]: the second is the least slot that is written
    queries,  # [QUERIES, T, H, D], contiguous
    keys,  # [P, H_kv, S, D] by the strides; rows of D contiguous
    values,  # likewise
    query_stride,  # from row to row
    key_stride,
    value_stride,
    num_pages,  # P
    page,  # S
    page_stride,
    head_stride,
    token_stride,
    first,  # position of the run's first token
    first_last,  # the position that the first kind of queries is rotated to at most
    second_last,  # the same of the second kind
    QUERIES: tl.constexpr,
    HEADS: tl.constexpr,  # H
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    TABLE: tl.constexpr,  # numbers of a position in the tables: D, or fewer
    GROWN: tl.constexpr,  # whether there is `growth`
    WEIGHED: tl.constexpr,  # whether there are weights
    JOINED: tl.constexpr,  # the first halves of keys are written to `keys` and the others to `values`; v is not read
    BOUNDED: tl.constexpr,  # whether there are `bounds`
    RING: tl.constexpr,  # position n of the run is at place n % (P * S)
):
    """Program (t, h): rotate head h of row t, first the queries of each kind, then the keys, whose values go with
    them to the row's place in the run. A row that has none there writes nothing."""
    row, head = tl.program_id(0), tl.program_id(1)
    dims = tl.arange(0, DIM_PADDED)
    inside = dims < DIM
    position = tl.load(positions + row)
    if head < QUERIES * HEADS:
        kind = head // HEADS
        position = tl.minimum(position, tl.where(kind == 0, first_last, second_last))
        source = q + row * query_stride + head % HEADS * DIM
        turned = _rotated(source, cos + position * TABLE, sin + position * TABLE, dims, DIM, TABLE)
        if GROWN:
            turned = _times(turned, tl.load(growth + position))
        if WEIGHED:
            turned = _times(turned, tl.load(query_weights + dims, mask=inside, other=0.0))
        target = ((kind * tl.num_programs(0) + row) * HEADS + head % HEADS) * DIM
        tl.store(queries + target + dims, turned, mask=inside)
        return
    own = head - QUERIES * HEADS
    slot = tl.load(slots + row)
    place = slot - first
    if RING:
        place = slot % (num_pages * page)
    writes = mask_if((place >= 0) & (place < num_pages * page), inside)
    if BOUNDED:
        writes = mask_if(slot >= tl.load(bounds + 1), writes)
    source = k + row * key_stride + own * DIM
    turned = _rotated(source, cos + position * TABLE, sin + position * TABLE, dims, DIM, TABLE)
    if WEIGHED:
        turned = _times(turned, tl.load(key_weights + dims, mask=inside, other=0.0))
    target = place // page * page_stride + own.to(tl.int64) * head_stride + place % page * token_stride
    if JOINED:
        tl.store(keys + target + dims, turned, mask=writes & (dims < DIM // 2))
        tl.store(values + target + dims - DIM // 2, turned, mask=writes & (dims >= DIM // 2))
    else:
        value = tl.load(v + row * value_stride + own * DIM + dims, mask=inside, other=0.0)
        tl.store(keys + target + dims, turned, mask=writes)
        tl.store(values + target + dims, value, mask=writes)
