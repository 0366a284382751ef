"""OLMoE (Ai2): queries and keys normed over all heads, and a softmax router."""

from __future__ import annotations

from offload.config.families.common import Defaults, Family, biases, decoder, epsilon
from offload.config.families.experts import NORMED, READS, read_experts, with_experts
from offload.config.families.windows import without_windows
from offload.config.model import ModelConfig
from offload.config.norm import Norm
from offload.fields import Fields

_DEFAULTS = Defaults(max_positions=4096, eps=1e-5)


def describe(source: Fields) -> ModelConfig:
    norm = Norm(epsilon(source, _DEFAULTS))
    attention = biases(source) | {"qk_norm": norm, "norms_whole": True}
    config = without_windows(source, decoder(source, "olmoe", _DEFAULTS, attention=attention))
    sized = source.changed({"moe_intermediate_size": config.intermediate_size})
    return with_experts(config, read_experts(sized, config, renormalised=source.flag(NORMED, False)))


FAMILIES = (
    Family("olmoe", "OLMoE 7B-A1B: mixture of experts", describe, READS | {NORMED}, refuses="`clip_qkv`"),
)  # fmt: skip
