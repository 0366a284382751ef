"""Solar Open (Upstage): GLM-4.5's experts in all layers, after an attention without norms of its own."""

from __future__ import annotations

from offload.config.families.common import Defaults, Family, decoder
from offload.config.families.experts import READS, SIGMOIDS, read_sigmoids, with_experts
from offload.config.families.windows import without_windows
from offload.config.model import ModelConfig
from offload.config.names import ExpertNames, TensorNames
from offload.config.rope import RopeDefaults
from offload.fields import Fields

_DEFAULTS = Defaults(
    max_positions=131072, kv_heads=8, head_dim=128, eps=1e-5, rope=RopeDefaults(theta=1000000.0, partial=1.0)
)  # fmt: skip
_COUNTS = ("n_routed_experts", "num_local_experts")
_SHARED = "n_shared_experts"


def describe(source: Fields) -> ModelConfig:
    sized = source.changed({"intermediate_size": source.data.get("moe_intermediate_size")})
    attention = {"bias": source.flag("attention_bias", False)}
    names = TensorNames(experts=ExpertNames(network="mlp.shared_experts."))
    config = without_windows(source, decoder(sized, "solar_open", _DEFAULTS, attention=attention, names=names))
    experts = read_sigmoids(source, config, counts=_COUNTS)
    return with_experts(config, experts, beside=experts.network.size * source.integer(_SHARED, 1 << 12, default=1))


FAMILIES = (
    Family(
        "solar_open",
        "Solar Open 100B: mixture of experts",
        describe,
        READS | SIGMOIDS | {*_COUNTS, _SHARED, "partial_rotary_factor", "first_k_dense_replace", "use_qk_norm"},
    ),
)
