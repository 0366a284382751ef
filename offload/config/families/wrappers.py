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
    Wrapper("gemma4", "Gemma 4 31B, 26B-A4B", "gemma4_text", _LLAVA),
    Wrapper("gemma4_unified", "Gemma 4 12B", "gemma4_unified_text", _LLAVA),
    Wrapper("muse_glimmer", "Muse Glimmer 30B", "muse_glimmer_text", _LLAVA),
    Wrapper("qwen3_5", "Qwen 3.5 to 3.8, dense", "qwen3_5_text", _LLAVA),
    Wrapper("qwen3_5_moe", "Qwen 3.5 to 3.8, mixtures of experts", "qwen3_5_moe_text", _LLAVA),
    Wrapper("idefics3", "Idefics 3", "llama", _IDEFICS, frozenset(("scale_factor",))),
    Wrapper("smolvlm", "SmolVLM", "llama", _IDEFICS, frozenset(("scale_factor",))),
)
