"""GLM-4.5 to 4.7 (Zhipu): mixtures of experts beside one that every row runs through, after a few dense layers. Experts
are chosen by the sigmoids of their scores plus a bias. The next-token head is a further layer."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import replace

from offload.config.families.common import Defaults, Family, decoder, epsilon, sizes
from offload.config.families.experts import READS, SIGMOIDS, read_sigmoids, with_experts
from offload.config.families.windows import without_windows
from offload.config.model import ModelConfig
from offload.config.names import NextTokenNames, TensorNames
from offload.config.networks import Experts
from offload.config.norm import Norm
from offload.config.rope import SECTION_KEYS, RopeDefaults
from offload.fields import Fields, whole

_DEFAULTS = Defaults(max_positions=131072, kv_heads=8, eps=1e-5, rope=RopeDefaults(partial=0.5))
_GLM4V = replace(_DEFAULTS, max_positions=65536, rope=RopeDefaults(partial=0.5, keys=SECTION_KEYS))
COUNTS = ("n_routed_experts", "num_local_experts")
SHARED, DENSE, _QK_NORM = "n_shared_experts", "first_k_dense_replace", "use_qk_norm"
HEADS = ("num_nextn_predict_layers", "num_mtp_layers")


def describe(source: Fields) -> ModelConfig:
    norm = Norm(epsilon(source, _DEFAULTS)) if source.flag(_QK_NORM, False) else None
    attention = {"bias": source.flag("attention_bias", False), "qk_norm": norm}
    return _described(source, "glm4_moe", _DEFAULTS, attention)


def describe_vl(source: Fields) -> ModelConfig:
    return _described(source, "glm4v_moe_text", _GLM4V, {"bias": source.flag("attention_bias", True)})


def _described(source: Fields, family: str, defaults: Defaults, attention: Mapping[str, object]) -> ModelConfig:
    config = without_windows(source, decoder(source, family, defaults, attention=attention))
    experts = read_sigmoids(source, config, counts=COUNTS)
    return with_head(source, config, experts, dense=range(source.get(DENSE, whole(0), 1)))


def with_head(
    source: Fields,
    config: ModelConfig,
    experts: Experts,
    *,
    dense: Container[int],
    shared: int = 1,
    norm: str = "shared_head.norm",
) -> ModelConfig:
    """`config` with experts in all layers but the `dense` ones, beside one or several for every row, and with a
    next-token head that is a further layer. shared: number of the latter, if the source does not say it. norm: the
    tensor of the head's last norm."""
    beside = experts.network.size * source.integer(SHARED, 1 << 12, default=shared)
    key = next((key for key in HEADS if source.data.get(key) is not None), HEADS[0])
    heads = source.get(key, whole(0, 64), 1)
    names = _names(config.names, config.num_layers, heads, norm)
    extended = replace(config, blocks=config.blocks + config.blocks[-1:], names=names)
    described = with_experts(extended, experts, beside=beside, dense=dense)
    *blocks, further = described.blocks
    return replace(described, blocks=tuple(blocks), next_token=further if heads == 1 else None)


def _names(names: TensorNames, num_layers: int, heads: int, norm: str) -> TensorNames:
    """The tensor names; those of next-token heads are of the layers after the last one. embed_tokens and
    shared_head.head of such a layer are unused: copies of the model's own tables, with which a head runs here as in
    SGLang."""
    layer = f"{TensorNames.body}layers.{num_layers}."
    return replace(
        names,
        experts=replace(names.experts, network="mlp.shared_experts."),
        next_token=NextTokenNames(layer, f"{layer}eh_proj", f"{layer}enorm", f"{layer}hnorm", f"{layer}{norm}"),
        unused=tuple(f"layers.{further}.*" for further in range(num_layers, num_layers + heads)),
    )


_READS = READS | SIGMOIDS | {*COUNTS, SHARED, DENSE, "partial_rotary_factor"}
_SIZES = sizes(151424, 4096, 10944, 46, 96) | {
    "n_routed_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1408,
}  # fmt: skip
FAMILIES = (
    Family("glm4_moe", "GLM-4.5 and 4.5-Air, 4.6, 4.7: mixtures of experts", describe, _READS | {_QK_NORM}),
    Family("glm4v_moe_text", "text of `glm4v_moe`", describe_vl, _READS, sizes=_SIZES),
)
