"""Tiny random assistants of Gemma 4 models. No tests in here."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from unittest.mock import patch

import torch
from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4TextConfig, PreTrainedModel

from kit.families import TINY, Tiny, weighted
from kit.models import byte_tokenizer

LAYERS = ("sliding_attention", "full_attention", "sliding_attention")
CLUSTERS = {"use_ordered_embeddings": True, "num_centroids": 8, "centroid_intermediate_top_k": 3}
OWN = {
    "num_hidden_layers": len(LAYERS), "num_kv_shared_layers": len(LAYERS), "layer_types": list(LAYERS),
    "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "use_double_wide_mlp": False,
    "enable_moe_block": False,
}  # fmt: skip
_OF_TARGET = ("model_type", "per_layer_config")


def random_assistant(target: str, *, clusters: bool = False, **fields: object) -> PreTrainedModel:
    """transformers' assistant of the tiny target of that name, which it (5.24) refuses to make: that no layer has keys
    of its own is an error to it. fields: of the target, see `random_tiny`."""
    whole = {key: value for key, value in (TINY[target].config() | fields).items() if key not in _OF_TARGET}
    size = whole["hidden_size"]
    text = Gemma4TextConfig(**whole | OWN | {"hidden_size": 24, "intermediate_size": 32})
    more = CLUSTERS if clusters else {}
    config = Gemma4AssistantConfig(text_config=text.to_dict(), backbone_hidden_size=size, **more)
    modes = property(lambda _: ["reuse"] * len(LAYERS))
    with patch.object(Gemma4TextConfig, "kv_sharing_modes", modes):
        model = weighted(Gemma4AssistantForCausalLM(config).float().eval(), Tiny("gemma4_assistant"), 3)
    if clusters:
        order = torch.randperm(text.vocab_size, generator=torch.Generator().manual_seed(5))
        model.masked_embedding.token_ordering.copy_(order)
    return model


def keeping_keys() -> AbstractContextManager[object]:
    """Models made within keep their last keys of each type of layer, for an assistant: by themselves (5.24) only those
    do in which layers share keys."""

    def modes(config: Gemma4TextConfig) -> list[str | None]:
        if config.num_kv_shared_layers:
            found: list[str | None] = ours.fget(config)  # type: ignore[misc]
            return found
        last = {kind: at for at, kind in enumerate(config.layer_types)}.values()
        return ["store" if at in last else None for at in range(config.num_hidden_layers)]

    ours = Gemma4TextConfig.kv_sharing_modes
    return patch.object(Gemma4TextConfig, "kv_sharing_modes", property(modes))


def save_assistant(
    target: str, folder: Path, *, tokenizer: bool = False, clusters: bool = False, **fields: object
) -> Path:
    random_assistant(target, clusters=clusters, **fields).save_pretrained(folder)
    if tokenizer:
        byte_tokenizer().save_pretrained(folder)
    return folder
