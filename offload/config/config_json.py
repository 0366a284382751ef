"""The description of a model from the fields of its config.json.

Only numbers are read. Remote code that a config names (`auto_map`) is never run. A field that changes the arithmetic
and that the model's family does not implement is refused by name. Fields that change nothing here are ignored, such as
`pretraining_tp`, the slicing of the authors' matrix products.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import replace
from difflib import get_close_matches

from offload.config.families import FAMILIES, WRAPPERS, Family, Wrapper
from offload.config.model import ModelConfig
from offload.config.names import TensorNames
from offload.config.quantisation import TEXT_CONFIG, parted, quantised
from offload.config.rope import is_neutral
from offload.fields import Fields

# Fields that change the arithmetic, with their neutral values. Absent and null are always neutral.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu", "swish"),
    "partial_rotary_factor": (1.0,),
    "rotary_pct": (1.0,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "logit_scale": (1.0,),
    "logits_scaling": (1.0,),
    "embedding_multiplier": (1.0,),
    "residual_multiplier": (1.0,),
    "scale_emb": (1.0,),
    "num_local_experts": (0,),
    "num_experts": (0,),
    "n_routed_experts": (0,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "lm_head_bias": (False,),
    "clip_qkv": (),
    "attention_chunk_size": (),
    "query_pre_attn_scalar": (),
    "dual_chunk_attention_config": (),
    "pruned_heads": ({}, []),
}
# Names of unlisted fields that may change the arithmetic: such a field with any but a neutral value is refused.
_SUSPECT = re.compile(r"softcap|multiplier|expert|moe|quant|alibi|rotary|sliding|sparse|qk_|(^|_)(m?rope|scal)")
_IS_FACTOR = re.compile(r"multiplier|scal")  # 1 may be neutral, 0 is not
_SAYS_NOTHING: tuple[object, ...] = (False, 0, "", [], {})
_UNKNOWN = "layers of another family may compute otherwise, and their text would be wrong without a sign of it"
_ALTERED = "its layers mix four residual streams (AltUp); Gemma 4's E2B and E4B, its successors, run"
_DECLINED = {  # families that are known and not implemented, and why
    "glm5_next": "its layers keep four residual streams and attend to tokens that an index chooses",
    "gemma3n": _ALTERED,
    "gemma3n_text": _ALTERED,
}
_RENAMED = {"qwen3_8_flash_next": "qwen4_exp", "qwen3_8_flash_next_text": "qwen4_exp_text"}  # by later folders
# Checked where they are read, in every family.
_READ = {"sliding_window", "use_sliding_window", "rope_theta", "rope_scaling", "rope_parameters"}


def config_of(
    data: Mapping[str, object],
    *,
    name: str = "",
    scales: str = "",
    stacked: Collection[str] = (),
    scaled: Set[str] | None = None,
) -> ModelConfig:
    """The config that transformers (4 or 5) wrote as `data`. Messages of ModelError begin with `name`.

    Fields are read as transformers reads them, with its defaults for the family; fields that it does not read are
    ignored. Absent token ids stay unknown. Sizes are required. scales: the dtype of the scales of quantised matrices,
    as far as it is known. stacked: the names of tensors that hold the gates and ups of all experts of a layer. scaled:
    of the scales of quantised matrices; None if they are not known.
    """
    plain, stored = parted(data, name or "config")
    config = _described(Fields(plain, name or "config"))
    if stacked:
        config = replace(config, names=_with_stacked(config.names, stacked))
    return config if stored is None else quantised(config, stored, scales, scaled)


def _with_stacked(names: TensorNames, stacked: Collection[str]) -> TensorNames:
    """`names` of a checkpoint with such tensors in all layers, in that of the next-token head alone, or in all but
    that: programs that quantise a model's layers one expert at a time copy its head as it is."""
    own, in_head = names.experts, [name.startswith(names.next_token.layer) for name in stacked]
    of_layers, of_head = (own if all(in_head) else own.stacked), (own.stacked if any(in_head) else own)
    next_token = replace(names.next_token, experts=None if of_head == of_layers else of_head)
    return replace(names, experts=of_layers, next_token=next_token)


def _described(source: Fields) -> ModelConfig:
    data = source.data
    wrapper = WRAPPERS.get(_model_type(data))
    if wrapper is None:
        return _read(source, _family(source, (*FAMILIES, *WRAPPERS)), None)
    _refuse_architectures(source, "ForConditionalGeneration")
    return _wrapped(source, wrapper)


def _wrapped(source: Fields, wrapper: Wrapper) -> ModelConfig:
    """The language model of a wrapper."""
    holder = source.inner(wrapper.within) if wrapper.within else source
    data = {**source.data, **holder.data}
    is_flat = wrapper.may_be_flat and data.get(TEXT_CONFIG) is None
    if is_flat:
        inner = {key: value for key, value in data.items() if key != "model_type"}
    else:
        _refuse_unsupported(Fields(data, source.where), wrapper.reads)
        inner = dict(holder.inner(TEXT_CONFIG).data)
    # A null in the inner config has a meaning in some families, such as no window. The outer config may replace it.
    outer = {"model_type": wrapper.default_family} | {key: data[key] for key in wrapper.outer if key in data}
    filled = inner | {key: value for key, value in outer.items() if inner.get(key) is None}
    text = Fields(filled, source.where) if is_flat else holder.inner(TEXT_CONFIG, filled)
    family = _family(text, tuple(FAMILIES))
    return _read(Fields({**family.sizes, **text.data}, text.where), family, wrapper)


def _family(source: Fields, known: Sequence[str]) -> Family:
    """The family that a config names. known: names for the message about another one."""
    name, listed = source.data.get("model_type"), "one that triforce models --families lists"
    if not isinstance(name, str):
        source.refuse("model_type", listed)
    if (name := _model_type(source.data)) not in FAMILIES:
        nearest, why = get_close_matches(name, known, 1, cutoff=0)[0], _DECLINED.get(name, _UNKNOWN)
        source.refuse("model_type", f"{listed}; the nearest name is {nearest}, but {why}")
    return FAMILIES[name]


def _model_type(data: Mapping[str, object]) -> str:
    name = str(data.get("model_type"))
    return _RENAMED.get(name, name)


def _read(source: Fields, family: Family, wrapper: Wrapper | None) -> ModelConfig:
    _refuse_unsupported(source, family.reads)
    if wrapper is None:
        _refuse_architectures(source, "ForCausalLM")
        return family.describe(source)
    config = family.describe(source)
    return replace(config, names=config.names.wrapped(wrapper.body, wrapper.head), wrapper=wrapper.name)


def _refuse_unsupported(source: Fields, reads: Set[str]) -> None:
    for key, value in source.data.items():
        if key in reads:
            continue
        if key in _NEUTRAL or (key not in _READ and _SUSPECT.search(key)):
            allowed = _NEUTRAL.get(key, (False, [], {}) if _IS_FACTOR.search(key) else _SAYS_NOTHING)
            if not is_neutral(value, allowed):
                neutral = " or ".join(["absent", *map(json.dumps, allowed)])
                source.refuse(key, f"{neutral}: it changes the arithmetic, and this program does not implement it")


def _refuse_architectures(source: Fields, kind: str) -> None:
    architectures = source.data.get("architectures") or []
    if not isinstance(architectures, list):
        source.refuse("architectures", "a list")
    if architectures and not any(kind in str(name) or str(name).endswith("Model") for name in architectures):
        source.refuse("architectures", f"a language model, ...{kind}")
