"""Multimodal wrappers: a language model of one of the families beside an encoder. Only the language model runs."""

from __future__ import annotations

from offload.config.families.common import Wrapper

_LLAVA = "model.language_model."
_IDEFICS = "model.text_model."
WRAPPERS = (
    Wrapper("mistral3", "Mistral Small 3.1 and later, Ministral 3, Devstral 2", "mistral", _LLAVA),
    Wrapper("llava", "LLaVA 1.5, Pixtral 12B", "llama", _LLAVA),
    Wrapper("llava_next", "LLaVA 1.6, Granite Vision", "llama", _LLAVA),
    Wrapper("gemma3", "Gemma 3, 4B and larger", "gemma3_text", _LLAVA),
    Wrapper("gemma4", "Gemma 4 E2B, E4B, 26B-A4B, 31B", "gemma4_text", _LLAVA),
    Wrapper("gemma4_unified", "Gemma 4 12B", "gemma4_unified_text", _LLAVA),
    Wrapper("muse_glimmer", "Muse Glimmer 30B", "muse_glimmer_text", _LLAVA),
    Wrapper("qwen3_5", "Qwen 3.5 to 3.8, dense", "qwen3_5_text", _LLAVA),
    Wrapper("qwen3_5_moe", "Qwen 3.5 to 3.8, mixtures of experts", "qwen3_5_moe_text", _LLAVA),
    Wrapper("qwen4_exp", "Qwen3.8-Flash-Next", "qwen4_exp_text", _LLAVA),
    Wrapper("qwen3_vl", "Qwen3-VL, dense", "qwen3_vl_text", _LLAVA),
    Wrapper("qwen3_vl_moe", "Qwen3-VL 30B-A3B, 235B-A22B", "qwen3_vl_moe_text", _LLAVA),
    Wrapper("qwen2_vl", "Qwen2-VL, QVQ", "qwen2_vl_text", _LLAVA, may_be_flat=True),
    Wrapper("qwen2_5_vl", "Qwen2.5-VL", "qwen2_5_vl_text", _LLAVA, may_be_flat=True),
    Wrapper(
        "qwen3_omni_moe", "Qwen3-Omni 30B-A3B: its thinker", "qwen3_omni_moe_text", "thinker.model.",
        refuses="pictures, sound", within="thinker_config", head="thinker.lm_head.weight",
    ),
    Wrapper("glm4v", "GLM-4.1V 9B", "glm4v_text", _LLAVA),
    Wrapper("glm4v_moe", "GLM-4.5V, GLM-4.6V", "glm4v_moe_text", _LLAVA),
    Wrapper("idefics3", "Idefics 3", "llama", _IDEFICS, frozenset(("scale_factor",))),
    Wrapper("smolvlm", "SmolVLM", "llama", _IDEFICS, frozenset(("scale_factor",))),
)  # fmt: skip
