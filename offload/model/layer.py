"""A layer as a list of steps, made from its description and its weights. Executors run the list over rows: by the CPU's
kernels (model/native_layers.py) or by torch's operators (model/torch_layers.py).

Every step reads and writes named operands of the rows. A mixer is one step between two products; a mixture of
experts is one in place of the feed-forward network's two products (docs/design.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from offload.config.block import Activation, Attention, Block, DeltaRule, Experts
from offload.kernels.delta import DeltaWeights
from offload.kernels.norms import NormWeights
from offload.kernels.products import Ending
from offload.weights.layout import LayerWeights
from offload.weights.linear import Linear

# x: the hidden rows [T, hidden]. qkv: the mixer's projected rows: queries, keys, values and others, [T, outputs].
# mixed: its output [T, out_size]. inner: the feed-forward network's inner rows [T, size]. part: a sublayer's output
# before its norm or sum over ranks, [T, hidden].
Operand = Literal["x", "qkv", "mixed", "inner", "part"]


class MixRows(Protocol):
    """What layers ask of the caches of a forward's sequences; see `offload.kv`."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, H, D], k and v [T, H_kv, D] -> [T, H * D], contiguous."""
        ...

    def recur(self, layer: int, rows: Tensor, weights: DeltaWeights) -> Tensor:
        """Projected rows of a layer with a state, [T, outputs] -> [T, out_size], contiguous."""
        ...


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
    """Attention: mixed = attention of the normed heads in qkv over their sequences' caches, times the gate's sigmoid
    where the layer has a gate."""

    attention: Attention
    weights: LayerWeights


@dataclass(frozen=True)
class Recur:
    """A delta rule: mixed = its output for the rows in qkv, with the states of their sequences."""

    delta: DeltaRule
    weights: DeltaWeights


@dataclass(frozen=True)
class Mix:
    """A mixture of experts: part = its output for the normed rows of x. router: fp32 [experts, hidden]."""

    experts: Experts
    router: Tensor
    norm: NormWeights | None


@dataclass(frozen=True)
class Add:
    """A sublayer's residual addition: x += factor * norm(sum of `part` over the ranks)."""

    norm: NormWeights | None
    factor: float


@dataclass(frozen=True)
class Scale:
    """The layer's scale: x *= factor, [1]."""

    factor: Tensor


LayerStep = Product | Attend | Recur | Mix | Add | Scale


def steps_of(block: Block, weights: LayerWeights, *, alone: bool) -> list[LayerStep]:
    """The steps of a layer. alone: one rank has the whole model, so products can be added to x without a sum over
    ranks."""
    mixer = Recur(block.delta, weights.delta) if weights.delta is not None else Attend(block.attention, weights)
    mix = [
        Product("x", weights.qkv, "qkv", weights.before_attention),
        mixer,
        *_added("mixed", weights.o, weights.after_attention, block.scale, alone),
    ]
    inner, *down = _network(block, weights, alone) if block.experts is None else _experts(block, block.experts, weights)
    steps: list[LayerStep] = [mix[0], inner, *mix[1:], *down] if block.side_by_side else [*mix, inner, *down]
    return steps if weights.factor is None else [*steps, Scale(weights.factor)]


def _network(block: Block, weights: LayerWeights, alone: bool) -> list[LayerStep]:
    """The steps of the feed-forward network: what reads x, and what adds to it."""
    network = block.feed_forward
    norm = weights.before_attention if block.side_by_side else weights.before_feed_forward
    ending: Ending = "gate" if network.gated else "activate"
    inner = Product("x", weights.gate_up, "inner", norm, ending, activation=network.activation)
    return [inner, *_added("inner", weights.down, weights.after_feed_forward, block.scale, alone)]


def _experts(block: Block, experts: Experts, weights: LayerWeights) -> list[LayerStep]:
    """The same of a mixture of experts."""
    assert weights.router is not None
    norm = weights.before_attention if block.side_by_side else weights.before_feed_forward
    return [Mix(experts, weights.router, norm), Add(weights.after_feed_forward, block.scale)]


def _added(read: Operand, linear: Linear, norm: NormWeights | None, factor: float, alone: bool) -> list[LayerStep]:
    """A sublayer's last product, added to x."""
    if alone and norm is None:
        return [Product(read, linear, "x", ending="add", factor=factor)]
    return [Product(read, linear, "part"), Add(norm, factor)]
