"""The fields of Qwen3.8-Flash-Next in GGUF files, from their metadata."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from offload.config.block import Block
from offload.config.families.windows import FULL
from offload.config.gguf_experts import QWEN35MOE, qwen35moe
from offload.config.gguf_fields import Metadata
from offload.config.gguf_layers import Fields, number
from offload.config.gguf_names import LAYER_TABLE
from offload.config.model import ModelConfig
from offload.config.ngrams import NGrams
from offload.fields import MOST, Kind, whole

_STREAMS = {"hc_count": "hyper_connection.count", "hc_lowrank": "hyper_connection.low_rank"}
_INDEXER = {
    "indexer_n_heads": "attention.indexer.head_count", "indexer_head_dim": "attention.indexer.key_length",
    "indexer_budget": "attention.indexer.top_k",
}  # fmt: skip
_RATIOS = "attention.compress_ratios"
_GRAMS = {
    "ngram_size": "ple.ngram_size", "heads_per_ngram": "ple.heads_per_ngram", "ple_conv_kernel_size": "ple.conv_kernel",
}  # fmt: skip
_LAYERS, _EOS, _ROW_SIZE = "ple.layers", "ple.eos_token_id", "embedding_length_per_layer_input"
_MULTIPLIERS, _SIZES, _OFFSETS = "ple.layer_multipliers", "ple.head_vocab_sizes", "ple.head_offsets"
_OF_PICTURES = "ple.image_token_id"  # which stands for their tokens; a text needs none
FLASH = QWEN35MOE | {
    *_STREAMS.values(), *_INDEXER.values(), _RATIOS, *_GRAMS.values(), _LAYERS, _EOS, _ROW_SIZE, _MULTIPLIERS, _SIZES,
    _OFFSETS, _OF_PICTURES,
}  # fmt: skip
_MOST_ROWS = (1 << 31) - 1


def qwen4exp(values: Metadata, common: Mapping[str, object]) -> Fields:
    """Fields of Qwen3.8-Flash-Next. Indexers have one key, states a sigmoid as the function of their gates, and
    experts' weights add up to 1: llama.cpp hardcodes that, and the file does not say it."""
    own = qwen35moe(values, common)
    types = own["layer_types"]
    assert isinstance(types, list)
    return {
        **own,
        **{field: values.integer(key) for field, key in (_STREAMS | _INDEXER).items()},
        "indexer_kv_heads": 1,
        "indexer_compress_ratio": _ratio(values, [layer for layer, kind in enumerate(types) if kind == FULL]),
        "output_gate_type": "sigmoid",
        "norm_topk_prob": True,
        **(_ngrams(values, common) if _LAYERS in values.data else {}),
    }


def _ngrams(values: Metadata, common: Mapping[str, object]) -> Fields:
    """The fields of n-gram embeddings, but for what hashes n-grams: that is in the file itself. The end of text that
    cuts them ends replies, too, where the tokenizer names none."""
    found = {field: values.integer(key) for field, key in _GRAMS.items()}
    [layer] = _integers(values, _LAYERS, 1, whole(0, values.head_layers().start - 1))  # a file has one table
    width = (found["ngram_size"] - 1) * found["heads_per_ngram"] * values.integer(_ROW_SIZE)
    own = values.get(_EOS, whole(0, int(number(common, "vocab_size")) - 1))
    ends = {"eos_token_id": common["eos_token_id"] or own}
    return {**found, **ends, "ple_layer_ids": [layer + 1], "ple_embed_dim": width}


def with_hashes(values: Metadata, config: ModelConfig) -> ModelConfig:
    """`config` with what hashes n-grams as the file has it, and its table's rows, where a config.json has the numbers
    that these follow from. Raises ModelError."""

    def change(block: Block) -> Block:
        return block if block.ngrams is None else replace(block, ngrams=_hashing(values, config, block.ngrams))

    return config.mapped(change) if config.with_ngrams else config


def _hashing(values: Metadata, config: ModelConfig, own: NGrams) -> NGrams:
    most = MOST // config.vocab_size  # else products wrap
    factors = _integers(values, _MULTIPLIERS, own.size, whole(1, most))
    sizes = _integers(values, _SIZES, own.num_heads, whole(1, _MOST_ROWS))
    offsets = _integers(values, _OFFSETS, own.num_heads, whole(0, _MOST_ROWS))
    eos, table = values.get(_EOS, whole()), values.header.tensors.get(LAYER_TABLE)
    rows = sum(sizes) if table is None else table.shape[0]
    found = replace(own, multipliers=factors, head_sizes=sizes, eos=eos, num_rows=rows, parts=1)
    if found.offsets != offsets:
        values.refuse(_OFFSETS, f"the sums of {_SIZES} before each head, {found.offsets[1]} for the second one")
    if rows < sum(sizes):
        values.refuse(_SIZES, f"numbers that add up to the {rows} rows of {LAYER_TABLE} at most, not to {sum(sizes)}")
    return found


def _integers(values: Metadata, key: str, count: int, kind: Kind) -> tuple[int, ...]:
    """A list of so many whole numbers, with all of their bits."""
    found = [each for each in values.values(key) if isinstance(each, int) and kind.fits(each)]
    return tuple(found) if len(found) == count else values.refuse(key, f"a list of {count}, each {kind.wanted}")


def _ratio(values: Metadata, attending: list[int]) -> object:
    """The tokens of an indexer's blocks. The file has a number for each layer, of which those of layers with a state
    and of a next-token head's say nothing; llama.cpp attends to all tokens where it is 0. attending: the numbers of
    layers that attend."""
    ratios = values.values(_RATIOS)
    found = {ratios[layer] if layer < len(ratios) else None for layer in attending}
    if len(found) != 1 or not found.isdisjoint((None, 0)):
        count = values.integer("block_count")
        values.refuse(
            _RATIOS, f"a list of {count} with the same number over 0 in layers {', '.join(map(str, attending))}, which "
            "attend: their indexers choose blocks of so many tokens; convert the model's folder again, with "
            "full_attention in its layer_types, or fetch another file",
        )  # fmt: skip
    return found.pop()
