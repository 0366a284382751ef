"""Trinity (Arcee): norms before and after each part, gated heads, positions in layers with a window alone, and experts
chosen by sigmoids plus a bias, after a few dense layers."""

from __future__ import annotations

from offload.config.families.common import Defaults, Family, decoder, epsilon
from offload.config.families.experts import READS, read_experts, with_experts
from offload.config.families.windows import others, windowed_layers, with_windows
from offload.config.model import ModelConfig
from offload.config.names import ExpertNames, TensorNames
from offload.config.norm import Norm
from offload.fields import Fields, whole

_DEFAULTS = Defaults(max_positions=16384, head_dim=128, eps=1e-5)
_GROUPS = ("num_expert_groups", "num_limited_groups")
_WINDOW, _PERIOD = 1024, "global_attn_every_n_layers"
_SHARED, _DENSE, _FACTOR, _SCALED = "num_shared_experts", "num_dense_layers", "route_scale", "mup_enabled"
_NAMES = TensorNames(
    after_attention="post_attention_layernorm",
    before_feed_forward="pre_mlp_layernorm",
    after_feed_forward="post_mlp_layernorm",
    experts=ExpertNames(router="mlp.router.gate", bias="mlp.expert_bias", network="mlp.shared_experts."),
)


def describe(source: Fields) -> ModelConfig:
    if source.flag("attention_bias", False):
        source.refuse("attention_bias", "absent or false: the gates of heads have no biases")
    for key in _GROUPS:
        source.integer(key, 1, default=1)
    norm, window = Norm(epsilon(source, _DEFAULTS)), source.data.get("sliding_window", _WINDOW)
    step, every = source.integer(_PERIOD, 1 << 12, default=4), source.integer("num_hidden_layers", 1 << 12)
    layers = windowed_layers(source, window, lambda: [at for at in range(every) if (at + 1) % step])
    config = decoder(
        source,
        "afmoe",
        _DEFAULTS,
        attention={"qk_norm": norm, "gate": True},
        block={"after_attention": norm, "after_feed_forward": norm},
        without_positions=others(source, layers),
        embedding_scale=source.integer("hidden_size", 1 << 20) ** 0.5 if source.flag(_SCALED, False) else 1.0,
        names=_NAMES,
    )
    experts = read_experts(
        source, config, scoring="sigmoid", bias="ranks", rounded="scores", factor=source.number(_FACTOR, default=1.0)
    )
    beside = experts.network.size * source.integer(_SHARED, 1 << 12, default=2)
    dense = range(source.get(_DENSE, whole(0), 1))
    return with_windows(source, with_experts(config, experts, beside=beside, dense=dense), window, layers)


FAMILIES = (
    Family(
        "afmoe",
        "Trinity Nano, Mini and Large: mixtures of experts",
        describe,
        READS | {*_GROUPS, _PERIOD, _SHARED, _DENSE, _FACTOR, _SCALED},
    ),
)
