"""GLM-4 (Zhipu): half of a head is rotated, neighbouring numbers together. `glm4` norms the outputs of its parts,
too. `glm4v_text` is its form in GLM-4.1V."""

from __future__ import annotations

from collections.abc import Mapping

from offload.config.families.common import Defaults, Family, decoder, epsilon, sizes
from offload.config.families.windows import without_windows
from offload.config.model import ModelConfig
from offload.config.names import TensorNames
from offload.config.norm import Norm
from offload.config.rope import SECTION_KEYS, RopeDefaults
from offload.fields import Fields

_DEFAULTS = Defaults(
    max_positions=131072, kv_heads=2, head_dim=128, derives_head_dim=False, eps=1.5625e-07,
    rope=RopeDefaults(partial=0.5, neighbours=True),
)  # fmt: skip
_GLM4V = Defaults(
    max_positions=32768, kv_heads=2, eps=1e-5,
    rope=RopeDefaults(partial=1.0, neighbours=True, keys=SECTION_KEYS),
)  # fmt: skip
_FUSED = "mlp.gate_up_proj"


def describe_glm(source: Fields) -> ModelConfig:
    config = decoder(source, "glm", _DEFAULTS, attention=_attention(source), names=TensorNames(fused_gate_up=_FUSED))
    return without_windows(source, config)


def describe_glm4(source: Fields) -> ModelConfig:
    return without_windows(source, _glm4(source, "glm4", _DEFAULTS, _attention(source)))


def describe_glm4v(source: Fields) -> ModelConfig:
    return _glm4(source, "glm4v_text", _GLM4V, {"bias": True})


def _glm4(source: Fields, family: str, defaults: Defaults, attention: Mapping[str, object]) -> ModelConfig:
    after = Norm(epsilon(source, defaults))
    names = TensorNames(
        fused_gate_up=_FUSED, after_attention="post_self_attn_layernorm", after_feed_forward="post_mlp_layernorm"
    )
    block = {"after_attention": after, "after_feed_forward": after}
    return decoder(source, family, defaults, attention=attention, block=block, names=names)


def _attention(source: Fields) -> dict[str, object]:
    return {"bias": source.flag("attention_bias", True)}


_READS = frozenset(("partial_rotary_factor",))
FAMILIES = (
    Family("glm", "GLM-4 9B", describe_glm, _READS),
    Family("glm4", "GLM-4 of 2025: 9B, 32B", describe_glm4, _READS),
    Family("glm4v_text", "text of `glm4v`", describe_glm4v, _READS, sizes=sizes(151552, 4096, 13696, 40, 32)),
)
