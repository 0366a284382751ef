"""A layer's weights: one flat buffer with named views, and where the layers of a model are.

Fused operators: q, k and v are one matrix, gate and up are one. A whole layer is one copy over the link.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from offload.errors import ModelError
from offload.kernels.codes import Codes
from offload.kernels.products import product
from offload.plan.config import ModelConfig
from offload.plan.shards import ALONE, Shard
from offload.plan.sizing import NUM_STAGING
from offload.transfer.checkpoint import Checkpoint
from offload.transfer.link import Event, Link
from offload.transfer.memory import Memory, Tier

OPERATORS = ("qkv", "o", "gate_up", "down")
_ALIGNMENT = 64  # bytes, of each view in its buffer


@dataclass(frozen=True)
class Linear:
    """x [T, in] -> [T, out] with weight [out, in]."""

    weight: Tensor | Codes
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return product(x, self.weight, self.bias)


@dataclass(frozen=True)
class LayerWeights:
    """Operators and norms of one layer, all views of one buffer."""

    qkv: Linear
    o: Linear
    gate_up: Linear
    down: Linear
    input_norm: Tensor
    post_norm: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None


@dataclass(frozen=True)
class View:
    """A tensor in a flat buffer. offset: bytes."""

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
    """The place of a layer's tensors in its flat buffer, uint8 [num_bytes], by name. Views may differ in dtype; each
    begins at a multiple of 64 bytes."""

    views: dict[str, View]
    num_bytes: int

    @classmethod
    def pack(cls, tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> LayerLayout:
        """`tensors`, name -> (shape, dtype), one after the other."""
        views, end = {}, 0
        for name, (shape, dtype) in tensors.items():
            views[name] = View(end, shape, dtype)
            end += -(-views[name].nbytes // _ALIGNMENT) * _ALIGNMENT
        return cls(views, end)

    @classmethod
    def of(cls, config: ModelConfig, dtype: torch.dtype, *, coded: bool = False) -> LayerLayout:
        """A layer of `config` in `dtype`, coded: its matrices in 4 bits."""
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        hidden, inner = config.hidden_size, config.intermediate_size
        shapes: dict[str, tuple[int, ...]] = {
            "qkv.weight": (q + 2 * kv, hidden),
            "o.weight": (hidden, q),
            "gate_up.weight": (2 * inner, hidden),
            "down.weight": (hidden, inner),
            "input_norm": (hidden,),
            "post_norm": (hidden,),
        }
        if config.qkv_bias:
            shapes["qkv.bias"] = (q + 2 * kv,)
        if config.o_bias:
            shapes["o.bias"] = (hidden,)
        if config.mlp_bias:
            shapes |= {"gate_up.bias": (2 * inner,), "down.bias": (hidden,)}
        if config.qk_norm:
            shapes |= {"q_norm": (config.head_dim,), "k_norm": (config.head_dim,)}
        tensors = {name: (shape, dtype) for name, shape in shapes.items()}
        if coded:
            for name in OPERATORS:
                tensors |= in_codes(name, tensors.pop(f"{name}.weight")[0])
        return cls.pack(tensors)

    def tensors(self, buffer: Tensor) -> dict[str, Tensor]:
        """All that `buffer` holds, by name."""
        return {name: view.of(buffer) for name, view in self.views.items()}

    def bind(self, buffer: Tensor) -> LayerWeights:
        """The layer that `buffer` holds, now or after a copy into it."""
        tensors = self.tensors(buffer)
        operators = {name: Linear(matrix_of(tensors, name), tensors.get(f"{name}.bias")) for name in OPERATORS}
        norms = {name: tensors.get(name) for name in ("input_norm", "post_norm", "q_norm", "k_norm")}
        return LayerWeights(**operators, **norms)  # type: ignore[arg-type]


def in_codes(name: str, shape: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """The tensor, by name, that operator `name` has in place of a matrix [outputs, inputs]: see `Codes`."""
    return {f"{name}.blocks": (Codes.shape_of_blocks(shape), torch.uint8)}


def matrix_of(tensors: Mapping[str, Tensor], name: str) -> Tensor | Codes:
    """The matrix of operator `name`, as it is or in codes."""
    return tensors[f"{name}.weight"] if f"{name}.blocks" not in tensors else Codes(tensors[f"{name}.blocks"])


@dataclass(frozen=True)
class _Source:
    """Rows, and of a matrix columns, of a checkpoint's tensor that are rows of a view. columns: None for all."""

    name: str
    rows: range
    columns: range | None = None


def _sources(whole: ModelConfig, shard: Shard, view: str) -> list[_Source]:
    """What a view of a shard is read from, top to bottom. Nothing for the bias of an operator whose outputs are summed
    over the ranks, but on the first: there it is added once."""
    dim, hidden = whole.head_dim, range(whole.hidden_size)
    heads, kv_heads, inner = shard.heads(whole), shard.kv_heads(whole), shard.inner(whole)
    q = range(heads.start * dim, heads.stop * dim)
    kv = range(kv_heads.start * dim, kv_heads.stop * dim)
    operator, _, kind = view.partition(".")
    by_outputs = {
        "qkv": [("self_attn.q_proj", q), ("self_attn.k_proj", kv), ("self_attn.v_proj", kv)],
        "gate_up": [("mlp.gate_proj", inner), ("mlp.up_proj", inner)],
    }
    by_inputs = {"o": ("self_attn.o_proj", q), "down": ("mlp.down_proj", inner)}
    if operator in by_outputs:
        return [_Source(f"{name}.{kind}", rows) for name, rows in by_outputs[operator]]
    if operator in by_inputs:
        name, inputs = by_inputs[operator]
        if kind == "bias":
            return [_Source(f"{name}.bias", hidden)] if shard.rank == 0 else []
        return [_Source(f"{name}.weight", hidden, inputs)]
    norms = {
        "input_norm": ("input_layernorm.weight", hidden),
        "post_norm": ("post_attention_layernorm.weight", hidden),
        "q_norm": ("self_attn.q_norm.weight", range(dim)),
        "k_norm": ("self_attn.k_norm.weight", range(dim)),
    }
    return [_Source(*norms[view])]


def load_layer(
    checkpoint: Checkpoint, whole: ModelConfig, layout: LayerLayout, index: int, buffer: Tensor, shard: Shard = ALONE
) -> None:
    """Read a shard of one layer of the model `whole` straight into its places in `buffer`, which is zeroed."""
    for operator, view in layout.views.items():
        target, row = view.of(buffer), 0
        for source in _sources(whole, shard, operator):
            checkpoint.read_into(
                f"model.layers.{index}.{source.name}",
                target[row : row + len(source.rows)],
                rows=source.rows,
                columns=source.columns,
            )
            row += len(source.rows)


def all_finite(tensor: Tensor) -> bool:
    """True where no element is infinite or NaN. No temporaries: those of `isfinite` take thrice a tensor's bytes."""
    return all(bool(end.isfinite()) for end in tensor.aminmax())


class Layers(Protocol):
    """The layers of a model, first to last, each ready to be used while it is the current one."""

    def __iter__(self) -> Iterator[LayerWeights]: ...

    def nbytes(self) -> int: ...


class ResidentLayers:
    """All layers on the device."""

    def __init__(self, layers: Sequence[LayerWeights], nbytes: int) -> None:
        self._layers, self._nbytes = layers, nbytes

    def __iter__(self) -> Iterator[LayerWeights]:
        return iter(self._layers)

    def nbytes(self) -> int:
        return self._nbytes


class StreamedLayers:
    """The first layers on the device, the rest on the host, each crossing the link when its turn comes, into one of a
    few staging buffers.

    Weights do not change, so the stream runs on in a circle: while the last layers are used, the next pass's first ones
    are on their way.
    """

    def __init__(
        self, resident: Sequence[LayerWeights], homes: Sequence[Tensor], layout: LayerLayout,
        staging: Sequence[Tensor], link: Link,
    ) -> None:  # fmt: skip
        self._resident, self._homes, self._staging, self._link = resident, homes, staging, link
        self._nbytes = (len(resident) + len(homes)) * layout.num_bytes
        self._bound = [layout.bind(buffer) for buffer in staging]
        self._full: list[Event] = []
        self._position = 0  # streamed layers used since the stream began

    def __iter__(self) -> Iterator[LayerWeights]:
        if self._homes and (not self._full or self._position % len(self._homes)):
            self._restart()
        yield from self._resident
        for _ in self._homes:
            slot = self._position % len(self._staging)
            self._full[slot].wait()
            yield self._bound[slot]
            self._fetch(self._position + len(self._staging))
            self._position += 1

    def nbytes(self) -> int:
        return self._nbytes

    def _restart(self) -> None:
        """At the first layer, also after a pass that was broken off."""
        for event in self._full:
            event.wait()
        self._position, self._full = 0, [self._link.record()] * len(self._staging)
        for position in range(len(self._staging)):
            self._fetch(position)

    def _fetch(self, position: int) -> None:
        slot = position % len(self._staging)
        home = self._homes[position % len(self._homes)]
        self._full[slot] = self._link.to_device(self._staging[slot], home, (self._link.record(),))


@dataclass(frozen=True)
class Weights:
    """A model's, or a shard of them. embedding [V, hidden], final_norm [hidden]; head [V, hidden], the embedding itself
    where tied, None on a rank that computes no logits."""

    embedding: Tensor
    layers: Layers
    final_norm: Tensor
    head: Linear | None


def load_weights(
    checkpoint: Checkpoint,
    config: ModelConfig,
    memory: Memory,
    *,
    dtype: torch.dtype,
    name: str = "target",
    link: Link | None = None,
    num_resident: int = 0,
    num_staging: int = NUM_STAGING,
    on_bytes: Callable[[int], None] = lambda num_bytes: None,
    shard: Shard = ALONE,
) -> Weights:
    """Read a checked checkpoint, or a shard of it, into its places: all on the device, or, with a link, the first
    `num_resident` layers there and the others on the host. The ledger calls them `name`'s. Rank 0 alone has the head.

    `on_bytes` is called with each layer's bytes as they arrive. Peak memory: what is placed, and one tensor's mapping.
    """

    def check_range(tensor: Tensor, owner: str) -> None:
        if tensor.dtype == torch.float16 and not all_finite(tensor):  # a bf16 weight may be larger than fp16 goes
            raise ModelError(f"{owner} has weights beyond fp16's range of 65504; try --dtype bf16 or fp32")

    def place(tensor: str, shape: tuple[int, ...]) -> Tensor:
        block = memory.allocate(shape, dtype, tier="device", purpose=f"{name} embeddings")
        checkpoint.read_into(tensor, block)
        check_range(block, tensor)
        on_bytes(block.nbytes)
        return block

    layout = LayerLayout.of(shard.config(config), dtype)
    size = (layout.num_bytes,)
    buffers = []
    for index in range(config.num_layers):
        tier: Tier = "device" if link is None or index < num_resident else "host"
        buffer = memory.allocate(size, torch.uint8, tier=tier, purpose=f"{name} layers")
        load_layer(checkpoint, config, layout, index, buffer, shard)
        for view in layout.views.values():
            check_range(view.of(buffer), f"layer {index}")
        on_bytes(buffer.nbytes)
        buffers.append(buffer)
    layers: Layers
    if link is None:
        layers = ResidentLayers([layout.bind(buffer) for buffer in buffers], sum(buffer.nbytes for buffer in buffers))
    else:
        staging = [
            memory.allocate(size, torch.uint8, tier="device", purpose="weight staging") for _ in range(num_staging)
        ]
        resident = [layout.bind(buffer) for buffer in buffers[:num_resident]]
        layers = StreamedLayers(resident, buffers[num_resident:], layout, staging, link)
    table = (config.vocab_size, config.hidden_size)
    embedding = place("model.embed_tokens.weight", table)
    head = None
    if shard.rank == 0:
        head = Linear(embedding if config.tie_embeddings else place("lm_head.weight", table), None)
    return Weights(embedding, layers, place("model.norm.weight", (config.hidden_size,)), head)
