"""Assistants of Gemma 4 (Google): a few layers of Gemma 4 without keys and values of their own, which draft for a model
of that family. Their vocabulary may be in clusters, of which the best ones have logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from offload.config.assistant import Assistant
from offload.config.block import Block
from offload.config.families import gemma4
from offload.config.families.common import Family
from offload.config.model import ModelConfig
from offload.fields import Fields

_TEXT, _TARGET, _TIED = "text_config", "backbone_hidden_size", "tie_word_embeddings"
_ORDERED, _CLUSTERS, _BEST = "use_ordered_embeddings", "num_centroids", "centroid_intermediate_top_k"
_SIZES = {family.name: family.sizes for family in gemma4.FAMILIES}


def _describe(text: str, describe: Callable[[Fields], ModelConfig], source: Fields) -> ModelConfig:
    inner = source.inner(_TEXT)
    layers = inner.integer("num_hidden_layers", 1 << 12)
    if inner.data.get("num_kv_shared_layers") not in (None, 0, layers):
        inner.refuse("num_kv_shared_layers", f"{layers}: all layers read the keys and values of another model")
    own = {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, _TIED: source.flag(_TIED, True)}
    filled = {**_SIZES[text], **inner.data, **own, "dtype": source.data.get("dtype")}
    config = describe(source.inner(_TEXT, filled))
    assistant = Assistant(source.integer(_TARGET, 1 << 20))
    if source.flag(_ORDERED, False):
        clusters = source.integer(_CLUSTERS, config.vocab_size, default=2048)
        if config.vocab_size % clusters:
            source.refuse(_CLUSTERS, f"a divisor of vocab_size, {config.vocab_size}")
        best = source.integer(_BEST, clusters, default=32)
        assistant = replace(assistant, clusters=clusters, best=best)
    config = config.mapped(_reading)
    return replace(config, family=f"{text.removesuffix('_text')}_assistant", logits_cap=None, assistant=assistant)


def _reading(block: Block) -> Block:
    return replace(block, mixer=replace(block.attention, shares=True))


_READS = frozenset((_TEXT, _TARGET, _ORDERED, _CLUSTERS, _BEST))
FAMILIES = (
    Family(
        "gemma4_assistant", "drafts for Gemma 4 E2B, E4B, 26B-A4B, 31B",
        partial(_describe, "gemma4_text", gemma4.describe), _READS,
    ),
    Family(
        "gemma4_unified_assistant", "drafts for Gemma 4 12B",
        partial(_describe, "gemma4_unified_text", gemma4.describe_unified), _READS,
    ),
)  # fmt: skip
