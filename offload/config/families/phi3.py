"""Phi-3, Phi-3.5 and Phi-4 (Microsoft): q, k and v in one tensor, gate and up too; LongRoPE (arXiv 2402.13753)."""

from __future__ import annotations

from collections.abc import Mapping

from offload.config.families.common import Defaults, Family, decoder
from offload.config.families.windows import with_one_window
from offload.config.model import ModelConfig
from offload.config.names import TensorNames
from offload.config.rope import RopeDefaults
from offload.fields import Fields

_ORIGINAL, _ORIGINAL_DEFAULT = "original_max_position_embeddings", 4096
_FORMS = ("rope_parameters", "rope_scaling")
_ROPE = RopeDefaults(partial=1.0, keys=frozenset(("short_factor", "long_factor")), kinds=("longrope",))


def describe(source: Fields) -> ModelConfig:
    config = decoder(
        _with_longrope(source),
        "phi3",
        Defaults(max_positions=4096, eps=1e-5, rope=_ROPE),
        names=TensorNames(fused_qkv="self_attn.qkv_proj", fused_gate_up="mlp.gate_up_proj"),
    )
    return with_one_window(source, config)


def _with_longrope(source: Fields) -> Fields:
    """`source` with its rope settings under today's names: "su" and "yarn" were names of LongRoPE, and the original
    length beside the settings overrides the one in them."""
    original = source.integer(_ORIGINAL, 1 << 30, default=_ORIGINAL_DEFAULT)
    changed = dict(source.data)
    for form in _FORMS:
        if isinstance(settings := changed.get(form), Mapping):
            kind = settings.get("rope_type", settings.get("type"))
            kind = "longrope" if kind in ("su", "yarn") else kind
            if kind not in (None, "default", "longrope"):
                source.refuse(form, "of type longrope or default")
            changed[form] = {**settings, "rope_type": kind, "type": None, _ORIGINAL: original}
    return Fields(changed | {_ORIGINAL: original}, source.where)


FAMILIES = (
    Family("phi3", "Phi-3, Phi-3.5 and Phi-4, mini and medium", describe, frozenset(("partial_rotary_factor",))),
)
