"""The families of models: one module each, which reads that family's config.json."""

from __future__ import annotations

from offload.config.families import (
    arcee,
    cohere,
    cohere2,
    ernie4_5,
    exaone4,
    gemma,
    gemma2,
    gemma3,
    gemma4,
    glm,
    glm4_moe,
    gpt_oss,
    granite,
    hunyuan,
    llama,
    ministral3,
    mistral,
    muse_glimmer,
    nemotron,
    olmo2,
    olmo3,
    olmo_hybrid,
    phi3,
    qwen,
    qwen3_5,
    qwen3_5_moe,
    qwen3_moe,
    qwen3_next,
    seed_oss,
    smollm3,
    starcoder2,
    wrappers,
)  # fmt: skip
from offload.config.families.common import Family as Family
from offload.config.families.common import Wrapper as Wrapper

_MODULES = (
    llama, mistral, qwen, qwen3_moe, qwen3_next, gpt_oss, qwen3_5, qwen3_5_moe, granite, seed_oss, ernie4_5, smollm3,
    hunyuan, phi3, glm, glm4_moe, olmo2, olmo3, olmo_hybrid, cohere, cohere2, nemotron, gemma, gemma2, gemma3, gemma4,
    arcee, exaone4, ministral3, starcoder2, muse_glimmer,
)  # fmt: skip
FAMILIES: dict[str, Family] = {family.name: family for module in _MODULES for family in module.FAMILIES}
WRAPPERS: dict[str, Wrapper] = {wrapper.name: wrapper for wrapper in wrappers.WRAPPERS}
KNOWN: tuple[Family | Wrapper, ...] = (*FAMILIES.values(), *WRAPPERS.values())
