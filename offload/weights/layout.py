"""The layout of a layer's weights: one flat buffer with named views. Operators are fused: q, k and v are one, gate and
up too."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from offload.config.block import BLOCK_NORMS
from offload.config.matrices import ALIGNMENT, OPERATORS
from offload.config.mixers import Attention
from offload.config.model import ModelConfig
from offload.config.ngrams import NGRAM_NORMS
from offload.config.norm import Norm
from offload.config.vectors import INDEX_NORMS, NGRAM_TAPS, STREAM_NORMS, layer_norms, layer_vectors
from offload.formats.encodings import ENCODINGS
from offload.formats.quantised import Codes
from offload.formats.stored import StoredMatrix
from offload.kernels.experts import Router
from offload.kernels.ngrams import NGramNorms
from offload.kernels.norms import NormWeights, dtype_of
from offload.kernels.recurrence import RecurrenceWeights
from offload.kernels.rope import ScoringWeights
from offload.weights.linear import Linear, Parts, Weight

NORMS = (*BLOCK_NORMS, "q_norm", "k_norm", "v_norm", *INDEX_NORMS, *STREAM_NORMS)
NGRAM_PARTS = dict(zip(NGRAM_NORMS, ("keys", "queries", "values"), strict=True))  # of `NGramNorms`
VECTORS = ("taps", "taps_bias", "decay", "time_bias", "skip")  # of a layer with a state
ROUTER = ("router", "router_bias", "router_scale")
SINK_LOGITS = "sink_logits"
ROTATED = ("q_norm", "k_norm")  # norms that multiply rotated queries and keys where `weighs_rotated`
_FACTOR = "factor"


@dataclass(frozen=True)
class NGramWeights:
    """The vectors of an n-gram embedding."""

    norms: NGramNorms
    convolution: RecurrenceWeights


@dataclass(frozen=True)
class LayerWeights:
    """Operators and norms of one layer, all views of one buffer. qkv: all projections of the mixer's input, o: of its
    output. gate_up: only up in a network without a gate. factor: on the layer's output rows, [1]. recurrence: of a
    layer with a state. router: of a layer with experts. q_b, k_b, v_b: of latent attention, and
    gates_b, times_b: of a delta rule, see `matrices.mixer_shapes`. to_latent, from_latent: where experts read latents.
    input_gate, input_out: of a layer with an input. states_in, states_out: the projections of a recurrence beside
    attention. index_q_norm, index_k_norm: of an indexer. mixer_streams, network_streams and what follows them: of the
    means of residual streams that mixer and network read, see `StreamWeights`. ngram_keys, ngram_values, ngrams: of an
    n-gram embedding."""

    qkv: Linear
    o: Linear
    gate_up: Linear
    down: Linear
    before_attention: NormWeights | None
    after_attention: NormWeights | None
    before_feed_forward: NormWeights | None
    after_feed_forward: NormWeights | None
    q_norm: NormWeights | None
    k_norm: NormWeights | None
    v_norm: NormWeights | None = None
    before_router: NormWeights | None = None
    before_experts: NormWeights | None = None
    after_experts: NormWeights | None = None
    after_network: NormWeights | None = None
    factor: Tensor | None = None
    recurrence: RecurrenceWeights | None = None
    router: Router | None = None
    q_b: Linear | None = None
    k_b: Linear | None = None
    v_b: Linear | None = None
    gates_b: Linear | None = None
    times_b: Linear | None = None
    to_latent: Linear | None = None
    from_latent: Linear | None = None
    states_in: Linear | None = None
    states_out: Linear | None = None
    input_gate: Linear | None = None
    input_out: Linear | None = None
    after_input: NormWeights | None = None
    index_q_norm: NormWeights | None = None
    index_k_norm: NormWeights | None = None
    mixer_streams: NormWeights | None = None
    mixer_low: Linear | None = None
    mixer_up: Linear | None = None
    network_streams: NormWeights | None = None
    network_low: Linear | None = None
    network_up: Linear | None = None
    ngram_keys: Linear | None = None
    ngram_values: Linear | None = None
    ngrams: NGramWeights | None = None

    @property
    def operators(self) -> dict[str, Linear]:
        """The layer's matrices, by name, in the order of OPERATORS."""
        return {name: own for name in OPERATORS if (own := getattr(self, name)) is not None}

    def vectors(self) -> list[Tensor]:
        """All tensors but the matrices."""
        norms = [getattr(self, name) for name in NORMS]
        found = [own.bias for own in self.operators.values()]
        if self.recurrence is not None:
            norms.append(self.recurrence.norm)
            found += [getattr(self.recurrence, name) for name in VECTORS]
        found += [each for norm in norms if norm is not None for each in (norm.weight, norm.bias)]
        if self.ngrams is not None:
            norms += [getattr(self.ngrams.norms, part) for part in NGRAM_PARTS.values()]
            found.append(self.ngrams.convolution.taps)
        if self.router is not None:
            found += [self.router.matrix, self.router.bias, self.router.scale]
        return [each for each in (*found, self.factor) if each is not None]


@dataclass(frozen=True)
class View:
    """A view of a tensor in a flat buffer. offset: in bytes."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def of(self, buffer: Tensor) -> Tensor:
        """The tensor in `buffer`, uint8 [bytes]. No copy."""
        return buffer[self.offset : self.offset + self.nbytes].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class LayerLayout:
    """The layout of a layer's tensors in its flat buffer, uint8 [num_bytes], by name. Views may differ in dtype; each
    begins at a multiple of 64 bytes. norms: of the norm vectors. stored: the encodings of views that hold a part of an
    operator's matrix as the checkpoint stores it."""

    views: dict[str, View]
    num_bytes: int
    norms: Mapping[str, Norm] = field(default_factory=dict)
    stored: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def pack(cls, tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> LayerLayout:
        """The layout of `tensors`, name -> (shape, dtype), one after the other."""
        views, end = {}, 0
        for name, (shape, dtype) in tensors.items():
            views[name] = View(end, shape, dtype)
            end += -(-views[name].nbytes // ALIGNMENT) * ALIGNMENT
        return cls(views, end)

    @classmethod
    def of(cls, config: ModelConfig, dtype: torch.dtype, code_bits: int | None = None) -> LayerLayout:
        """The layout of the layer `config.block` in `dtype`, with matrices in codes if `code_bits` is given."""
        tensors: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        stored: dict[str, str] = {}
        for name, parts in config.layer_matrices().items():
            outputs, inputs, _ = config.products[name]
            if code_bits is not None:
                tensors |= in_codes(name, (outputs, inputs), code_bits)
                continue
            for number, part in enumerate(parts):
                view = matrix_name(name, number, part.encoding)
                if part.encoding:
                    stored[view] = part.encoding
                    shape = part.outputs, ENCODINGS[part.encoding].row_bytes(inputs)
                    tensors[view] = shape, torch.uint8
                else:
                    tensors[view] = (part.outputs, inputs), dtype
        norms = layer_norms(config.block, config.hidden_size)
        tensors |= {name: ((size,), dtype_of(norm, dtype)) for name, (size, norm) in norms.items()}
        vectors = layer_vectors(config.block, config.hidden_size)
        tensors |= {name: (shape, torch.float32) for name, shape in vectors.items()}
        tensors |= {f"{name}.bias": ((outputs,), dtype) for name, (outputs, _, bias) in config.products.items() if bias}
        tensors |= {_FACTOR: ((1,), dtype)} if config.block.multiplied else {}
        return replace(cls.pack(tensors), norms={name: norm for name, (_, norm) in norms.items()}, stored=stored)

    @classmethod
    def of_layers(cls, config: ModelConfig, dtype: torch.dtype, code_bits: int | None = None) -> list[LayerLayout]:
        """The layout of each layer; equal layouts are one object."""
        made = list[LayerLayout]()
        for kind, _ in config.kinds:
            found = cls.of(kind, dtype, code_bits)
            made.append(next((each for each in made if each == found), found))
        by_block = {kind.block: layout for (kind, _), layout in zip(config.kinds, made, strict=True)}
        return [by_block[block] for block in config.blocks]

    @property
    def end_of_matrices(self) -> int:
        """The offset of norms and biases, in bytes; matrices come first."""
        matrices = ("weight", "blocks", "stored")
        return next(
            (view.offset for name, view in self.views.items() if name.split(".")[-1] not in matrices), self.num_bytes
        )

    def tensors(self, buffer: Tensor) -> dict[str, Tensor]:
        """All tensors in `buffer`, by name."""
        return {name: view.of(buffer) for name, view in self.views.items()}

    def bind(self, buffer: Tensor) -> LayerWeights:
        """The layer in `buffer`, as views, also of bytes copied into it later."""
        tensors = self.tensors(buffer)
        named = {name.partition(".")[0] for name in tensors}
        has = [name for name in OPERATORS if name in named]
        operators = {name: Linear(self._matrix(tensors, name), tensors.get(f"{name}.bias")) for name in has}
        norms = {name: NormWeights(norm, tensors[name], tensors.get(f"{name}.bias")) for name, norm in self._normed}
        recurrence = None
        if vectors := {name: tensors[name] for name in VECTORS if name in tensors}:
            recurrence = RecurrenceWeights(**vectors, norm=norms.get("out_norm"))
        of_norms = {name: norms.get(name) for name in NORMS}
        router = None
        if (matrix := tensors.get("router")) is not None:
            bias, scale = tensors.get("router_bias"), tensors.get("router_scale")
            router = Router(matrix, bias, scale, of_norms["before_router"])
        ngrams = None
        if (taps := tensors.get(NGRAM_TAPS)) is not None:
            parts = {part: norms[name] for name, part in NGRAM_PARTS.items()}
            ngrams = NGramWeights(NGramNorms(**parts), RecurrenceWeights(taps))
        others = {"factor": tensors.get(_FACTOR), "recurrence": recurrence, "router": router, "ngrams": ngrams}
        return LayerWeights(**operators, **of_norms, **others)  # type: ignore[arg-type]

    @property
    def _normed(self) -> list[tuple[str, Norm]]:
        """The norms by name; their biases have no name of their own here."""
        return [(name, norm) for name, norm in self.norms.items() if not name.endswith(".bias")]

    def _matrix(self, tensors: Mapping[str, Tensor], operator: str) -> Weight:
        """The matrix of an operator: codes, or its parts."""
        if f"{operator}.blocks" in tensors:
            return Codes(tensors[f"{operator}.blocks"])
        parts = [
            StoredMatrix(tensor, ENCODINGS[self.stored[name]]) if name in self.stored else tensor
            for name, tensor in tensors.items()
            if name.startswith(f"{operator}.") and not name.endswith("bias")
        ]
        return parts[0] if len(parts) == 1 else Parts(tuple(parts))


def scoring_weights(attention: Attention, layout: LayerLayout, buffer: Tensor, device: torch.device) -> ScoringWeights:
    """The weights in `buffer` that a layer's attention scores need, copied to `device`. The copies stay on it wherever
    the layer is."""

    def copied(name: str) -> Tensor:
        return layout.views[name].of(buffer).clone().to(device)

    query, key = ROTATED
    return ScoringWeights(
        (copied(query), copied(key)) if attention.weighs_rotated else None,
        copied(SINK_LOGITS) if attention.sink_logits else None,
    )


def in_codes(name: str, shape: tuple[int, ...], bits: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """The tensor, by name, that replaces the matrix [outputs, inputs] of operator `name`: see `Codes`."""
    return {f"{name}.blocks": (Codes.shape_of_blocks(shape, bits), torch.uint8)}


def matrix_name(operator: str, part: int, encoding: str) -> str:
    """The name of the view of a part of an operator's matrix: "qkv.weight", "qkv.1.stored"."""
    return ".".join([operator, *([str(part)] if part else []), "stored" if encoding else "weight"])
