"""North and Command A+ (Cohere): Command A's windows and positions, with a mixture of experts beside the attention,
which reads the same norm. Experts are chosen by their raw scores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from offload.config.families.common import Defaults, Family, biases, decoder
from offload.config.families.experts import MLP_TYPES, NORMED, READS, dense_layers, read_experts, with_experts
from offload.config.families.windows import PERIOD, windowed_layers, with_windows
from offload.config.model import ModelConfig
from offload.config.names import ExpertNames, TensorNames
from offload.config.networks import Experts
from offload.config.norm import Norm
from offload.config.rope import RopeDefaults
from offload.fields import Fields, whole

_WINDOW, _EVERY = 4096, 4  # defaults
_DENSE, _INNER = "first_k_dense_replace", "prefix_dense_intermediate_size"
_DENSE_PERIOD = "prefix_dense_sliding_window_pattern"
_SHARED, _JOINED, _CHOSEN = "num_shared_experts", "shared_expert_combination_strategy", "expert_selection_fn"
_FORM = {"use_parallel_block": True, "use_gated_activation": True, "use_qk_norm": False}
_HEADS, _CENTRED, _WAYS = "num_nextn_predict_layers", "layer_norm_eps", ("average", "sum")
_NAMES = TensorNames(experts=ExpertNames(network="mlp.shared_experts."))


def describe(source: Fields) -> ModelConfig:
    for key, wanted in _FORM.items():
        if source.flag(key, wanted) != wanted:
            source.refuse(key, f"absent or {str(wanted).lower()} in cohere2_moe")
    rope = source.data.get("rope_parameters")
    if isinstance(rope, Mapping) and rope.get("rope_theta") is not None:  # the base beside it is then not read
        source = source.changed({"rope_theta": None})
    num_layers, heads = source.integer("num_hidden_layers", 1 << 12), source.get(_HEADS, whole(0, 1 << 6), 0)
    first = min(source.get(_DENSE, whole(0), 0), num_layers)
    dense, period = dense_layers(source, num_layers, first), source.integer(_DENSE_PERIOD, 1 << 12, default=1)
    window = source.data.get("sliding_window", _WINDOW)
    layers = windowed_layers(source, window, lambda: _windowed(source, num_layers, first, period))
    defaults = Defaults(
        max_positions=8192, head_dim=128, eps=1e-5, tied=True, rope=RopeDefaults(neighbours=True),
        norm_key=_CENTRED if source.data.get("rms_norm_eps") is None else "rms_norm_eps",
    )  # fmt: skip
    turning = {*layers, *(dense if period == 1 else ())}
    config = decoder(
        source,
        "cohere2_moe",
        defaults,
        norm=partial(Norm, centred=defaults.norm_key == _CENTRED),
        attention=biases(source),
        block={"before_feed_forward": None, "side_by_side": True},
        without_positions=[layer for layer in range(num_layers) if layer not in turning],
        logits_scale=source.number("logit_scale", default=0.0625),
        names=replace(_NAMES, unused=tuple(f"layers.{num_layers + head}.*" for head in range(heads))),
    )
    shared, experts = source.get(_SHARED, whole(0, 1 << 12), 0), _experts(source, config)
    experts = replace(experts, averaged=shared > 0 and source.choice(_JOINED, _WAYS, _WAYS[0]) == _WAYS[0])
    mixed = with_experts(config, experts, beside=experts.network.size * shared, dense=dense)
    inner = source.integer(_INNER, 1 << 22, default=config.intermediate_size)
    blocks = (
        replace(block, feed_forward=replace(block.feed_forward, size=inner)) if layer in dense else block
        for layer, block in enumerate(mixed.blocks)
    )
    return with_windows(source, replace(mixed, blocks=tuple(blocks)), window, layers)


def _windowed(source: Fields, num_layers: int, first: int, period: int) -> list[int]:
    """The layers with a window where the config names none: of the first dense ones all but each `period`-th, and of
    the others all but each n-th, counted anew."""
    step = source.integer(PERIOD, 1 << 12, default=_EVERY)
    return [
        layer for layer in range(num_layers) if ((layer + 1) % period if layer < first else (layer - first + 1) % step)
    ]


def _experts(source: Fields, config: ModelConfig) -> Experts:
    """Weights are sigmoids in the dtype, or the softmax of the scores of those in use."""
    source = source.changed({"moe_intermediate_size": config.intermediate_size})
    if source.choice(_CHOSEN, ("softmax", "sigmoid"), "softmax") == "softmax":
        return read_experts(source, config, ranks_scores=True, rounded="scores")
    return read_experts(
        source, config, scoring="sigmoid", ranks_scores=True, rounded="shares", eps=0.0,
        renormalised=source.flag(NORMED, True),
    )  # fmt: skip


FAMILIES = (
    Family(
        "cohere2_moe",
        "North Mini Code, Command A+: mixtures of experts",
        describe,
        READS - {"moe_intermediate_size"}
        | {NORMED, MLP_TYPES, PERIOD, _DENSE, _INNER, _DENSE_PERIOD, _SHARED, _JOINED, _CHOSEN, _HEADS, *_FORM}
        | {"logit_scale"},
    ),
)
