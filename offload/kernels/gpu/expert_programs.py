"""The programs of a mixture of experts, in Triton. `offload.kernels.gpu.experts` launches them and owns their memory.

Letters: T rows, E experts, S scores of each row (the experts', and the gate's of the network beside them), U experts in
use of each row. A pair is a row with one of its experts: pair t * U + u is row
t with the u-th one that it chose. Pairs of one expert lie together on lines, in tiles of `ROWS` lines that belong to
one expert each, so that its weights are read once for a tile; a line without a pair has -1.

A row's scores, choice and sums are its own, and each product sums the inputs of a line in one order, so a row's bits
depend neither on T nor on the lines beside it.
"""

# Triton evaluates the annotations, so they are not postponed.
import triton
import triton.language as tl

from offload.kernels.gpu.activation import activated, opened
from offload.kernels.gpu.programs import mask_if
from offload.kernels.gpu.stored_products import sum_blocks


@triton.jit(do_not_specialize=["num_rows"])
def score_rows(
    rows,  # [T, num_inputs], contiguous
    router,  # fp32 [S, num_inputs], contiguous
    scores,  # fp32 [T, S]
    num_rows,  # T
    num_inputs,
    num_experts,  # S
    factor,  # of all scores
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
    NUMBERS: tl.constexpr,  # inputs at a time
):
    """Program (b, c): the scores of block b of the rows for block c of the experts, products with the router's rows.
    Every `NUMBERS`-th input is summed first, one after the other; then the `NUMBERS` sums are."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    expert = tl.program_id(1) * EXPERTS + tl.arange(0, EXPERTS)
    real, valid = row < num_rows, expert < num_experts
    total = tl.zeros([ROWS, EXPERTS, NUMBERS], tl.float32)
    for first in tl.range(0, num_inputs, NUMBERS):
        at = first + tl.arange(0, NUMBERS)
        inside = (at < num_inputs)[None, :]
        x = tl.load(rows + (row * num_inputs)[:, None] + at[None, :], mask=real[:, None] & inside, other=0.0)
        own = tl.load(router + (expert * num_inputs)[:, None] + at[None, :], mask=valid[:, None] & inside, other=0.0)
        x = tl.broadcast_to(x.to(tl.float32)[:, None, :], total.shape)
        total = tl.fma(x, tl.broadcast_to(own[None, :, :], total.shape), total)
    target = (row * num_experts)[:, None] + expert[None, :]
    tl.store(scores + target, tl.sum(total, 2) * factor, mask=real[:, None] & valid[None, :])


@triton.jit
def _opened(rank, expert, GROUPS: tl.constexpr, USED: tl.constexpr, BEST: tl.constexpr, SIZE: tl.constexpr,
            PADDED: tl.constexpr):  # fmt: skip
    """Which experts are of the groups in use, the first ones of equal sums; of `SIZE` experts each."""
    group, sums = tl.arange(0, PADDED), tl.full([PADDED], float("-inf"), tl.float32)
    for own in range(GROUPS):
        inside = expert // SIZE == own
        total = tl.max(tl.where(inside, rank, float("-inf")), 0)
        if BEST == 2:
            first = tl.min(tl.where(inside & (rank == total), expert, GROUPS * SIZE), 0)
            total += tl.max(tl.where(inside & (expert != first), rank, float("-inf")), 0)
        sums = tl.where(group == own, tl.where(total == total, total, float("inf")), sums)
    left, opened = group < GROUPS, expert < 0
    for _ in range(USED):
        most = tl.max(tl.where(left, sums, float("-inf")), 0)
        first = tl.min(tl.where(left & (sums == most), group, PADDED), 0)
        opened, left = opened | (expert // SIZE == first), left & (group != first)
    return opened


@triton.jit
def choose_experts(
    scores,  # fp32 [T, SCORES]
    bias,  # fp32 [E], if there is one
    scale,  # fp32 [E], if there is one
    real,  # bool [T], if some rows are padding
    like,  # of the dtype of the rows, if something is rounded to it
    chosen,  # int32 [T, USED]; of padding E
    weights,  # fp32 [T, USED]
    factor,  # of all weights
    EXPERTS: tl.constexpr,  # E
    SCORES: tl.constexpr,  # S
    USED: tl.constexpr,  # U
    SIGMOID: tl.constexpr,  # shares are sigmoids, not of the softmax
    RENORMALISED: tl.constexpr,  # weights are those of the experts in use, not of all
    BIASED: tl.constexpr,  # the bias is a part of the scores
    CORRECTED: tl.constexpr,  # the bias is a part of the ranks alone
    SOFTMAX: tl.constexpr,  # ranks need the softmax itself
    RANKS_SCORES: tl.constexpr,  # ranks are of scores, not of shares
    GROUPS: tl.constexpr,
    GROUPS_USED: tl.constexpr,
    GROUP_BEST: tl.constexpr,  # ranks of a group that are added up
    EPS: tl.constexpr,  # of the sum of shares in use
    FLOORED: tl.constexpr,  # that sum is at least EPS, which is not added to it
    ROUNDS_SCORES: tl.constexpr,
    ROUNDS_SHARES: tl.constexpr,
    CAP: tl.constexpr,  # of scores; 0: no cap
    SCALED: tl.constexpr,  # each expert has a factor of its own
    PADS: tl.constexpr,  # some rows are padding
    PADDED: tl.constexpr,  # at least E, a power of two
    GROUPS_PADDED: tl.constexpr,  # likewise of groups
    USED_PADDED: tl.constexpr,  # likewise of U
):
    """Program t: the experts of row t, the largest rank first and the first expert of equal ones; and their weights, as
    `kernels.experts.chosen` has them. A score that is NaN counts as the largest, and makes the row's weights NaN."""
    row = tl.program_id(0)
    expert, slot = tl.arange(0, PADDED), tl.arange(0, USED_PADDED)
    left = expert < EXPERTS  # which of them are not chosen yet
    score = tl.load(scores + row * SCORES + expert, mask=left, other=float("-inf"))
    score = tl.where(score == score, score, float("inf"))
    if BIASED:
        score += tl.load(bias + expert, mask=left, other=0.0)
    if ROUNDS_SCORES:
        score = score.to(like.dtype.element_ty).to(tl.float32)
    if CAP:
        score = tl.where(left, (2 / (1 + tl.exp(-2 * score / CAP)) - 1) * CAP, score)
    power = 1 / (1 + tl.exp(-score)) if SIGMOID else tl.exp(score - tl.max(score, 0))
    if SOFTMAX:
        power = power / tl.sum(power, 0)
    if ROUNDS_SHARES:
        power = power.to(like.dtype.element_ty).to(tl.float32)
    rank = power if (SIGMOID or SOFTMAX) and not RANKS_SCORES else score  # what is compared
    if CORRECTED:
        rank += tl.load(bias + expert, mask=left, other=0.0)
    rank = tl.where(rank == rank, rank, float("inf"))
    if GROUPS > 1:
        left = left & _opened(rank, expert, GROUPS, GROUPS_USED, GROUP_BEST, EXPERTS // GROUPS, GROUPS_PADDED)
    found, share, total = tl.zeros([USED_PADDED], tl.int32), tl.zeros([USED_PADDED], tl.float32), 0.0
    for place in range(USED):
        most = tl.max(tl.where(left, rank, float("-inf")), 0)
        first = tl.min(tl.where(left & (rank == most), expert, PADDED), 0)
        own = tl.sum(tl.where(expert == first, power, 0.0), 0)
        found, share = tl.where(slot == place, first, found), tl.where(slot == place, own, share)
        total += own
        left = left & (expert != first)
    if SIGMOID or SOFTMAX:
        if not RENORMALISED:
            total = 1.0
        elif FLOORED:
            total = tl.maximum(total, EPS)
        else:
            total += EPS
    elif not RENORMALISED:
        total = tl.sum(power, 0)
    share = share / total * factor
    if SCALED:
        share *= tl.load(scale + found, mask=slot < USED, other=0.0)
    if PADS:
        found = tl.where(tl.load(real + row) != 0, found, EXPERTS)
    tl.store(chosen + row * USED + slot, found, mask=slot < USED)
    tl.store(weights + row * USED + slot, share, mask=slot < USED)


@triton.jit(do_not_specialize=["num_pairs", "num_tiles"])
def arrange_pairs(
    chosen,  # int32 [num_pairs]
    pair_of,  # int32 [num_tiles * ROWS]: of each line; of tiles without an expert it is not written
    expert_of,  # int32 [num_tiles]: of each tile, or -1
    num_pairs,
    num_tiles,  # as many as pairs can need
    EXPERTS: tl.constexpr,  # E
    PADDED: tl.constexpr,  # more than E, a power of two
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,  # pairs at a time
):
    """Program e: gives the pairs of expert e the lines of its tiles, in their order. The pairs of the experts before it
    come first."""
    own, expert = tl.program_id(0), tl.arange(0, PADDED)
    count = tl.zeros([PADDED], tl.int32)
    for begun in tl.range(0, num_pairs, BLOCK):
        pair = begun + tl.arange(0, BLOCK)
        count += tl.histogram(tl.load(chosen + pair, mask=pair < num_pairs, other=EXPERTS), PADDED)
    tiles = (count + ROWS - 1) // ROWS
    first = tl.sum(tl.where(expert < own, tiles, 0), 0)
    last = first + tl.sum(tl.where(expert == own, tiles, 0), 0)
    line = first * ROWS
    for begun in tl.range(0, num_pairs, BLOCK):
        pair = begun + tl.arange(0, BLOCK)
        is_own = tl.load(chosen + pair, mask=pair < num_pairs, other=EXPERTS) == own
        number = tl.cumsum(is_own.to(tl.int32), 0)
        tl.store(pair_of + line + number - 1, pair, mask=is_own)
        line += tl.sum(is_own.to(tl.int32), 0)
    rest = line + tl.arange(0, ROWS)
    tl.store(pair_of + rest, tl.full([ROWS], -1, tl.int32), mask=rest < last * ROWS)
    end = tl.where(own == EXPERTS - 1, num_tiles, last)
    for begun in tl.range(first, end, BLOCK):
        tile = begun + tl.arange(0, BLOCK)
        tl.store(expert_of + tile, tl.where(tile < last, own, -1), mask=tile < end)


@triton.jit
def lines_of(pair_of, tile, per_row, ROWS: tl.constexpr):
    """The pairs of a tile's lines, their rows of the input, of which `per_row` pairs have one, and which lines have a
    pair: int32, int32 and bool [ROWS]."""
    pair = tl.load(pair_of + tile * ROWS + tl.arange(0, ROWS))
    return pair, tl.maximum(pair, 0) // per_row, pair >= 0


@triton.jit
def place_of(expert_of, places, tile):
    """The place of a tile's expert in the bank, or -1 if the tile has none, or the expert is not there."""
    expert = tl.load(expert_of + tile)
    return tl.load(places + expert, mask=expert >= 0, other=-1)


@triton.jit
def numbers_at(address, like):
    """A pointer to bytes as one to numbers of the dtype of another pointer."""
    return address.to(tl.pointer_type(like.dtype.element_ty))


@triton.jit
def _sum_inputs(
    rows, row, real, weight, output, valid, num_inputs, ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
    NUMBERS: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """The products of rows with outputs of a plain matrix, weight [any, num_inputs], over `NUMBERS` inputs at a time,
    in their order: fp32 [ROWS, OUTPUTS]."""
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    own = rows + (row.to(tl.int64) * num_inputs)[:, None]
    matrix = weight + (output.to(tl.int64) * num_inputs)[:, None]
    for first in tl.range(0, num_inputs, NUMBERS):
        at = first + tl.arange(0, NUMBERS)
        inside = (at < num_inputs)[None, :]
        x = tl.load(own + at[None, :], mask=real[:, None] & inside, other=0.0)
        numbers = tl.load(matrix + at[None, :], mask=valid[:, None] & inside, other=0.0)
        if WIDEN:
            x, numbers = x.to(tl.float32), numbers.to(tl.float32)
        total = tl.dot(x, tl.trans(numbers), total, input_precision="ieee")
    return total


@triton.jit
def ended(total, bias, output, valid, ADDED: tl.constexpr):
    """Sums plus a bias, if there is one, rounded to its dtype."""
    if ADDED:
        total += tl.load(bias + output, mask=valid, other=0.0).to(tl.float32)[None, :]
    return total.to(bias.dtype.element_ty)


@triton.jit
def multiply_plain(
    rows,  # [any, num_inputs] of 16 bits, contiguous
    pair_of,  # int32 [tiles * ROWS]
    expert_of,  # int32 [tiles]
    places,  # int32 [E]
    content,  # uint8 [places, step]: the bank
    out,  # [pairs, num_outputs] by the stride
    per_row,  # pairs that have one row of the input
    num_inputs,
    num_outputs,
    step,  # bytes from a place to the next one
    gate_at,  # bytes from a place to the gate's matrix
    weight_at,  # to that of up or down, [num_outputs, num_inputs]
    bias_at,  # to its bias, which that of the gate precedes
    out_stride,
    GATED: tl.constexpr,
    ADDED: tl.constexpr,  # whether there are biases
    ACTIVATION: tl.constexpr,  # as `activation.NUMBERS`; -1: none
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    NUMBERS: tl.constexpr,
    WIDEN: tl.constexpr,  # products of fp32: the interpreter has no bf16
):
    """Program (t, c): what the expert of tile t makes of its lines, in column c of the outputs, for their pairs."""
    tile = tl.program_id(0)
    place = place_of(expert_of, places, tile)
    if place < 0:
        return
    pair, row, real = lines_of(pair_of, tile, per_row, ROWS)
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    valid = output < num_outputs
    home = content + place.to(tl.int64) * step
    total = _sum_inputs(
        rows, row, real, numbers_at(home + weight_at, out), output, valid, num_inputs, ROWS, OUTPUTS, NUMBERS, WIDEN
    )
    bias = numbers_at(home + bias_at, out)
    made = ended(total, bias, output, valid, ADDED)
    if GATED:
        total = _sum_inputs(
            rows, row, real, numbers_at(home + gate_at, out), output, valid, num_inputs, ROWS, OUTPUTS, NUMBERS, WIDEN
        )
        made = opened(ended(total, bias - num_outputs, output, valid, ADDED), made, ACTIVATION)
    elif ACTIVATION >= 0:
        made = activated(made.to(tl.float32), ACTIVATION).to(made.dtype)
    target = (pair.to(tl.int64) * out_stride)[:, None] + output[None, :]
    tl.store(out + target, made, mask=real[:, None] & valid[None, :])


@triton.jit
def multiply_blocks(
    rows,  # as `multiply_plain`; at a multiple of 8 bytes
    pair_of,
    expert_of,
    places,
    content,
    book,  # from stored_codes_gpu.book_of
    out,
    per_row,
    num_blocks,  # of an output
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
    BLOCKS: tl.constexpr,  # at a time
    WIDEN: tl.constexpr,
    FORM: tl.constexpr,  # an Encoding
):
    """Program (t, c): as `multiply_plain`, with matrices as they are stored, gate and up in one encoding. The number of
    columns is even."""
    tile, column = tl.program_id(0), tl.program_id(1)
    place = place_of(expert_of, places, tile)
    if place < 0:
        return
    pair, row, real = lines_of(pair_of, tile, per_row, ROWS)
    home = content + place.to(tl.int64) * step
    bias, made = numbers_at(home + bias_at, out), tl.zeros([ROWS, OUTPUTS], out.dtype.element_ty)
    up, output = made, tl.arange(0, OUTPUTS)
    for part in tl.range(0, 1 + GATED, num_stages=1):  # one copy of the loop: two would spill, and compile for as long
        up = made
        total, output = sum_blocks(
            rows, row, real, home + tl.where(part == 0, weight_at, gate_at), book, column, num_outputs, num_blocks, 0,
            num_blocks, ROWS, OUTPUTS, BLOCKS, WIDEN, FORM,
        )  # fmt: skip
        made = ended(total, bias - part * num_outputs, output, output < num_outputs, ADDED)
    valid = output < num_outputs
    if GATED:
        made = opened(made, up, ACTIVATION)
    elif ACTIVATION >= 0:
        made = activated(made.to(tl.float32), ACTIVATION).to(made.dtype)
    target = (pair.to(tl.int64) * out_stride)[:, None] + output[None, :]
    tl.store(out + target, made, mask=real[:, None] & valid[None, :])


@triton.jit
def sum_pairs(
    made,  # [T * U, num_outputs], contiguous
    chosen,  # int32 [T, U]; of padding E
    weights,  # fp32 [T, U]
    beside,  # [T, num_outputs] by the stride: of the network beside the experts, if there is one
    scores,  # fp32 [T, S]
    out,  # [T, num_outputs], contiguous
    num_outputs,
    stride,
    EXPERTS: tl.constexpr,  # E
    SCORES: tl.constexpr,  # S
    USED: tl.constexpr,  # U
    ADDS: tl.constexpr,  # whether there is a network beside the experts
    COLUMNS: tl.constexpr,
    SUM_FACTOR: tl.constexpr,  # of the sum over experts
    BOTH_FACTOR: tl.constexpr,  # of that plus the output of the network
):
    """Program (t, c): the weighted sum of what row t's experts made of it, in the order in which they were chosen, in
    block c of the outputs; plus the output of the network beside them, times the sigmoid of the gate's score. The sum
    of padding is 0."""
    row, column = tl.program_id(0), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < num_outputs
    total = tl.zeros([COLUMNS], tl.float32)
    for place in tl.range(0, USED, loop_unroll_factor=4):
        pair = row * USED + place
        valid = mask_if(tl.load(chosen + pair) < EXPERTS, inside)
        part = tl.load(made + pair.to(tl.int64) * num_outputs + column, mask=valid, other=0.0).to(tl.float32)
        total = tl.fma(part, tl.full([COLUMNS], tl.load(weights + pair), tl.float32), total)
    kind = out.dtype.element_ty
    total = (total.to(kind).to(tl.float32) * SUM_FACTOR).to(kind)
    if ADDS:
        other = tl.load(beside + row.to(tl.int64) * stride + column, mask=inside, other=0.0).to(tl.float32)
        if SCORES > EXPERTS:
            gate = tl.load(scores + row * SCORES + EXPERTS).to(kind).to(tl.float32)
            gate = (1 / (1 + tl.exp(-gate))).to(kind).to(tl.float32)
            other = (other * gate).to(kind).to(tl.float32)
        total = (total.to(tl.float32) + other).to(kind)
        total = (total.to(tl.float32) * BOTH_FACTOR).to(kind)
    tl.store(out + row.to(tl.int64) * num_outputs + column, total, mask=inside)
