"""Nemotron-H and Nemotron 3 (NVIDIA): layers of one part each, which is a recurrent state (Mamba-2), attention without
positions, a feed-forward network with relu squared, or a mixture of such networks."""

from __future__ import annotations

from dataclasses import replace

from offload.config.block import Block
from offload.config.families.common import Defaults, Family, decoder, epsilon
from offload.config.families.experts import READS, SIGMOIDS, read_sigmoids
from offload.config.families.states import STATEFUL, mamba_names, read_mamba
from offload.config.families.windows import FULL
from offload.config.mixers import Attention, Mamba2, NoMixer
from offload.config.model import ModelConfig
from offload.config.names import ExpertNames, TensorNames
from offload.config.norm import Norm
from offload.fields import Fields

DENSE, MIXTURE = "mlp", "moe"
_BY_LETTER = {"M": STATEFUL, "*": FULL, "-": DENSE, "E": MIXTURE}
_OLD = {"mamba": STATEFUL, "attention": FULL}
_LISTS = ("layers_block_type", "layer_types")
_PATTERN = "hybrid_override_pattern"
_ACTIVATION = "mlp_hidden_act"
_ALIASES = {"mamba_n_groups": "n_groups", "mamba_d_conv": "conv_kernel", "mamba_conv_bias": "use_conv_bias"}
_COUNTS = ("n_routed_experts", "num_local_experts")
_SHARED, _LATENT = "moe_shared_expert_intermediate_size", "moe_latent_size"
_DEFAULTS = Defaults(max_positions=4096, kv_heads=8, head_dim=128, eps=1e-5, norm_key="layer_norm_epsilon")
_NAMES = TensorNames(
    body="backbone.",
    table="embeddings",
    final_norm="norm_f",
    before_attention="norm",
    before_feed_forward="norm",
    attention="mixer.",
    dense="mixer.",
    recurrence=mamba_names("mixer."),
    experts=ExpertNames(
        router="mixer.gate", gate="", up="mixer.experts.{}.up_proj", down="mixer.experts.{}.down_proj",
        bias="mixer.gate.e_score_correction_bias", network="mixer.shared_experts.",
        to_latent="mixer.fc1_latent_proj", from_latent="mixer.fc2_latent_proj",
    ),
)  # fmt: skip


def describe(source: Fields) -> ModelConfig:
    source = source.changed({key: source.data[old] for old, key in _ALIASES.items() if old in source.data})
    source.choice("mamba_hidden_act", ("silu",), default="silu")
    source.choice(_ACTIVATION, ("relu2",), default="relu2")
    types, biased = _types(source), source.flag("mlp_bias", False)
    sized = source.changed({"num_hidden_layers": len(types), "rope_parameters": None, "rope_scaling": None})
    config = decoder(
        sized, "nemotron_h", _DEFAULTS, without_positions=range(len(types)), names=_NAMES,
        feed_forward={"activation": "relu_squared", "gated": False},
    )  # fmt: skip
    norm, bias = Norm(epsilon(source, _DEFAULTS)), source.flag("use_bias", False)
    mamba = read_mamba(
        source, heads=("mamba_num_heads", 128), head_dim=("mamba_head_dim", 64), groups=("n_groups", 8),
        state=("ssm_state_size", 128), width=("conv_kernel", 4), taps_bias="use_conv_bias", bias=bias, out_bias=bias,
        norm=replace(norm, fp32=True),
    )  # fmt: skip
    network, attends = replace(config.block.feed_forward, bias=biased), config.block.attention
    nothing = replace(network, size=0)

    def mixer(own: Attention | Mamba2) -> Block:
        return Block(own, nothing, before_attention=norm, before_feed_forward=None)

    def mixture() -> Block:
        latent = 0 if source.data.get(_LATENT) is None else source.integer(_LATENT, 1 << 20)
        if latent and biased:
            source.refuse("mlp_bias", f"absent or false where {_LATENT} is given")
        experts = read_sigmoids(source, config, counts=_COUNTS, latent=latent)
        beside = replace(network, size=source.integer(_SHARED, 1 << 22))
        return replace(dense, feed_forward=beside, experts=experts)

    dense = Block(NoMixer(), network, before_attention=None, before_feed_forward=norm)
    made = {STATEFUL: mixer(mamba), FULL: mixer(attends), DENSE: dense}
    made |= {MIXTURE: mixture()} if MIXTURE in types else {}
    return replace(config, blocks=tuple(made[kind] for kind in types))


def _types(source: Fields) -> list[str]:
    """The types of all layers: from a list of words, or from a text with a letter for each."""
    key = next((key for key in _LISTS if source.data.get(key) is not None), _PATTERN)
    given = source.data.get(key)
    if isinstance(given, str):
        given = [_BY_LETTER.get(letter, letter) for letter in given]
    words = [_OLD.get(word, word) for word in given] if isinstance(given, list) else []
    if not words or not all(word in _BY_LETTER.values() for word in words) or FULL not in words:
        wanted = " and ".join([", ".join([STATEFUL, DENSE, MIXTURE]), FULL])
        source.refuse(
            key, f"a list of {wanted}, one for each layer, {FULL} in one at least, or a text of M, -, E and *"
        )
    return words


_READS = READS | SIGMOIDS | {
    *_COUNTS, _SHARED, _LATENT, "moe_shared_expert_overlap", "n_shared_experts", "mamba_ssm_cache_dtype",
    "partial_rotary_factor",
}  # fmt: skip
FAMILIES = (
    Family("nemotron_h", "Nemotron 3 Nano and Super, Nemotron Nano 2, Nemotron-H: states (Mamba-2)", describe, _READS),
)
