"""Granite 4 H (IBM): Granite's multipliers, layers with a recurrent state (Mamba-2) or attention, mostly without
positions, and a mixture of experts beside a network, or the network alone."""

from __future__ import annotations

from offload.config.families import granite
from offload.config.families.common import Defaults, Family, epsilon
from offload.config.families.experts import READS, read_experts, with_experts
from offload.config.families.states import STATEFUL, mamba_names, no_limits, read_mamba, with_states
from offload.config.families.windows import FULL
from offload.config.model import ModelConfig
from offload.config.names import ExpertNames, TensorNames
from offload.config.norm import Norm
from offload.fields import Fields, whole

_OLD = {"mamba": STATEFUL, "attention": FULL}
_TYPES, _OTHER_TYPES = "layer_types", "layers_block_type"
_SHARED, _COUNT = "shared_intermediate_size", "num_local_experts"
_HEADS, _HEAD_DIM = "mamba_n_heads", "mamba_d_head"
_JOINED = "block_sparse_moe.input_linear"
_NAMES = TensorNames(
    fused_gate_up="shared_mlp.input_linear",
    down="shared_mlp.output_linear",
    recurrence=mamba_names("mamba."),
    experts=ExpertNames(
        router="block_sparse_moe.router.layer", gate=_JOINED, up=_JOINED, down="block_sparse_moe.output_linear"
    ),
)


def describe(source: Fields) -> ModelConfig:
    no_limits(source)
    sized = source.changed({"intermediate_size": source.integer(_SHARED, 1 << 22, default=1024)})
    rotates, count = source.data.get("position_embedding_type") == "rope", source.integer("num_hidden_layers", 1 << 12)
    config = granite.described(
        sized, "granitemoehybrid", names=_NAMES, without_positions=() if rotates else range(count)
    )
    size = {"moe_intermediate_size": source.integer("intermediate_size", 1 << 22)}
    if source.get(_COUNT, whole(0, 1 << 12), 8):
        experts = read_experts(source.changed(size), config, counts=(_COUNT,), rounded="scores")
        config = with_experts(config, experts, beside=config.block.feed_forward.size)
    layers = _stateful(source, count)
    if not layers:
        return config
    inner = source.integer("mamba_expand", 64, default=2) * config.hidden_size
    heads = source.integer(_HEADS, 1 << 12, default=128)
    named = source.changed({_HEAD_DIM: inner // heads}) if source.data.get(_HEAD_DIM) in (None, "auto") else source
    bias = source.flag("mamba_proj_bias", False)
    mamba = read_mamba(
        named, heads=(_HEADS, 128), head_dim=(_HEAD_DIM, 64), groups=("mamba_n_groups", 1),
        state=("mamba_d_state", 256), width=("mamba_d_conv", 4), taps_bias="mamba_conv_bias", bias=bias, out_bias=bias,
        norm=Norm(epsilon(source, Defaults()), fp32=True),
    )  # fmt: skip
    return with_states(config, mamba, layers)


def _stateful(source: Fields, count: int) -> list[int]:
    """The numbers of the layers with a state."""
    key = _TYPES if source.data.get(_TYPES) is not None else _OTHER_TYPES
    given = source.data.get(key)
    types = [_OLD.get(kind, kind) for kind in given] if isinstance(given, list) else []
    if len(types) != count or FULL not in types or any(kind not in (FULL, STATEFUL) for kind in types):
        source.refuse(key, f"a list of {FULL} and {STATEFUL}, one for each of {count} layers, {FULL} in one at least")
    return [layer for layer, kind in enumerate(types) if kind == STATEFUL]


_READS = granite.READS | READS
FAMILIES = (Family("granitemoehybrid", "Granite 4 H, with experts and without: states (Mamba-2)", describe, _READS),)
