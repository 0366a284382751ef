"""Ling 3 (Ant): most layers have a recurrent state in which each channel of a key decays by itself (Kimi Delta
Attention), the last one of each group latent attention whose heads are gated; a mixture of experts after a few dense
layers. The next-token head is a further layer."""

from __future__ import annotations

import json
from dataclasses import replace

from offload.config.families.common import Defaults, Family, epsilon
from offload.config.families.experts import MLP_TYPES, READS, SIGMOIDS, dense_layers, read_sigmoids
from offload.config.families.glm4_moe import HEADS, SHARED, with_head
from offload.config.families.kimi_linear import ALIASES, aliased
from offload.config.families.latent import LATENT, latent_decoder
from offload.config.families.states import STATEFUL, channel_names, layer_kinds, read_channel_rule, with_states
from offload.config.families.windows import FULL
from offload.config.model import ModelConfig
from offload.config.names import TensorNames
from offload.config.norm import Norm
from offload.config.rope import RopeDefaults
from offload.fields import Fields, number, whole

_DENSE, _GROUP, _LEAST, _PARTIAL = (
    "first_k_dense_replace",
    "layer_group_size",
    "kda_lower_bound",
    "partial_rotary_factor",
)
_LIMITS = ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list")
_SAID: dict[str, object] = {  # switches, and what is implemented of them
    **dict.fromkeys(("no_kda_lora", "linear_silu", "use_qk_norm", "moe_router_enable_expert_bias"), True),
    **dict.fromkeys(("use_kda_lora", "mtp_use_kda", "use_mla_nope", "use_bias", "use_qkv_bias", "use_nGPT"), False),
    **dict.fromkeys(("scale_router_input", "up_proj_norm", "value_norm"), False),
    "attention_bias": False,  # the gate of heads has none
    "gated_attention_proj_granularity_type": "head_wise", "group_norm_size": 1, "topk_method": "noaux_tc",
    "score_function": "sigmoid", "scoring_func": "sigmoid",
}  # fmt: skip
_SAME = {  # fields that have to say what another one does
    "moe_shared_expert_intermediate_size": "moe_intermediate_size", "rotary_dim": "qk_rope_head_dim",
}  # fmt: skip
_SIZES = {"head_dim": "head_dim", "num_heads": "num_attention_heads", "conv_kernel_dim": "short_conv_kernel_size"}
_DEFAULTS = Defaults(max_positions=262144, rope=RopeDefaults(theta=6e6))
_LAYER = "attention."


def describe(source: Fields) -> ModelConfig:
    source = _checked(aliased(source, ALIASES | {HEADS[0]: HEADS[1]}))
    config = latent_decoder(_rotating_all(source), "bailing_hybrid", _DEFAULTS)
    config = config.mapped(lambda block: replace(block, mixer=replace(block.attention, gate=True, gates_heads=True)))
    config = replace(config, names=_named(config.names))
    experts = read_sigmoids(source, config, counts=("num_local_experts",), factor=2.5)
    dense = dense_layers(source, config.num_layers, source.get(_DENSE, whole(0), 2))
    config = with_head(source, config, experts, dense=dense, norm="final_layernorm")
    sizes = {
        f"linear_{name}": source.data.get(f"linear_{name}") or source.data.get(key) for name, key in _SIZES.items()
    }
    least = source.get(_LEAST, number(-1e3, 0.0), -5.0) if source.flag("kda_safe_gate", True) else None
    norm = Norm(epsilon(source, _DEFAULTS), fp32=True)
    rule = read_channel_rule(source.changed(sizes), low_rank=False, least=least, norm=norm)
    return with_states(config, rule, _stateful(source, config.num_layers))


def _checked(source: Fields) -> Fields:
    for key, wanted in _SAID.items():
        if source.data.get(key) not in (None, wanted):
            source.refuse(key, f"absent or {json.dumps(wanted)} in bailing_hybrid")
    for key, other in _SAME.items():
        if source.data.get(key) not in (None, source.data.get(other)):
            source.refuse(key, f"absent, or {source.data.get(other)} as {other} is")
    for key in _LIMITS:
        limits = source.data.get(key) or []
        if not isinstance(limits, list) or any(limits):
            source.refuse(key, "absent or 0 in all layers: gates and ups that are cut off are not implemented")
    return source


def _rotating_all(source: Fields) -> Fields:
    """`source` without the share of numbers that rotate, which transformers does not read, and without the base beside
    rope_parameters, of which it writes the default."""
    rope = source.data.get("rope_parameters")
    if not isinstance(rope, dict) or not rope:
        return source.changed({_PARTIAL: None})
    kept = {key: value for key, value in rope.items() if key != _PARTIAL}
    base = None if "rope_theta" in kept else source.data.get("rope_theta")
    return source.changed({_PARTIAL: None, "rope_parameters": kept, "rope_theta": base})


def _named(names: TensorNames) -> TensorNames:
    latent = {
        name: getattr(names, name).replace("self_attn.", _LAYER) for name in ("q_norm", "k_norm", "q_b", "k_b", "v_b")
    }
    return replace(
        names, table="word_embeddings", attention=_LAYER, out="dense", gate=f"{_LAYER}g_proj", **latent,
        experts=replace(names.experts, bias="mlp.gate.expert_bias"),
        recurrence=channel_names(_LAYER, low_rank=False),
    )  # fmt: skip


def _stateful(source: Fields, count: int) -> list[int]:
    """The layers with a state: all but the last one of each group. Programs differ about layers behind the last whole
    group."""
    group = source.integer(_GROUP, 1 << 12, default=6)
    if source.data.get("layer_types") is None and count % group:
        source.refuse(_GROUP, f"a divisor of num_hidden_layers {count}, or beside layer_types")
    kinds = layer_kinds(source, (FULL, STATEFUL), lambda layer: STATEFUL if (layer + 1) % group else FULL)
    return [layer for layer, kind in enumerate(kinds) if kind == STATEFUL]


_READS = READS | SIGMOIDS | LATENT | {*ALIASES, *HEADS, SHARED, _DENSE, MLP_TYPES, _PARTIAL, *_SAID, *_SAME, *_LIMITS}
_READS |= {"mtp_loss_scaling_factor"}  # of training
FAMILIES = (Family("bailing_hybrid", "Ling 3: mixtures of experts, states and latent attention", describe, _READS),)
