"""The fields of Qwen3.8-Flash-Next in GGUF files, from their metadata."""

from __future__ import annotations

from collections.abc import Mapping

from offload.config.families.windows import FULL
from offload.config.gguf_experts import QWEN35MOE, qwen35moe
from offload.config.gguf_fields import Metadata
from offload.config.gguf_layers import Fields

_STREAMS = {"hc_count": "hyper_connection.count", "hc_lowrank": "hyper_connection.low_rank"}
_INDEXER = {
    "indexer_n_heads": "attention.indexer.head_count", "indexer_head_dim": "attention.indexer.key_length",
    "indexer_budget": "attention.indexer.top_k",
}  # fmt: skip
_RATIOS = "attention.compress_ratios"
FLASH = QWEN35MOE | {*_STREAMS.values(), *_INDEXER.values(), _RATIOS}


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
    }


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
