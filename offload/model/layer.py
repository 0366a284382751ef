"""A layer as a list of steps, made from its description and its weights. Executors run the list over rows: by the CPU's
kernels (model/native_layers.py) or by torch's operators (model/torch_layers.py).

Every step reads and writes named operands of the rows. A mixer other than attention is a step in place of
`Attend`, a feed-forward network other than a dense one has steps in place of its two products (docs/design.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from offload.config.block import Activation, Attention, Block
from offload.kernels.norms import NormWeights
from offload.kernels.products import Ending
from offload.weights.layout import LayerWeights
from offload.weights.linear import Linear

# x: the hidden rows [T, hidden]. qkv: queries, keys, values and gate, [T, outputs]. attended: [T, H * D]. inner: the
# feed-forward network's inner rows [T, size]. part: a sublayer's output before its norm or sum over ranks, [T, hidden].
Operand = Literal["x", "qkv", "attended", "inner", "part"]
# (layer, q [T, H, D], k and v [T, H_kv, D]) -> [T, H * D], contiguous
AttendRows = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Product:
    """A matrix product: out = ending(norm(read) @ weight^T + bias), rounded to the dtype after the norm, the product
    and each step of the ending; see `kernels.products.Step`. factor: of the ending "add"."""

    read: Operand
    linear: Linear
    out: Operand
    norm: NormWeights | None = None
    ending: Ending = "write"
    factor: float = 1.0
    activation: Activation = "silu"


@dataclass(frozen=True)
class Attend:
    """Attention: attended = attention of the normed heads in qkv over their sequences' caches, times the gate's sigmoid
    where the layer has a gate."""

    attention: Attention
    weights: LayerWeights


@dataclass(frozen=True)
class Add:
    """A sublayer's residual addition: x += factor * norm(sum of `part` over the ranks)."""

    norm: NormWeights | None
    factor: float


@dataclass(frozen=True)
class Scale:
    """The layer's scale: x *= factor, [1]."""

    factor: Tensor


LayerStep = Product | Attend | Add | Scale


def steps_of(block: Block, weights: LayerWeights, *, alone: bool) -> list[LayerStep]:
    """The steps of a layer. alone: one rank has the whole model, so products can be added to x without a sum over
    ranks."""
    attend = [
        Product("x", weights.qkv, "qkv", weights.before_attention),
        Attend(block.attention, weights),
        *_added("attended", weights.o, weights.after_attention, block.scale, alone),
    ]
    inner = Product(
        "x",
        weights.gate_up,
        "inner",
        weights.before_attention if block.side_by_side else weights.before_feed_forward,
        "gate" if block.feed_forward.gated else "activate",
        activation=block.feed_forward.activation,
    )
    down = _added("inner", weights.down, weights.after_feed_forward, block.scale, alone)
    steps: list[LayerStep] = [attend[0], inner, *attend[1:], *down] if block.side_by_side else [*attend, inner, *down]
    return steps if weights.factor is None else [*steps, Scale(weights.factor)]


def _added(read: Operand, linear: Linear, norm: NormWeights | None, factor: float, alone: bool) -> list[LayerStep]:
    """A sublayer's last product, added to x."""
    if alone and norm is None:
        return [Product(read, linear, "x", ending="add", factor=factor)]
    return [Product(read, linear, "part"), Add(norm, factor)]
