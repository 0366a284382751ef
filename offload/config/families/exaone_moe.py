"""K-EXAONE (LG): EXAONE 4's windows and positions with norms before attention and network, and experts of DeepSeek V3's
form."""

from __future__ import annotations

from dataclasses import replace

from offload.config.families import exaone4
from offload.config.families.common import Family
from offload.config.families.experts import MLP_TYPES, READS, SIGMOIDS, dense_layers, read_sigmoids, with_experts
from offload.config.families.windows import PERIOD
from offload.config.model import ModelConfig
from offload.config.names import ExpertNames, TensorNames
from offload.fields import Fields, whole

_SHARED, _DENSE, _FLAGS = "num_shared_experts", "first_k_dense_replace", "is_moe_layer"
_NAMES = TensorNames(experts=ExpertNames(bias="mlp.e_score_correction_bias", network="mlp.shared_experts."))


def describe(source: Fields) -> ModelConfig:
    config = replace(exaone4.described(source, "exaone_moe"), names=_NAMES)
    experts = read_sigmoids(source, config, factor=2.5)
    beside = experts.network.size * source.integer(_SHARED, 1 << 12, default=1)
    return with_experts(config, experts, beside=beside, dense=_dense_layers(source, config.num_layers))


def _dense_layers(source: Fields, num_layers: int) -> frozenset[int]:
    """The layers without experts, which a list of flags may name, too."""
    dense = dense_layers(source, num_layers, source.get(_DENSE, whole(0), 1))
    flags = [layer not in dense for layer in range(num_layers)]
    if source.data.get(_FLAGS) not in (None, flags):
        source.refuse(_FLAGS, f"absent or as {MLP_TYPES} and {_DENSE} have it")
    return dense


FAMILIES = (
    Family(
        "exaone_moe",
        "K-EXAONE 236B-A23B: mixture of experts",
        describe,
        READS | SIGMOIDS | {PERIOD, _SHARED, _DENSE, MLP_TYPES, _FLAGS},
    ),
)
