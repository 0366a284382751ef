"""The fields of models with latent attention (MLA) in GGUF files, from their metadata."""

from __future__ import annotations

from collections.abc import Mapping

from offload.config.families.states import STATEFUL
from offload.config.families.windows import FULL
from offload.config.gguf_experts import GLM4MOE, SHARED_SIZE, SIGMOID, grouped, scoring, shared_experts, sigmoids
from offload.config.gguf_fields import Metadata
from offload.config.gguf_layers import KV_HEADS, LATENT_RANK, Fields
from offload.config.gguf_rope import rope_settings
from offload.fields import number

_QUERY_RANK, _BY_HEAD = "attention.q_lora_rank", "_mla"  # of lengths: of a head of the model
_KEY, _VALUE, _ORIGINAL = "attention.key_length", "attention.value_length", "original_max_position_embeddings"
_GROWTH, _GROWTH_LENGTH = "attention.temperature_scale", "attention.temperature_length"
_GROWN = 0.1  # of Mistral Small 4; files of the converter do not say it
DEEPSEEK2 = GLM4MOE | {LATENT_RANK, _QUERY_RANK, _KEY + _BY_HEAD, _VALUE + _BY_HEAD}
MISTRAL4 = DEEPSEEK2 | {_GROWTH, _GROWTH_LENGTH}
KIMI_LINEAR = DEEPSEEK2 | {KV_HEADS, "ssm.conv_kernel"}
BAILINGMOE3 = KIMI_LINEAR | {SHARED_SIZE}


def deepseek2(values: Metadata, common: Mapping[str, object]) -> Fields:
    """Fields of DeepSeek V3 and GLM-4.7-Flash, whose scores are sigmoids with a bias, or else of DeepSeek V2. Files of
    the former from before llama.cpp 18980 say that scores are a softmax, but have the bias."""
    own = {**_latent(values), **_experts(values)}
    has_bias = values.has("exp_probs_b.bias", int(str(own["first_k_dense_replace"])))
    if scoring(values) == SIGMOID or has_bias:
        return own | {"model_type": "deepseek_v3"}
    return own | {"model_type": "deepseek_v2", "topk_method": "group_limited_greedy"}


def mistral4(values: Metadata, common: Mapping[str, object]) -> Fields:
    """Fields of Mistral Small 4."""
    own = {**_latent(values), **_experts(values)}
    rope = own["rope_parameters"]
    assert isinstance(rope, dict)
    length = values.integer(_GROWTH_LENGTH, default=rope.get(_ORIGINAL))
    if rope.get(_ORIGINAL) != length:
        values.refuse(_GROWTH_LENGTH, "absent, or rope.scaling.original_context_length")
    grown = {"llama_4_scaling_beta": values.number(_GROWTH, _GROWN), "partial_rotary_factor": None}
    return own | {"rope_parameters": {**rope, **grown}}


def kimi_linear(values: Metadata, common: Mapping[str, object]) -> Fields:
    """Fields of Kimi Linear. The weights of experts add up to 1: llama.cpp hardcodes that, and the file does not say
    it."""
    return _with_states(values, common) | {"norm_topk_prob": True}


def bailingmoe3(values: Metadata, common: Mapping[str, object]) -> Fields:
    """Fields of Ling 3."""
    size = values.integer("expert_feed_forward_length") * values.integer("expert_shared_count")
    if values.integer(SHARED_SIZE, default=size) != size:
        values.refuse(SHARED_SIZE, f"absent, or {size}, expert_feed_forward_length times expert_shared_count")
    is_bounded = values.flag("kda.safe_gate", True)
    return _with_states(values, common) | {
        "kda_safe_gate": is_bounded,
        "kda_lower_bound": values.get("kda.gate_lower_bound", number(-1e3, 0.0)) if is_bounded else None,
        "num_nextn_predict_layers": len(values.head_layers()),
    }


def _with_states(values: Metadata, common: Mapping[str, object]) -> Fields:
    """Fields of a model some of whose layers have states in which each channel decays by itself: those without KV
    heads, of as many heads as an attention."""
    count = values.head_layers().start
    kv_heads = values.values(KV_HEADS)[:count]
    if len(kv_heads) != count or {*kv_heads} != {0, 1}:
        values.refuse(KV_HEADS, f"a list of {count}, 1 in each layer that attends and 0 in the others")
    return {
        **_latent(values),
        **sigmoids(values),
        "n_shared_experts": values.integer("expert_shared_count"),
        "layer_types": [FULL if each else STATEFUL for each in kv_heads],
        "num_key_value_heads": 1,
        "linear_head_dim": values.integer("kda.head_dim"),
        "linear_num_heads": common["num_attention_heads"],
        "linear_conv_kernel_dim": values.integer("ssm.conv_kernel"),
    }


def _latent(values: Metadata) -> Fields:
    """Fields of latent attention. Old files have heads' keys and values in one tensor, and the lengths of heads."""
    kind = _BY_HEAD if _KEY + _BY_HEAD in values.data else ""
    rotated, query_rank = values.integer("rope.dimension_count"), values.optional(_QUERY_RANK)
    rope = rope_settings(values, rotated)["rope_parameters"]
    assert isinstance(rope, dict)
    if (multiplier := rope.get("mscale_all_dim")) is not None:  # a tenth of the config's, here alone (llama.cpp 17945)
        rope |= dict.fromkeys(("mscale", "mscale_all_dim"), 10 * multiplier)
    return {
        "kv_lora_rank": values.integer(LATENT_RANK),
        "q_lora_rank": query_rank and int(query_rank),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": values.integer(_KEY + kind) - rotated,
        "v_head_dim": values.integer(_VALUE + kind),
        "rope_parameters": rope,
    }


def _experts(values: Metadata) -> Fields:
    return {**grouped(values), **shared_experts(values), "num_nextn_predict_layers": len(values.head_layers())}
