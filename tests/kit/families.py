"""Tiny random models of the families that are no Llamas: two shapes each. No tests in here.

Ground truth is transformers' own model. A model's weights are random, its norms near 1 and its biases not 0, so that a
part that is left out shows.
"""

from __future__ import annotations

import copy
import json
import re
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Mistral4ForCausalLM,
    MuseGlimmerConfig,
    MuseGlimmerForConditionalGeneration,
    PreTrainedConfig,
    PreTrainedModel,
)

from kit.models import SMALL, byte_tokenizer, perturbed

THETA = 500.0
LONGROPE: dict[str, object] = {
    "rope_type": "longrope", "rope_theta": THETA, "short_factor": [1.0, 1.1, 1.3], "long_factor": [1.5, 2.0, 4.0],
}  # fmt: skip
GROWING: dict[str, object] = {
    "rope_type": "yarn", "rope_theta": THETA, "factor": 4.0, "original_max_position_embeddings": 16,
    "beta_fast": 4.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5,
}  # fmt: skip
PLUS_ONE = (  # norms times 1 + w
    *("nemotron", "gemma", "gemma2", "gemma3_text"),
    *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen4_exp_text"),
)
VISION = {
    "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 16, "patch_size": 2,
    "pos_emb_height": 4, "pos_emb_width": 4,
}  # fmt: skip
ADAPTER = {"out_hidden_size": 16, "projector_hidden_size": 16}  # else a thousand times as many weights as the text
QWEN_VISION = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16, "patch_size": 2,
}  # fmt: skip
QWEN3_VISION = QWEN_VISION | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
GLM_VISION = QWEN_VISION | {"image_size": 8}
AUDIO = {
    "encoder_layers": 1, "d_model": 16, "encoder_attention_heads": 2, "encoder_ffn_dim": 16, "num_mel_bins": 8,
    "output_dim": 16, "downsample_hidden_size": 4,
}  # fmt: skip
SEEING: dict[str, dict[str, object]] = {  # wrappers whose text has no model of its own: configs beside it
    "qwen3_vl": {"vision_config": QWEN3_VISION},
    "qwen3_vl_moe": {"vision_config": QWEN3_VISION},
    "qwen2_vl": {"vision_config": {**QWEN_VISION, "embed_dim": 16, "mlp_ratio": 1}},
    "qwen2_5_vl": {"vision_config": {**QWEN_VISION, "fullatt_block_indexes": [0]}},
    "qwen3_omni_moe": {"vision_config": QWEN3_VISION, "audio_config": AUDIO, "vision_start_token_id": 1000},
    "glm4v": {"vision_config": GLM_VISION},
    "glm4v_moe": {"vision_config": GLM_VISION},
}
CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 10}
YARN: dict[str, object] = {
    "rope_type": "yarn", "rope_theta": THETA, "factor": 4.0, "original_max_position_embeddings": 16,
}  # fmt: skip


PROPORTIONAL = {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": THETA}
GEMMA4_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": PROPORTIONAL,
}
GEMMA4 = {
    "hidden_size_per_layer_input": 0, "global_head_dim": 12, "sliding_window": 9, "hidden_act": ...,
    "final_logit_softcapping": 3.0, "tie_word_embeddings": True,
    "rope_parameters": {**GEMMA4_ROPES, "full_attention": {**PROPORTIONAL, "factor": 2.0}},
}  # fmt: skip
INPUTS = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": SMALL["vocab_size"]}


@dataclass(frozen=True)
class Tiny:
    """fields: of its config that differ from SMALL. wrapped: the model_type that it is wrapped in, if any."""

    family: str
    fields: dict[str, object] = field(default_factory=dict)
    wrapped: str = ""

    def config(self) -> dict[str, object]:
        """The text model's, as config.json has it."""
        common = {**SMALL, "rope_parameters": {"rope_type": "default", "rope_theta": THETA}}
        config = {**common, **self.fields, "model_type": self.family}
        return {key: value for key, value in config.items() if value is not ...}


def _with(family: str, **fields: object) -> Tiny:
    return Tiny(family, fields)


MULTIPLIED = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.6,
    "residual_multiplier": 0.4,
    "logits_scaling": 5.0,
}
STATES: dict[str, object] = {
    "num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": THETA, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0],
        "mrope_interleaved": True,
    },
}  # fmt: skip
MAMBA: dict[str, object] = {  # without the least time step of a prompt, which a single step does not have
    "mamba_num_heads": 6, "mamba_head_dim": 12, "n_groups": 2, "ssm_state_size": 8, "chunk_size": 16,
    "time_step_min": 1e-12, "num_hidden_layers": ..., "rope_parameters": ...,
}  # fmt: skip
GRANITE_MAMBA: dict[str, object] = {
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 16,
    "num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2, "head_dim": ...,
}  # fmt: skip
EXPERTS: dict[str, object] = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16}
GLM_EXPERTS: dict[str, object] = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16}
SECTIONS = {"rope_type": "default", "rope_theta": THETA, "mrope_section": [2, 1, 1]}
LATENT: dict[str, object] = {
    "kv_lora_rank": 32, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "num_key_value_heads": 4, "head_dim": ..., "num_hidden_layers": 3,
}  # fmt: skip
FLASH: dict[str, object] = {
    **STATES, **EXPERTS, "shared_expert_intermediate_size": 32, "hc_count": 4, "hc_lowrank": 16, "head_dim": 32,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "output_gate_type": "sigmoid",
    "indexer_n_heads": 8, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 16,
    "indexer_compress_ratio": 4, "num_key_value_heads": 2, "intermediate_size": ...,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": THETA, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}  # fmt: skip
NGRAMS: dict[str, object] = {
    "ple_layer_ids": [2], "ple_embed_dim": 64, "ngram_size": 3, "heads_per_ngram": 4, "ngram_vocab_size_base": 211,
    "make_ngram_vocab_size_divisible_by": 8, "split_ngram_parts": 4, "eos_token_id": 2,
}  # fmt: skip
KIMI: dict[str, object] = {
    "linear_head_dim": 8, "linear_num_heads": 6, "num_local_experts": 8, "num_experts_per_tok": 3,
    "moe_intermediate_size": 16, "num_hidden_layers": 4, "rope_parameters": ...,
}  # fmt: skip
LING: dict[str, object] = {
    "head_dim": 8, "num_local_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "q_lora_rank": ...,
    "num_hidden_layers": 4, "first_k_dense_replace": 1, "num_mtp_layers": 0,
}  # fmt: skip
MISTRAL4: dict[str, object] = {
    **LATENT, **GLM_EXPERTS, "max_position_embeddings": 64, "n_group": 2, "topk_group": 1, "n_routed_experts": 12,
    "routed_scaling_factor": 1.5,
    "rope_parameters": {**GROWING, "llama_4_scaling_beta": 0.1, "partial_rotary_factor": 8 / 24},
}  # fmt: skip
TEMPERED = {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}
ERNIE_EXPERTS: dict[str, object] = {
    "moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 16, "moe_num_shared_experts": 2,
}  # fmt: skip
COHERE_EXPERTS: dict[str, object] = {"num_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 16}
LAGUNA_ROPES = {
    "full_attention": {**YARN, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 1.0},
}
PARTIAL = {"rope_type": "default", "rope_theta": THETA, "partial_rotary_factor": 0.5}
CONVOLUTIONS = {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "conv"]}
TINY: dict[str, Tiny] = {
    "granite": _with("granite", **MULTIPLIED),
    "granite, biased and tied": _with(
        "granite", **MULTIPLIED, attention_bias=True, mlp_bias=True, tie_word_embeddings=True, num_key_value_heads=4
    ),
    "seed_oss": _with("seed_oss", head_dim=16),
    "seed_oss, out bias": _with("seed_oss", attention_out_bias=True, mlp_bias=True, num_key_value_heads=1),
    "ernie4_5": _with("ernie4_5"),
    "ernie4_5, biased and tied": _with("ernie4_5", use_bias=True, tie_word_embeddings=True, num_key_value_heads=1),
    "smollm3": _with("smollm3", num_hidden_layers=5),
    "smollm3, listed": _with("smollm3", no_rope_layers=[0, 1], attention_bias=True, tie_word_embeddings=True),
    "hunyuan": _with("hunyuan_v1_dense"),
    "hunyuan, yarn": _with(
        "hunyuan_v1_dense",
        rope_parameters={
            "rope_type": "yarn", "rope_theta": THETA, "factor": 4.0, "original_max_position_embeddings": 16,
        },
    ),
    "hunyuan, stretched": _with(
        "hunyuan_v1_dense", attention_bias=True, num_key_value_heads=1, tie_word_embeddings=True,
        rope_parameters={"rope_type": "dynamic", "rope_theta": THETA, "alpha": 50.0, "factor": 1.0},
    ),
    "phi3": _with("phi3", head_dim=...),
    "phi3, short": _with(
        "phi3", head_dim=..., num_key_value_heads=4, original_max_position_embeddings=64,
        rope_parameters={**LONGROPE, "partial_rotary_factor": 0.75},
    ),
    "phi3, long": _with(
        "phi3", head_dim=..., original_max_position_embeddings=16,
        rope_parameters={**LONGROPE, "partial_rotary_factor": 0.75},
    ),
    "glm": _with("glm", eos_token_id=3, rope_parameters=PARTIAL),
    "glm, without biases": _with("glm", eos_token_id=3, rope_parameters=PARTIAL, attention_bias=False, head_dim=16),
    "glm4": _with("glm4", eos_token_id=3, rope_parameters=PARTIAL),
    "glm4, all rotated": _with(
        "glm4", eos_token_id=3, rope_parameters={**PARTIAL, "partial_rotary_factor": 1.0}, num_key_value_heads=1
    ),
    "olmo2": _with("olmo2"),
    "olmo2, as many KV heads": _with("olmo2", num_key_value_heads=4, tie_word_embeddings=True, attention_bias=True),
    "cohere": _with("cohere", logit_scale=0.7, tie_word_embeddings=True),
    "cohere, normed": _with("cohere", use_qk_norm=True, logit_scale=0.7, tie_word_embeddings=True),
    "cohere, biased and untied": _with("cohere", logit_scale=2.0, attention_bias=True, num_key_value_heads=4),
    "nemotron": _with("nemotron", rope_parameters=PARTIAL),
    "nemotron, biased": _with(
        "nemotron", rope_parameters=PARTIAL, attention_bias=True, mlp_bias=True, num_key_value_heads=1
    ),
    "gemma": _with("gemma", hidden_act="gelu_pytorch_tanh", tie_word_embeddings=True),
    "gemma, biased and untied": _with(
        "gemma", hidden_act="gelu", attention_bias=True, num_key_value_heads=1, head_dim=16
    ),
    "arcee": _with("arcee", hidden_act="relu2"),
    "arcee, biased": _with("arcee", hidden_act="relu2", attention_bias=True, mlp_bias=True, num_key_value_heads=4),
    "exaone4": _with("exaone4", sliding_window=None, layer_types=["full_attention"] * 2),
    "exaone4, a window that no context outgrows": _with(
        "exaone4", sliding_window=256, num_hidden_layers=5, tie_word_embeddings=True
    ),
    "mistral, a window": _with("mistral", sliding_window=9, num_hidden_layers=3),
    "qwen2, windows": _with(
        "qwen2", use_sliding_window=True, sliding_window=12, max_window_layers=1, num_hidden_layers=3
    ),
    "qwen3, windows named": _with(
        "qwen3", use_sliding_window=True, sliding_window=5, num_hidden_layers=3,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "smollm3, windows": _with("smollm3", num_hidden_layers=5, use_sliding_window=True, sliding_window=10),
    "phi3, a window": _with("phi3", head_dim=..., sliding_window=11),
    "exaone4, windows": _with("exaone4", sliding_window=13, num_hidden_layers=5, num_key_value_heads=1),
    "olmo3": _with(
        "olmo3", sliding_window=10, num_hidden_layers=5,
        rope_parameters={"sliding_attention": {"rope_type": "default", "rope_theta": THETA}, "full_attention": YARN},
    ),
    "olmo3, named": _with(
        "olmo3", sliding_window=7, num_key_value_heads=4, attention_bias=True,
        layer_types=["full_attention", "sliding_attention"], rope_parameters=None,
    ),
    "cohere2": _with("cohere2", sliding_window=9, num_hidden_layers=5, tie_word_embeddings=True, head_dim=...),
    "cohere2, other windows": _with(
        "cohere2", sliding_window=14, logit_scale=0.7, attention_bias=True, num_key_value_heads=1, head_dim=...,
        layer_types=["full_attention", "sliding_attention"],
    ),
    "gemma2": _with("gemma2", sliding_window=9, num_hidden_layers=3, tie_word_embeddings=True, hidden_act=..., **CAPS),
    "gemma2, without caps": _with(
        "gemma2", sliding_window=14, num_key_value_heads=1, attention_bias=True, query_pre_attn_scalar=24,
        attn_logit_softcapping=None, final_logit_softcapping=None, tie_word_embeddings=True,
        layer_types=["full_attention", "sliding_attention"],
    ),
    "gemma3": _with(
        "gemma3_text", sliding_window=9, num_hidden_layers=7, tie_word_embeddings=True, hidden_act=...,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": THETA},
        },
    ),
    "gemma3, wrapped": Tiny(
        "gemma3_text",
        {
            "sliding_window": 12, "query_pre_attn_scalar": 24, "rope_parameters": ..., "rope_theta": THETA,
            "rope_local_base_freq": 100.0, "rope_scaling": {"factor": 4.0, "rope_type": "linear"},
            "sliding_window_pattern": 2, "num_hidden_layers": 3, "num_key_value_heads": 1, "attention_bias": True,
            "tie_word_embeddings": True,
        },
        "gemma3",
    ),
    "gemma4": _with("gemma4_text", num_hidden_layers=7, **GEMMA4, attention_k_eq_v=True, num_global_key_value_heads=1),
    "gemma4, wrapped": Tiny(
        "gemma4_text",
        {
            **GEMMA4, "num_hidden_layers": 3, "num_key_value_heads": 1, "sliding_window": 14, "attention_bias": True,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"], "final_logit_softcapping": None,
        },
        "gemma4",
    ),
    "gemma4, of many layers": _with(
        "gemma4_text", **GEMMA4, num_hidden_layers=12, attention_k_eq_v=True, num_global_key_value_heads=4
    ),
    "gemma4, one layout": _with(
        "gemma4_text", **{**GEMMA4, "global_head_dim": 8}, num_key_value_heads=1, num_global_key_value_heads=2,
        attention_k_eq_v=True, num_hidden_layers=5,
        layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    ),
    "gemma4, shared caches": _with(
        "gemma4_text", num_hidden_layers=6, **GEMMA4, num_kv_shared_layers=3, use_double_wide_mlp=True,
        num_key_value_heads=1,
        layer_types=["sliding_attention", "full_attention"] + ["sliding_attention"] * 3 + ["full_attention"],
    ),
    "gemma4, inputs of layers": _with(
        "gemma4_text", num_hidden_layers=6, **GEMMA4 | INPUTS | {"tie_word_embeddings": False},
        num_kv_shared_layers=3, use_double_wide_mlp=True, num_key_value_heads=1,
        layer_types=["sliding_attention", "full_attention"] + ["sliding_attention"] * 3 + ["full_attention"],
    ),
    "gemma4, inputs and wrapped": Tiny(
        "gemma4_text",
        {
            **GEMMA4, **INPUTS, "num_hidden_layers": 5, "attention_k_eq_v": True, "num_global_key_value_heads": 1,
            "num_kv_shared_layers": 2, "final_logit_softcapping": None,
            "layer_types": ["full_attention", "sliding_attention"] * 2 + ["full_attention"],
        },
        "gemma4",
    ),
    "gemma4, sparse": _with(
        "gemma4_text", num_hidden_layers=4, **GEMMA4, enable_moe_block=True, num_experts=8, top_k_experts=3,
        moe_intermediate_size=16, layer_types=["full_attention", "sliding_attention"] * 2,
    ),
    "gemma4, sparse and wrapped": Tiny(
        "gemma4_text",
        {
            **GEMMA4, "num_hidden_layers": 3, "num_key_value_heads": 1, "attention_bias": True, "num_experts": 5,
            "enable_moe_block": True, "top_k_experts": 1, "moe_intermediate_size": 32, "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
        "gemma4",
    ),
    "gemma4_unified": _with(
        "gemma4_unified_text", num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"],
        **{**GEMMA4, "hidden_size_per_layer_input": ..., "global_head_dim": 8}, attention_k_eq_v=True,
    ),
    "gpt_oss": _with(
        "gpt_oss", num_local_experts=8, num_experts_per_tok=3, intermediate_size=16, num_hidden_layers=3,
        sliding_window=12, rope_parameters={**YARN, "truncate": False},
    ),
    "gpt_oss, top 1": _with(
        "gpt_oss", num_local_experts=5, num_experts_per_tok=1, intermediate_size=32, num_hidden_layers=2,
        layer_types=["full_attention", "full_attention"], attention_bias=False, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
    ),
    "qwen3_moe": _with("qwen3_moe", **EXPERTS, num_hidden_layers=3, norm_topk_prob=True),
    "qwen3_moe, some dense": _with(
        "qwen3_moe", num_experts=5, num_experts_per_tok=1, moe_intermediate_size=32, num_hidden_layers=4,
        mlp_only_layers=[1], decoder_sparse_step=2, attention_bias=True, num_key_value_heads=1,
        tie_word_embeddings=True, hidden_size=64,
    ),
    "qwen3_5": _with("qwen3_5_text", **STATES),
    "qwen3_5, tied": _with(
        "qwen3_5_text",
        **{
            **STATES, "linear_num_value_heads": 2, "linear_key_head_dim": 12, "linear_conv_kernel_dim": 3,
            "num_hidden_layers": 3,
        },
        layer_types=["full_attention", "linear_attention", "full_attention"], tie_word_embeddings=True, head_dim=16,
        num_key_value_heads=1, attention_bias=True,
    ),
    "qwen3_5, wrapped": Tiny("qwen3_5_text", {**STATES, "num_hidden_layers": 8, "num_key_value_heads": 4}, "qwen3_5"),
    "qwen3_5_moe": _with("qwen3_5_moe_text", **STATES, **EXPERTS, shared_expert_intermediate_size=24),
    "qwen3_5_moe, one of five": _with(
        "qwen3_5_moe_text", **{**STATES, "num_hidden_layers": 3}, num_experts=5, num_experts_per_tok=1,
        moe_intermediate_size=32, shared_expert_intermediate_size=16, attention_bias=True, num_key_value_heads=1,
        layer_types=["full_attention", "linear_attention", "full_attention"], tie_word_embeddings=True, head_dim=16,
    ),
    "qwen3_5_moe, wrapped": Tiny(
        "qwen3_5_moe_text",
        {**STATES, **EXPERTS, "shared_expert_intermediate_size": 32, "num_key_value_heads": 4},
        "qwen3_5_moe",
    ),
    "qwen3_next": _with(
        "qwen3_next", **{**STATES, "rope_parameters": PARTIAL}, **EXPERTS, shared_expert_intermediate_size=24,
    ),
    "qwen3_next, not renormalised": _with(
        "qwen3_next", **{**STATES, "rope_parameters": PARTIAL, "num_hidden_layers": 3, "linear_num_value_heads": 2},
        num_experts=5, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=16,
        norm_topk_prob=False, attention_bias=True, num_key_value_heads=1, tie_word_embeddings=True, head_dim=16,
        layer_types=["full_attention", "linear_attention", "full_attention"],
    ),
    "qwen4_exp": _with("qwen4_exp_text", **FLASH),
    "qwen4_exp, n-grams": _with("qwen4_exp_text", **FLASH, **NGRAMS),
    "glm4_moe": _with("glm4_moe", **GLM_EXPERTS, num_hidden_layers=3, rope_parameters=PARTIAL, use_qk_norm=True),
    "glm4_moe, odd": _with(
        "glm4_moe", n_routed_experts=5, num_experts_per_tok=1, moe_intermediate_size=32, n_shared_experts=2,
        routed_scaling_factor=2.5, norm_topk_prob=False, first_k_dense_replace=2, num_hidden_layers=4,
        attention_bias=True, num_key_value_heads=1, tie_word_embeddings=True, rope_parameters=PARTIAL,
    ),
    "solar_open": _with("solar_open", **GLM_EXPERTS, intermediate_size=...),
    "solar_open, groups": _with(
        "solar_open", **GLM_EXPERTS | {"n_routed_experts": 12}, intermediate_size=..., n_group=3, topk_group=2,
        n_shared_experts=2, norm_topk_prob=False, routed_scaling_factor=1.5, attention_bias=True,
        num_key_value_heads=1, tie_word_embeddings=True,
    ),
    "minimax_m2": _with(
        "minimax_m2", num_local_experts=8, num_experts_per_tok=3, intermediate_size=16, rope_parameters=PARTIAL,
    ),
    "minimax_m2, top 1": _with(
        "minimax_m2", num_local_experts=5, num_experts_per_tok=1, intermediate_size=32, num_key_value_heads=4,
        num_hidden_layers=3, tie_word_embeddings=True,
    ),
    "ernie4_5_moe": _with("ernie4_5_moe", **ERNIE_EXPERTS, num_hidden_layers=3),
    "ernie4_5_moe, some dense": _with(
        "ernie4_5_moe", **ERNIE_EXPERTS | {"moe_k": 1, "moe_num_shared_experts": 0}, num_hidden_layers=5,
        moe_layer_start_index=0, moe_layer_end_index=3, moe_layer_interval=2, moe_norm_min=0.6,
        tie_word_embeddings=True, num_key_value_heads=1,
    ),
    "hunyuan_v1_moe": _with("hunyuan_v1_moe", num_experts=8, moe_topk=3, intermediate_size=16),
    "hunyuan_v1_moe, stretched": _with(
        "hunyuan_v1_moe", num_experts=5, moe_topk=[2, 2], intermediate_size=32, attention_bias=True,
        num_key_value_heads=1, tie_word_embeddings=True,
        rope_parameters={"rope_type": "dynamic", "rope_theta": THETA, "alpha": 50.0, "factor": 1.0},
    ),
    "exaone_moe": _with(
        "exaone_moe", **EXPERTS, num_hidden_layers=4, sliding_window=9,
        layer_types=["sliding_attention"] * 3 + ["full_attention"],
    ),
    "exaone_moe, groups": _with(
        "exaone_moe", **EXPERTS | {"num_experts": 12}, num_hidden_layers=3, sliding_window=12, n_group=3, topk_group=2,
        mlp_layer_types=["sparse", "dense", "sparse"], num_shared_experts=2, norm_topk_prob=False,
        routed_scaling_factor=1.5, num_key_value_heads=1, tie_word_embeddings=True,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
    ),
    "afmoe": _with(
        "afmoe", **EXPERTS, num_hidden_layers=5, sliding_window=9, num_shared_experts=1, route_scale=2.5,
        mup_enabled=True,
    ),
    "afmoe, named": _with(
        "afmoe", **EXPERTS | {"num_experts_per_tok": 1}, num_hidden_layers=3, sliding_window=14, num_shared_experts=2,
        num_dense_layers=0, num_key_value_heads=1, tie_word_embeddings=True,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
    ),
    "laguna": _with(
        "laguna", **EXPERTS, num_hidden_layers=4, sliding_window=9, shared_expert_intermediate_size=24,
        num_attention_heads_per_layer=[4, 6, 6, 6], layer_types=["full_attention"] + ["sliding_attention"] * 3,
        moe_routed_scaling_factor=2.5, moe_router_logit_softcapping=1.5, rope_parameters=LAGUNA_ROPES,
    ),
    "laguna, of full width": _with(
        "laguna", **EXPERTS | {"num_experts_per_tok": 2}, num_hidden_layers=3, shared_expert_intermediate_size=32,
        sliding_window=0, gating="per-element", num_key_value_heads=1, num_attention_heads_per_layer=[4, 2, 6],
        mlp_layer_types=["dense", "sparse", "sparse"], tie_word_embeddings=True, rope_parameters=None,
    ),
    "cohere2_moe": _with(
        "cohere2_moe", **COHERE_EXPERTS, num_hidden_layers=6, sliding_window=9, expert_selection_fn="sigmoid",
        norm_topk_prob=False, rms_norm_eps=1e-5, first_k_dense_replace=1, prefix_dense_intermediate_size=48,
        num_shared_experts=1, logit_scale=0.7, tie_word_embeddings=False,
    ),
    "cohere2_moe, of a softmax": _with(
        "cohere2_moe", **COHERE_EXPERTS, num_hidden_layers=4, sliding_window=12, first_k_dense_replace=2,
        prefix_dense_sliding_window_pattern=2, num_shared_experts=2, shared_expert_combination_strategy="sum",
        attention_bias=True, num_key_value_heads=1, tie_word_embeddings=True, sliding_window_pattern=2,
    ),
    "olmoe": _with("olmoe", num_experts=8, num_experts_per_tok=3, intermediate_size=16, head_dim=...),
    "olmoe, renormalised": _with(
        "olmoe", num_experts=5, num_experts_per_tok=2, intermediate_size=32, head_dim=..., norm_topk_prob=True,
        attention_bias=True, num_key_value_heads=1, tie_word_embeddings=True,
    ),
    "qwen2_moe": _with("qwen2_moe", **EXPERTS, shared_expert_intermediate_size=24, head_dim=...),
    "qwen2_moe, some dense": _with(
        "qwen2_moe", **EXPERTS, shared_expert_intermediate_size=32, head_dim=..., num_hidden_layers=4, qkv_bias=False,
        mlp_only_layers=[1], decoder_sparse_step=2, norm_topk_prob=True, num_key_value_heads=1,
        tie_word_embeddings=True,
    ),
    "glm4_moe, groups": _with(
        "glm4_moe", **GLM_EXPERTS | {"n_routed_experts": 12}, num_hidden_layers=3, n_group=4, topk_group=2,
        rope_parameters=PARTIAL,
    ),
    "glm4_moe_lite": _with(
        "glm4_moe_lite", **LATENT | {"v_head_dim": 24}, **GLM_EXPERTS, first_k_dense_replace=1,
    ),
    "glm4_moe_lite, biased": _with(
        "glm4_moe_lite", **LATENT | {"qk_nope_head_dim": 8}, **GLM_EXPERTS, attention_bias=True, n_shared_experts=2,
        mlp_layer_types=["sparse", "dense", "sparse"], tie_word_embeddings=True, rope_interleave=False,
    ),
    "deepseek_v2": _with(
        "deepseek_v2", **LATENT | {"q_lora_rank": None}, **GLM_EXPERTS, n_group=1, topk_group=1,
        first_k_dense_replace=1,
    ),
    "deepseek_v2, groups": _with(
        "deepseek_v2", **LATENT, **GLM_EXPERTS | {"n_routed_experts": 12}, n_group=4, topk_group=2,
        topk_method="group_limited_greedy", routed_scaling_factor=3.0, attention_bias=True, n_shared_experts=1,
        rope_parameters={**TEMPERED, "mscale": 0.7}, tie_word_embeddings=True,
    ),
    "deepseek_v3": _with(
        "deepseek_v3", **LATENT, **GLM_EXPERTS | {"n_routed_experts": 12}, n_group=4, topk_group=2,
        first_k_dense_replace=1, rope_parameters=TEMPERED,
    ),
    "deepseek_v3, dense": _with(
        "deepseek_v3", **LATENT, **GLM_EXPERTS, n_group=1, topk_group=1, first_k_dense_replace=3,
        tie_word_embeddings=True,
    ),
    "mistral4": _with("mistral4", **MISTRAL4),
    "mistral4, wrapped": Tiny("mistral4", MISTRAL4 | {"n_group": 1, "norm_topk_prob": False}, "mistral3"),
    "olmo_hybrid": _with("olmo_hybrid", num_hidden_layers=4, linear_key_head_dim=8, rope_parameters=None),
    "olmo_hybrid, positions": _with(
        "olmo_hybrid", num_hidden_layers=3, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=12,
        linear_value_head_dim=8, linear_allow_neg_eigval=False, attention_bias=True, tie_word_embeddings=True,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
    ),
    "nemotron_h": _with(
        "nemotron_h", **MAMBA, **GLM_EXPERTS, moe_shared_expert_intermediate_size=24, routed_scaling_factor=2.5,
        layers_block_type=["linear_attention", "moe", "linear_attention", "full_attention", "moe", "mlp"],
    ),
    "nemotron_h, dense": _with(
        "nemotron_h", **MAMBA | {"mamba_num_heads": 4, "n_groups": 1, "conv_kernel": 3}, use_bias=True, mlp_bias=True,
        use_conv_bias=False, num_key_value_heads=1,
        layers_block_type=["mlp", "linear_attention", "full_attention", "mlp", "linear_attention"],
    ),
    "nemotron_h, groups": _with(
        "nemotron_h", **MAMBA | {"n_groups": 6}, **GLM_EXPERTS | {"n_routed_experts": 12}, n_group=3, topk_group=2,
        moe_shared_expert_intermediate_size=32, norm_topk_prob=False, num_key_value_heads=4,
        layers_block_type=["full_attention", "moe", "linear_attention", "moe"],
    ),
    "nemotron_h, latents": _with(
        "nemotron_h", **MAMBA, **GLM_EXPERTS, moe_shared_expert_intermediate_size=24, moe_latent_size=16,
        layers_block_type=["linear_attention", "moe", "full_attention", "moe"],
    ),
    "granitemoehybrid": _with(
        "granitemoehybrid", **MULTIPLIED, **GRANITE_MAMBA, num_local_experts=8, num_experts_per_tok=3,
        intermediate_size=16, shared_intermediate_size=24,
    ),
    "granitemoehybrid, dense": _with(
        "granitemoehybrid", **MULTIPLIED, **GRANITE_MAMBA | {"mamba_n_groups": 2, "mamba_d_conv": 2},
        num_local_experts=0, shared_intermediate_size=48, position_embedding_type="rope", attention_bias=True,
        mamba_proj_bias=True, mamba_conv_bias=False, num_key_value_heads=1, tie_word_embeddings=True,
    ),
    "granitemoehybrid, attention alone": _with(
        "granitemoehybrid", **MULTIPLIED, **GRANITE_MAMBA | {"layer_types": ["full_attention"] * 4},
        num_local_experts=0, shared_intermediate_size=48, position_embedding_type="rope",
    ),
    "falcon_h1": _with(
        "falcon_h1", **{key: size for key, size in GRANITE_MAMBA.items() if key not in ("layer_types", "head_dim")},
        mamba_d_ssm=64, ssm_multipliers=[0.7, 1.3, 0.8, 1.2, 0.9], key_multiplier=0.6, mlp_multipliers=[0.7, 1.4],
        attention_in_multiplier=1.2, attention_out_multiplier=0.8, ssm_in_multiplier=1.3, ssm_out_multiplier=0.7,
        embedding_multiplier=2.0, lm_head_multiplier=0.5,
    ),
    "falcon_h1, normed": _with(
        "falcon_h1", **{key: size for key, size in GRANITE_MAMBA.items() if key not in ("layer_types", "head_dim")}
        | {"mamba_n_groups": 2, "num_hidden_layers": 2}, mamba_d_ssm=64, mamba_rms_norm=True, num_key_value_heads=1,
        mamba_norm_before_gate=False, mamba_conv_bias=False, tie_word_embeddings=True,
    ),
    "qwen3_vl": Tiny("qwen3_vl_text", {"rope_parameters": {**SECTIONS, "mrope_interleaved": True}}, "qwen3_vl"),
    "qwen3_vl_moe": Tiny(
        "qwen3_vl_moe_text",
        {**EXPERTS, "num_hidden_layers": 3, "rope_parameters": {**SECTIONS, "mrope_interleaved": True}},
        "qwen3_vl_moe",
    ),
    "qwen2_vl": Tiny(
        "qwen2_vl_text",
        {
            "head_dim": ..., "rope_parameters": ..., "rope_theta": THETA,
            "rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]},
        },
        "qwen2_vl",
    ),
    "qwen2_5_vl": Tiny(
        "qwen2_5_vl_text",
        {
            "head_dim": ..., "rope_parameters": SECTIONS, "num_key_value_heads": 1, "use_sliding_window": True,
            "sliding_window": 12, "max_window_layers": 1, "num_hidden_layers": 3,
        },
        "qwen2_5_vl",
    ),
    "qwen3_omni_moe": Tiny(
        "qwen3_omni_moe_text",
        {**EXPERTS, "num_hidden_layers": 3, "rope_parameters": SECTIONS, "mlp_only_layers": [1]},
        "qwen3_omni_moe",
    ),
    "glm4v": Tiny("glm4v_text", {"rope_parameters": {**PARTIAL, "mrope_section": [1, 1, 0]}}, "glm4v"),
    "glm4v_moe": Tiny(
        "glm4v_moe_text",
        {
            **GLM_EXPERTS, "num_hidden_layers": 3, "routed_scaling_factor": 2.5,
            "rope_parameters": {**PARTIAL, "mrope_section": [1, 1, 0]},
        },
        "glm4v_moe",
    ),
    "lfm2": _with("lfm2", **CONVOLUTIONS, block_multiple_of=64),
    "lfm2, biased": _with(
        "lfm2", num_hidden_layers=3, full_attn_idxs=[2, 0], conv_bias=True, conv_L_cache=5, norm_eps=1e-3,
        block_auto_adjust_ff_dim=False, num_key_value_heads=1, tie_word_embeddings=True,
    ),
    "lfm2_moe": _with("lfm2_moe", **EXPERTS, **CONVOLUTIONS, num_dense_layers=1),
    "lfm2_moe, without biases": _with(
        "lfm2_moe", **EXPERTS | {"num_experts_per_tok": 2}, num_hidden_layers=3, num_dense_layers=0, conv_L_cache=2,
        use_expert_bias=False, norm_topk_prob=False, routed_scaling_factor=1.5, num_key_value_heads=4,
        layer_types=["full_attention", "conv", "full_attention"], tie_word_embeddings=True,
    ),
    "lfm3": _with(
        "lfm3", num_hidden_layers=5, sliding_window=9,
        rope_parameters={"sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                         "full_attention": PROPORTIONAL},
    ),
    "lfm3, plain": _with(
        "lfm3", num_hidden_layers=3, sliding_window=14, use_sandwich_norm=False, use_attention_gate=False,
        attention_bias=True, conv_bias=True, conv_L_cache=3, norm_eps=1e-3, num_key_value_heads=1,
        layer_types=["sliding_attention", "conv", "full_attention"], rope_parameters=None, tie_word_embeddings=True,
    ),
    "kimi_linear": _with(
        "kimi_linear", **LATENT | KIMI | {"q_lora_rank": None}, routed_scaling_factor=2.0,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
    ),
    "kimi_linear, groups": _with(
        "kimi_linear", **LATENT | KIMI | {"num_local_experts": 12, "num_hidden_layers": 3, "linear_head_dim": 12},
        n_group=2, topk_group=1, norm_topk_prob=False, n_shared_experts=2, attention_bias=True,
        linear_conv_kernel_dim=3,
        layer_types=["full_attention", "linear_attention", "full_attention"], mlp_layer_types=["sparse"] * 3,
    ),
    "bailing_hybrid": _with("bailing_hybrid", **LATENT | LING, n_group=4, topk_group=2, layer_group_size=4),
    "bailing_hybrid, unbounded": _with(
        "bailing_hybrid", **LATENT | LING | {"num_hidden_layers": 3, "head_dim": 12, "first_k_dense_replace": 0},
        n_group=1, topk_group=1, kda_safe_gate=False, norm_topk_prob=False, n_shared_experts=2,
        routed_scaling_factor=1.5, short_conv_kernel_size=2,
        layer_types=["full_attention", "linear_attention", "linear_attention"],
    ),
    "bailing_hybrid, bounded otherwise": _with(
        "bailing_hybrid", **LATENT | LING | {"num_hidden_layers": 2, "num_experts_per_tok": 2}, n_group=2,
        topk_group=1, layer_group_size=2, kda_lower_bound=-2.0,
    ),
    "starcoder2": _with("starcoder2", hidden_act="gelu_pytorch_tanh", tie_word_embeddings=True),
    "starcoder2, a window": _with(
        "starcoder2", sliding_window=9, num_hidden_layers=3, use_bias=False, tie_word_embeddings=False,
        hidden_act="gelu_pytorch_tanh",
    ),
    "muse_glimmer": Tiny(
        "muse_glimmer_text",
        {
            "sliding_window": 9, "num_hidden_layers": 5, "qk_scale_factor": 2.5, "output_multiplier": 0.6,
            "final_logit_softcapping": 4.0, "post_norm_eps": 1e-3, "hidden_act": ...,
        },
        "muse_glimmer",
    ),
    "muse_glimmer, named": Tiny(
        "muse_glimmer_text",
        {
            "sliding_window": 12, "num_key_value_heads": 1, "layer_rope_theta": [0, THETA],
            "layer_types": ["full_attention", "sliding_attention"], "hidden_act": ...,
        },
        "muse_glimmer",
    ),
    "ministral3, a window": _with(
        "ministral3", max_position_embeddings=64, rope_parameters=GROWING, sliding_window=9
    ),
    "ministral3": _with("ministral3", max_position_embeddings=64, rope_parameters=GROWING),
    "ministral3, wrapped": Tiny(
        "ministral3", {"max_position_embeddings": 64, "rope_parameters": GROWING, "num_key_value_heads": 1}, "mistral3"
    ),
    "mistral, wrapped": Tiny("mistral", {"sliding_window": None}, "mistral3"),
    "granite, wrapped": Tiny("granite", dict(MULTIPLIED), "llava_next"),
    "llama, wrapped": Tiny("llama", {}, "smolvlm"),
}  # fmt: skip


def random_tiny(name: str, *, seed: int = 0, **fields: object) -> PreTrainedModel:
    """transformers' model, weights scaled so that attention and logits are peaked."""
    tiny = TINY[name]
    if tiny.wrapped in SEEING:
        return weighted(AutoModelForImageTextToText.from_config(seeing(name, **fields)).float().eval(), tiny, seed)
    config = AutoConfig.for_model(**tiny.config() | fields)
    plain = "attn_logit_softcapping" in tiny.fields or tiny.family == "gpt_oss"  # sdpa neither caps nor has sinks
    eager = {"attn_implementation": "eager"} if plain else {}
    if tiny.wrapped == "muse_glimmer":  # its text model has no class of its own
        whole = MuseGlimmerConfig(text_config=config.to_dict(), vision_config=VISION, **ADAPTER)
        model: PreTrainedModel = MuseGlimmerForConditionalGeneration(whole).float().eval()
    elif tiny.family == "mistral4":  # which AutoModelForCausalLM does not know
        model = Mistral4ForCausalLM(config).float().eval()
    else:
        model = AutoModelForCausalLM.from_config(config, **eager).float().eval()
    return weighted(model, tiny, seed)


def seeing(name: str, **fields: object) -> PreTrainedConfig:
    """The config of a model that sees pictures: of one that hears and speaks, too, its thinker's."""
    tiny = TINY[name]
    kind, text = tiny.wrapped + "_thinker" * ("omni" in tiny.wrapped), tiny.config() | fields
    tied = {"tie_word_embeddings": text["tie_word_embeddings"]}
    return AutoConfig.for_model(kind, text_config=text, **tied, **copy.deepcopy(SEEING[tiny.wrapped]))


def weighted(model: PreTrainedModel, tiny: Tiny, seed: int) -> PreTrainedModel:
    """The model with random weights."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for part, weight in sorted(model.named_parameters()):
            noise = torch.randn(weight.shape, generator=generator)
            if part.endswith("A_log"):
                weight.copy_(noise - 1.0)  # decays of .9 to .2
            elif part.endswith("sinks"):
                weight.copy_(1.0 + 2.0 * noise)  # from next to no weight to most of a row's
            elif "norm" in part:
                own = tiny.family in PLUS_ONE and "linear_attn" not in part
                middle = 0.0 if own or part.endswith("bias") else 1.0
                weight.copy_(middle + 0.2 * noise)
            elif part.endswith("scale"):
                weight.copy_(1.0 + 0.3 * noise)
            elif part.endswith("bias") or "embed" in part:
                weight.copy_(0.3 * noise if part.endswith("bias") else noise)
            else:
                gain = 2.0 if any(each in part for each in ("q_proj", "k_proj", "qkv_proj", "lm_head")) else 1.0
                weight.copy_(gain * noise / weight.shape[-1] ** 0.5)
        for part, factor in model.named_buffers():
            if part.endswith("layer_scalar"):
                factor.copy_(1.0 + 0.3 * torch.randn(1, generator=generator))
            elif part.endswith(("correction_bias", "expert_bias")):
                factor.copy_(0.3 * torch.randn(factor.shape, generator=generator))
    return model


def as_the_authors_have_it(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The tensors of an OLMo Hybrid under the names of its checkpoints. transformers (5.23) writes others: its
    convolution in three equal parts, and norms of layers that attend with names of the others."""
    found: dict[str, torch.Tensor] = {}
    config = model.config
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    for name, tensor in model.state_dict().items():
        layer = name.split(".")[2] if ".layers." in name else ""
        if name.endswith("conv1d.weight"):
            for letter, part in zip("qkv", tensor.split((keys, keys, values)), strict=True):
                found[name.replace("conv1d", f"{letter}_conv1d")] = part.contiguous()
        elif layer and config.layer_types[int(layer)] == "linear_attention":
            renamed = name.replace("input_layernorm", "attention_layer_norm")
            found[renamed.replace("post_attention_layernorm", "feedforward_layer_norm")] = tensor
        elif name != "lm_head.weight" or not config.tie_word_embeddings:
            found[name] = tensor
    return found


def with_authors_names(folder: Path) -> None:
    """Rename tensors that transformers (5.23) writes under names of others: of Kimi Linear the networks of dense
    layers, of Ling 3 the output of layers with a state."""
    tensors = load_file(path := folder / "model.safetensors")
    latent = {name.rpartition("attention.")[0] for name in tensors if "kv_a_proj" in name}

    def renamed(name: str) -> str:
        name = re.sub(r"block_sparse_moe\.(?=(?:gate|up|down)_proj)", "mlp.", name)
        layer, _, part = name.rpartition("attention.")
        return name if layer in latent or part != "dense.weight" else f"{layer}attention.o_proj.weight"

    save_file({renamed(name): tensor for name, tensor in tensors.items()}, path, metadata={"format": "pt"})


def as_released(wrapped: str, model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The tensors of a model that sees pictures as its authors' checkpoints have them, which transformers (5.23)
    renames, stacks and transposes as it reads them."""
    body = {"qwen2_vl": "model.", "qwen3_omni_moe": "model."}.get(wrapped, "model.language_model.")
    others = {"qwen2_vl": "", "qwen3_omni_moe": ""}.get(wrapped, "model.")
    found: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        own = name.startswith(("model.language_model.", "lm_head"))
        name = name.replace("model.language_model.", body, 1) if own else name.replace("model.", others, 1)
        name = f"thinker.{name}" if wrapped == "qwen3_omni_moe" else name
        if ".experts." not in name:
            found[name] = tensor
        elif wrapped == "qwen3_vl_moe":
            found[name] = tensor.transpose(1, 2)
        else:
            parts = ("gate_proj", "up_proj") if name.endswith("gate_up_proj") else ("down_proj",)
            for number, expert in enumerate(tensor):
                rows = zip(parts, expert.chunk(len(parts)), strict=True)
                found |= {f"{name.rpartition('.')[0]}.{number}.{part}.weight": own for part, own in rows}
    return {name: tensor.contiguous() for name, tensor in found.items()}


def save_tiny(name: str, folder: Path, *, noise: float = 0.0, tokenizer: bool = False, **fields: object) -> Path:
    """The model as safetensors; a wrapped one as its wrapper's checkpoints have it, a picture's tensors among them.
    noise: see `perturbed`. tokenizer: with one token per byte."""
    tiny, model = TINY[name], random_tiny(name, **fields)
    model = perturbed(model, noise) if noise else model
    folder.mkdir(parents=True, exist_ok=True)
    if tokenizer:
        byte_tokenizer().save_pretrained(folder)
    if not tiny.wrapped:
        model.save_pretrained(folder)
        if tiny.family == "olmo_hybrid":
            save_file(as_the_authors_have_it(model), folder / "model.safetensors", metadata={"format": "pt"})
        if tiny.family in ("kimi_linear", "bailing_hybrid"):
            with_authors_names(folder)
        config = json.loads((folder / "config.json").read_text())
        left_out = {key for key, value in tiny.fields.items() if value is ...}
        (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k not in left_out}))
        return folder
    named = {"muse_glimmer": lambda part: part, "smolvlm": lambda part: part.replace("model.", "model.text_model.")}
    rename = named.get(tiny.wrapped, lambda part: f"language_model.{part}")
    tensors = {rename(part): tensor.contiguous() for part, tensor in model.state_dict().items()}
    if tiny.wrapped in SEEING:
        tensors = as_released(tiny.wrapped, model)
    if tiny.fields.get("tie_word_embeddings"):
        tensors = {part: tensor for part, tensor in tensors.items() if "lm_head" not in part}
    tensors["vision_tower.patch_conv.weight"] = torch.ones(2, 2)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    wrapper = {
        "model_type": tiny.wrapped, "architectures": ["AnyForConditionalGeneration"], "dtype": "float32",
        "text_config": tiny.config() | fields, "vision_config": {"model_type": "pixtral"}, "image_token_index": 10,
        "tie_word_embeddings": False,
    }  # fmt: skip
    wrapper |= {"scale_factor": 4} if tiny.wrapped == "smolvlm" else {}
    if tiny.wrapped == "qwen2_vl":  # its text's fields are among the others
        wrapper = wrapper.pop("text_config") | wrapper
    if tiny.wrapped == "qwen3_omni_moe":
        inner = ("text_config", "vision_config", "tie_word_embeddings")
        wrapper["thinker_config"] = {key: wrapper.pop(key) for key in inner} | {"audio_config": AUDIO}
    (folder / "config.json").write_text(json.dumps(wrapper))
    return folder
