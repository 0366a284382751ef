"""The families of models: one module each, which reads that family's config.json."""

from __future__ import annotations

from offload.config.families import (
    afmoe,
    arcee,
    bailing_hybrid,
    cohere,
    cohere2,
    cohere2_moe,
    deepseek,
    ernie4_5,
    ernie4_5_moe,
    exaone4,
    exaone_moe,
    falcon_h1,
    gemma,
    gemma2,
    gemma3,
    gemma4,
    gemma4_assistant,
    glm,
    glm4_moe,
    gpt_oss,
    granite,
    granitemoehybrid,
    hunyuan,
    kimi_linear,
    laguna,
    lfm2,
    lfm3,
    llama,
    minimax_m2,
    ministral3,
    mistral,
    mistral4,
    muse_glimmer,
    nemotron,
    nemotron_h,
    olmo2,
    olmo3,
    olmo_hybrid,
    olmoe,
    phi3,
    qwen,
    qwen2_moe,
    qwen3_5,
    qwen3_5_moe,
    qwen3_moe,
    qwen3_next,
    qwen4_exp,
    seed_oss,
    smollm3,
    solar_open,
    starcoder2,
    wrappers,
)  # fmt: skip
from offload.config.families.common import Family as Family
from offload.config.families.common import Wrapper as Wrapper

_MODULES = (
    llama, mistral, qwen, qwen2_moe, qwen3_moe, qwen3_next, gpt_oss, qwen3_5, qwen3_5_moe, granite, seed_oss, ernie4_5,
    ernie4_5_moe, smollm3, hunyuan, phi3, glm, glm4_moe, solar_open, minimax_m2, olmo2, olmo3, olmo_hybrid, olmoe,
    cohere, cohere2, nemotron, gemma, gemma2, gemma3, gemma4, gemma4_assistant, arcee, exaone4, exaone_moe, ministral3,
    starcoder2, muse_glimmer, afmoe, laguna, cohere2_moe, lfm2, lfm3, nemotron_h, granitemoehybrid, falcon_h1, deepseek,
    mistral4, kimi_linear, bailing_hybrid, qwen4_exp,
)  # fmt: skip
FAMILIES: dict[str, Family] = {family.name: family for module in _MODULES for family in module.FAMILIES}
WRAPPERS: dict[str, Wrapper] = {wrapper.name: wrapper for wrapper in wrappers.WRAPPERS}
KNOWN: tuple[Family | Wrapper, ...] = (*FAMILIES.values(), *WRAPPERS.values())
