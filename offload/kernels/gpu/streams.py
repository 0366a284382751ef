"""Operations on rows of several residual streams on a GPU, in Triton, by one launch each (`kernels.streams`).

A program's instructions do not depend on the number of rows, so neither do a row's bits. They round where torch's
operators do; e^x and sums of squares may have other last bits.
"""

# Triton evaluates the annotations of programs, so they are not postponed.
import torch
import triton
import triton.language as tl
from torch import Tensor

from offload.kernels.norms import NormWeights
from offload.kernels.streams import StreamKernels
from offload.native.launch import launch

NUMBERS = 1024  # of a stream, that a program has at a time


def normed(x: Tensor, norm: NormWeights, count: int) -> Tensor:
    """See `kernels.streams.normed`. x: contiguous rows."""
    assert not norm.norm.centred
    assert norm.bias is None
    assert norm.weight.dtype == torch.float32
    assert norm.weight.is_contiguous()
    out, size = torch.empty_like(x), x.shape[1] // count
    arguments = x, norm.weight, out, size, count, norm.norm.eps
    launch(norm_streams, (len(x), count), arguments, NUMBERS=NUMBERS, num_warps=4, enable_fp_fusion=False)
    return out


def gates(low: Tensor, rank: int, count: int) -> tuple[Tensor, Tensor]:
    """See `kernels.streams.gates`. low: contiguous rows."""
    num_rows, width = low.shape
    inner, factors = low.new_empty(num_rows, rank), low.new_empty(num_rows, width - rank)
    arguments = low, inner, factors, width, rank, count
    grid = num_rows, -(-width // NUMBERS)
    launch(open_gates, grid, arguments, NUMBERS=NUMBERS, num_warps=4, enable_fp_fusion=False)
    return inner, factors


def mean(mixes: Tensor, rows: Tensor, count: int) -> Tensor:
    """See `kernels.streams.mean`. Both contiguous."""
    num_rows, size = len(rows), rows.shape[1] // count
    out = rows.new_empty(num_rows, size)
    grid = num_rows, -(-size // NUMBERS)
    arguments = mixes, rows, out, size
    launch(mean_streams, grid, arguments, COUNT=count, NUMBERS=NUMBERS, num_warps=4, enable_fp_fusion=False)
    return out


def inject(x: Tensor, part: Tensor, factors: Tensor) -> None:
    """See `kernels.streams.inject`. x: contiguous rows; part: rows by a stride."""
    num_rows, size = part.shape
    grid = num_rows, factors.shape[1], -(-size // NUMBERS)
    arguments = x, part, factors, part.stride(0), size
    launch(inject_part, grid, arguments, NUMBERS=NUMBERS, num_warps=4, enable_fp_fusion=False)


@triton.jit
def _sigmoid(x):
    return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), 1.0 + tl.exp(-x))


@triton.jit(do_not_specialize=["eps"])
def norm_streams(
    x,  # [T, COUNT * size], contiguous
    weights,  # fp32 [COUNT * size]
    out,  # as x
    size,
    count,
    eps,
    NUMBERS: tl.constexpr,
):
    """Program (t, c): stream c of row t. The sum of squares is of NUMBERS lanes, each over every so many numbers."""
    stream = tl.program_id(1)
    first = (tl.program_id(0).to(tl.int64) * count + stream) * size
    lane, squares = tl.arange(0, NUMBERS), tl.zeros([NUMBERS], tl.float32)
    for begun in range(0, size, NUMBERS):
        number = begun + lane
        own = tl.load(x + first + number, mask=number < size, other=0.0).to(tl.float32)
        squares += own * own
    scale = tl.rsqrt(tl.sum(squares) / size + eps)
    for begun in range(0, size, NUMBERS):
        number = begun + lane
        own = tl.load(x + first + number, mask=number < size, other=0.0).to(tl.float32)
        weight = tl.load(weights + stream * size + number, mask=number < size, other=0.0)
        tl.store(out + first + number, (own * scale * weight).to(out.dtype.element_ty), mask=number < size)


@triton.jit
def open_gates(
    low,  # [T, width], contiguous
    inner,  # [T, rank], contiguous
    factors,  # [T, width - rank], contiguous
    width,
    rank,
    count,
    NUMBERS: tl.constexpr,
):
    """Program (t, b): block b of the numbers of row t."""
    row, number = tl.program_id(0).to(tl.int64), tl.program_id(1) * NUMBERS + tl.arange(0, NUMBERS)
    kind = low.dtype.element_ty
    own = tl.load(low + row * width + number, mask=number < width, other=0.0).to(tl.float32)
    own = tl.div_rn(own, tl.full(own.shape, 1.0, tl.float32) * count).to(kind).to(tl.float32)
    opened = _sigmoid(own)
    activated = tl.div_rn(own, 1.0 + tl.exp(-own))
    tl.store(inner + row * rank + number, activated.to(kind), mask=number < rank)
    is_factor = (number >= rank) & (number < width)
    doubled = (2.0 * opened.to(kind).to(tl.float32)).to(kind)
    tl.store(factors + row * (width - rank) + number - rank, doubled, mask=is_factor)


@triton.jit
def mean_streams(
    mixes,  # [T, COUNT * size], contiguous
    rows,  # as mixes
    out,  # [T, size], contiguous
    size,
    COUNT: tl.constexpr,
    NUMBERS: tl.constexpr,
):
    """Program (t, b): block b of the numbers of row t, of all streams."""
    row, number = tl.program_id(0).to(tl.int64), tl.program_id(1) * NUMBERS + tl.arange(0, NUMBERS)
    kind, inside = rows.dtype.element_ty, number < size
    total = tl.zeros([NUMBERS], tl.float32)
    for stream in tl.static_range(COUNT):
        place = (row * COUNT + stream) * size + number
        mix = _sigmoid(tl.load(mixes + place, mask=inside, other=0.0).to(tl.float32)).to(kind).to(tl.float32)
        total += (mix * tl.load(rows + place, mask=inside, other=0.0).to(tl.float32)).to(kind).to(tl.float32)
    tl.store(out + row * size + number, tl.div_rn(total, tl.full(total.shape, COUNT, tl.float32)).to(kind), mask=inside)


@triton.jit
def inject_part(
    x,  # [T, C * size], contiguous
    part,  # [T, size] by its stride
    factors,  # [T, C], contiguous
    part_stride,
    size,
    NUMBERS: tl.constexpr,
):
    """Program (t, c, b): block b of stream c of row t."""
    row, stream, count = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    number = tl.program_id(2) * NUMBERS + tl.arange(0, NUMBERS)
    kind, inside = x.dtype.element_ty, number < size
    own = (row * count + stream) * size + number
    factor = tl.load(factors + row * count + stream).to(tl.float32)
    added = (tl.load(part + row * part_stride + number, mask=inside, other=0.0).to(tl.float32) * factor).to(kind)
    total = tl.load(x + own, mask=inside, other=0.0).to(tl.float32) + added.to(tl.float32)
    tl.store(x + own, total.to(kind), mask=inside)


BY_TRITON = StreamKernels(normed, gates, mean, inject)
