"""ERNIE 4.5 (Baidu), mixtures of experts beside one that every row runs through. Experts are chosen by their softmax
plus a bias."""

from __future__ import annotations

from dataclasses import replace

from offload.config.families import ernie4_5
from offload.config.families.common import Family
from offload.config.families.experts import read_experts, with_experts
from offload.config.model import ModelConfig
from offload.config.names import ExpertNames, TensorNames
from offload.fields import Fields, whole

_COUNT, _USED, _SHARED, _LEAST = "moe_num_experts", "moe_k", "moe_num_shared_experts", "moe_norm_min"
_FIRST, _LAST, _STEP = "moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval"
_NAMES = TensorNames(
    experts=ExpertNames(bias="mlp.moe_statics.e_score_correction_bias", network="mlp.shared_experts."),
    unused=("mtp_*",),  # of heads that draft further tokens
)


def describe(source: Fields) -> ModelConfig:
    if source.flag("use_bias", False):
        source.refuse("use_bias", "false in ernie4_5_moe: its output head would have a bias")
    config = replace(ernie4_5.described(source, "ernie4_5_moe", kv_heads=4, head_dim=None), names=_NAMES)
    experts = read_experts(
        source, config, counts=(_COUNT,), used=_USED, bias="ranks", floored=True,
        eps=source.number(_LEAST, default=1e-12),
    )  # fmt: skip
    shared = source.get(_SHARED, whole(0, 1 << 12), 2)
    beside = experts.network.size * shared
    return with_experts(config, experts, beside=beside, dense=_dense_layers(source, config.num_layers))


def _dense_layers(source: Fields, num_layers: int) -> list[int]:
    """The layers outside the range of those with experts, and all but each n-th one in it."""
    first, last = source.get(_FIRST, whole(0), 1), source.get(_LAST, whole(-1), -1)
    step, sparse = source.integer(_STEP, num_layers, default=1), range(first, num_layers if last < 0 else last + 1)
    return [layer for layer in range(num_layers) if layer not in sparse or (layer + 1) % step]


FAMILIES = (
    Family(
        "ernie4_5_moe",
        "ERNIE 4.5 21B-A3B, 300B-A47B: mixtures of experts",
        describe,
        {_COUNT, _USED, _SHARED, _LEAST, _FIRST, _LAST, _STEP, "moe_intermediate_size"}
        | {"moe_capacity", "moe_gate", "moe_use_aux_free"},  # of its training
    ),
)
