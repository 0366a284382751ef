"""Activations of a feed-forward network's inner rows times their gate on a GPU, in Triton, by one launch."""

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
    )
    return out


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    """The activation of x, fp32."""
    if ACTIVATION == 0:
        active = x / (1 + tl.exp(-x))
    elif ACTIVATION == 1:  # 0.5 x (1 + tanh u) = x / (1 + exp(-2 u)), u = sqrt(2 / pi) (x + 0.044715 x^3)
        active = x / (1 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    elif ACTIVATION == 2:
        positive = tl.maximum(x, 0.0)
        active = positive * positive
    else:
        clamped = tl.minimum(x, 7.0)
        active = clamped / (1 + tl.exp(-1.702 * clamped))
    return active


@triton.jit
def opened(gate, up, ACTIVATION: tl.constexpr):
    """The activation of gate times up, in their dtype, rounded to it after the activation and after the product. Up is
    clamped and 1 added, which is rounded, where the activation is the clamped one."""
    kind = gate.dtype
    if ACTIVATION == 3:
        up = (tl.minimum(tl.maximum(up.to(tl.float32), -7.0), 7.0) + 1).to(kind)
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
