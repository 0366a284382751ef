"""The key of a model in a plan: its shapes and forms, by which a given plan is checked."""

from __future__ import annotations

import os

from offload.config.model import ModelConfig
from offload.machine import KERNELS

_SHAPES = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")


def key_of(config: ModelConfig, dtype: str) -> str:
    """The key of a model: shapes, encodings of the matrices, dtype (bf16, fp16 or fp32), and whether kernels are
    requested."""
    attention, inner = config.block.attention, config.block.feed_forward
    own = config.block.experts
    experts = {} if own is None else {"experts": own.count, "used": own.used, "of": own.network.size}
    shapes = {name: getattr(config, name) for name in _SHAPES} | {
        "qkv_bias": int(attention.bias),
        "o_bias": int(attention.out_bias),
        "mlp_bias": int(inner.bias),
        "qk_norm": int(attention.qk_norm is not None),
        **experts,
    }
    named = " ".join(f"{name}={value}" for name, value in shapes.items())
    form = "" if config.is_llama_shaped else f" {config.family}"
    form += " values=keys" if attention.values_are_keys else ""
    form += f" latent={attention.latent.rank}" if attention.latent else ""
    form += f" heads={','.join(map(str, config.head_counts))}" if len(config.head_counts) > 1 else ""
    stored = *config.block.encodings.every, config.head_encoding
    form += f" stored={','.join(stored)}" if any(stored) else ""
    return f"{named}{form} {dtype} kernels={os.environ.get(KERNELS) or 'on'}"
