"""Mixtures of experts on a GPU, in Triton (see `expert_programs`): the host launches the same programs whatever experts
the rows choose, and does not wait for their choice, so that a pass may be a graph where all experts are on the GPU.

Passes multiply stored experts in fixed point (see `fixed_programs`) wherever they have integers, with the bits of the
CPU's kernels: which device runs an expert changes no text. Prefills decode their numbers to 16 bits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from offload.config.networks import Activation, Experts
from offload.formats.encodings import Encoding
from offload.formats.fixed_gpu import GROUP, check_bytes, counts_of
from offload.formats.stored import StoredMatrix
from offload.formats.stored_codes_gpu import book_of
from offload.kernels.experts import Bank, Batch, ExpertHomes, ExpertWeights, Matrix, Mixture, Room, Router
from offload.kernels.experts_host import HostRows
from offload.kernels.gpu.activation import NUMBERS, gated
from offload.kernels.gpu.expert_programs import (
    arrange_pairs,
    choose_experts,
    multiply_blocks,
    multiply_plain,
    score_rows,
    sum_pairs,
)
from offload.kernels.gpu.fixed_programs import multiply_fixed
from offload.kernels.gpu.fixed_rows import FixedRows, Pairs
from offload.kernels.rows import MAX_ROWS
from offload.native.host_work import between
from offload.native.launch import launch

MOST_ROWS = 8192  # at a time
ROWS = (16, 32)  # of a tile: the minimum of tensor cores, and twice that where experts of plain numbers have more rows
FIXED_ROWS = (8, 16)  # of a tile in fixed point
SCORED = {"ROWS": 4, "EXPERTS": 4, "NUMBERS": 512}  # of a program that scores
PAIRS = (256, 2048)  # at a time, of a program that arranges them, and of one that arranges many
COLUMNS = 512  # of a program that sums
# Few outputs, since each row's experts are programs of their own: eight of 768 rows give enough programs for a GPU.
PLAIN = {"OUTPUTS": 32, "NUMBERS": 128}
PLAIN_WARPS, PLAIN_STAGES = 4, 3


@dataclass(frozen=True)
class Lines:
    """Pairs of rows and their experts, by expert, see `expert_programs`. pair_of: int32 [tiles * rows]. expert_of:
    int32 [tiles]. rows: lines of a tile."""

    pair_of: Tensor
    expert_of: Tensor
    rows: int


@dataclass(frozen=True)
class _Products:
    """The products of all experts with one of their matrices, or with gate and up. per_row: pairs of each row that is
    multiplied. bias: of the matrix, or of gate and up."""

    weight: Matrix
    bias: Tensor | None
    per_row: int = 1
    gate: Matrix | None = None
    activation: Activation | None = None


def run_experts(
    mixture: Mixture,
    homes: ExpertHomes,
    rows: Tensor,
    beside: Tensor | None = None,
    real: Tensor | None = None,
    latents: Tensor | None = None,
    *,
    in_prefill: bool = False,
) -> Tensor:
    """See `kernels.experts.RunExperts`. Rows of 16 bits; the router's matrix contiguous. in_prefill: however few rows
    there are, they are not multiplied in fixed point. Temporary memory: `scratch_bytes` of at most MOST_ROWS rows."""
    if rows.dtype.itemsize != 2:
        raise ValueError(f"rows are {rows.dtype}; a GPU's own experts take bf16 and fp16")
    nothing = [None] * -(-len(rows) // MOST_ROWS)
    parts = (nothing if each is None else each.split(MOST_ROWS) for each in (beside, real, latents))
    given = zip(rows.split(MOST_ROWS), *parts, strict=True)
    fixed = not in_prefill and len(rows) <= MAX_ROWS and homes.bank.places[0].has_integers
    made = [_run(mixture, homes, *each, fixed=fixed) for each in given]
    return made[0] if len(made) == 1 else torch.cat(made)


def scratch_bytes(experts: Experts, num_rows: int, hidden_size: int, *, alike: bool = True) -> int:
    """Bytes of temporary memory for `num_rows` rows, but for few bytes of a pair. alike: whether gate and up are in one
    encoding. In fixed point MAX_ROWS rows need less than a prefill's block does otherwise."""
    inner = experts.network.size * (1 if alike or not experts.network.gated else 3)
    return 4 * num_rows * experts.num_scores + 2 * num_rows * experts.used * (inner + hidden_size)


def _run(
    mixture: Mixture,
    homes: ExpertHomes,
    rows: Tensor,
    beside: Tensor | None,
    real: Tensor | None,
    latents: Tensor | None,
    *,
    fixed: bool,
) -> Tensor:
    experts, router = mixture.experts, mixture.router
    normed, scored = (each.contiguous() for each in mixture.normed(rows))
    normed = normed if latents is None else latents.contiguous()
    scores = score(experts, router, scored)
    lent = homes.room if homes.room is not None and homes.room.is_lent else None
    room = homes.room if lent is None and len(rows) <= MAX_ROWS else None
    chosen, weights = choose(experts, router, scores, real, like=scored, room=room)
    first = homes.bank.places[0]
    lines = arranged(chosen, experts.count, rows_of_tile(chosen.numel(), experts.count, first, fixed), room=room)
    sizes = experts.network.size, normed.shape[1]
    inner, made = (
        _taken(lent or room, name, (chosen.numel(), size), rows.dtype, rows.device)
        for name, size in zip(("inner", "made"), sizes, strict=True)
    )
    if room is not None:
        normed = room.take("normed", normed.shape, normed.dtype, normed.device).copy_(normed)

    def multiply() -> None:
        own = {each: FixedRows.of(normed, each) for each in {*_encodings(first.gate, first.up)}} if fixed else {}
        on_host = HostRows(normed, chosen) if homes.on_host else None
        for batch in homes.batches(chosen if on_host is None else on_host.chosen):
            if on_host is not None and batch.bank.content.device != rows.device:
                on_host.run(experts, batch, made)
                continue
            here = batch.bank.places[0]
            _inner(experts, here, lines, batch, normed, inner, own, lent)
            pairs = Pairs(chosen, batch.places)
            of_inner = {each: FixedRows.of(inner, each, pairs) for each in _encodings(first.down)} if fixed else {}
            _multiply(_Products(here.down, here.down_bias), lines, batch, inner, made, of_inner)

    if room is None:
        multiply()
    else:
        between(multiply)
    out = torch.empty(*normed.shape, dtype=rows.dtype, device=rows.device)
    grid = len(rows), -(-normed.shape[1] // COLUMNS)
    other, stride = (out, 0) if beside is None else (beside, beside.stride(0))
    launch(
        sum_pairs, grid, (made, chosen, weights, other, scores, out, normed.shape[1], stride),
        EXPERTS=experts.count, SCORES=experts.num_scores, USED=experts.used, ADDS=beside is not None, COLUMNS=COLUMNS,
        SUM_FACTOR=experts.factors[1], BOTH_FACTOR=experts.factors[2], num_warps=4,
    )  # fmt: skip
    return out


def score(experts: Experts, router: Router, rows: Tensor) -> Tensor:
    """The scores of rows [T, hidden], fp32 [T, scores]."""
    assert router.matrix.is_contiguous()
    assert router.matrix.dtype == torch.float32
    (count, hidden), num_rows = router.matrix.shape, len(rows)
    scores = torch.empty(num_rows, count, device=rows.device)
    grid = -(-num_rows // SCORED["ROWS"]), -(-count // SCORED["EXPERTS"])
    given = rows, router.matrix, scores, num_rows, hidden, count, experts.score_scale
    launch(score_rows, grid, given, **SCORED, num_warps=4)
    return scores


def _taken(room: Room | None, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if room is not None:
        return room.take(name, shape, dtype, device)
    return torch.empty(shape, dtype=dtype, device=device)


def choose(
    experts: Experts,
    router: Router,
    scores: Tensor,
    real: Tensor | None = None,
    *,
    like: Tensor | None = None,
    room: Room | None = None,
) -> tuple[Tensor, Tensor]:
    """The experts of rows by their scores, fp32 [T, scores]: int32 [T, used], the largest rank first and the first
    expert of equal ones, in `room` if there is one; and their weights, fp32 [T, used]. real: see `RunExperts`; of
    padding the experts' number. like: of the rows' dtype; None: fp32."""
    count, used, num_rows = experts.count, experts.used, len(scores)
    chosen = _taken(room, "chosen", (num_rows, used), torch.int32, scores.device)
    weights = torch.empty(num_rows, used, device=scores.device)
    vectors = (scores if each is None else each for each in (router.bias, router.scale, real, like))
    launch(
        choose_experts, (num_rows,), (scores, *vectors, chosen, weights, experts.factors[0]),
        EXPERTS=count, SCORES=experts.num_scores, USED=used, SIGMOID=experts.scoring == "sigmoid",
        RENORMALISED=experts.renormalised, BIASED=experts.bias == "scores", CORRECTED=experts.bias == "ranks",
        SOFTMAX=experts.needs_softmax, RANKS_SCORES=experts.ranks_scores, GROUPS=experts.groups,
        GROUPS_USED=experts.groups_used, GROUP_BEST=experts.group_best, EPS=experts.eps, FLOORED=experts.floored,
        ROUNDS_SCORES=experts.rounded != "none", ROUNDS_SHARES=experts.rounded == "shares", SCALED=experts.scaled,
        CAP=experts.score_cap or 0.0,
        PADS=real is not None, PADDED=_padded(count), GROUPS_PADDED=_padded(experts.groups),
        USED_PADDED=_padded(used), num_warps=1,
    )  # fmt: skip
    return chosen, weights


def most_tiles(num_pairs: int, count: int, rows: int) -> int:
    """The tiles of `rows` lines that so many pairs with `count` experts need at most."""
    busy = min(num_pairs, count)
    return busy + (num_pairs - busy) // rows


def rows_of_tile(num_pairs: int, count: int, weights: ExpertWeights, fixed: bool = False) -> int:
    """The lines of a tile for pairs with `count` experts. Either number gives a row the same bits. fixed: in fixed
    point."""
    if fixed:
        return FIXED_ROWS[num_pairs > FIXED_ROWS[0] * count]
    stored = any(isinstance(each, StoredMatrix) for each in (weights.gate, weights.up, weights.down))
    return ROWS[num_pairs > ROWS[0] * count and not stored]


def arranging_warps(count: int) -> int:
    """The warps of a program that arranges pairs with `count` experts, whose counts are in registers."""
    return 4 if count < 512 else 8


def arranged(chosen: Tensor, count: int, rows: int, *, room: Room | None = None) -> Lines:
    """Lines for pairs with the experts `chosen`, int32 [T, used], of `count`, in tiles of `rows`; in `room` if there is
    one."""
    num_pairs = chosen.numel()
    tiles = most_tiles(num_pairs, count, rows)
    sizes = {"pair_of": tiles * rows, "expert_of": tiles}
    pair_of, expert_of = (_taken(room, name, (size,), torch.int32, chosen.device) for name, size in sizes.items())
    block = PAIRS[num_pairs > 8 * PAIRS[1]]
    launch(
        arrange_pairs, (count,), (chosen, pair_of, expert_of, num_pairs, tiles),
        EXPERTS=count, PADDED=_padded(count + 1), ROWS=rows, BLOCK=block, num_warps=arranging_warps(count),
    )  # fmt: skip
    return Lines(pair_of, expert_of, rows)


def _inner(
    experts: Experts, first: ExpertWeights, lines: Lines, batch: Batch, rows: Tensor, inner: Tensor,
    fixed: Mapping[Encoding, FixedRows], room: Room | None,
) -> None:  # fmt: skip
    """Fill inner [pairs, size] for the experts in a batch. Gate and up in two encodings are multiplied apart. fixed:
    the rows in fixed point, for each encoding; empty where they are multiplied as they are. room: for the numbers of
    both."""
    gate, up, bias, used = first.gate, first.up, first.gate_up_bias, experts.used
    activation = experts.network.activation
    if gate is None or _encoding(gate) == _encoding(up):
        _multiply(_Products(up, bias, used, gate, activation), lines, batch, rows, inner, fixed)
        return
    both = _taken(room, "both", (len(inner), 2 * inner.shape[1]), inner.dtype, inner.device)
    biases = (None, None) if bias is None else bias.chunk(2)
    for matrix, own, out in zip((gate, up), biases, both.chunk(2, 1), strict=True):
        _multiply(_Products(matrix, own, used), lines, batch, rows, out, fixed)
    inner.copy_(gated(both, activation))  # of other batches' pairs, too, whose rows do not count


def _multiply(
    of: _Products, lines: Lines, batch: Batch, rows: Tensor, out: Tensor, fixed: Mapping[Encoding, FixedRows]
) -> None:
    """Fill the rows of out, [pairs, outputs] by its stride, of pairs whose experts are in a batch. fixed: as
    `_inner`."""
    (outputs, inputs), weight, bank = of.weight.shape, of.weight, batch.bank
    bias = of.bias if of.bias is None or of.gate is None else of.bias[outputs:]
    offsets = [0 if each is None else _offset(each, bank) for each in (of.gate, weight, bias)]
    ending = {
        "GATED": of.gate is not None, "ADDED": bias is not None, "ROWS": lines.rows,
        "ACTIVATION": -1 if of.activation is None else NUMBERS[of.activation],
    }  # fmt: skip
    lists = lines.pair_of, lines.expert_of, batch.places, bank.content
    sizes = outputs, bank.step, *offsets, out.stride(0)
    tiles = len(lines.expert_of)
    widen = {"WIDEN": not rows.is_cuda}
    if not isinstance(weight, StoredMatrix):
        launch(
            multiply_plain, (tiles, -(-outputs // PLAIN["OUTPUTS"])), (rows, *lists, out, of.per_row, inputs, *sizes),
            **ending, **PLAIN, **widen, num_warps=PLAIN_WARPS, num_stages=PLAIN_STAGES, enable_fp_fusion=False,
        )  # fmt: skip
    elif fixed:
        own, tiling = fixed[weight.encoding], weight.encoding.fixed_tiling
        given = own.planes, own.units, own.sums, *lists, book_of(weight), counts_of(rows.device), out
        compiled = launch(
            multiply_fixed, (tiles, -(-outputs // tiling.outputs)),
            (*given, len(own.units), of.per_row, inputs // GROUP, *sizes),
            **ending, OUTPUTS=tiling.outputs, FORM=weight.encoding,
            num_warps=tiling.warps, num_stages=tiling.stages, enable_fp_fusion=False,
        )  # fmt: skip
        check_bytes(compiled)
    else:
        form, tiling = weight.encoding, weight.encoding.expert_tiling
        launch(
            multiply_blocks, (tiles, -(-outputs // (2 * tiling.outputs)) * 2),
            (rows, *lists, book_of(weight), out, of.per_row, inputs // form.numbers, *sizes),
            **ending, **widen, OUTPUTS=tiling.outputs, BLOCKS=tiling.blocks(form), FORM=form,
            num_warps=tiling.warps, num_stages=tiling.stages,
        )  # fmt: skip


def _encodings(*matrices: Matrix | None) -> list[Encoding]:
    """The encodings of those that are stored."""
    return [each.encoding for each in matrices if isinstance(each, StoredMatrix)]


def _encoding(matrix: Matrix) -> Encoding | None:
    return matrix.encoding if isinstance(matrix, StoredMatrix) else None


def _offset(part: Matrix, bank: Bank) -> int:
    """The offset in bytes of a tensor of the bank's first place."""
    tensor = part.rows if isinstance(part, StoredMatrix) else part
    assert tensor.is_contiguous()
    return int(tensor.storage_offset() * tensor.itemsize - bank.content.storage_offset())


def _padded(number: int) -> int:
    return 1 << (number - 1).bit_length()
