"""Activations of a feed-forward network's inner rows times their gate on a GPU, in Triton, by one launch: with the
CPU's sequence of fp32 operations (native/products.h), so also with its bits, if the launch fuses no product with a
sum."""

# Triton evaluates the annotations of programs, so they are not postponed.
import torch
import triton
import triton.language as tl
from torch import Tensor

from offload.config.networks import Activation
from offload.native.launch import launch

_COLUMNS = 1024  # of a program
NUMBERS: dict[Activation, int] = {"silu": 0, "gelu_tanh": 1, "relu_squared": 2, "clamped_silu": 3}


def gated(x: Tensor, activation: Activation) -> Tensor:
    """See `kernels.activation.gated`. x: contiguous rows."""
    num_rows, size = len(x), x.shape[1] // 2
    out = torch.empty(num_rows, size, dtype=x.dtype, device=x.device)
    launch(
        activate_gate,
        (num_rows, -(-size // _COLUMNS)),
        (x, out, x.stride(0), size),
        ACTIVATION=NUMBERS[activation],
        COLUMNS=_COLUMNS,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return out


@triton.jit
def _exp2(x):
    """2^x for x up to 126, and 0 from -127 on down: `exp2` of native/vectors.h."""
    x = tl.where(x < -127.0, -127.0, x)
    above = x + 12582912.0  # 1.5 * 2^23: the sum is rounded to an integer, the even one of two
    t = x - (above - 12582912.0)
    total = tl.full(x.shape, 1.52527338e-5, tl.float32)
    total = tl.fma(total, t, tl.full(x.shape, 1.54035304e-4, tl.float32))
    total = tl.fma(total, t, tl.full(x.shape, 1.33335581e-3, tl.float32))
    total = tl.fma(total, t, tl.full(x.shape, 9.61812911e-3, tl.float32))
    total = tl.fma(total, t, tl.full(x.shape, 5.55041087e-2, tl.float32))
    total = tl.fma(total, t, tl.full(x.shape, 2.40226507e-1, tl.float32))
    total = tl.fma(total, t, tl.full(x.shape, 6.93147181e-1, tl.float32))
    total = tl.fma(total, t, tl.full(x.shape, 1.0, tl.float32))
    power = (above.to(tl.int32, bitcast=True) - (0x4B400000 - 127)) << 23
    return total * power.to(tl.float32, bitcast=True)


@triton.jit
def _divided(x, power):
    """x / (1 + 2^power)."""
    return tl.div_rn(x, 1 + tl.where(power > 126.0, float("inf"), _exp2(tl.where(power > 126.0, 0.0, power))))


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    """The activation of x, fp32."""
    if ACTIVATION == 0:
        active = _divided(x, x * -1.44269504)
    elif ACTIVATION == 1:  # 0.5 x (1 + tanh u) = x / (1 + exp(-2 u)), u = sqrt(2 / pi) (x + 0.044715 x^3)
        active = _divided(x, x * (1 + 0.044715 * x * x) * -2.30220818)
    elif ACTIVATION == 2:
        positive = tl.where(x < 0.0, 0.0, x)
        active = positive * positive
    else:
        clamped = tl.where(x > 7.0, 7.0, x)
        active = _divided(clamped, clamped * -2.4554669857025146)  # -1.702 log2(e)
    return active


@triton.jit
def opened(gate, up, ACTIVATION: tl.constexpr):
    """The activation of gate times up, in their dtype, rounded to it after the activation and after the product. Up is
    clamped and 1 added, which is rounded, where the activation is the clamped one."""
    kind = gate.dtype
    if ACTIVATION == 3:
        most = up.to(tl.float32)
        most = tl.where(most > 7.0, 7.0, most)
        up = (tl.where(most < -7.0, -7.0, most) + 1).to(kind)
    active = activated(gate.to(tl.float32), ACTIVATION).to(kind)
    return (active.to(tl.float32) * up.to(tl.float32)).to(kind)


@triton.jit
def activate_gate(
    x,  # [T, 2 * size] by the stride: gate, then up
    out,  # [T, size], contiguous
    stride,
    size,
    ACTIVATION: tl.constexpr,  # 0: SiLU, 1: GELU by its approximation with tanh, 2: squared ReLU, 3: clamped SiLU
    COLUMNS: tl.constexpr,
):
    """Program (t, c): block c of row t."""
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < size
    gate = tl.load(x + row * stride + column, mask=inside, other=0.0)
    up = tl.load(x + row * stride + size + column, mask=inside, other=0.0)
    tl.store(out + row * size + column, opened(gate, up, ACTIVATION), mask=inside)
