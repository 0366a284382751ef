"""Readers of quantization_config, one for each quantisation method.

A reader refuses unknown fields by name. Activations are never quantised here: if a config asks for that, a remark says
so. Fields about how the weights were computed are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from offload.config import modelopt
from offload.config.rules import MAX_RULES, as_rules, rules_of, target_rule
from offload.config.schemes import ACTIVATIONS, KV_CACHE, MAX_PATTERN, Quantisation, Rule, Scheme, is_pattern
from offload.fields import TEXT, Fields, list_of, one_of, whole

_MAX_GROUP = 1 << 22
_SCALES = {"float16": "F16", "half": "F16", "bfloat16": "BF16", "float32": "F32", "float": "F32"}
# A field with such a name and any value but a neutral one changes more than a matrix' encoding.
_SUSPECT = re.compile(r"rotat|transform|hadamard|lora|adapter|sparsity|outlier|codebook|residual|svd")
_NOT_HERE = {  # methods that are refused, and why
    "bitsandbytes": "its numbers (NF4) are no integers times a step; transformers and vLLM run it",
    "exl2": "its numbers are ExLlamaV2's alone, which runs it, as does TabbyAPI",
    "exl3": "its numbers follow from a GPU's arithmetic in fp16; ExLlamaV3 and TabbyAPI run it",
}


def read_quantisation(source: Fields, dtype: str) -> Quantisation:
    """The quantisation that a config describes. source: quantization_config. dtype: of the model, by config.json.
    ModelError for anything unknown."""
    if (why := _NOT_HERE.get(str(source.data.get("quant_method")))) is not None:
        source.refuse("quant_method", f"one of {', '.join(_METHODS)}: {why}")
    method = source.choice("quant_method", tuple(_METHODS))
    for key, value in source.data.items():
        if _SUSPECT.search(key) and value not in (None, False, "", [], {}) and key not in _JUDGED:
            source.refuse(key, "absent: it changes the arithmetic, and this program does not implement it")
    return _METHODS[method](source, dtype)


def _awq(source: Fields, dtype: str) -> Quantisation:
    key = next((key for key in ("version", "format") if source.data.get(key) is not None), "version")
    if str(source.data.get(key, "gemm")).lower() != "gemm":
        source.refuse(key, "gemm")
    scheme = Scheme("awq", _bits(source, (4,)), _group(source), has_zeros=True)
    left = [*rules_of(source, "modules_to_not_convert", "holds"), *rules_of(source, "modules_to_not_convert", "names")]
    return Quantisation((Rule("is", "lm_head"), *left, Rule("class", "Linear", scheme)))


def _gptq(source: Fields, dtype: str) -> Quantisation:
    rules = [] if source.flag("lm_head", False) else [Rule("is", "lm_head")]
    dynamic = source.data.get("dynamic") or {}
    if not isinstance(dynamic, Mapping) or len(dynamic) > MAX_RULES:
        source.refuse("dynamic", f"a JSON object of at most {MAX_RULES} patterns")
    for pattern, changes in dynamic.items():
        text = re.sub(r"^[-+]:", "", pattern)
        if not is_pattern(text) or not (isinstance(changes, Mapping) or pattern.startswith("-:")):
            source.refuse(
                "dynamic", f"of regular expressions of at most {MAX_PATTERN} characters without nested repeats"
            )
        own = source.inner(f"dynamic {pattern}", {**source.data, **_mapping(changes)})
        rules.append(Rule("matches", text, None if pattern.startswith("-:") else _gptq_scheme(own)))
    scheme, chosen = _gptq_scheme(source), source.data.get("modules_in_block_to_quantize")
    if chosen is None:
        return Quantisation((*rules, Rule("class", "Linear", scheme)))
    if not isinstance(chosen, list):
        source.refuse("modules_in_block_to_quantize", "a list of names")
    flat = [name for each in chosen for name in (each if isinstance(each, list) else [each])]
    return Quantisation((*rules, *as_rules(source, "modules_in_block_to_quantize", flat, "ends", scheme)))


def _gptq_scheme(source: Fields) -> Scheme:
    key = "format" if source.data.get("checkpoint_format") is None else "checkpoint_format"
    form = source.choice(key, ("gptq", "gptq_v2"), default="gptq")
    source.choice("pack_dtype", ("int32",), default="int32")
    if source.flag("is_marlin_format", False):
        source.refuse("is_marlin_format", "false; fetch the model in the gptq format")
    group = _group(source)
    any_order = source.flag("desc_act", False) and group > 0
    less_one = form == "gptq"
    return Scheme("gptq", _bits(source, (4, 8)), group, any_order=any_order, less_one=less_one, has_zeros=True)


def _fp8(source: Fields, dtype: str) -> Quantisation:
    """The reader of FP8 as written by transformers, DeepSeek and AutoFP8."""
    source.choice("activation_scheme", ("dynamic", "static"), default="dynamic")
    source.choice("fmt", ("e4m3", "float8_e4m3fn"), default="e4m3")
    source.choice("scale_fmt", ("float", "ue8m0"), default="float")
    by_tensor = source.data.get("weight_block_size", 0) is None
    outputs, inputs = (0, 0) if by_tensor else _sizes(source, "weight_block_size")
    tables = as_rules(source, "modules_to_convert", source.data.get("modules_to_convert") or [], "ends", modelopt.FP8)
    return _in_fp8(source, Scheme("bytes", 8, inputs, outputs, "F32", widens=True, is_float=True), tables)


def _fbgemm_fp8(source: Fields, dtype: str) -> Quantisation:
    return _in_fp8(source, Scheme("bytes", 8, 0, 1, "F32", widens=True, is_float=True))


def _mxfp4(source: Fields, dtype: str) -> Quantisation:
    """The reader of gpt-oss's MXFP4. As in transformers, experts alone are in it."""
    left = rules_of(source, "modules_to_not_convert", "names")
    return Quantisation((*left, Rule("holds", ".experts.", Scheme("mxfp4", 4, 32))))


def _in_fp8(source: Fields, scheme: Scheme, tables: Sequence[Rule] = ()) -> Quantisation:
    """tables: rules for embeddings, which are plain otherwise."""
    key = "ignored_layers" if source.data.get("modules_to_not_convert") is None else "modules_to_not_convert"
    left = rules_of(source, key, "names") if source.data.get(key) is not None else [Rule("is", "lm_head")]
    return Quantisation((*left, *tables, Rule("class", "Linear", scheme)), (ACTIVATIONS,))


_FLOATS = {  # formats with one scheme each
    "nvfp4-pack-quantized": Scheme("packed_fp4", 4, 16, scales="F8_E4M3", is_float=True),
    "mxfp4-pack-quantized": Scheme("packed_fp4", 4, 32, scales="E8M0", is_float=True),
    "mxfp8-quantized": modelopt.MXFP8,
}
_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", *_FLOATS)


def _compressed(source: Fields, dtype: str) -> Quantisation:
    """The reader of compressed-tensors: groups of targets, which are module names, patterns or classes, in that
    order."""
    sparse = source.data.get("sparsity_config") or {}
    if not isinstance(sparse, Mapping) or sparse.get("format", "dense") != "dense":
        source.refuse("sparsity_config", "absent or of format dense")
    groups = source.inner("config_groups")
    if len(groups.data) > MAX_RULES:
        source.refuse("config_groups", f"an object of at most {MAX_RULES}")
    source.choice("format", (*_FORMATS, "mixed-precision"))
    found, remarks = dict[str, Scheme | None](), dict[str, None]()
    for name in groups.data:
        own = groups.inner(name, {"format": source.data["format"], **_given(groups.inner(name).data)})
        scheme = _group_scheme(own, dtype)
        targets = own.data.get("targets")
        as_rules(own, "targets", targets, "is", scheme)
        found |= dict.fromkeys(targets, scheme) if isinstance(targets, list) else {}
        if own.data.get("input_activations") or own.data.get("output_activations"):
            remarks[ACTIVATIONS] = None
    if source.data.get("kv_cache_scheme"):
        remarks[KV_CACHE] = None
    ordered = sorted(found, key=lambda target: (target.startswith("re:"), target))
    by_name = [target_rule(target, found[target], "is") for target in ordered]
    classes = [Rule("class", target, found[target]) for target in ordered if not target.startswith("re:")]
    left = [*rules_of(source, "ignore", "is"), *rules_of(source, "ignore", "class")]
    return Quantisation((*left, *by_name, *classes), tuple(remarks))


def _group_scheme(source: Fields, dtype: str) -> Scheme | None:
    if source.data.get("weights") is None:
        return None
    own = source.inner("weights")
    form, kind = source.choice("format", _FORMATS), own.choice("type", ("int", "float"), default="int")
    if form in _FLOATS:
        return _only(own, _FLOATS[form])
    bits = _bits(own, (4, 8) if form == "pack-quantized" else (8,), key="num_bits")
    if form == "pack-quantized" and kind == "float":
        own.refuse("type", "int in the format pack-quantized")
    if own.data.get("dynamic"):
        own.refuse("dynamic", "false")
    symmetric = own.flag("symmetric", True)
    if kind == "float" and not symmetric:
        own.refuse("symmetric", "true where type is float")
    outputs, inputs = _shared(own)
    scales = own.data.get("scale_dtype") or dtype
    scale_kind = _SCALES.get(str(scales).removeprefix("torch."))
    if scale_kind is None:
        own.refuse("scale_dtype", f"one of {', '.join(_SCALES)}")
    return Scheme(
        "packed" if form == "pack-quantized" else "bytes", bits, inputs, outputs, scale_kind,
        is_float=kind == "float", any_order=own.data.get("actorder") in (True, "group", "dynamic"),
        has_zeros=not symmetric,
    )  # fmt: skip


def _only(own: Fields, scheme: Scheme) -> Scheme:
    """The scheme of a format, whose fields can say nothing else."""
    for key, value in (("type", "float"), ("num_bits", scheme.bits), ("group_size", scheme.inputs)):
        own.get(key, one_of(value))
    if own.data.get("dynamic"):
        own.refuse("dynamic", "false")
    if not own.flag("symmetric", True):
        own.refuse("symmetric", "true where type is float")
    return scheme


def _shared(own: Fields) -> tuple[int, int]:
    """Numbers of outputs and inputs that share a scale; 0 means all."""
    group = own.data.get("group_size")
    inferred = "tensor" if group is None else "channel" if group == -1 else "group"
    strategy = own.choice("strategy", ("tensor", "channel", "group", "block"), default=inferred)
    if strategy == "group":
        return 1, own.integer("group_size", _MAX_GROUP)
    if strategy == "block":
        return _sizes(own, "block_structure")
    return (1, 0) if strategy == "channel" else (0, 0)


def _quark(source: Fields, dtype: str) -> Quantisation:
    """The reader of AMD's Quark, of whose formats MXFP4 alone is read. Patterns of layers go before the rest."""
    if source.data.get("layer_type_quant_config"):
        source.refuse("layer_type_quant_config", "absent")
    if re.search("rotat|quarot", str(source.data.get("algo_config")).lower()):
        source.refuse("algo_config", "without rotations, of which some change activations; vLLM runs it")
    own, given = source.inner("global_quant_config"), source.data.get("layer_quant_config")
    layers = source.inner("layer_quant_config", _mapping(given))
    found = [*rules_of(source, "exclude", "glob")]
    for layer in layers.data:
        found += as_rules(source, "layer_quant_config", [layer], "glob", _quark_scheme(layers.inner(layer)))
    asked = any(each.data.get("input_tensors") for each in (own, *map(layers.inner, layers.data)))
    return Quantisation((*found, Rule("class", "Linear", _quark_scheme(own))), (ACTIVATIONS,) * asked)


def _quark_scheme(source: Fields) -> Scheme | None:
    if source.data.get("weight") is None:
        return None
    own = source.inner("weight")
    if own.get("dtype", TEXT) != "fp4":
        own.refuse("dtype", "fp4, with scales of e8m0 (MXFP4); vLLM runs Quark's other formats, MXFP6 on AMD GPUs")
    own.choice("scale_format", ("e8m0",), default="e8m0")
    own.get("group_size", one_of(32))
    return Scheme("fp4", 4, 32, scales="E8M0", is_float=True)


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}


def _given(group: Mapping[str, object]) -> dict[str, object]:
    return {key: value for key, value in group.items() if value is not None}


def _sizes(source: Fields, key: str) -> tuple[int, int]:
    """Outputs and inputs of a block; 128 each by default."""
    outputs, inputs = source.get(key, list_of(whole(1, _MAX_GROUP), "two whole numbers", length=2), [128, 128])
    return outputs, inputs


def _bits(source: Fields, allowed: tuple[int, ...], key: str = "bits") -> int:
    bits: int = source.get(key, one_of(*allowed))
    return bits


def _group(source: Fields) -> int:
    """The number of inputs that share a scale; -1 (all) is read as 0."""
    return 0 if source.data.get("group_size") == -1 else source.integer("group_size", _MAX_GROUP, default=128)


_METHODS: Mapping[str, Callable[[Fields, str], Quantisation]] = {
    "awq": _awq, "gptq": _gptq, "compressed-tensors": _compressed, "fp8": _fp8, "fbgemm_fp8": _fbgemm_fp8,
    **dict.fromkeys(modelopt.METHODS, modelopt.read_modelopt), "mxfp4": _mxfp4, "quark": _quark,
}  # fmt: skip
_JUDGED = ("sparsity_config",)
