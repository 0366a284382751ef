"""LFM2 and LFM2.5 (Liquid AI): most layers have a gated short convolution, the others attention. Sparse models have
experts after a few dense layers, chosen by sigmoids plus a bias."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from offload.config.families.common import Defaults, Family, decoder, epsilon
from offload.config.families.experts import FACTOR, NORMED, READS, read_experts, with_experts
from offload.config.families.states import CONVOLVED, layer_kinds, read_short_convolution, with_states
from offload.config.families.windows import FULL
from offload.config.model import ModelConfig
from offload.config.names import ExpertNames, RecurrenceNames, TensorNames
from offload.config.norm import Norm
from offload.config.rope import RopeDefaults
from offload.fields import Fields, list_of, whole

_DEFAULTS = Defaults(
    max_positions=128000, kv_heads=8, eps=1e-5, norm_key="norm_eps", tied=True, rope=RopeDefaults(theta=1000000.0)
)
_SIZES, _ADJUSTS = ("block_ff_dim", "intermediate_size"), "block_auto_adjust_ff_dim"
_FACTOR, _MULTIPLE = "block_ffn_dim_multiplier", "block_multiple_of"
_ATTENDING, _TIED = "full_attn_idxs", "tie_embedding"
_BIASED, _DENSE = "use_expert_bias", "num_dense_layers"
_NETWORK = "feed_forward."
NAMES = TensorNames(
    opening=f"{_NETWORK}w1",
    up=f"{_NETWORK}w3",
    down=f"{_NETWORK}w2",
    before_attention="operator_norm",
    before_feed_forward="ffn_norm",
    final_norm="embedding_norm",
    recurrence=RecurrenceNames(parts=("conv.in_proj",) * 3, taps=("conv.conv",), out="conv.out_proj"),
    experts=ExpertNames(
        router=f"{_NETWORK}gate",
        gate=f"{_NETWORK}experts.{{}}.w1",
        up=f"{_NETWORK}experts.{{}}.w3",
        down=f"{_NETWORK}experts.{{}}.w2",
        bias=f"{_NETWORK}expert_bias",
    ),
)
_OWN_NAMES = replace(NAMES, out="out_proj", q_norm="self_attn.q_layernorm", k_norm="self_attn.k_layernorm")


def describe(source: Fields) -> ModelConfig:
    """full_attn_idxs: of older configs, the layers that attend; without it all do."""
    listed, count = source.data.get(_ATTENDING), source.integer("num_hidden_layers", 1 << 12)
    if listed is not None and not list_of(whole(0, count - 1)).fits(listed):
        source.refuse(_ATTENDING, f"a list of layers from 0 to {count - 1}")
    attending = range(count) if listed is None else listed
    return _described(source.changed({"intermediate_size": _inner_size(source)}), "lfm2", attending)


def describe_moe(source: Fields) -> ModelConfig:
    config = _described(source, "lfm2_moe", ())
    experts = read_experts(
        source, config, renormalised=source.flag(NORMED, True), scoring="sigmoid", rounded="shares", eps=1e-6,
        bias="ranks" if source.flag(_BIASED, True) else "none", factor=source.number(FACTOR, default=1.0),
    )  # fmt: skip
    return with_experts(config, experts, dense=range(source.get(_DENSE, whole(0), 2)))


def _described(source: Fields, family: str, attending: Collection[int]) -> ModelConfig:
    """A dense model. attending: the layers that attend where the config lists no kinds of layers."""
    if source.data.get(_TIED) is not None:
        source = source.changed({"tie_word_embeddings": source.flag(_TIED, True)})
    config = decoder(
        source, family, _DEFAULTS, attention={"qk_norm": Norm(epsilon(source, _DEFAULTS))}, names=_OWN_NAMES
    )
    kinds = layer_kinds(source, (FULL, CONVOLVED), lambda layer: FULL if layer in attending else CONVOLVED)
    layers = [layer for layer, kind in enumerate(kinds) if kind == CONVOLVED]
    return with_states(config, read_short_convolution(source, width=3), layers)


def _inner_size(source: Fields) -> int:
    """The inner rows of the feed-forward network, which follow from those that the config gives."""
    size = source.integer(next((key for key in _SIZES if source.data.get(key) is not None), _SIZES[1]), 1 << 22)
    if not source.flag(_ADJUSTS, True):
        return size
    size = int(2 * size / 3)
    if _FACTOR in source.data and source.data[_FACTOR] is None:
        return size
    size, multiple = int(source.number(_FACTOR, default=1.0) * size), source.integer(_MULTIPLE, 1 << 20, default=256)
    return -(-size // multiple) * multiple


FAMILIES = (
    Family("lfm2", "LFM2 and 2.5, dense: 350M to 2.6B", describe, frozenset((_FACTOR,))),
    Family("lfm2_moe", "LFM2 8B-A1B, 24B-A2B: mixtures of experts", describe_moe, READS | {NORMED, FACTOR, _BIASED}),
)
