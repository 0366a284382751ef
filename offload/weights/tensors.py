"""The mapping from rows and columns of a checkpoint's tensors to a layer's views, and their order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch

from offload.config.block import BLOCK_NORMS
from offload.config.matrices import (
    AROUND_EXPERTS,
    BY_HEAD,
    LOW_RANK,
    OF_INPUT,
    STREAMS,
    expert_matrices,
    expert_vectors,
    layer_parts,
)
from offload.config.mixers import LOW_RANK_PARTS, Attention, DeltaRule, HeadStates, Latent, ShortConvolution
from offload.config.model import ModelConfig
from offload.config.names import ExpertNames
from offload.config.next_token import join_of
from offload.config.ngrams import NGRAM_NORMS, OF_NGRAMS
from offload.config.rope import PROPORTIONAL, Rope
from offload.config.vectors import INDEX_NORMS, NGRAM_TAPS, STREAM_NORMS, layer_norms
from offload.plan.shards import ALONE, Shard
from offload.weights.layout import ROUTER, SINK_LOGITS, VECTORS, LayerLayout


@dataclass(frozen=True)
class Source:
    """A source of a view: rows, and for a matrix columns, of a checkpoint's tensor. name: within its layer. rows: a
    step above 1 leaves out rows between them. columns: without a step; None for a vector. rotates: these are whole
    heads, or parts of heads, whose elements `head_order` orders; head_dim: of them, if not the attention's. transposed:
    columns are rows of the view."""

    name: str
    rows: range
    columns: range | None = None
    rotates: bool = False
    head_dim: int = 0
    transposed: bool = False

    @property
    def height(self) -> int:
        """Rows of the view."""
        return len(self.columns if self.transposed and self.columns is not None else self.rows)


def sources(whole: ModelConfig, shard: Shard, view: str) -> list[Source]:
    """The sources of a view of a shard's layer, `whole.block`, top to bottom. The bias of an operator whose outputs are
    summed over the ranks has sources only on the first rank, so that it is added once."""
    operator, _, kind = view.partition(".")
    names, hidden = whole.names, range(whole.hidden_size)
    network, mixer = whole.block.feed_forward.size, whole.block.mixer.out_size
    if not {"qkv": mixer, "o": mixer, "gate_up": network, "down": network}.get(operator, 1):
        return []
    if operator in ("qkv", "gate_up"):
        columns = hidden if kind == "weight" else None
        parts = _qkv(whole, shard) if operator == "qkv" else _gate_up(whole, shard)
        return [replace(part, name=f"{part.name}.{kind}", columns=columns) for part in parts]
    if operator in ("o", "down"):
        name, inputs = _by_inputs(whole, shard, operator)
        if kind == "bias":
            return [Source(f"{name}.bias", hidden)] if shard.rank == 0 else []
        return [Source(f"{name}.weight", hidden, inputs)]
    if operator == "states_in":
        parts = _of_parts(whole, names.recurrence.parts, recurrence_rows(whole, shard))
        return [replace(part, name=f"{part.name}.weight", columns=hidden) for part in parts]
    if operator == "states_out":
        return [Source(f"{names.recurrence.out}.weight", hidden, _of_states(whole, shard))]
    if operator in (*AROUND_EXPERTS, *OF_INPUT):
        return [_on_every_rank(whole, operator)]
    if operator in STREAMS:
        return _of_streams(whole, operator)
    if operator in (*OF_NGRAMS, NGRAM_TAPS, *NGRAM_NORMS):
        return [_of_ngrams(whole, operator)]
    if operator in ("q_b", *BY_HEAD):
        return _of_latent(whole, shard, operator)
    if operator in LOW_RANK:
        return [_of_low_rank(whole, shard, operator)]
    if operator in ROUTER:
        return _of_router(whole, operator)
    if operator == SINK_LOGITS:
        return [Source(names.sink_logits, shard.heads(whole))]
    if operator == "factor":
        return [Source("layer_scalar", range(1))]
    if operator in VECTORS:
        return _vectors(whole, shard, operator)
    norms = layer_norms(whole.block, whole.hidden_size)
    if norms[operator][1].weightless:
        return []
    if operator == "out_norm":
        return [Source(f"{names.recurrence.norm}.weight", _out_normed(whole, shard))]
    if operator == "before_router":
        return [Source(names.experts.norm + (kind and f".{kind}"), hidden)]
    if operator in STREAM_NORMS:
        return [Source(f"{_prefix(whole, operator)}{names.streams.norm}.weight", range(norms[operator][0]))]
    if operator in INDEX_NORMS:
        name = getattr(names.index, operator.removeprefix("index_"))
        size = norms[operator][0]
        return [Source(f"{name}.weight", range(size), rotates=True, head_dim=size)]
    name = f"{getattr(names, operator)}.{kind or 'weight'}"
    if operator in BLOCK_NORMS or whole.block.attention.latent is not None:
        return [Source(name, range(norms[operator][0]))]
    if whole.block.attention.weighs_heads:
        heads = shard.heads(whole) if operator == "q_norm" else shard.kv_heads(whole)
        return [Source(name, heads, range(whole.head_dim), rotates=True)]
    return [Source(name, _normed(whole, shard, operator), rotates=operator != "v_norm")]


def _on_every_rank(whole: ModelConfig, operator: str) -> Source:
    """The source of a matrix that each rank has whole: before or behind experts, or of the layer's input."""
    block, names = whole.block, whole.names.experts if operator in AROUND_EXPERTS else whole.names
    (part,) = layer_parts(block, whole.hidden_size)[operator]
    return Source(f"{getattr(names, operator)}.weight", range(part.outputs), range(part.inputs))


def _of_streams(whole: ModelConfig, operator: str) -> list[Source]:
    """The sources of a matrix of the mean of streams before a part, which each rank has whole."""
    streams, names, prefix = whole.block.streams, whole.names.streams, _prefix(whole, operator)
    assert streams is not None
    width = range(streams.count * whole.hidden_size)
    if operator.endswith("_up"):
        return [Source(f"{prefix}{names.up}.weight", width, range(streams.rank))]
    of_low = zip((names.down, names.inject), streams.low_parts, strict=True)
    return [Source(f"{prefix}{name}.weight", range(size), width) for name, size in of_low]


def _of_ngrams(whole: ModelConfig, view: str) -> Source:
    """The source of a tensor of an n-gram embedding, which each rank has whole; of its taps each row is a channel's."""
    own, name = whole.block.ngrams, f"{getattr(whole.names.ngrams, view.removeprefix('ngram_'))}.weight"
    assert own is not None
    if view in OF_NGRAMS:
        outputs, inputs, _ = own.products[view]
        return Source(name, range(outputs), range(inputs))
    return Source(name, range(own.channels), range(own.taps) if view == NGRAM_TAPS else None)


def _prefix(whole: ModelConfig, operator: str) -> str:
    """The prefix of the names of a mean of streams."""
    names = whole.names.streams
    return names.mixer if operator.startswith("mixer") else names.network


def _of_router(whole: ModelConfig, vector: str) -> list[Source]:
    """The sources of a router's tensors: of its matrix the experts' rows and the row of the gate."""
    experts, names, hidden = whole.block.experts, whole.names.experts, range(whole.hidden_size)
    assert experts is not None
    if vector != "router":
        return [Source(names.bias if vector == "router_bias" else names.scale, range(experts.count))]
    rows = [Source(f"{names.router}.weight", range(experts.count), hidden)]
    return rows + [Source(f"{names.network_gate}.weight", range(1), hidden)] * experts.gates_network


def expert_sources(whole: ModelConfig, shard: Shard, number: int, view: str) -> list[Source]:
    """The sources of a view of a shard's expert `number` in the layer `whole.block`, top to bottom, see
    `weights.experts.layout_of`. Those of a tensor of all experts are of its matrices one below the other."""
    experts, names = whole.block.experts, whole.names.experts
    assert experts is not None
    hidden = range(experts.row_size(whole.hidden_size))
    inner, (operator, kind) = shard.inner_of_experts(whole), view.split(".")
    if operator == "down":
        rows = hidden if "{}" in names.down else _after(number * len(hidden), hidden)
        found = [Source(f"{names.down.format(number)}.{kind}", rows, inner if kind == "weight" else None)]
        return found if kind == "weight" or shard.rank == 0 else []
    columns, parts = hidden if kind == "weight" else None, ("gate", "up") if operator == "gate_up" else (operator,)
    every = [_rows_of_expert(names, part, number, experts.network.size)[inner.start : inner.stop] for part in parts]
    tensors = [f"{getattr(names, part).format(number)}.{kind}" for part in parts]
    return [Source(tensor, own, columns) for tensor, own in zip(tensors, every, strict=True)]


def _rows_of_expert(names: ExpertNames, part: str, number: int, size: int) -> range:
    """The rows of an expert's gate or up in their tensor."""
    fused = names.gate == names.up
    first = 0 if "{}" in names.up else number * size * (1 + fused)
    if fused and names.alternate:
        return range(first + (part == "up"), first + 2 * size, 2)
    return _after(first + size * (fused and part == "up"), range(size))


def _normed(whole: ModelConfig, shard: Shard, norm: str) -> range:
    """The shard's elements of the weight of q_norm or k_norm."""
    attention = whole.block.attention
    if not attention.norms_whole:
        return range(attention.head_dim)
    return _times(shard.heads(whole) if norm == "q_norm" else shard.kv_heads(whole), attention.head_dim)


def _out_normed(whole: ModelConfig, shard: Shard) -> range:
    """The shard's elements of the weight of a recurrence's norm."""
    states = whole.block.recurrence
    if isinstance(states, DeltaRule):  # all heads share it
        return range(states.norm_size)
    return _of_states(whole, shard)


def _qkv(whole: ModelConfig, shard: Shard) -> Iterator[Source]:
    if not whole.block.attends:
        yield from _of_parts(whole, whole.names.recurrence.parts, _projected_rows(whole, shard))
        return
    attention, names, heads = whole.block.attention, whole.names, shard.heads(whole)
    if (latent := attention.latent) is not None:
        yield from _latent_rows(whole, latent, heads)
        return
    fused, gate = names.fused_qkv, names.gate
    kv_heads, dim = shard.kv_heads(whole), attention.head_dim
    if attention.gate and names.gate_has_queries:  # each head's query, then its gate
        both = [range(2 * head * dim, 2 * (head + 1) * dim) for head in heads]
        yield from (Source(gate, rows[:dim], rotates=True) for rows in both)
        keys, values = (f"{names.attention}{letter}_proj" for letter in "kv")
        yield from (Source(keys, _times(kv_heads, dim), rotates=True), Source(values, _times(kv_heads, dim)))
        yield from (Source(gate, rows[dim:]) for rows in both)
        yield from _index(whole)
        return
    first = 0
    for letter, size, own in (
        ("q", attention.q_size, heads), ("k", attention.kv_size, kv_heads), ("v", attention.kv_size, kv_heads),
    )[: 1 if attention.shares else 2 if attention.values_are_keys else 3]:  # fmt: skip
        rows = _times(own, dim)
        name, rows = (fused, _after(first, rows)) if fused else (f"{names.attention}{letter}_proj", rows)
        yield Source(name, rows, rotates=letter != "v")
        first += size
    if attention.gate:
        yield Source(gate, heads if attention.gates_heads else _times(heads, dim))
    yield from _index(whole)


def _index(whole: ModelConfig) -> Iterator[Source]:
    """The rows of an indexer's queries and key, if there is one: each rank has all of them."""
    if (indexer := whole.block.attention.indexer) is not None:
        names, size, key = whole.names.index, indexer.q_size, range(indexer.head_dim)
        yield Source(names.queries, range(size), rotates=True, head_dim=len(key))
        own = _after(size, key) if names.key == names.queries else key
        yield Source(names.key, own, rotates=True, head_dim=len(key))


def _latent_rows(whole: ModelConfig, latent: Latent, heads: range) -> Iterator[Source]:
    """The rows of queries, or of the low-rank rows that they are products with, of a token's row, and of the gate."""
    attention, names, row = whole.block.attention, whole.names, range(latent.rank + latent.rotated)
    if latent.query_rank:
        yield Source(names.low_queries, range(latent.query_rank))
    else:
        yield from _queries(latent, heads, names.queries)
    yield Source(names.latent_rows, row[: latent.rank])
    yield Source(names.latent_rows, row[latent.rank :], rotates=True)
    if attention.gate:
        yield Source(names.gate, heads if attention.gates_heads else _times(heads, latent.value_dim))


def _queries(latent: Latent, heads: range, name: str) -> Iterator[Source]:
    """The rows of heads' queries in tensor `name`."""
    for head in heads:
        rows = _times(range(head, head + 1), latent.query_dim)
        yield from (Source(name, rows[: latent.plain]), Source(name, rows[latent.plain :], rotates=True))


def _of_latent(whole: ModelConfig, shard: Shard, operator: str) -> list[Source]:
    """The sources of a further operator of latent attention, see `TensorNames`."""
    latent, heads, names = whole.block.attention.latent, shard.heads(whole), whole.names
    assert latent is not None
    if operator == "q_b":
        queries = _queries(latent, heads, names.q_b)
        return [replace(each, name=f"{each.name}.weight", columns=range(latent.query_rank)) for each in queries]
    is_keys, inputs = operator == "k_b", range(latent.rank)
    if names.splits_latent:
        size, columns = (latent.rank, range(latent.plain)) if is_keys else (latent.value_dim, inputs)
        return [Source(f"{getattr(names, operator)}.weight", _times(heads, size), columns)]
    found, both = list[Source](), latent.plain + latent.value_dim
    for head in heads:
        rows = _times(range(head, head + 1), both)
        own = rows[: latent.plain] if is_keys else rows[latent.plain :]
        found.append(Source(f"{names.k_b}.weight", own, inputs, transposed=is_keys))
    return found


def _of_low_rank(whole: ModelConfig, shard: Shard, operator: str) -> Source:
    """The source of the matrix of a delta rule's gates, or of its times."""
    delta, rows = whole.block.recurrence, recurrence_rows(whole, shard)
    assert isinstance(delta, DeltaRule)
    own = rows[LOW_RANK_PARTS[LOW_RANK.index(operator)]]
    return Source(f"{getattr(whole.names.recurrence, operator)}.weight", own, range(delta.low_rank))


def _gate_up(whole: ModelConfig, shard: Shard) -> Iterator[Source]:
    (gate, up, _), inner = whole.names.network(whole.block), shard.inner(whole)
    if whole.block.feed_forward.gated:
        yield Source(gate, inner)
    yield Source(up, _after(whole.intermediate_size, inner) if whole.names.fused_gate_up else inner)


def _by_inputs(whole: ModelConfig, shard: Shard, operator: str) -> tuple[str, range]:
    if operator == "down":
        return whole.names.network(whole.block)[2], shard.inner(whole)
    if whole.block.attends:
        attention = whole.block.attention
        size = attention.out_size // attention.num_heads
        return whole.names.attention + whole.names.out, _times(shard.heads(whole), size)
    return whole.names.recurrence.out, _of_states(whole, shard)


def _of_states(whole: ModelConfig, shard: Shard) -> range:
    """The shard's numbers of a recurrence's output."""
    return _times(shard.value_heads(whole), whole.block.recurrence.value_dim)


def recurrence_rows(whole: ModelConfig, shard: Shard) -> list[range]:
    """The shard's rows of each part of a projected row, within that part."""
    states, heads = whole.block.recurrence, shard.value_heads(whole)
    if isinstance(states, ShortConvolution):
        return [heads] * len(states.parts)
    keys, values = _times(shard.key_heads(whole), states.key_dim), _times(heads, states.value_dim)
    by_channel = isinstance(states, DeltaRule) and states.by_channel
    return [keys, keys, values, values, *[heads] * (len(states.rates) - by_channel), *[keys] * by_channel]


def _projected_rows(whole: ModelConfig, shard: Shard) -> list[range]:
    """The shard's rows of each part of the fused projection: each rank has all numbers that gates and times of low rank
    are products with."""
    states, rows = whole.block.recurrence, recurrence_rows(whole, shard)
    if not isinstance(states, DeltaRule) or not states.low_rank:
        return rows
    return [range(states.low_rank) if part in LOW_RANK_PARTS else own for part, own in enumerate(rows)]


def _of_parts(whole: ModelConfig, names: Sequence[str], rows: Sequence[range]) -> Iterator[Source]:
    """The rows of each part of a recurrence; parts of one name are in one tensor, one after the other, or one after the
    other for each key head."""
    states, own = whole.block.recurrence, whole.names.recurrence
    parts = [*zip(names, states.parts, strict=False)]
    stored = [at for at in own.order if at < len(parts)]
    for at, (name, size) in enumerate(parts):
        groups = states.num_key_heads if isinstance(states, HeadStates) and name in own.grouped else 1
        same = [other for other in stored if parts[other][0] == name]
        sizes = [parts[other][1] // groups for other in same]
        before, width = sum(sizes[: same.index(at)]), sum(sizes)
        size //= groups
        for group in range(rows[at].start // size, -(-rows[at].stop // size)):
            first, wanted = group * size, rows[at]
            inside = range(max(wanted.start - first, 0), min(wanted.stop - first, size))
            yield Source(name, _after(group * width + before, inside))


def _vectors(whole: ModelConfig, shard: Shard, vector: str) -> list[Source]:
    """The sources of a recurrence's vectors; of its taps each row is a channel's."""
    names, width = whole.names.recurrence, whole.block.recurrence.width
    if not vector.startswith("taps"):
        rows = recurrence_rows(whole, shard)[-1] if vector == "time_bias" else shard.value_heads(whole)
        return [Source(getattr(names, vector), rows)]
    found = _of_parts(whole, names.taps, recurrence_rows(whole, shard))
    if vector == "taps_bias":
        return [replace(part, name=f"{part.name}.bias") for part in found]
    return [replace(part, name=f"{part.name}.weight", columns=range(width)) for part in found]


def _times(heads: range, dim: int) -> range:
    return range(heads.start * dim, heads.stop * dim)


def _after(first: int, rows: range) -> range:
    return range(first + rows.start, first + rows.stop, rows.step)


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Hugging Face names -> shapes of all weights, matrices as [out, in]. Only tensors that `config` implies; of a
    next-token head its own."""
    layers = {kind.block: _layer_tensors(kind) for kind, _ in config.kinds}
    names, table, row = config.names, (config.vocab_size, config.hidden_size), (config.hidden_size,)
    tensors: dict[str, tuple[int, ...]] = {}
    for index, block in enumerate(config.blocks):
        tensors |= {config.layer_name(index) + name: shape for name, shape in layers[block].items()}
    last, size = config.last_norm
    tensors |= {f"{last}.weight": (size,)}
    tensors |= {name: (each.outputs, each.inputs) for name, each in config.of_last_mean.items()}
    for layer in config.with_ngrams:
        tensors |= dict(zip(config.ngram_parts(layer), config.ngrams(layer).part_shapes, strict=True))
    if config.is_head:
        own, join = names.next_token, join_of(config)
        tensors |= {f"{own.embedding_norm}.weight": row, f"{own.hidden_norm}.weight": (config.row_size,)}
        return tensors | {f"{name}.weight": (join.outputs, join.inputs // len(own.joins)) for name in own.joins}
    tensors |= {names.embeddings: table}
    tensors |= {f"{last}.bias": row} if config.norm.bias else {}
    tensors |= {name: (each.outputs, each.inputs) for name, each in config.of_layer_table.items()}
    beside = config.assistant.matrices(config.hidden_size) if config.assistant else {}
    tensors |= {name: (each.outputs, each.inputs) for name, each in beside.items()}
    tensors |= {names.layer_norm: (config.layer_table.size,)} if config.layer_table else {}
    return tensors if config.tie_embeddings else tensors | {names.head: table}


def _layer_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shapes of `config.block`'s tensors, by name within a layer."""
    found: dict[str, tuple[int, ...]] = {}
    own = (sources(config, ALONE, view) for view in LayerLayout.of(config.plain, torch.float32).views)
    for source in chain(chain.from_iterable(own), _of_experts(config)):
        shape = (source.rows[-1] + 1, *([] if source.columns is None else [source.columns.stop]))
        found[source.name] = max(found.get(source.name, shape), shape)
    return found


def _of_experts(config: ModelConfig) -> Iterator[Source]:
    """The sources of all experts of `config.block`."""
    block, hidden = config.block, config.hidden_size
    views = [*(f"{name}.weight" for name in expert_matrices(block, hidden)), *expert_vectors(block, hidden)]
    for number in range(block.experts.count if block.experts else 0):
        for view in views:
            yield from expert_sources(config, ALONE, number, view)


def head_order(attention: Attention, size: int = 0) -> torch.Tensor | None:
    """The order of a query or key head's elements in this program, int64 [D]: i and i + D/2 are rotated together, and
    elements without positions come last in both halves. None: as in the checkpoint. Of latent attention: of the numbers
    with positions by themselves. size: of other heads that rotate alike, such as an indexer's; 0: of the attention's.

    The order does not change the terms of a product of a query with a key.
    """
    rope = attention.rope or Rope()
    dim = size or (attention.latent.rotated if attention.latent else attention.head_dim)
    rotated = rope.rotated or dim
    if (rotated == dim or rope.kind == PROPORTIONAL) and not rope.neighbours:
        return None
    numbers = torch.arange(rotated)
    pairs = numbers.view(-1, 2).T if rope.neighbours else numbers.view(2, -1)
    return torch.cat([pairs, torch.arange(rotated, dim).view(2, -1)], 1).flatten()
