"""DeepSeek V2 and V3, and models of their form: latent attention, and mixtures of experts beside some that every row
runs through, after a few dense layers. The next-token head of V3's form is a further layer."""

from __future__ import annotations

from offload.config.families.common import Defaults, Family
from offload.config.families.experts import (
    FACTOR,
    NORMED,
    READS,
    SIGMOIDS,
    dense_layers,
    read_experts,
    read_sigmoids,
    with_groups,
)
from offload.config.families.glm4_moe import COUNTS, DENSE, HEADS, SHARED, with_head
from offload.config.families.latent import LATENT, latent_decoder
from offload.config.model import ModelConfig
from offload.fields import Fields, whole

_METHOD, _PERIOD = "topk_method", "moe_layer_freq"
_METHODS = ("greedy", "group_limited_greedy")
_READS = READS | SIGMOIDS | LATENT | {*COUNTS, SHARED, DENSE, *HEADS, _METHOD, _PERIOD, "scoring_func"}


def describe_v2(source: Fields) -> ModelConfig:
    config = latent_decoder(source, "deepseek_v2", Defaults())
    for key, wanted in (("scoring_func", "softmax"), (NORMED, False), ("rope_interleave", True)):
        if source.data.get(key) not in (None, wanted):
            source.refuse(key, f"absent or {wanted} in deepseek_v2")
    experts = read_experts(
        source, config, counts=COUNTS, renormalised=False, factor=source.number(FACTOR, default=1.0)
    )  # fmt: skip
    if source.choice(_METHOD, _METHODS, default=_METHODS[0]) == _METHODS[1]:
        experts = with_groups(source, experts, group_best=1)
    alone = source.changed(dict.fromkeys(HEADS, 0))
    return with_head(alone, config, experts, dense=_first(source, 0), shared=2)


def describe_v3(source: Fields) -> ModelConfig:
    config = latent_decoder(source, "deepseek_v3", Defaults(max_positions=4096))
    source = source.changed({"n_group": source.data.get("n_group", 8), "topk_group": source.data.get("topk_group", 4)})
    experts = read_sigmoids(source, config, counts=COUNTS, factor=2.5)
    return with_head(_of_sigmoids(source), config, experts, dense=_first(source, 3))


def describe_lite(source: Fields) -> ModelConfig:
    config = latent_decoder(source, "glm4_moe_lite", Defaults(max_positions=202752, eps=1e-5))
    experts = read_sigmoids(source, config, counts=COUNTS, factor=1.8)
    dense = dense_layers(source, config.num_layers, source.get(DENSE, whole(0), 1))
    return with_head(_of_sigmoids(source), config, experts, dense=dense)


def _of_sigmoids(source: Fields) -> Fields:
    """The fields, checked."""
    for key, wanted in (("scoring_func", "sigmoid"), (_METHOD, "noaux_tc")):
        if source.data.get(key) not in (None, wanted):
            source.refuse(key, f"absent or {wanted}")
    return source


def _first(source: Fields, default: int) -> range:
    """The dense layers. Raises ModelError where others are not every layer after them."""
    if source.get(_PERIOD, whole(1), 1) != 1:
        source.refuse(_PERIOD, "1: every layer after the first ones has experts")
    return range(source.get(DENSE, whole(0), default))


FAMILIES = (
    Family("deepseek_v2", "DeepSeek V2, V2-Lite, V2.5: mixtures of experts", describe_v2, _READS),
    Family("deepseek_v3", "DeepSeek V3, V3.1, R1: mixtures of experts", describe_v3, _READS),
    Family("glm4_moe_lite", "GLM-4.7-Flash: a mixture of experts", describe_lite, _READS | {"mlp_layer_types"}),
)
