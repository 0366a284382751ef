"""A layer as a list of steps, made from its description and its weights. Executors run the list over rows: by the CPU's
kernels (model/native_layers.py) or by torch's operators (model/torch_layers.py).

Every step reads and writes named operands of the rows. A mixer is one step between two products; a mixture of
experts is one in place of the feed-forward network's two products, or behind them (docs/design.md).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch
from torch import Tensor

from offload.config.block import Block
from offload.config.mixers import Attention, Recurrence
from offload.config.networks import Activation, Experts
from offload.config.ngrams import NGrams
from offload.kernels.experts import Mixture
from offload.kernels.norms import NormWeights
from offload.kernels.pooled import IndexRows
from offload.kernels.products import Ending
from offload.kernels.recurrence import RecurrenceWeights
from offload.model.sums import Sums
from offload.weights.layout import LayerWeights, NGramWeights
from offload.weights.linear import Linear
from offload.weights.streams import StreamWeights

# x: the hidden rows [T, hidden]. qkv: the mixer's projected rows: queries, keys, values and others, [T, outputs].
# mixed: its output [T, out_size]. inner: the feed-forward network's inner rows [T, size]. part: a sublayer's output
# before its norm or sum over ranks, [T, hidden]. made: that of experts, beside: of a network beside them, [T, hidden].
# states, recurred: as qkv and mixed, of a recurrence beside attention. gated: the gate of the layer's input, [T, size].
# latent: rows that experts read in place of the hidden ones, and then what they make of them, [T, latent]. Of residual
# streams x is all of them, [T, count * hidden], read: the rows that a part reads, [T, hidden], factors: those of its
# output, [T, count].
Operand = Literal[
    "x", "qkv", "mixed", "inner", "part", "made", "beside", "gated", "latent", "states", "recurred", "read", "factors",
]  # fmt: skip


class MixRows(Protocol):
    """The interface through which layers use the caches of a forward's sequences; see `offload.kv`."""

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        """q [T, H, D], k and v [T, H_kv, D] -> [T, H * D], contiguous. k, v: see `Cache`."""
        ...

    def attend_chosen(self, layer: int, q: Tensor, k: Tensor, v: Tensor, index: IndexRows) -> Tensor:
        """As `attend`, in a layer with an indexer: rows attend to what it chooses."""
        ...

    def with_earlier(self, ids: Tensor) -> Tensor:
        """The ids of a forward's tokens, int64 [T] -> [context + T] on the host, after those before them."""
        ...

    def convolve(self, layer: int, rows: Tensor, weights: RecurrenceWeights) -> Tensor:
        """Normed gated values of a layer with n-grams, [T, channels] -> their convolution, [T, channels]."""
        ...

    def recur(self, layer: int, rows: Tensor, weights: RecurrenceWeights) -> Tensor:
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
    """Attention: mixed = attention of the normed heads in qkv over their sequences' caches, times the function of the
    gate where the layer has one. Latent attention has three products of its own: of the queries, and by head before and
    after the cache attends; its gate comes last."""

    attention: Attention
    weights: LayerWeights


@dataclass(frozen=True)
class Recur:
    """A recurrence: out = its output for the projected rows `read`, with the states of their sequences. low_rank: the
    matrices of its gates and times, if these are products with numbers of `read`."""

    recurrence: Recurrence
    weights: RecurrenceWeights
    read: Operand = "qkv"
    out: Operand = "mixed"
    low_rank: tuple[Linear, Linear] | None = None


@dataclass(frozen=True)
class Mix:
    """A mixture of experts: made = its output for the normed rows of `read`. adds: plus `beside`, times the gate of the
    router where it has one. If experts read latents: latent = its output for these."""

    mixture: Mixture
    adds: bool = False
    read: Operand = "x"

    @property
    def out(self) -> Operand:
        return "latent" if self.mixture.experts.latent else "made"


@dataclass(frozen=True)
class Join:
    """The sum of two outputs, each normed if it has a norm: made = of_experts(sum of `made` over the ranks) +
    of_network(sum of `beside` over them)."""

    of_experts: NormWeights | None
    of_network: NormWeights | None

    def __call__(self, made: Tensor, beside: Tensor, sums: Sums) -> Tensor:
        """Both outputs [T, hidden] of this rank -> their sum over all ranks, after one exchange."""
        if sums.size > 1:
            made, beside = sums.total(torch.cat([made, beside], 1)).chunk(2, 1)
        made = made if self.of_experts is None else self.of_experts(made)
        return made + (beside if self.of_network is None else self.of_network(beside))


@dataclass(frozen=True)
class Add:
    """A sublayer's residual addition: x += factor * norm(sum of `read` over the ranks). is_whole: it is that sum
    already."""

    norm: NormWeights | None
    factor: float
    read: Operand = "part"
    is_whole: bool = False


@dataclass(frozen=True)
class Mean:
    """The mean over residual streams that a part reads: read, factors = those of `Read`."""

    weights: StreamWeights


@dataclass(frozen=True)
class Inject:
    """A sublayer's addition to residual streams: each stream of x += its factor * sum of `part` over the ranks.
    is_whole: as of `Add`."""

    part: Operand = "part"
    is_whole: bool = False


@dataclass(frozen=True)
class AddNGrams:
    """The n-gram embedding of a layer: x += gated values + their convolution. The layer's input is its table's rows,
    [T, width]."""

    ngrams: NGrams
    weights: NGramWeights
    keys: Linear
    values: Linear


@dataclass(frozen=True)
class Gate:
    """The layer's input, see `LayerTable`: gated *= it."""


@dataclass(frozen=True)
class Scale:
    """The layer's scale: x *= factor, [1]."""

    factor: Tensor


LayerStep = Product | Attend | Recur | Mix | Join | Add | Mean | Inject | AddNGrams | Gate | Scale


def reads(step: LayerStep) -> frozenset[Operand]:
    """The operands that a step reads."""
    match step:
        case Product():
            return frozenset((step.read, "x") if step.ending == "add" else (step.read,))
        case Attend():
            return frozenset(("qkv",))
        case Recur():
            return frozenset((step.read,))
        case Mix():
            beside: tuple[Operand, ...] = ("beside",) if step.adds else ()
            return frozenset((step.read, *beside, *(("latent",) if step.mixture.experts.latent else ())))
        case Join():
            return frozenset(("made", "beside"))
        case Add():
            return frozenset(("x", step.read))
        case Inject():
            return frozenset(("x", "factors", step.part))
        case Gate():
            return frozenset(("gated",))
        case _:
            return frozenset(("x",))


def steps_of(block: Block, weights: LayerWeights, *, alone: bool) -> list[LayerStep]:
    """The steps of a layer. alone: one rank has the whole model, so products can be added to x without a sum over
    ranks."""
    mix: list[LayerStep] = []
    if block.has_mixer:
        mix = [
            *_mean(block, weights.mixer_streams, weights.mixer_low, weights.mixer_up),
            Product(_rows(block), weights.qkv, "qkv", weights.before_attention),
            Attend(block.attention, weights) if block.attends else _recur(block, weights),
            *_added(block, "mixed", weights.o, weights.after_attention, alone),
        ]
    if weights.states_in is not None and weights.states_out is not None:
        mix = [
            Product("x", weights.states_in, "states", weights.before_attention),
            *mix,
            replace(_recur(block, weights), read="states", out="recurred"),
            *_added(block, "recurred", weights.states_out, None, alone),
        ]
    first, last = _network(block, weights, alone) if block.experts is None else _experts(block, block.experts, weights)
    if block.has_network:
        first = [*_mean(block, weights.network_streams, weights.network_low, weights.network_up), *first]
    steps: list[LayerStep] = [mix[0], *first, *mix[1:], *last] if block.side_by_side else [*mix, *first, *last]
    if weights.input_gate is not None and weights.input_out is not None:
        activation = block.feed_forward.activation
        steps.append(Product("x", weights.input_gate, "gated", ending="activate", activation=activation))
        steps += [Gate(), Product("gated", weights.input_out, "part"), Add(weights.after_input, 1.0, is_whole=True)]
    steps = [*_ngrams(block, weights), *steps]
    return steps if weights.factor is None else [*steps, Scale(weights.factor)]


def takes_input(step: LayerStep) -> bool:
    """Whether a step takes the layer's input."""
    return isinstance(step, Gate | AddNGrams)


def _ngrams(block: Block, weights: LayerWeights) -> list[LayerStep]:
    if block.ngrams is None:
        return []
    keys, values, own = weights.ngram_keys, weights.ngram_values, weights.ngrams
    assert keys is not None
    assert values is not None
    assert own is not None
    return [AddNGrams(block.ngrams, own, keys, values)]


def _mean(block: Block, norm: NormWeights | None, low: Linear | None, up: Linear | None) -> list[LayerStep]:
    """The mean of residual streams that a part reads, if there are some."""
    if block.streams is None:
        return []
    assert norm is not None
    assert low is not None
    assert up is not None
    return [Mean(StreamWeights(block.streams, norm, low, up))]


def _rows(block: Block) -> Operand:
    """The rows that a part reads."""
    return "x" if block.streams is None else "read"


def _recur(block: Block, weights: LayerWeights) -> Recur:
    assert weights.recurrence is not None
    gates, times = weights.gates_b, weights.times_b
    low_rank = None if gates is None or times is None else (gates, times)
    return Recur(block.recurrence, weights.recurrence, low_rank=low_rank)


def _network(block: Block, weights: LayerWeights, alone: bool) -> tuple[list[LayerStep], list[LayerStep]]:
    """The steps of the feed-forward network, if there is one: those that read x, and those that add to it."""
    if not block.has_network:
        return [], []
    added = _added(block, "inner", weights.down, weights.after_feed_forward, alone)
    return [_inner(block, weights)], added


def _experts(block: Block, experts: Experts, weights: LayerWeights) -> tuple[list[LayerStep], list[LayerStep]]:
    """The steps of a mixture of experts and of the feed-forward network beside it, if there is one: those that read x,
    and those that add to it."""
    assert weights.router is not None
    beside: list[LayerStep] = [_inner(block, weights), Product("inner", weights.down, "beside")]
    beside, joins = beside if block.feed_forward.size else [], block.joins
    assert beside or not (joins or experts.gates_network)
    norm = weights.before_experts or _read(block, weights)
    mix = Mix(Mixture(experts, weights.router, norm), bool(beside) and not joins, _rows(block))
    join = [Join(weights.after_experts, weights.after_network)] if joins else []
    add: LayerStep = Add(weights.after_feed_forward, block.scale, "made", is_whole=joins)
    if block.streams is not None:
        add = Inject("made", is_whole=joins)
    if weights.to_latent is None or weights.from_latent is None:
        return [*beside, mix], [*join, add]
    assert not experts.averaged
    assert not experts.gates_network
    read = Product(_rows(block), weights.to_latent, "latent", norm)
    return [*beside, read, mix], [Product("latent", weights.from_latent, "made"), *join, add]


def _inner(block: Block, weights: LayerWeights) -> Product:
    """The first step of the feed-forward network."""
    network = block.feed_forward
    ending: Ending = "gate" if network.gated else "activate"
    read = _read(block, weights)
    return Product(_rows(block), weights.gate_up, "inner", read, ending, activation=network.activation)


def _read(block: Block, weights: LayerWeights) -> NormWeights | None:
    """The norm of the rows that the feed-forward network reads."""
    return weights.before_attention if block.side_by_side else weights.before_feed_forward


def _added(block: Block, read: Operand, linear: Linear, norm: NormWeights | None, alone: bool) -> list[LayerStep]:
    """A sublayer's last product, added to x."""
    if block.streams is not None:
        return [Product(read, linear, "part"), Inject()]
    if alone and norm is None:
        return [Product(read, linear, "x", ending="add", factor=block.scale)]
    return [Product(read, linear, "part"), Add(norm, block.scale)]
