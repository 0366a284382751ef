"""Tiny models whose attention has sink logits, of families that have none. No tests in here.

Ground truth is transformers' own attention of gpt-oss, in transformers' own models.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import Parameter
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from kit.families import random_tiny
from kit.models import perturbed, random_model, save
from offload.config.block import Block
from offload.config.families import FAMILIES
from offload.config.model import ModelConfig
from offload.fields import Fields

ATTENTION = "sink_logits"
NAMES = ("llama", "qwen2, windows")  # the second has growing layers and layers with a window, and biases, as gpt-oss

ALL_ATTENTION_FUNCTIONS.register(ATTENTION, eager_attention_forward)
ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, eager_mask)


def random_sunk(name: str, *, seed: int = 0, **fields: object) -> PreTrainedModel:
    """A model of NAMES whose sinks take from next to nothing to most of a row's weight."""
    model = random_model("llama-gqa", **fields) if name == "llama" else random_tiny(name, **fields)
    model.set_attn_implementation(ATTENTION)
    generator = torch.Generator().manual_seed(seed)
    for layer in model.model.layers:
        layer.self_attn.sinks = Parameter(1 + 2 * torch.randn(model.config.num_attention_heads, generator=generator))
    return model


def save_sunk(name: str, folder: Path, *, noise: float = 0.0, tokenizer: bool = False, **fields: object) -> Path:
    """noise: see `perturbed`. tokenizer: with one token per byte."""
    model = random_sunk(name, **fields)
    folder.mkdir(parents=True, exist_ok=True)
    return save(perturbed(model, noise) if noise else model, folder, tokenizer=tokenizer)


def with_sink_logits(config: ModelConfig) -> ModelConfig:
    def sunk(block: Block) -> Block:
        return replace(block, mixer=replace(block.attention, sink_logits=True))

    return config.mapped(sunk)


def read_as_sunk(patch: pytest.MonkeyPatch) -> None:
    """Every config of a family of NAMES has sink logits, as long as the patch lasts."""
    for name in ("llama", "qwen2"):
        family = FAMILIES[name]

        def described(source: Fields, describe: Callable[[Fields], ModelConfig] = family.describe) -> ModelConfig:
            return with_sink_logits(describe(source))

        patch.setitem(FAMILIES, name, replace(family, describe=described))


def in_rank(rank: int) -> None:
    """The same in the process of a rank, for `forked.forked_ranks`."""
    read_as_sunk(pytest.MonkeyPatch())
