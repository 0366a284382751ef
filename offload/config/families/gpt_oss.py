"""gpt-oss (OpenAI): a window in every other layer, sink logits, and experts with clamped gates.

In plain numbers a folder has the experts' matrices by inputs; of a gate and an up rows alternate.
"""

from __future__ import annotations

from dataclasses import replace

from offload.config.families.common import Defaults, Family, decoder
from offload.config.families.experts import READS, read_experts, with_experts
from offload.config.families.windows import windowed_layers, with_windows
from offload.config.model import ModelConfig
from offload.config.names import ExpertNames
from offload.config.networks import CLAMPED_LIMIT, CLAMPED_SLOPE
from offload.config.rope import RopeDefaults
from offload.fields import Fields

_DEFAULTS = Defaults(max_positions=131072, kv_heads=8, head_dim=64, eps=1e-5, rope=RopeDefaults(theta=150000.0))
_YARN = {
    "rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
_NAMES = ExpertNames(
    router="mlp.router",
    gate="mlp.experts.gate_up_proj",
    up="mlp.experts.gate_up_proj",
    down="mlp.experts.down_proj",
    bias="mlp.router.bias",
    alternate=True,
    by_inputs=True,
)
_CLAMPS = {"swiglu_alpha": CLAMPED_SLOPE, "swiglu_limit": CLAMPED_LIMIT}


def describe(source: Fields) -> ModelConfig:
    if not source.data.get("rope_parameters") and not source.data.get("rope_scaling"):
        source = source.changed({"rope_parameters": _YARN})
    for key, value in _CLAMPS.items():
        if source.number(key, default=value) != value:
            source.refuse(key, f"{value}: other clamps are not implemented")
    bias = source.flag("attention_bias", True)
    attention = {"bias": bias, "out_bias": bias, "sink_logits": True}
    network = {"activation": "clamped_silu", "bias": True}
    config = decoder(source, "gpt_oss", _DEFAULTS, attention=attention, feed_forward=network)
    size = source.changed({"moe_intermediate_size": config.intermediate_size})
    experts = read_experts(size, config, counts=("num_local_experts", "num_experts"), bias="scores")
    config = replace(with_experts(config, experts), names=replace(config.names, experts=_NAMES))
    window = source.data.get("sliding_window", 128)
    return with_windows(source, config, window, windowed_layers(source, window, lambda: range(0, config.num_layers, 2)))


FAMILIES = (
    Family(
        "gpt_oss",
        "gpt-oss 20B and 120B: mixtures of experts",
        describe,
        READS | {*_CLAMPS, "experts_per_token"},
    ),
)
