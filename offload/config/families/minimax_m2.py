"""MiniMax-M2: queries and keys normed over all heads, half of a head rotated, and experts chosen by the sigmoids of
their rounded scores plus a bias."""

from __future__ import annotations

from offload.config.families.common import Defaults, Family, decoder, epsilon
from offload.config.families.experts import READS, read_experts, with_experts
from offload.config.families.windows import without_windows
from offload.config.model import ModelConfig
from offload.config.names import ExpertNames, TensorNames
from offload.config.norm import Norm
from offload.config.rope import RopeDefaults
from offload.fields import Fields

_DEFAULTS = Defaults(
    max_positions=196608, kv_heads=8, head_dim=128, rope=RopeDefaults(theta=5000000.0, partial=1.0)
)  # fmt: skip
_ROTATED, _PARTIAL, _QK_NORM, _QK_NORMS = "rotary_dim", "partial_rotary_factor", "use_qk_norm", "qk_norm_type"
_MIXTURE = "block_sparse_moe"
_NAMES = ExpertNames(
    router=f"{_MIXTURE}.gate",
    gate=f"{_MIXTURE}.experts.{{}}.w1",
    up=f"{_MIXTURE}.experts.{{}}.w3",
    down=f"{_MIXTURE}.experts.{{}}.w2",
    bias=f"{_MIXTURE}.e_score_correction_bias",
)


def describe(source: Fields) -> ModelConfig:
    if not source.flag(_QK_NORM, True):
        source.refuse(_QK_NORM, "absent or true")
    if source.data.get(_QK_NORMS) not in (None, "per_layer"):
        source.refuse(_QK_NORMS, 'absent or "per_layer": one norm over all heads')
    norm = Norm(epsilon(source, _DEFAULTS))
    attention = {"qk_norm": norm, "norms_whole": True}
    config = decoder(
        _with_share(source), "minimax_m2", _DEFAULTS, attention=attention, names=TensorNames(experts=_NAMES)
    )
    sized = source.changed({"moe_intermediate_size": config.intermediate_size})
    experts = read_experts(
        sized, config, counts=("num_local_experts", "num_experts"), scoring="sigmoid", bias="ranks", rounded="scores",
        eps=0.0,
    )  # fmt: skip
    return with_experts(without_windows(source, config), experts)


def _with_share(source: Fields) -> Fields:
    """`source` with the rotated share of a head, which released configs give as a number of elements."""
    if source.data.get(_ROTATED) is None or source.data.get(_PARTIAL) is not None:
        return source
    share = source.integer(_ROTATED, 1 << 12) / source.integer("head_dim", 1 << 12, default=_DEFAULTS.head_dim)
    return source.changed({_PARTIAL: share})


FAMILIES = (
    Family(
        "minimax_m2",
        "MiniMax-M2, M2.1, M2.5: mixtures of experts",
        describe,
        READS | {_ROTATED, _PARTIAL, _QK_NORM, _QK_NORMS, "shared_moe_mode"},
    ),
)
