"""Short convolutions, gated or dilated, on a GPU, in Triton, by one launch.

Where the number of replayed tokens is on the GPU it is read there, so a graph may contain the launch. All tokens have
the same instructions, so a row's bits do not depend on how tokens are divided into launches.
"""

# Triton evaluates the annotations of programs, so they are not postponed.
import torch
import triton
import triton.language as tl
from torch import Tensor

from offload.config.mixers import DilatedConvolution, ShortConvolution
from offload.kernels.recurrence import Held, RecurrenceWeights, Replayed
from offload.native.launch import launch

NUMBERS = 128  # channels of a program
ROWS = 16  # of a program: no fewer than the rows before a token that its convolution reads


def convolution(
    own: ShortConvolution | DilatedConvolution,
    weights: RecurrenceWeights,
    held: Held,
    rows: Tensor,
    replayed: Replayed,
    *,
    settles: bool,
) -> Tensor:
    """`RunRecurrence` by one launch."""
    assert own.width - 1 <= ROWS
    assert held.inputs.is_contiguous()
    num_rows, there, count = len(rows), replayed.there, -1
    if there is None:
        there, count = torch.empty(1, dtype=torch.long, device=rows.device), replayed.count  # it is not read
    out = torch.empty(num_rows, own.out_size, dtype=rows.dtype, device=rows.device)
    bias = weights.taps if weights.taps_bias is None else weights.taps_bias
    launch(
        convolve,
        (-(-own.channels // NUMBERS), max(-(-num_rows // ROWS), 1)),
        (held.inputs, rows, weights.taps, bias, there, out, rows.stride(0), count, num_rows, int(settles)),
        **constants(own),
        num_warps=4,
        enable_fp_fusion=False,
    )
    return out


def constants(own: ShortConvolution | DilatedConvolution) -> dict[str, object]:
    """The constants of `convolve`."""
    kind: dict[str, object] = {"DILATION": 1, "GATED": True, "BIASED": "taps_bias" in own.vectors}
    if isinstance(own, DilatedConvolution):
        kind |= {"DILATION": own.dilation, "GATED": False}
    return kind | {
        "CHANNELS": own.channels, "WIDTH": own.width, "TAIL": 1 << (own.width - 1).bit_length(),
        "NUMBERS": NUMBERS, "ROWS": ROWS,
    }  # fmt: skip


@triton.jit
def _inputs(held, rows, row_stride, token, first_new, channel, mask, CHANNELS: tl.constexpr, GATED: tl.constexpr):
    """The inputs of some channels at the places `token` [n, 1]: of held tokens, of which there are `first_new`, or of
    new rows, B * x or x. In the dtype of rows."""
    old, row = token < first_new, rows + (token - first_new).to(tl.int64) * row_stride + channel
    before = tl.load(held + token.to(tl.int64) * CHANNELS + channel, mask=mask & old, other=0.0)
    new = mask & (token >= first_new)
    own = tl.load(row, mask=new, other=0.0)
    if GATED:
        x = tl.load(row + 2 * CHANNELS, mask=new, other=0.0)
        own = (own.to(tl.float32) * x.to(tl.float32)).to(before.dtype)
    return tl.where(old, before, own)


@triton.jit(do_not_specialize=["count", "num_rows", "settles"])
def convolve(
    held,  # [WIDTH - 1 + M, CHANNELS], contiguous
    rows,  # [T, 3 * CHANNELS]: B, C and x; or if not GATED [T, CHANNELS]: x; a row contiguous
    taps,  # fp32 [taps, CHANNELS]
    bias,  # fp32 [CHANNELS], if BIASED
    there,  # int64 [1]: n, where `count` is negative
    out,  # [T, CHANNELS]
    row_stride,
    count,  # n, of tokens that are replayed
    num_rows,  # T
    settles,  # 1: of the last tokens WIDTH - 1 are held, 0: of those before the rows, and all rows
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,  # tokens from the first tap to the last
    DILATION: tl.constexpr,  # tokens between taps
    GATED: tl.constexpr,
    TAIL: tl.constexpr,  # the least power of two that is WIDTH - 1 or more
    BIASED: tl.constexpr,
    NUMBERS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Program (c, r): block c of the channels of block r of the rows. Tokens are told by their places, as in `held`:
    replayed ones' from WIDTH - 1 on, the new rows' from WIDTH - 1 + n on. The first block of rows alone reads what is
    held, and writes it once it has read it."""
    channel = tl.program_id(0) * NUMBERS + tl.arange(0, NUMBERS)[None, :]
    first, inside = tl.program_id(1) * ROWS, channel < CHANNELS
    replayed = tl.load(there, mask=count < 0, other=count).to(tl.int32)
    first_new, row = replayed + WIDTH - 1, first + tl.arange(0, ROWS)[:, None]
    mask, place = inside & (row < num_rows), replayed + row
    sums = tl.zeros([ROWS, NUMBERS], tl.float32)
    for tap in tl.static_range((WIDTH - 1) // DILATION + 1):
        weight = tl.load(taps + tap * CHANNELS + channel, mask=inside, other=0.0)
        each = _inputs(held, rows, row_stride, place + tap * DILATION, first_new, channel, mask, CHANNELS, GATED)
        sums += each.to(tl.float32) * weight
    if BIASED:
        sums += tl.load(bias + channel, mask=inside, other=0.0)
    dtype = out.dtype.element_ty
    made = sums.to(dtype).to(tl.float32)
    if GATED:
        gate = tl.load(rows + row.to(tl.int64) * row_stride + CHANNELS + channel, mask=mask, other=0.0)
        made = made * gate.to(tl.float32)
    else:
        made = made / (1.0 + tl.exp(-made))
    tl.store(out + row.to(tl.int64) * CHANNELS + channel, made.to(dtype), mask=mask)
    if first > 0:
        return
    tail = tl.arange(0, TAIL)[:, None]
    real = inside & (tail < WIDTH - 1)
    last = replayed + num_rows * settles + tail
    moved = _inputs(held, rows, row_stride, last, first_new, channel, real, CHANNELS, GATED)
    tl.debug_barrier()
    tl.store(held + tail * CHANNELS + channel, moved, mask=real)
    for begun in range(0, tl.where(settles == 0, num_rows, 0), ROWS):
        new = begun + tl.arange(0, ROWS)[:, None]
        own = inside & (new < num_rows)
        kept = _inputs(held, rows, row_stride, first_new + new, first_new, channel, own, CHANNELS, GATED)
        tl.store(held + (WIDTH - 1 + new) * CHANNELS + channel, kept, mask=own)
