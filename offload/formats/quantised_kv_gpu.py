"""Encoding of keys and values in 4 bits on a GPU, in Triton. See `offload.formats.quantised_kv`, order "matrices"."""

# Triton reads the annotations of programs: they are not postponed.
import torch
import triton
import triton.language as tl
from torch import Tensor

from offload.formats.quantised_kv import KVCodes, check_rows
from offload.native.launch import launch

_WARPS = 4


def encode(rows: Tensor, into: KVCodes, wanted: Tensor | None = None) -> None:
    """The GPU's `offload.formats.quantised_kv.encode`, in one launch. wanted: int64 [L, H_kv, groups] contiguous;
    groups with a negative entry are left unchanged."""
    dim, blocks = check_rows(rows, into, "matrices")[4], into.blocks
    num_layers, num_heads, num_groups, _ = blocks.shape
    assert wanted is None or (wanted.shape == blocks.shape[:3] and wanted.is_contiguous())
    launch(
        encode_groups,
        (num_groups, num_heads, num_layers),
        (
            rows, blocks, blocks.view(torch.int32), blocks if wanted is None else wanted,
            *rows.stride()[:3], *blocks.stride()[:2],
        ),
        CHOSEN=wanted is not None,
        DIM=dim,
        DIM_PADDED=1 << (dim - 1).bit_length(),
        num_warps=_WARPS,
    )  # fmt: skip


@triton.jit
def _units(least, most):
    """Steps and lows of groups: halves of the least and the largest number, fp32 -> steps and lows, bf16 as fp32, and 2
    / step; see `formats.quantised.group_codes`."""
    low = 2 * least + 0.0  # no negative zero
    below = low.to(tl.int32, bitcast=True) + tl.where(low < 0, 65535, 0)
    low = tl.maximum((below & -65536).to(tl.float32, bitcast=True), -3.3895313892515355e38)  # the least finite one
    step = tl.div_rn(most - 0.5 * low, 7.5)
    step = ((step.to(tl.int32, bitcast=True) + 65535) & -65536).to(tl.float32, bitcast=True)
    step = tl.where(step < 7.888609052210118e-31, 0.0, step)  # 2**-100
    inverse = tl.where(step > 0, tl.div_rn(tl.full(step.shape, 2.0, tl.float32), tl.where(step > 0, step, 1.0)), 0.0)
    return step, low, inverse


@triton.jit
def _joined(step, low):
    """Step and low as in a block: int32, with the step in the low half."""
    return (step.to(tl.int32, bitcast=True) >> 16) & 65535 | low.to(tl.int32, bitcast=True)


@triton.jit
def _codes(halves, low, inverse):
    """The codes of numbers, given as halves -> int32."""
    units = tl.minimum(tl.maximum((halves - 0.5 * low) * inverse, 0.0), 15.0)
    return (units + 12582912.0).to(tl.int32, bitcast=True) & 15  # the last bits of so large a sum are whole numbers


@triton.jit
def encode_groups(
    rows,  # [L, 2, H_kv, tokens, D] by the strides, in elements; a head's [tokens, D] contiguous
    blocks,  # [L, H_kv, groups, BYTES] uint8 by the strides, in bytes
    units,  # the same memory as int32
    wanted,  # int64 [L, H_kv, groups]: negative for groups to leave unchanged
    layer_stride,
    kind_stride,
    head_stride,
    block_layer_stride,
    block_head_stride,
    CHOSEN: tl.constexpr,  # False: all groups are wanted
    DIM: tl.constexpr,  # a multiple of 16
    DIM_PADDED: tl.constexpr,
):
    """Program (g, h, l): the codes of group g of the tokens of KV head h in layer l."""
    TOKENS: tl.constexpr = 32  # of a block
    HALF: tl.constexpr = 16
    CHANNELS: tl.constexpr = 64  # of the values that share a step
    LANES: tl.constexpr = min(CHANNELS, DIM_PADDED)
    WIDTH: tl.constexpr = DIM_PADDED // LANES
    VALUE_UNITS: tl.constexpr = 4 * DIM + HALF * DIM
    VALUES: tl.constexpr = VALUE_UNITS + 4 * TOKENS * ((DIM + CHANNELS - 1) // CHANNELS)
    BYTES: tl.constexpr = VALUES + HALF * DIM
    group, head, layer = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if CHOSEN:  # noqa: SIM102 (in a single condition Triton would load from a missing tensor)
        if tl.load(wanted + (layer * tl.num_programs(1) + head).to(tl.int64) * tl.num_programs(0) + group) < 0:
            return
    keys = rows + layer.to(tl.int64) * layer_stride + head.to(tl.int64) * head_stride
    keys += group.to(tl.int64) * (TOKENS * DIM)
    block = layer.to(tl.int64) * block_layer_stride + head.to(tl.int64) * block_head_stride
    block += group.to(tl.int64) * BYTES
    token, dims = tl.arange(0, HALF)[:, None], tl.arange(0, DIM_PADDED)[None, :]
    at, inside = token * DIM + dims, dims < DIM
    mask = inside & (token >= 0)

    near = 0.5 * tl.load(keys + at, mask=mask, other=0.0).to(tl.float32)
    far = 0.5 * tl.load(keys + HALF * DIM + at, mask=mask, other=0.0).to(tl.float32)
    least, most = tl.min(tl.minimum(near, far), 0), tl.max(tl.maximum(near, far), 0)
    step, low, inverse = _units(least[None, :], most[None, :])
    tl.store(units + block // 4 + dims, _joined(step, low), mask=inside)
    codes = _codes(near, low, inverse) | _codes(far, low, inverse) << 4
    tl.store(blocks + block + 4 * DIM + at, codes.to(tl.uint8), mask=mask)

    values = keys + kind_stride
    near = 0.5 * tl.load(values + at, mask=mask, other=0.0).to(tl.float32)
    far = 0.5 * tl.load(values + HALF * DIM + at, mask=mask, other=0.0).to(tl.float32)
    near, far = tl.reshape(near, (HALF, WIDTH, LANES)), tl.reshape(far, (HALF, WIDTH, LANES))
    width = tl.arange(0, WIDTH)
    real = (width[:, None] * LANES + tl.arange(0, LANES)[None, :] < DIM)[None, :, :]
    unit = (block + VALUE_UNITS) // 4 + width[None, :] * TOKENS + token
    some = (width * LANES < DIM)[None, :] & (token >= 0)
    step, low, inverse = _of_rows(near, real)
    tl.store(units + unit, _joined(step, low), mask=some)
    codes = _codes(near, low[:, :, None], inverse[:, :, None])
    step, low, inverse = _of_rows(far, real)
    tl.store(units + unit + HALF, _joined(step, low), mask=some)
    codes |= _codes(far, low[:, :, None], inverse[:, :, None]) << 4
    turned = tl.trans(tl.reshape(codes, (HALF, DIM_PADDED)).to(tl.uint8))
    place = tl.arange(0, DIM_PADDED)[:, None] * HALF + tl.arange(0, HALF)[None, :]
    tl.store(blocks + block + VALUES + place, turned, mask=place < HALF * DIM)


@triton.jit
def _of_rows(halves, real):
    """`_units` of each token's channels: [tokens, WIDTH, LANES] -> [tokens, WIDTH]."""
    least = tl.min(tl.where(real, halves, float("inf")), 2)
    return _units(least, tl.max(tl.where(real, halves, float("-inf")), 2))
