"""Kinds of a model's tensors in a GGUF file, by the file's name: the rules of llama.cpp's llama-quantize with an
importance matrix, for dense models (its src/llama-quant.cpp, of August 2026).

A rule is a role of matrices, perhaps with a condition on the layer or the model; "": all other matrices. A rule whose
condition holds comes before one without.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import gguf
from gguf import GGMLQuantizationType as Kind

from offload.config.model import ModelConfig

HEAD, EMBEDDINGS = "output", "token_embd"
CONDITIONS: Mapping[str, Callable[[int, ModelConfig], bool]] = {
    "grouped": lambda layer, config: config.num_heads >= 4 * config.num_kv_heads,
    "first two": lambda layer, config: layer < 2,
    "first sixteenth": lambda layer, config: layer < config.num_layers // 16,
    "first eighth": lambda layer, config: layer < config.num_layers // 8,
    "more bits": lambda layer, config: _has_more_bits(layer, config.num_layers),
}
_MORE = {"attn_v, more bits": "Q6_K", "ffn_down, more bits": "Q6_K"}
_SMALL = {HEAD: "Q5_K", EMBEDDINGS: "Q2_K", "attn_v": "Q2_K", "attn_v, grouped": "Q4_K"}
_IQ2 = _SMALL | {"ffn_down, first eighth": "Q2_K"}
_IQ1 = _IQ2 | {"attn_output": "IQ2_XXS"}
MIXTURES: Mapping[str, Mapping[str, str]] = {
    "Q8_0": {"": "Q8_0", HEAD: "Q8_0"},
    "Q6_K": {"": "Q6_K"},
    "Q5_K_M": {"": "Q5_K"} | _MORE,
    "Q4_K_M": {"": "Q4_K"} | _MORE,
    "IQ4_NL": {"": "IQ4_NL", "attn_v, grouped": "Q5_K"},
    "IQ4_XS": {"": "IQ4_XS", "attn_v, grouped": "Q5_K"},
    "Q3_K_M": {
        "": "Q3_K", "attn_v": "Q4_K", "attn_v, first two": "Q5_K", "attn_output": "Q4_K", "ffn_down": "Q4_K",
        "ffn_down, first sixteenth": "Q5_K",
    },
    "IQ3_M": {"": "IQ3_S", "attn_v": "Q4_K", "attn_output": "Q4_K", "ffn_down, first eighth": "Q4_K"},
    "IQ3_S": {"": "IQ3_S", "attn_v, grouped": "Q4_K"},
    "IQ3_XXS": {
        "": "IQ3_XXS", HEAD: "Q5_K", EMBEDDINGS: "IQ3_S", "attn_v, grouped": "Q4_K", "attn_q": "IQ2_S",
        "attn_k": "IQ2_S", "attn_output": "IQ3_S",
    },
    "Q2_K": {"": "Q2_K", "attn_v": "Q3_K", "attn_v, grouped": "Q4_K", "attn_output": "Q3_K", "ffn_down": "Q3_K"},
    "IQ2_M": {
        "": "IQ2_S", HEAD: "Q5_K", EMBEDDINGS: "IQ3_S", "attn_v": "IQ3_S", "attn_v, grouped": "Q4_K",
        "attn_output": "IQ3_S", "ffn_down, first eighth": "IQ3_S",
    },
    "IQ2_XS": {"": "IQ2_XS"} | _IQ2,
    "IQ2_XXS": {"": "IQ2_XXS"} | _IQ2,
    "IQ1_M": {"": "IQ1_M"} | _IQ1,
    "IQ1_S": {"": "IQ1_S"} | _IQ1,
    "NVFP4": {"": "NVFP4"},  # llama-quantize makes none: all but the head
}  # fmt: skip
# In place of a kind whose blocks do not divide the rows.
_SHORTER = {"Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}


def kind_of(name: str, shape: tuple[int, ...], mixture: str, config: ModelConfig) -> Kind:
    """The kind of the tensor `name`, ggml's name, in a file named after `mixture`."""
    if len(shape) == 1:
        return Kind.F32
    rules, parts = MIXTURES[mixture], name.split(".")
    role = HEAD if config.tie_embeddings and parts[-2] == EMBEDDINGS else parts[-2]
    if role == HEAD:
        return Kind.Q8_0 if shape[-1] % _block(rules[""]) else _fitting(rules.get(HEAD, "Q6_K"), shape[-1])
    layer = int(parts[1]) if parts[0] == "blk" else 0
    held = (rules.get(f"{role}, {when}") for when, holds in CONDITIONS.items() if holds(layer, config))
    return _fitting(next(filter(None, held), rules.get(role, rules[""])), shape[-1])


def _has_more_bits(layer: int, num_layers: int) -> bool:
    first = num_layers // 8
    return layer < first or layer >= 7 * num_layers // 8 or (layer - first) % 3 == 2


def _fitting(kind: str, row: int) -> Kind:
    """`kind`, or the one that llama-quantize takes for it where its blocks do not divide a row of that length."""
    if row % _block(kind) == 0:
        return Kind[kind]
    shorter = _SHORTER.get(kind, "IQ4_NL")
    return Kind.F16 if row % _block(shorter) else Kind[shorter]


def _block(kind: str) -> int:
    return int(gguf.GGML_QUANT_SIZES[Kind[kind]][0])
