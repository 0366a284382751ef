"""Laguna (Poolside): layers with a window have more query heads than the others and positions of their own; heads are
gated by softplus, and experts are chosen by sigmoids plus a bias, after a few dense layers."""

from __future__ import annotations

from dataclasses import replace

from offload.config.families.common import Defaults, Family, decoder, epsilon
from offload.config.families.experts import MLP_TYPES, NORMED, READS, dense_layers, read_experts, with_experts
from offload.config.families.windows import FULL, WINDOWED, rope_of_type, windowed_layers, with_windows
from offload.config.model import ModelConfig
from offload.config.names import ExpertNames, TensorNames
from offload.config.norm import Norm
from offload.config.rope import RopeDefaults, read_rope
from offload.fields import Fields, list_of, number, whole

_WINDOW, _HEADS, _SHARED = 512, "num_attention_heads_per_layer", "shared_expert_intermediate_size"
_FACTOR, _CAP = "moe_routed_scaling_factor", "moe_router_logit_softcapping"
_GATING, _GATES = "gating", {True: True, "per-head": True, "per_head": True, "per-element": False, "per_element": False}
_OFF = ("attention_bias", "qkv_bias", "moe_apply_router_weight_on_input", "swa_attention_sink_enabled")
_PARTIAL, _ROPES = "partial_rotary_factor", "rope_parameters"
_NAMES = TensorNames(
    gate="self_attn.g_proj",
    experts=ExpertNames(bias="mlp.experts.e_score_correction_bias", network="mlp.shared_expert."),
)


def describe(source: Fields) -> ModelConfig:
    for key in _OFF:
        if source.flag(key, False):
            source.refuse(key, "absent or false in laguna")
    source = source.changed({_PARTIAL: None})  # each kind of layers has its own
    share = 1.0 if source.data.get(_ROPES) else 0.5
    defaults = Defaults(
        max_positions=131072, kv_heads=8, head_dim=128, rope=RopeDefaults(theta=500000.0, partial=share)
    )
    attention = {
        "qk_norm": Norm(epsilon(source, defaults)), "gate": True, "gate_function": "softplus",
        "gates_heads": _gates_heads(source),
    }  # fmt: skip
    config = decoder(rope_of_type(source, FULL), "laguna", defaults, attention=attention, names=_NAMES)
    experts = read_experts(
        source, config, scoring="sigmoid", bias="ranks", rounded="scores", eps=0.0, scales_sum=True,
        factor=source.number(_FACTOR, default=1.0), score_cap=source.get(_CAP, number(0.0, 1e6).or_null, None) or None,
    )  # fmt: skip
    dense = dense_layers(source, config.num_layers, 1)
    config = with_experts(config, experts, beside=source.integer(_SHARED, 1 << 22), dense=dense)
    rope = read_rope(
        rope_of_type(source, WINDOWED), max_positions=config.max_positions, head_dim=config.head_dim,
        defaults=RopeDefaults(partial=1.0),
    )  # fmt: skip
    window = source.data.get("sliding_window", _WINDOW)
    layers = windowed_layers(source, window, list)
    return with_windows(source, _with_heads(source, config), window, layers, rope=rope)


def _gates_heads(source: Fields) -> bool:
    """Whether each head has one gate, and not each of its numbers."""
    said, types = source.data.get(_GATING, True), source.data.get(f"{_GATING}_types")
    if not isinstance(said, (str, bool)) or said not in _GATES:
        source.refuse(_GATING, 'true, "per-head" or "per-element"')
    named = types if isinstance(types, list) else [] if types is None else [types]
    if any(not isinstance(each, str) or _GATES.get(each) != _GATES[said] for each in named):
        source.refuse(f"{_GATING}_types", f"absent, or as {_GATING} has it in all layers")
    return _GATES[said]


def _with_heads(source: Fields, config: ModelConfig) -> ModelConfig:
    """`config` with the query heads of each layer."""
    layers, kv_heads = config.num_layers, config.num_kv_heads
    counts = source.data.get(_HEADS) or [config.num_heads] * layers
    if not list_of(whole(1, 1 << 14), length=layers).fits(counts) or any(count % kv_heads for count in counts):
        source.refuse(_HEADS, f"a list of {layers}, a multiple of the KV heads, {kv_heads}, for each layer")
    blocks = (
        replace(block, mixer=replace(block.attention, num_heads=count))
        for block, count in zip(config.blocks, counts, strict=True)
    )
    return replace(config, blocks=tuple(blocks))


FAMILIES = (
    Family(
        "laguna",
        "Laguna XS, S and M: mixtures of experts",
        describe,
        READS
        | {NORMED, MLP_TYPES, _HEADS, _SHARED, _FACTOR, _CAP, _GATING, f"{_GATING}_types", _PARTIAL, *_OFF}
        | {"decoder_sparse_step", "mlp_only_layers", "moe_router_use_sigmoid"},  # of before mlp_layer_types
    ),
)
