"""Qwen3.8-Flash-Next (Alibaba, `qwen4_exp`): a mixture of experts over several residual streams, whose layers have a
recurrent state (gated delta rule), but every fourth, which attends to what an index of its own chooses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from offload.config.block import Block
from offload.config.families import qwen3_5_moe
from offload.config.families.common import Defaults, Family, epsilon, sizes
from offload.config.families.gemma2 import NORM
from offload.config.families.qwen3_5 import with_next_token
from offload.config.families.states import STATEFUL, layer_kinds
from offload.config.families.windows import FULL, INDEXED
from offload.config.mixers import MOST_BEFORE, MOST_TAPS, DeltaRule, Indexer, RecurrenceGate
from offload.config.model import ModelConfig
from offload.config.names import NextTokenNames
from offload.config.ngrams import NGrams, head_sizes, multipliers, padded
from offload.config.rope import SECTION_KEYS, RopeDefaults
from offload.config.streams import Streams
from offload.fields import Fields, list_of, whole

_PERIOD = "full_attention_interval"
_STREAMS = ("hc_count", "hc_lowrank")
_INDEXER = ("indexer_n_heads", "indexer_head_dim", "indexer_budget", "indexer_compress_ratio")
_KEY_HEADS, _GATE, _NORMED = "indexer_kv_heads", "output_gate_type", "norm_topk_prob"
_GATES = ("sigmoid", "silu")
_GRAMS, _WIDTH, _TAPS = "ple_layer_ids", "ple_embed_dim", "ple_conv_kernel_size"
_HASHES = ("*.ple_embedding.layer_multipliers", "*.ple_embedding.ngram_heads_*")  # they follow from the fields
_DEFAULTS = Defaults(
    kv_heads=2, head_dim=256, derives_head_dim=False, max_positions=32768,
    rope=RopeDefaults(partial=0.25, keys=SECTION_KEYS),
)  # fmt: skip


def describe(source: Fields) -> ModelConfig:
    kinds = layer_kinds(source, (FULL, INDEXED, STATEFUL), lambda layer: _unnamed(source, layer))
    named = source.changed({"layer_types": [FULL if kind == INDEXED else kind for kind in kinds]})
    renormalised = source.flag(_NORMED, True)
    config = qwen3_5_moe.described(named, "qwen4_exp_text", renormalised=renormalised, defaults=_DEFAULTS)
    streams, indexer = _streams(source), _indexer(source, config)
    gate: RecurrenceGate = "sigmoid" if source.choice(_GATE, _GATES, default="silu") == "sigmoid" else "silu"

    def change(block: Block) -> Block:
        mixer: Any = replace(block.mixer, gate=gate) if isinstance(block.mixer, DeltaRule) else block.mixer
        if block.attends:
            mixer = replace(block.attention, indexer=indexer)
        return replace(block, mixer=mixer, streams=streams, before_attention=None, before_feed_forward=None)

    config = _with_ngrams(source, with_next_token(source, config.mapped(change)))
    names = replace(config.names, next_token=NextTokenNames(join="mtp.fc_embedding", join_hidden="mtp.fc_hidden"))
    return replace(config, names=names, next_token=config.next_token and _without_index(config.next_token))


def _with_ngrams(source: Fields, config: ModelConfig) -> ModelConfig:
    """`config` with the n-gram embeddings of the layers that the config lists, counted from 1."""
    layers, blocks = sorted(set(source.get(_GRAMS, list_of(whole(1, config.num_layers)), ()))), list(config.blocks)
    for index, layer in enumerate(layers):
        blocks[layer - 1] = replace(blocks[layer - 1], ngrams=_ngrams(source, config, index))
    names = replace(config.names, unused=(*config.names.unused, *_HASHES)) if layers else config.names
    return replace(config, blocks=tuple(blocks), names=names)


def _ngrams(source: Fields, config: ModelConfig, index: int) -> NGrams:
    """The n-gram embedding of a layer. index: of it among those that have one."""
    size, heads = source.integer("ngram_size", 8, default=3), source.integer("heads_per_ngram", 1 << 10, default=8)
    width, count = source.integer(_WIDTH, 1 << 20, default=config.hidden_size), (size - 1) * heads
    if not count or width % count:
        source.refuse(_WIDTH, f"a multiple of the {count} rows of a token, of n-grams of 2 or more")
    if not config.eos_token_ids:
        source.refuse("eos_token_id", "given where there are n-grams, which an end of text cuts")
    own = head_sizes(source.integer("ngram_vocab_size_base", 1 << 32, default=20_000_000), count, index=index)
    multiple = source.integer("make_ngram_vocab_size_divisible_by", 1 << 20, default=128)
    seed = source.get("seed", whole(0, (1 << 62) - 1), 1234)
    taps = source.integer(_TAPS, MOST_TAPS, default=4)
    if (taps - 1) * size > MOST_BEFORE:
        source.refuse(_TAPS, f"{1 + MOST_BEFORE // size} at most for n-grams of {size} tokens, which are its dilation")
    assert config.streams is not None
    return NGrams(
        size, heads, width // count, multipliers(seed, config.vocab_size, size, index=index), own,
        padded(sum(own), multiple), config.eos_token_ids[0], config.hidden_size, config.streams.count,
        taps=taps, dilation=size, norm=config.streams.norm,
        parts=source.integer("split_ngram_parts", 1 << 16, default=512),
    )  # fmt: skip


def _without_index(block: Block) -> Block:
    """The layer of the next-token head: it attends within a window, where an index would choose everything."""
    return replace(block, mixer=replace(block.attention, indexer=None))


def _unnamed(source: Fields, layer: int) -> str:
    return STATEFUL if (layer + 1) % source.integer(_PERIOD, 1 << 12, default=4) else INDEXED


def _streams(source: Fields) -> Streams:
    """The residual streams of all layers."""
    count, rank = source.integer(_STREAMS[0], 64, default=4), source.integer(_STREAMS[1], 1 << 14, default=320)
    if count < 2:
        source.refuse(_STREAMS[0], "2 or more")
    return Streams(count, rank, NORM(epsilon(source, _DEFAULTS)))


def _indexer(source: Fields, config: ModelConfig) -> Indexer:
    """The indexer of all layers that attend."""
    heads, dim, budget, ratio = (source.integer(key, 1 << 20) for key in _INDEXER)
    if source.integer(_KEY_HEADS, 1 << 10) != 1:
        source.refuse(_KEY_HEADS, "1: blocks have one key")
    if budget % ratio:
        source.refuse(_INDEXER[2], f"a multiple of {_INDEXER[3]} {ratio}")
    rotated = config.rope.rotated or config.head_dim
    if dim % 2 or dim < rotated or dim > config.head_dim:
        source.refuse(_INDEXER[1], f"even, from the {rotated} rotated numbers of a head to all {config.head_dim}")
    return Indexer(heads, dim, budget, ratio, NORM(epsilon(source, _DEFAULTS)))


_OF_GRAMS = (
    "ngram_size", "heads_per_ngram", _WIDTH, _TAPS, "ngram_vocab_size_base",
    "make_ngram_vocab_size_divisible_by", "seed", "split_ngram_parts",
)  # fmt: skip
READS = qwen3_5_moe.READS | {*_STREAMS, *_INDEXER, _KEY_HEADS, _GATE, _NORMED, _GRAMS, *_OF_GRAMS}
_SIZES = sizes(248320, 2048, 512, 40, 16) | {
    "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
}  # fmt: skip
FAMILIES = (
    Family(
        "qwen4_exp_text", "Qwen3.8-Flash-Next (125B-A6B) and its fine-tunes; text of `qwen4_exp`", describe, READS,
        sizes=_SIZES,
    ),
)  # fmt: skip
