"""The fields of models in GGUF files whose layers with a state are of Mamba-2."""

from __future__ import annotations

from collections.abc import Mapping

from offload.config.families.states import STATEFUL
from offload.config.families.windows import FULL
from offload.config.gguf_experts import SHARED_SIZE, SIGMOIDS, sigmoids
from offload.config.gguf_fields import Metadata
from offload.config.gguf_layers import INNER, KV_HEADS, Fields
from offload.config.gguf_states import STATES

_LATENT = "moe_latent_size"
_SIZES = STATES - {"full_attention_interval", "rope.dimension_sections", "nextn_predict_layers"}
# The tensor by which a layer of one part is told, and the part.
_ONE_PART = {
    "ssm_in.weight": STATEFUL, "attn_q.weight": FULL, "ffn_gate_inp.weight": "moe", "ffn_up.weight": "mlp",
}  # fmt: skip
NEMOTRON_H = SIGMOIDS | _SIZES | {SHARED_SIZE, KV_HEADS, INNER, _LATENT, "nextn_predict_layers"}
FALCON_H1 = _SIZES
GRANITE_HYBRID = _SIZES | {"expert_count", "expert_used_count", SHARED_SIZE, KV_HEADS}


def nemotron_h(values: Metadata, common: Mapping[str, object]) -> Fields:
    """Fields of Nemotron-H, whose layers are of one part each: of a layer's tensors one tells which."""
    count, inner = values.head_layers().start, values.values(INNER)
    own = sigmoids(values) if "expert_count" in values.data else {}
    latent = values.optional(_LATENT)
    return {
        **_mamba(values, "mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel"),
        **own,
        "n_routed_experts": own.get("num_experts", 0),
        "layers_block_type": [_kind_of(values, layer) for layer in range(count)],
        "num_key_value_heads": _largest(values, KV_HEADS),
        "intermediate_size": max([1, *(size for size in inner if isinstance(size, int))]),
        "moe_shared_expert_intermediate_size": values.data.get(SHARED_SIZE),
        "moe_latent_size": None if latent is None else int(latent),
        "mlp_bias": _any_has(values, "ffn_down.bias"),
        "use_bias": _any_has(values, "ssm_in.bias"),
        "use_conv_bias": _any_has(values, "ssm_conv1d.bias"),
        "mlp_hidden_act": "relu2",
    }


def _kind_of(values: Metadata, layer: int) -> str:
    """The type of a layer of one part. Raises ModelError for a layer without any."""
    found = next((kind for tensor, kind in _ONE_PART.items() if values.has(tensor, layer)), None)
    return found or values.refuse("block_count", f"the number of layers: {layer} has none of {', '.join(_ONE_PART)}")


def granitehybrid(values: Metadata, common: Mapping[str, object], granite: Fields) -> Fields:
    """Fields of Granite 4, of which layers without KV heads have a state. granite: those of Granite."""
    kv_heads = [value if isinstance(value, int) else 0 for value in values.values(KV_HEADS)]
    mamba = _mamba(values, "mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv")
    inner, shared = values.integer(INNER), values.data.get(SHARED_SIZE)
    return {
        **granite,
        **mamba,
        "layer_types": [FULL if heads else STATEFUL for heads in kv_heads],
        "num_key_value_heads": _largest(values, KV_HEADS),
        "num_local_experts": values.data.get("expert_count", 0),
        "num_experts_per_tok": values.data.get("expert_used_count", 0),
        "intermediate_size": inner,
        "shared_intermediate_size": inner if shared is None else shared,
        "attention_bias": _any_has(values, "attn_q.bias"),
        "mamba_conv_bias": _any_has(values, "ssm_conv1d.bias"),
        "mamba_proj_bias": _any_has(values, "ssm_in.bias"),
        "position_embedding_type": "rope" if values.flag("rope.scaling.finetuned", True) else None,
    }


def falcon_h1(values: Metadata, common: Mapping[str, object]) -> Fields:
    """Fields of Falcon-H1, whose multipliers are in the weights already."""
    mamba = _mamba(values, "mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv")
    return {
        **mamba,
        "mamba_d_ssm": values.integer("ssm.inner_size"),
        "mamba_rms_norm": values.has("ssm_norm.weight"),
        "mamba_norm_before_gate": False,
        "mamba_conv_bias": values.has("ssm_conv1d.bias"),
    }


def _mamba(values: Metadata, heads: str, head_dim: str, groups: str, state: str, width: str) -> Fields:
    """The sizes of a Mamba-2 under a family's names."""
    count, inner = values.integer("ssm.time_step_rank"), values.integer("ssm.inner_size")
    if inner % count:
        values.refuse("ssm.inner_size", f"a multiple of ssm.time_step_rank, {count}")
    return {
        heads: count,
        head_dim: inner // count,
        groups: values.integer("ssm.group_count"),
        state: values.integer("ssm.state_size"),
        width: values.integer("ssm.conv_kernel"),
    }


def _any_has(values: Metadata, tensor: str) -> bool:
    """Whether some layer has this tensor."""
    return any(values.has(tensor, layer) for layer in range(values.head_layers().start))


def _largest(values: Metadata, key: str) -> int:
    """The largest of the numbers of all layers."""
    return max(value if isinstance(value, int) else 0 for value in values.values(key))
