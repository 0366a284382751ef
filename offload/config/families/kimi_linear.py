"""Kimi Linear (Moonshot): most layers have a recurrent state in which each channel of a key decays by itself (Kimi
Delta Attention), the others latent attention without positions; a mixture of experts in all but the first layers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

from offload.config.families.common import Defaults, Family, epsilon
from offload.config.families.experts import MLP_TYPES, READS, SIGMOIDS, dense_layers, read_sigmoids, with_experts
from offload.config.families.latent import LATENT, latent_decoder
from offload.config.families.states import STATEFUL, channel_names, layer_kinds, read_channel_rule, with_states
from offload.config.families.windows import FULL
from offload.config.model import ModelConfig
from offload.config.names import ExpertNames
from offload.config.norm import Norm
from offload.fields import Fields, list_of, whole

_STATES, _DENSE, _SHARED, _PERIOD = "linear_attn_config", "first_k_dense_replace", "n_shared_experts", "moe_layer_freq"
_KDA, _ATTENDING = "kda_layers", "full_attn_layers"  # numbers from 1
_SIZES = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}
# The names in checkpoints, and those of transformers.
ALIASES = {
    "model_max_length": "max_position_embeddings", "moe_renormalize": "norm_topk_prob", "num_expert_group": "n_group",
    "num_experts": "num_local_experts", "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}  # fmt: skip
_DEFAULTS = Defaults(max_positions=1 << 20, eps=1e-5)
_SPARSE = "block_sparse_moe."
_EXPERTS = ExpertNames(
    router=f"{_SPARSE}gate", gate=f"{_SPARSE}experts.{{}}.w1", up=f"{_SPARSE}experts.{{}}.w3",
    down=f"{_SPARSE}experts.{{}}.w2", bias=f"{_SPARSE}gate.e_score_correction_bias",
    network=f"{_SPARSE}shared_experts.",
)  # fmt: skip


def describe(source: Fields) -> ModelConfig:
    source = _with_states_fields(aliased(source, ALIASES))
    for key, wanted in (("mla_use_nope", True), ("moe_router_activation_func", "sigmoid"), (_PERIOD, 1)):
        if source.data.get(key) not in (None, wanted):
            source.refuse(key, f"absent or {json.dumps(wanted)} in kimi_linear")
    if source.get("num_nextn_predict_layers", whole(), 0):
        source.refuse("num_nextn_predict_layers", "absent or 0 in kimi_linear: no such head is known")
    unrotated = source.changed(dict.fromkeys(("rope_theta", "rope_scaling", "rope_parameters")))
    config = latent_decoder(unrotated, "kimi_linear", _DEFAULTS)
    config = config.mapped(lambda block: replace(block, mixer=replace(block.attention, rope=None)))
    experts = read_sigmoids(source, config, counts=("num_local_experts",), factor=2.446)
    dense = dense_layers(source, config.num_layers, source.get(_DENSE, whole(0), 1))
    beside = experts.network.size * source.integer(_SHARED, 1 << 12, default=1)
    names = replace(config.names, experts=_EXPERTS, recurrence=channel_names("self_attn.", low_rank=True))
    config = with_experts(replace(config, names=names), experts, beside=beside, dense=dense)
    rule = read_channel_rule(source, low_rank=True, norm=Norm(epsilon(source, _DEFAULTS), fp32=True))
    kinds = layer_kinds(source, (FULL, STATEFUL), lambda layer: FULL if layer and layer % 4 == 0 else STATEFUL)
    return with_states(config, rule, [layer for layer, kind in enumerate(kinds) if kind == STATEFUL])


def aliased(source: Fields, names: Mapping[str, str]) -> Fields:
    """`source` with fields under transformers' names. names: theirs, by those in checkpoints. Raises ModelError for a
    field that is there under both with other values."""
    given = {meant: source.data[name] for name, meant in names.items() if source.data.get(name) is not None}
    for name, meant in names.items():
        if meant in given and source.data.get(meant) not in (None, given[meant]):
            source.refuse(name, f"absent, or {source.data[meant]} as {meant} is")
    return source.changed(given)


def _with_states_fields(source: Fields) -> Fields:
    """`source` with the fields that checkpoints have in an object of their own."""
    if source.data.get(_STATES) is None:
        return source
    inner, count = source.inner(_STATES), source.integer("num_hidden_layers", 1 << 12)
    for key in inner.data:
        if key not in (_KDA, _ATTENDING, *_SIZES):
            inner.refuse(key, "absent: this program does not implement it")
    found = {meant: inner.data[key] for key, meant in _SIZES.items() if key in inner.data}
    if _KDA not in inner.data and _ATTENDING not in inner.data:
        return source.changed(found)
    kda, attending = (inner.get(key, list_of(whole(1, count))) for key in (_KDA, _ATTENDING))
    if sorted([*kda, *attending]) != [*range(1, count + 1)]:
        inner.refuse(_KDA, f"a list of layers that has each of 1 to {count} once, together with {_ATTENDING}")
    types = [FULL if layer in attending else STATEFUL for layer in range(1, count + 1)]
    if source.data.get("layer_types") not in (None, types):
        source.refuse("layer_types", f"absent, or as {_STATES} has it")
    return source.changed({**found, "layer_types": types})


_READS = READS | SIGMOIDS | LATENT | {*ALIASES, _DENSE, _SHARED, _PERIOD, MLP_TYPES, "moe_router_activation_func"}
FAMILIES = (Family("kimi_linear", "Kimi Linear: a mixture of experts, states and latent attention", describe, _READS),)
