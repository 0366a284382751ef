"""The fields of mixtures of experts in GGUF files, from their metadata."""

from __future__ import annotations

from collections.abc import Mapping

from offload.config.families.windows import FULL, WINDOWED
from offload.config.gguf_fields import Metadata
from offload.config.gguf_layers import HEADS, WINDOW, WINDOWS, Fields, attention_bias, heads_of, layer_types, number
from offload.config.gguf_rope import share_of
from offload.config.gguf_states import CONVOLUTIONS, STATES, lfm2, qwen35
from offload.fields import whole

SHARED_SIZE, _SHARED_COUNT = "expert_shared_feed_forward_length", "expert_shared_count"
_DENSE, _SCORING = "leading_dense_block_count", "expert_gating_func"
_SCALE, _RENORMALISED = "expert_weights_scale", "expert_weights_norm"
_GROUPS = ("expert_group_count", "expert_group_used_count")
_LOCAL_THETA = "rope.freq_base_swa"
_STEP = "interleave_moe_layer_step"
_SOFTMAX, SIGMOID = 1, 2  # llama.cpp's numbers of scores; 0 is the architecture's own
EXPERTS = frozenset(("expert_count", "expert_used_count", "expert_feed_forward_length"))
GPT_OSS = EXPERTS | WINDOWS
QWEN35MOE = EXPERTS | STATES | {SHARED_SIZE}
SIGMOIDS = EXPERTS | {_SHARED_COUNT, _DENSE, _SCORING, _SCALE, _RENORMALISED, *_GROUPS}
GLM4MOE = SIGMOIDS | {"nextn_predict_layers"}
EXAONE_MOE = GLM4MOE | WINDOWS | {SHARED_SIZE}
MINIMAX_M2 = EXPERTS | {_SCORING}
ERNIE_MOE = EXPERTS | {_SHARED_COUNT, SHARED_SIZE, _DENSE, _SCORING, _STEP}
HUNYUAN_MOE = EXPERTS | {_SHARED_COUNT, SHARED_SIZE}
QWEN2MOE = EXPERTS | {SHARED_SIZE}
LFM2MOE = EXPERTS | CONVOLUTIONS | {_DENSE, _SCORING, _SCALE, _RENORMALISED}
AFMOE = SIGMOIDS | WINDOWS | {SHARED_SIZE}
LAGUNA = SIGMOIDS | WINDOWS | {SHARED_SIZE, HEADS}
COHERE2MOE = GLM4MOE | WINDOWS | {SHARED_SIZE, "logit_scale"}


def qwen3moe(values: Metadata, common: Mapping[str, object]) -> Fields:
    """Fields of Qwen3's mixtures of experts. Weights are those of the softmax over the experts in use: llama.cpp
    hardcodes that, and the file does not say it."""
    return {**attention_bias(values, common), **experts(values), "norm_topk_prob": True}


def qwen2moe(values: Metadata, common: Mapping[str, object]) -> Fields:
    """Fields of Qwen2's mixtures of experts. Weights are those of the softmax over all experts: llama.cpp hardcodes
    that, and the file does not say it."""
    shared = values.integer(SHARED_SIZE)
    return {**experts(values), "qkv_bias": values.has("attn_q.bias"), "shared_expert_intermediate_size": shared}


def olmoe(values: Metadata, common: Mapping[str, object]) -> Fields:
    """Fields of OLMoE, whose weights are those of the softmax over all experts, as llama.cpp has it."""
    return {
        **attention_bias(values, common),
        "num_experts": values.integer("expert_count"),
        "num_experts_per_tok": values.integer("expert_used_count"),
    }


def minimax_m2(values: Metadata, common: Mapping[str, object]) -> Fields:
    """Fields of MiniMax-M2."""
    _scored(values, SIGMOID, "sigmoids")
    own = experts(values)
    return {**own, "num_local_experts": own["num_experts"], "intermediate_size": own["moe_intermediate_size"]}


def ernie4_5_moe(values: Metadata, common: Mapping[str, object]) -> Fields:
    """Fields of ERNIE 4.5's mixtures of experts. The size of the network beside them is that of so many experts."""
    _scored(values, _SOFTMAX, "a softmax")
    return {
        "moe_num_experts": values.integer("expert_count"),
        "moe_k": values.integer("expert_used_count"),
        "moe_intermediate_size": values.integer("expert_feed_forward_length"),
        "moe_num_shared_experts": values.get(_SHARED_COUNT, whole(0, 1 << 12), 0),
        "moe_layer_start_index": values.get(_DENSE, whole(0), 0),
        "moe_layer_interval": values.integer(_STEP, default=1),
    }


def hunyuan_moe(values: Metadata, common: Mapping[str, object]) -> Fields:
    """Fields of Hunyuan's mixtures of experts."""
    own = experts(values, used="moe_topk")
    for key, wanted in ((_SHARED_COUNT, 1), (SHARED_SIZE, own["moe_intermediate_size"])):
        if values.integer(key) != wanted:
            values.refuse(key, f"{wanted}: one network as large as an expert is beside them")
    return {**attention_bias(values, common), **own, "intermediate_size": own["moe_intermediate_size"]}


def exaone_moe(values: Metadata, common: Mapping[str, object]) -> Fields:
    """Fields of K-EXAONE. A next-token head is left alone."""
    return {
        **sigmoids(values),
        "num_shared_experts": values.integer(_SHARED_COUNT),
        "sliding_window": values.integer(WINDOW),
        "layer_types": layer_types(values, common, 4),
    }


def afmoe(values: Metadata, common: Mapping[str, object]) -> Fields:
    """Fields of Trinity. Embeddings are scaled: llama.cpp hardcodes that, and the file does not say it."""
    _scored(values, SIGMOID, "sigmoids")
    _adds_up(values)
    return {
        **experts(values),
        "num_expert_groups": values.get(_GROUPS[0], whole(0, 1 << 12), 0) or 1,
        "num_shared_experts": values.integer(_SHARED_COUNT),
        "num_dense_layers": values.get(_DENSE, whole(0), 0),
        "route_scale": values.optional(_SCALE) or 1.0,
        "mup_enabled": True,
        "sliding_window": values.integer(WINDOW),
        "layer_types": layer_types(values, common, 4),
    }


def laguna(values: Metadata, common: Mapping[str, object]) -> Fields:
    """Fields of Laguna. Layers with a window have plain positions of their own. A gate has a row for each head, or for
    each number of the heads."""
    _scored(values, SIGMOID, "sigmoids")
    _adds_up(values)
    if values.integer(_SHARED_COUNT, default=1) != 1:
        values.refuse(_SHARED_COUNT, "absent or 1: one network is beside the experts")
    heads, dense, full = heads_of(values), values.get(_DENSE, whole(0), 0), common["rope_parameters"]
    assert isinstance(full, Mapping)
    gate, head_dim = values.header.tensors.get("blk.0.attn_gate.weight"), int(number(common, "head_dim"))
    rotated = values.integer("rope.dimension_count_swa", default=head_dim)
    local: Fields = {"rope_type": "default", "rope_theta": values.number(_LOCAL_THETA, full["rope_theta"])}
    return {
        **experts(values),
        "gating": gate is None or gate.shape[0] == heads[0] or "per-element",
        "num_attention_heads_per_layer": heads,
        "shared_expert_intermediate_size": values.integer(SHARED_SIZE),
        "mlp_layer_types": ["dense" if layer < dense else "sparse" for layer in range(len(heads))],
        "moe_routed_scaling_factor": values.optional(_SCALE) or 1.0,
        "sliding_window": values.optional(WINDOW) and values.integer(WINDOW),
        "layer_types": layer_types(values, common, 4, full_first=True),
        "rope_parameters": {FULL: full, WINDOWED: local | {"partial_rotary_factor": share_of(rotated, head_dim)}},
    }


def cohere2moe(values: Metadata, common: Mapping[str, object]) -> Fields:
    """Fields of Cohere's mixtures of experts, which are RMS normed if the file has an epsilon for that. A next-token
    head is left alone."""
    _scored(values, SIGMOID, "sigmoids")
    if values.optional(_SCALE) not in (None, 1.0):
        values.refuse(_SCALE, "absent or 1.0")
    eps = {"rms_norm_eps": "attention.layer_norm_rms_epsilon", "layer_norm_eps": "attention.layer_norm_epsilon"}
    norms: Fields = {field: found for field, key in eps.items() if (found := values.optional(key)) is not None}
    if not norms:
        values.refuse(eps["rms_norm_eps"], "a number over 0")
    return {
        **attention_bias(values, common),
        **norms,
        "num_experts": values.integer("expert_count"),
        "num_experts_per_tok": values.integer("expert_used_count"),
        "intermediate_size": values.integer("expert_feed_forward_length"),
        "prefix_dense_intermediate_size": common["intermediate_size"],
        "first_k_dense_replace": values.get(_DENSE, whole(0), 0),
        "expert_selection_fn": "sigmoid",
        "norm_topk_prob": values.flag(_RENORMALISED, False),
        "num_shared_experts": values.get(_SHARED_COUNT, whole(0, 1 << 12), 0),
        "logit_scale": values.number("logit_scale"),
        "sliding_window": values.integer(WINDOW),
        "layer_types": layer_types(values, common, 4, full_first=True),
    }


def gpt_oss(values: Metadata, common: Mapping[str, object]) -> Fields:
    """Fields of gpt-oss. Layers 0, 2 and so on have a window: llama.cpp hardcodes that, and the file does not say it.
    Nor does it say that the model was trained with YaRN's ramp not rounded to whole pairs ("truncate" is false in its
    config.json): it is here, while llama.cpp rounds it."""
    rope = common["rope_parameters"]
    assert isinstance(rope, Mapping)
    if values.number(_LOCAL_THETA, rope["rope_theta"]) != rope["rope_theta"]:
        values.refuse(_LOCAL_THETA, f"absent or rope.freq_base, {rope['rope_theta']}: one base for all layers is known")
    return {
        **attention_bias(values, common),
        **experts(values),
        "intermediate_size": values.integer("expert_feed_forward_length"),
        "sliding_window": values.integer(WINDOW),
        "layer_types": layer_types(values, common, 2),
        "rope_parameters": {**rope, "truncate": False} if rope["rope_type"] == "yarn" else rope,
    }


def qwen35moe(values: Metadata, common: Mapping[str, object]) -> Fields:
    """Fields of Qwen3.5's mixtures of experts."""
    size = common["intermediate_size"]
    shared = values.integer(SHARED_SIZE, default=size if isinstance(size, int) else None)
    return {**qwen35(values, common), **experts(values), "shared_expert_intermediate_size": shared}


def qwen3next(values: Metadata, common: Mapping[str, object]) -> Fields:
    """Fields of Qwen3-Next."""
    return {**qwen35moe(values, common), "num_nextn_predict_layers": len(values.head_layers())}


def glm4moe(values: Metadata, common: Mapping[str, object]) -> Fields:
    """Fields of GLM-4.5."""
    return {
        **attention_bias(values, common),
        **sigmoids(values),
        **shared_experts(values),
        "use_qk_norm": values.has("attn_q_norm.weight"),
        "num_nextn_predict_layers": len(values.head_layers()),
    }


def lfm2moe(values: Metadata, common: Mapping[str, object]) -> Fields:
    """Fields of LFM2's mixtures of experts. Their weights add up to 1: llama.cpp hardcodes that."""
    _scored(values, SIGMOID, "sigmoids")
    dense, factor = values.get(_DENSE, whole(0), 0), values.optional(_SCALE)
    return {
        **lfm2(values, common),
        **experts(values),
        "num_dense_layers": dense,
        "use_expert_bias": values.has("exp_probs_b.bias", dense),
        "routed_scaling_factor": 1.0 if factor is None else factor,
        "norm_topk_prob": values.flag(_RENORMALISED, True),
    }


def sigmoids(values: Metadata) -> Fields:
    """Fields of a mixture of experts of DeepSeek V3's form, after some dense layers."""
    _scored(values, SIGMOID, "sigmoids")
    return grouped(values)


def shared_experts(values: Metadata) -> Fields:
    """The numbers of experts, and of those that every row runs through."""
    return {"n_routed_experts": values.integer("expert_count"), "n_shared_experts": values.integer(_SHARED_COUNT)}


def grouped(values: Metadata) -> Fields:
    """Fields of a mixture of experts in groups, after some dense layers."""
    factor, (groups, groups_used) = values.optional(_SCALE), (values.get(key, whole(0, 1 << 12), 0) for key in _GROUPS)
    return {
        **experts(values),
        "first_k_dense_replace": values.get(_DENSE, whole(0), 0),
        "routed_scaling_factor": 1.0 if factor is None else factor,
        "norm_topk_prob": values.flag(_RENORMALISED, False),
        "n_group": groups or 1,
        "topk_group": groups_used or 1,
    }


def _scored(values: Metadata, kind: int, name: str) -> None:
    """Refuse scores of another kind than the architecture's."""
    if scoring(values) not in (0, kind):
        values.refuse(_SCORING, f"absent, 0 or {kind}: only {name} of the experts' scores are implemented")


def scoring(values: Metadata) -> int:
    """llama.cpp's number of scores; 0 if the file does not say it."""
    number: int = values.get(_SCORING, whole(0, 1 << 8), 0)
    return number


def _adds_up(values: Metadata) -> None:
    """Refuse weights that do not add up to 1."""
    if not values.flag(_RENORMALISED, False):
        values.refuse(_RENORMALISED, "true: weights of experts that do not add up to 1 are not implemented here")


def experts(values: Metadata, *, used: str = "num_experts_per_tok") -> Fields:
    """Fields of a mixture of experts. used: the field of those that a row runs through."""
    return {
        "num_experts": values.integer("expert_count"),
        used: values.integer("expert_used_count"),
        "moe_intermediate_size": values.integer("expert_feed_forward_length"),
    }
