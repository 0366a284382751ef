"""The supported architectures of llama.cpp, and the translation of each one's metadata to fields of a config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass

from offload.config.families.windows import FULL, WINDOWED
from offload.config.gguf_experts import (
    AFMOE,
    COHERE2MOE,
    ERNIE_MOE,
    EXAONE_MOE,
    EXPERTS,
    GLM4MOE,
    GPT_OSS,
    HUNYUAN_MOE,
    LAGUNA,
    LFM2MOE,
    MINIMAX_M2,
    QWEN2MOE,
    QWEN35MOE,
    afmoe,
    cohere2moe,
    ernie4_5_moe,
    exaone_moe,
    glm4moe,
    gpt_oss,
    hunyuan_moe,
    laguna,
    lfm2moe,
    minimax_m2,
    olmoe,
    qwen2moe,
    qwen3moe,
    qwen3next,
    qwen35moe,
)
from offload.config.gguf_fields import Metadata
from offload.config.gguf_flash import FLASH, qwen4exp
from offload.config.gguf_gemma4 import GEMMA4, gemma4
from offload.config.gguf_latent import (
    BAILINGMOE3,
    DEEPSEEK2,
    KIMI_LINEAR,
    MISTRAL4,
    bailingmoe3,
    deepseek2,
    kimi_linear,
    mistral4,
)
from offload.config.gguf_layers import SECTIONS, WINDOW, WINDOWS, Fields, attention_bias, layer_types, number
from offload.config.gguf_mamba import FALCON_H1, GRANITE_HYBRID, NEMOTRON_H, falcon_h1, granitehybrid, nemotron_h
from offload.config.gguf_states import CONVOLUTIONS, STATES, lfm2, qwen35
from offload.config.names import Decays

Own = Callable[[Metadata, Mapping[str, object]], Fields]
_RMS, _LAYER = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
_SCALES = frozenset(("attention.scale", "embedding_scale", "residual_scale", "logit_scale"))
_CAPS = frozenset(("attn_logit_softcapping", "final_logit_softcapping"))


@dataclass(frozen=True)
class Architecture:
    """An architecture of llama.cpp. family: a name of FAMILIES. own: makes fields besides the common ones, from the
    metadata and the common ones. norm_key, norm_field: of the norms' epsilon, in the metadata and in a config.json; ""
    if `own` reads it. neighbours: the converter put rows of q and k that are rotated together beside each other.
    has_one: it added 1 to the weights of norms. halves_sections: where positions have sections, it put rows that are
    rotated together into halves. tiled: it put value heads with a state in the order of their key heads, over and over.
    decays: how it stored decays, see `RecurrenceNames`. reads: keys that change the arithmetic and that are read."""

    family: str
    own: Own
    norm_key: str = _RMS
    norm_field: str = "rms_norm_eps"
    neighbours: bool = False
    has_one: bool = False
    halves_sections: bool = False
    tiled: bool = False
    decays: Decays = "rates"
    reads: Set[str] = frozenset()


def _biases(values: Metadata, common: Mapping[str, object]) -> Fields:
    return {"attention_bias": values.has("attn_q.bias"), "mlp_bias": values.has("ffn_down.bias")}


def _none(values: Metadata, common: Mapping[str, object]) -> Fields:
    return {}


def _mistral3(values: Metadata, common: Mapping[str, object]) -> Fields:
    """Fields of Ministral 3 if queries grow with their position, else of Mistral Small."""
    beta, settings = values.optional("attention.temperature_scale"), common["rope_parameters"]
    if beta is None or not isinstance(settings, Mapping):
        return {"sliding_window": None}
    grown = {"rope_parameters": {**settings, "llama_4_scaling_beta": beta}}
    return {"model_type": "ministral3", "sliding_window": None, **grown}


def _granite(values: Metadata, common: Mapping[str, object]) -> Fields:
    named = {
        "attention_multiplier": "attention.scale", "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale", "logits_scaling": "logit_scale",
    }  # fmt: skip
    found = {field: value for field, key in named.items() if (value := values.optional(key)) is not None}
    heads = {} if "attention_multiplier" in found else {"attention_multiplier": number(common, "head_dim") ** -0.5}
    return {**_biases(values, common), **found, **heads}


def _granitehybrid(values: Metadata, common: Mapping[str, object]) -> Fields:
    return granitehybrid(values, common, _granite(values, common))


def _cohere(values: Metadata, common: Mapping[str, object]) -> Fields:
    scale = {"logit_scale": values.number("logit_scale")}
    return {**scale, **attention_bias(values, common), "use_qk_norm": values.has("attn_q_norm.weight")}


def _cohere2(values: Metadata, common: Mapping[str, object]) -> Fields:
    """Fields of Cohere2. Every fourth layer has no window: llama.cpp hardcodes that, and the file does not say it."""
    windows = {"sliding_window": values.integer(WINDOW), "layer_types": layer_types(values, common, 4)}
    return {"logit_scale": values.number("logit_scale"), **attention_bias(values, common), **windows}


def _phi3(values: Metadata, common: Mapping[str, object]) -> Fields:
    original = values.optional("rope.scaling.original_context_length")
    found: Fields = {"sliding_window": None if values.optional(WINDOW) is None else values.integer(WINDOW)}
    return found if original is None else {**found, "original_max_position_embeddings": int(original)}


def _gemma(values: Metadata, common: Mapping[str, object]) -> Fields:
    return {"hidden_act": "gelu_pytorch_tanh", **attention_bias(values, common)}


def _gemma2(values: Metadata, common: Mapping[str, object]) -> Fields:
    """Fields of Gemma 2. Only the 27B model scales scores by hidden_size / heads: llama.cpp hardcodes that, and the
    file does not say it."""
    return {
        **attention_bias(values, common),
        "query_pre_attn_scalar": _scalar(common, largest=46),
        "attn_logit_softcapping": values.optional("attn_logit_softcapping"),
        "final_logit_softcapping": values.optional("final_logit_softcapping"),
        "sliding_window": values.integer(WINDOW),
        "layer_types": layer_types(values, common, 2),
    }


def _gemma3(values: Metadata, common: Mapping[str, object]) -> Fields:
    window = values.optional(WINDOW)
    windows: Fields = {"sliding_window": window and int(window), "layer_types": layer_types(values, common, 6)}
    local = values.number("rope.freq_base_swa", 10000.0)
    settings = {FULL: common["rope_parameters"], WINDOWED: {"rope_type": "default", "rope_theta": local}}
    scalar = {"query_pre_attn_scalar": _scalar(common, largest=62)}
    return {**attention_bias(values, common), **scalar, **windows, "rope_parameters": settings}


def _olmo2(values: Metadata, common: Mapping[str, object]) -> Fields:
    """Fields of OLMo 3 if layers have a window, else of OLMo 2. Scaled positions apply to layers without a window."""
    if values.optional(WINDOW) is None:
        return attention_bias(values, common)
    full = common["rope_parameters"]
    theta = full.get("rope_theta") if isinstance(full, Mapping) else None
    return {
        **attention_bias(values, common),
        "model_type": "olmo3",
        "sliding_window": values.integer(WINDOW),
        "layer_types": layer_types(values, common, 4),
        "rope_parameters": {FULL: full, WINDOWED: {"rope_type": "default", "rope_theta": theta}},
    }


def _exaone4(values: Metadata, common: Mapping[str, object]) -> Fields:
    if values.optional(WINDOW) is None:
        return {"sliding_window": None, "layer_types": [FULL] * int(number(common, "num_hidden_layers"))}
    return {"sliding_window": values.integer(WINDOW), "layer_types": layer_types(values, common, 4)}


def _seed_oss(values: Metadata, common: Mapping[str, object]) -> Fields:
    return {**_biases(values, common), "attention_out_bias": values.has("attn_output.bias")}


def _ernie(values: Metadata, common: Mapping[str, object]) -> Fields:
    return {"use_bias": values.has("attn_q.bias")}


def _starcoder2(values: Metadata, common: Mapping[str, object]) -> Fields:
    return {"use_bias": values.has("attn_q.bias"), "sliding_window": None}


def _arcee(values: Metadata, common: Mapping[str, object]) -> Fields:
    return {**_biases(values, common), "hidden_act": "relu2"}


def _scalar(common: Mapping[str, object], *, largest: int) -> float:
    """The square of the divisor of scores: head_dim, or hidden_size / heads. largest: number of layers of the only
    model that uses the latter."""
    if common["num_hidden_layers"] == largest:
        return number(common, "hidden_size") / number(common, "num_attention_heads")
    return number(common, "head_dim")


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("llama", _biases, neighbours=True),
    "mistral3": Architecture("mistral", _mistral3, neighbours=True, reads=frozenset(("attention.temperature_scale",))),
    "qwen2": Architecture("qwen2", _none),
    "qwen3": Architecture("qwen3", attention_bias),
    "qwen2vl": Architecture("qwen2_vl_text", _none, reads=SECTIONS),
    "qwen3vl": Architecture("qwen3_vl_text", attention_bias, reads=SECTIONS),
    "qwen3vlmoe": Architecture("qwen3_vl_moe_text", qwen3moe, reads=EXPERTS | SECTIONS),
    "qwen3moe": Architecture("qwen3_moe", qwen3moe, reads=EXPERTS),
    "granite": Architecture("granite", _granite, neighbours=True, reads=_SCALES),
    "smollm3": Architecture("smollm3", _biases, neighbours=True),
    "arcee": Architecture("arcee", _arcee, neighbours=True),
    "phi3": Architecture("phi3", _phi3, reads=WINDOWS),
    "gemma": Architecture("gemma", _gemma, has_one=True),
    "gemma2": Architecture("gemma2", _gemma2, has_one=True, reads=_CAPS | WINDOWS),
    "gemma3": Architecture("gemma3_text", _gemma3, has_one=True, reads=WINDOWS),
    "gemma4": Architecture("gemma4_text", gemma4, reads=GEMMA4),
    "olmo2": Architecture("olmo2", _olmo2, reads=WINDOWS),
    "command-r": Architecture("cohere", _cohere, _LAYER, "layer_norm_eps", reads=frozenset(("logit_scale",))),
    "cohere2": Architecture("cohere2", _cohere2, _LAYER, "layer_norm_eps", reads=WINDOWS | {"logit_scale"}),
    "glm4": Architecture("glm4", attention_bias, halves_sections=True, reads=SECTIONS),
    "seed_oss": Architecture("seed_oss", _seed_oss),
    "ernie4_5": Architecture("ernie4_5", _ernie),
    "hunyuan-dense": Architecture("hunyuan_v1_dense", attention_bias),
    "exaone4": Architecture("exaone4", _exaone4, reads=WINDOWS),
    "starcoder2": Architecture("starcoder2", _starcoder2, _LAYER, "norm_epsilon"),
    "qwen3next": Architecture("qwen3_next", qwen3next, has_one=True, reads=QWEN35MOE),
    "qwen35": Architecture("qwen3_5_text", qwen35, has_one=True, tiled=True, reads=STATES),
    "qwen35moe": Architecture("qwen3_5_moe_text", qwen35moe, has_one=True, tiled=True, reads=QWEN35MOE),
    "qwen4exp": Architecture("qwen4_exp_text", qwen4exp, has_one=True, tiled=True, reads=FLASH),
    "gpt-oss": Architecture("gpt_oss", gpt_oss, reads=GPT_OSS),
    "glm4moe": Architecture("glm4_moe", glm4moe, reads=GLM4MOE | SECTIONS),
    "deepseek2": Architecture("deepseek_v3", deepseek2, reads=DEEPSEEK2),
    "mistral4": Architecture("mistral4", mistral4, reads=MISTRAL4),
    "kimi-linear": Architecture("kimi_linear", kimi_linear, reads=KIMI_LINEAR),
    "bailingmoe3": Architecture("bailing_hybrid", bailingmoe3, decays="negated", reads=BAILINGMOE3),
    "minimax-m2": Architecture("minimax_m2", minimax_m2, reads=MINIMAX_M2),
    "ernie4_5-moe": Architecture("ernie4_5_moe", ernie4_5_moe, reads=ERNIE_MOE),
    "hunyuan-moe": Architecture("hunyuan_v1_moe", hunyuan_moe, reads=HUNYUAN_MOE),
    "exaone-moe": Architecture("exaone_moe", exaone_moe, reads=EXAONE_MOE),
    "olmoe": Architecture("olmoe", olmoe, reads=EXPERTS - {"expert_feed_forward_length"}),
    "qwen2moe": Architecture("qwen2_moe", qwen2moe, reads=QWEN2MOE),
    "lfm2": Architecture("lfm2", lfm2, norm_field="norm_eps", reads=CONVOLUTIONS),
    "lfm2moe": Architecture("lfm2_moe", lfm2moe, norm_field="norm_eps", reads=LFM2MOE),
    "nemotron_h": Architecture("nemotron_h", nemotron_h, _LAYER, "layer_norm_epsilon", reads=NEMOTRON_H),
    "nemotron_h_moe": Architecture("nemotron_h", nemotron_h, _LAYER, "layer_norm_epsilon", reads=NEMOTRON_H),
    "falcon-h1": Architecture("falcon_h1", falcon_h1, reads=FALCON_H1),
    "granitehybrid": Architecture("granitemoehybrid", _granitehybrid, neighbours=True, reads=_SCALES | GRANITE_HYBRID),
    "afmoe": Architecture("afmoe", afmoe, reads=AFMOE),
    "laguna": Architecture("laguna", laguna, reads=LAGUNA),
    "cohere2moe": Architecture("cohere2_moe", cohere2moe, "", reads=COHERE2MOE),
    "nemotron": Architecture("nemotron", _biases, _LAYER, "norm_eps", has_one=True),
}
