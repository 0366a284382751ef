"""The reader of NVIDIA ModelOpt's description of a checkpoint: one scheme for all its modules, or a map of schemes by
module (MIXED_PRECISION).

It is in config.json's quantization_config, or in a file of its own alone. Lists of modules that are left are often not
whole, so the tensors decide where they are there: a module with a `weight_scale_2` is in NVFP4, one with another scale
in FP8, one with none is plain.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from offload.config.rules import rules_of
from offload.config.schemes import ACTIVATIONS, KV_CACHE, Quantisation, Rule, Scheme
from offload.fields import TEXT, Fields, one_of

FILE = "hf_quant_config.json"
METHODS = ("modelopt", "modelopt_fp4", "modelopt_fp8", "modelopt_mixed")  # the others by SGLang and vLLM
SCALE, TENSOR_SCALE = "weight_scale", "weight_scale_2"  # parts of a module; the second one in NVFP4 alone
_MIXED = "MIXED_PRECISION"
FP8 = Scheme("bytes", 8, 0, 0, "F32", widens=True, is_float=True)
_NVFP4 = Scheme("fp4", 4, 16, scales="F8_E4M3", is_float=True)
_BLOCKS = replace(FP8, outputs=128, inputs=128)
MXFP8 = replace(FP8, outputs=1, inputs=32)
_SCHEMES = {
    "FP8": FP8, "FP8_PER_CHANNEL_PER_TOKEN": replace(FP8, outputs=1), "FP8_PB_WO": _BLOCKS,
    "FP8_BLOCK_SCALES": _BLOCKS, "MXFP8": MXFP8, "NVFP4": _NVFP4, "W4A16_NVFP4": _NVFP4,
}  # fmt: skip
_WEIGHTS_ALONE = ("FP8_PB_WO", "W4A16_NVFP4")
_WITH_FACTORS = re.compile("AWQ|SVD")
_WRAPPED = re.compile(r"^(model\.language_model|language_model\.model|language_model(?=\.lm_head))\.")


def read_modelopt(source: Fields, dtype: str) -> Quantisation:
    """The quantisation that a description says. source: quantization_config. ModelError for anything unknown."""
    own = source.inner("quantization") if source.data.get("quantization") else source
    if str(own.data.get("quant_algo")).upper() == _MIXED:
        layers, rules = own.inner("quantized_layers"), tuple[Rule, ...]()
        named = {_without_wrapper(name): _scheme(layers.inner(name)) for name in layers.data}
    else:
        key = "exclude_modules" if own.data.get("ignore") is None else "ignore"
        rules, named = (*rules_of(own, key, "glob"), Rule("class", "Linear", _scheme(own))), {}
    algorithms = {each.data["quant_algo"].upper() for each in ([own] if rules else map(layers.inner, layers.data))}
    remarks = [ACTIVATIONS] if algorithms.difference(_WEIGHTS_ALONE) else []
    remarks += [KV_CACHE] if own.data.get("kv_cache_scheme") or own.data.get("kv_cache_quant_algo") else []
    return Quantisation(rules, tuple(remarks), named, by_tensors=True)


def from_file(data: Mapping[str, object]) -> dict[str, object] | None:
    """The quantization_config that FILE's content stands for; None where no weights are quantised."""
    said = data.get("quantization")
    if not isinstance(said, Mapping) or not said.get("quant_algo"):
        return None
    return {**said, "quant_method": METHODS[0]}


def as_stored(scheme: Scheme | None, scale: str) -> Scheme | None:
    """The scheme of a module by the scale that its tensors have, "" for none. scheme: the description's."""
    if not scale:
        return None
    if scheme is not None and scheme.is_e2m1 == (scale == TENSOR_SCALE):
        return scheme
    return {TENSOR_SCALE: _NVFP4, SCALE: FP8}.get(scale, _BLOCKS)


def _scheme(source: Fields) -> Scheme:
    """The scheme of an algorithm, which maps may have in small letters."""
    algorithm, allowed = source.get("quant_algo", TEXT).upper(), one_of(*_SCHEMES, _MIXED).wanted
    if _WITH_FACTORS.search(algorithm):
        source.refuse("quant_algo", f"{allowed}: its pre_quant_scale multiplies activations; TensorRT-LLM runs it")
    if algorithm not in _SCHEMES:
        source.refuse("quant_algo", allowed)
    found = _SCHEMES[algorithm]
    if not found.is_e2m1 or source.data.get("group_size") is None:
        return found
    return replace(found, inputs=source.get("group_size", one_of(16, 32)))


def _without_wrapper(module: str) -> str:
    """The name of a module of a language model, without a wrapper's prefix."""
    return _WRAPPED.sub("" if module.endswith("lm_head") else "model.", module, count=1)
