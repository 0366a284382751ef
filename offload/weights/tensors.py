"""The mapping from rows and columns of a checkpoint's tensors to a layer's views, and their order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from offload.config.block import BLOCK_NORMS, Attention
from offload.config.model import ModelConfig, layer_norms
from offload.config.rope import PROPORTIONAL, Rope
from offload.plan.shards import ALONE, Shard
from offload.weights.layout import LayerLayout


@dataclass(frozen=True)
class Source:
    """A source of a view: rows, and for a matrix columns, of a checkpoint's tensor. name: within its layer. columns:
    None for a vector."""

    name: str
    rows: range
    columns: range | None = None


def sources(whole: ModelConfig, shard: Shard, view: str) -> list[Source]:
    """The sources of a view of a shard's layer, `whole.block`, top to bottom. The bias of an operator whose outputs are
    summed over the ranks has sources only on the first rank, so that it is added once."""
    operator, _, kind = view.partition(".")
    names, hidden = whole.names, range(whole.hidden_size)
    if operator in ("qkv", "gate_up"):
        columns = hidden if kind == "weight" else None
        parts = _qkv(whole, shard) if operator == "qkv" else _gate_up(whole, shard)
        return [Source(f"{name}.{kind}", rows, columns) for name, rows in parts]
    if operator in ("o", "down"):
        name, inputs = _by_inputs(whole, shard)[operator]
        if kind == "bias":
            return [Source(f"{name}.bias", hidden)] if shard.rank == 0 else []
        return [Source(f"{name}.weight", hidden, inputs)]
    if operator == "factor":
        return [Source("layer_scalar", range(1))]
    norms = layer_norms(whole)
    if norms[operator][1].weightless:
        return []
    name = f"{getattr(names, operator)}.{kind or 'weight'}"
    if operator in BLOCK_NORMS:
        return [Source(name, hidden)]
    if whole.block.attention.weighs_heads:
        heads = shard.heads(whole) if operator == "q_norm" else shard.kv_heads(whole)
        return [Source(name, heads, range(whole.head_dim))]
    return [Source(name, _normed(whole, shard, operator))]


def _normed(whole: ModelConfig, shard: Shard, norm: str) -> range:
    """The shard's elements of the weight of q_norm or k_norm."""
    attention = whole.block.attention
    if not attention.norms_whole:
        return range(attention.head_dim)
    return _times(shard.heads(whole) if norm == "q_norm" else shard.kv_heads(whole), attention.head_dim)


def _qkv(whole: ModelConfig, shard: Shard) -> Iterator[tuple[str, range]]:
    attention, fused = whole.block.attention, whole.names.fused_qkv
    heads, kv_heads = shard.heads(whole), shard.kv_heads(whole)
    first = 0
    for letter, size, own in (
        ("q", attention.q_size, heads), ("k", attention.kv_size, kv_heads), ("v", attention.kv_size, kv_heads),
    )[: 2 if attention.values_are_keys else 3]:  # fmt: skip
        rows = _times(own, attention.head_dim)
        yield (fused, _after(first, rows)) if fused else (f"self_attn.{letter}_proj", rows)
        first += size
    if attention.gate:
        yield "self_attn.gate_proj", _times(heads, attention.head_dim)


def _gate_up(whole: ModelConfig, shard: Shard) -> Iterator[tuple[str, range]]:
    fused, inner = whole.names.fused_gate_up, shard.inner(whole)
    if whole.block.feed_forward.gated:
        yield (fused or "mlp.gate_proj", inner)
    yield (fused, _after(whole.intermediate_size, inner)) if fused else (whole.names.up, inner)


def _by_inputs(whole: ModelConfig, shard: Shard) -> dict[str, tuple[str, range]]:
    inputs = _times(shard.heads(whole), whole.head_dim)
    return {"o": ("self_attn.o_proj", inputs), "down": (whole.names.down, shard.inner(whole))}


def _times(heads: range, dim: int) -> range:
    return range(heads.start * dim, heads.stop * dim)


def _after(first: int, rows: range) -> range:
    return range(first + rows.start, first + rows.stop)


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Hugging Face names -> shapes of all weights, matrices as [out, in]. Only tensors that `config` implies."""
    layers = {kind.block: _layer_tensors(kind) for kind, _ in config.kinds}
    names, table = config.names, (config.vocab_size, config.hidden_size)
    tensors: dict[str, tuple[int, ...]] = {names.embeddings: table}
    for index, block in enumerate(config.blocks):
        tensors |= {f"{names.body}layers.{index}.{name}": shape for name, shape in layers[block].items()}
    tensors[f"{names.norm}.weight"] = (config.hidden_size,)
    if config.norm.bias:
        tensors[f"{names.norm}.bias"] = (config.hidden_size,)
    return tensors if config.tie_embeddings else tensors | {names.head: table}


def _layer_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shapes of `config.block`'s tensors, by name within a layer."""
    found: dict[str, tuple[int, ...]] = {}
    for view in LayerLayout.of(config.plain, torch.float32).views:
        for source in sources(config, ALONE, view):
            shape = (source.rows.stop, *([] if source.columns is None else [source.columns.stop]))
            found[source.name] = max(found.get(source.name, shape), shape)
    return found


def head_order(attention: Attention) -> torch.Tensor | None:
    """The order of a query or key head's elements in this program, int64 [D]: i and i + D/2 are rotated together, and
    elements without positions come last in both halves. None: as in the checkpoint.

    The order does not change the terms of a product of a query with a key.
    """
    rope, dim = attention.rope or Rope(), attention.head_dim
    rotated = rope.rotated or dim
    if (rotated == dim or rope.kind == PROPORTIONAL) and not rope.neighbours:
        return None
    numbers = torch.arange(rotated)
    pairs = numbers.view(-1, 2).T if rope.neighbours else numbers.view(2, -1)
    return torch.cat([pairs, torch.arange(rotated, dim).view(2, -1)], 1).flatten()
