"""The fields of families whose attention is latent (MLA)."""

from __future__ import annotations

import math
from collections.abc import Set
from dataclasses import replace

from offload.config.families.common import Defaults, decoder
from offload.config.mixers import Latent
from offload.config.model import ModelConfig
from offload.config.names import TensorNames
from offload.config.norm import Norm
from offload.config.rope import Rope
from offload.fields import Fields, whole

_RANK, _QUERY_RANK = "kv_lora_rank", "q_lora_rank"
_PLAIN, _ROTATED, _VALUES, _PAIRS, _BIAS = (
    *("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "rope_interleave"),
    "attention_bias",
)
LATENT: Set[str] = frozenset((_RANK, _QUERY_RANK, _PLAIN, _ROTATED, _VALUES, _PAIRS, "qk_head_dim", "head_dim"))
# transformers makes the norms of low-rank rows without the config's epsilon. Other programs take that (transformers,
# issue 44261).
LOW_RANK_NORM = Norm(1e-6)
_NAMES = TensorNames(q_norm="self_attn.q_a_layernorm", k_norm="self_attn.kv_a_layernorm")


def latent_decoder(source: Fields, family: str, defaults: Defaults) -> ModelConfig:
    """The model of `source`, whose layers are Llama's but for latent attention. Raises ModelError."""
    bias, most = source.flag(_BIAS, False), 1 << 16
    latent = Latent(
        source.integer(_RANK, most), source.integer(_PLAIN, most), source.integer(_ROTATED, most),
        source.integer(_VALUES, most), 0 if source.data.get(_QUERY_RANK) is None else source.integer(_QUERY_RANK, most),
    )  # fmt: skip
    if latent.rank % 2 or latent.rotated % 2:
        source.refuse(_RANK if latent.rank % 2 else _ROTATED, "even: a token's row is cached in halves")
    if bias and not latent.query_rank:
        source.refuse(_BIAS, f"false without {_QUERY_RANK}, as queries have no bias then")
    if source.get("qk_head_dim", whole(1), latent.query_dim) != latent.query_dim:
        source.refuse("qk_head_dim", f"{latent.query_dim}, the sum of {_PLAIN} and {_ROTATED}")
    pairs = replace(defaults, rope=replace(defaults.rope, neighbours=source.flag(_PAIRS, True)))
    heads = source.changed({"head_dim": latent.rotated, "num_key_value_heads": 1})
    fields = {"bias": bias, "out_bias": bias, "qk_norm": LOW_RANK_NORM}
    config = decoder(heads, family, pairs, attention=fields, names=_NAMES)
    rope = config.rope
    scale = latent.query_dim**-0.5 * _temperature(rope) ** 2
    rotated = replace(rope, rotated=rope.rotated or latent.rotated)
    size = latent.rank + latent.rotated
    return config.mapped(
        lambda block: replace(
            block, mixer=replace(block.attention, head_dim=size, rope=rotated, scale=scale, latent=latent)
        )
    )


def _temperature(rope: Rope) -> float:
    """The root of the factor on scores that DeepSeek's `mscale_all_dim` gives where positions are scaled."""
    if rope.kind == "default" or not rope.mscale_all_dim or rope.factor <= 1:
        return 1.0
    return 0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1
