"""Plans of popular models over long texts on one or two 24 GB GPUs: bytes by place, milliseconds per token.

usage: python benchmarks/plans.py [--context 120000]

Prints the tables of docs/memory.md; the second is for models with quantised weights, the third for those with states,
the fourth for mixtures of experts, the last for four of them where host memory is short. Nothing is measured: GPUs are
RTX 4090s at their typical rates, with 128 GB of host memory, and the models' shapes are from their published
config.json files.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from report import say

from offload.config.config_json import config_of
from offload.config.gguf_forms import in_form
from offload.config.model import ModelConfig
from offload.config.next_token import head_of
from offload.errors import DoesNotFit, UsageError
from offload.plan.planner import Options, Plan
from offload.plan.request import Request
from offload.speed.hardware import RTX_4090, Hardware

GPU = Hardware("cuda:0", "RTX 4090", 24 * 10**9, 128 * 10**9, True, rates=RTX_4090)
MAX_TOKENS = 256
LLAMA: dict[str, object] = {"dtype": "bfloat16", "max_position_embeddings": 131072, "rms_norm_eps": 1e-5}
MODELS: dict[str, dict[str, object]] = {
    "Devstral Small 2 24B": {
        "model_type": "ministral3", "vocab_size": 131072, "hidden_size": 5120, "intermediate_size": 32768,
        "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    },
    "Granite 4.1 8B": {
        "model_type": "granite", "vocab_size": 100352, "hidden_size": 4096, "intermediate_size": 12800,
        "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 8,
    },
    "Seed-OSS 36B": {
        "model_type": "seed_oss", "vocab_size": 155136, "hidden_size": 5120, "intermediate_size": 27648,
        "num_hidden_layers": 64, "num_attention_heads": 80, "num_key_value_heads": 8, "head_dim": 128,
    },
    "Gemma 3 27B": {
        "model_type": "gemma3_text", "vocab_size": 262208, "hidden_size": 5376, "intermediate_size": 21504,
        "num_hidden_layers": 62, "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128,
        "query_pre_attn_scalar": 168, "sliding_window": 1024, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "Gemma 4 31B": {
        "model_type": "gemma4_text", "vocab_size": 262144, "hidden_size": 5376, "intermediate_size": 21504,
        "num_hidden_layers": 60, "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 256,
        "num_global_key_value_heads": 4, "attention_k_eq_v": True, "sliding_window": 1024,
        "hidden_size_per_layer_input": 0, "rms_norm_eps": 1e-6,
    },
    "OLMo 3 7B": {
        "model_type": "olmo3", "vocab_size": 100278, "hidden_size": 4096, "intermediate_size": 11008,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32, "sliding_window": 4096,
    },
    "GLM-4 32B": {
        "model_type": "glm4", "vocab_size": 151552, "hidden_size": 6144, "intermediate_size": 23040,
        "num_hidden_layers": 61, "num_attention_heads": 48, "num_key_value_heads": 2, "head_dim": 128,
        "attention_bias": False,
    },
    "Phi-4-mini": {
        "model_type": "phi3", "vocab_size": 200064, "hidden_size": 3072, "intermediate_size": 8192,
        "num_hidden_layers": 32, "num_attention_heads": 24, "num_key_value_heads": 8, "tie_word_embeddings": True,
    },
}  # fmt: skip
QWEN: dict[str, object] = {
    "model_type": "qwen3_5_text", "vocab_size": 248320, "head_dim": 256, "num_key_value_heads": 4,
    "max_position_embeddings": 262144, "rms_norm_eps": 1e-6, "dtype": "bfloat16", "mtp_num_hidden_layers": 1,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32,
}  # fmt: skip
STATES: dict[str, dict[str, object]] = {  # models whose layers have states
    "Qwen3.6 27B": QWEN | {
        "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 64, "num_attention_heads": 24,
        "linear_num_value_heads": 48,
    },
    "Qwen3.5 9B": QWEN | {
        "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32, "num_attention_heads": 16,
    },
    "Qwen3.5 4B": QWEN | {
        "hidden_size": 2560, "intermediate_size": 9216, "num_hidden_layers": 32, "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
}  # fmt: skip
CONTEXTS = (32768, 131072, 262144)
CARDS = (("12 GB", 12, 1), ("16 GB", 16, 1), ("24 GB", 24, 1), ("2 x 24 GB", 24, 2))
LLAMA_3: dict[str, object] = {"model_type": "llama", "vocab_size": 128256, "num_key_value_heads": 8}
YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
STORED: dict[str, tuple[dict[str, object], str]] = {  # "": as in its config.json
    f"{name} {form}".strip(): (fields, form)
    for name, forms, fields in (
        ("Yarn Llama 2 13B", ("Q8_0", "Q4_K_M"), {
            "model_type": "llama", "vocab_size": 32000, "hidden_size": 5120, "intermediate_size": 13824,
            "num_hidden_layers": 40, "num_attention_heads": 40, "num_key_value_heads": 40, "rope_scaling": YARN,
        }),
        ("Llama 3.1 8B", ("Q8_0",), LLAMA_3 | {
            "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        }),
        ("Qwen3 32B AWQ", ("",), {
            "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 5120, "intermediate_size": 25600,
            "num_hidden_layers": 64, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128,
            "quantization_config": AWQ, "dtype": "float16",
        }),
        ("Devstral Small 2 24B", ("Q4_K_M",), MODELS["Devstral Small 2 24B"]),
        ("Llama 3.3 70B", ("Q4_K_M",), LLAMA_3 | {
            "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
        }),
    )
    for form in forms
}  # fmt: skip
MIXTURES: dict[str, tuple[dict[str, object], str]] = {  # "": as in its config.json
    "Qwen3 30B-A3B Q4_K_M": ({
        "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144,
        "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
        "max_position_embeddings": 262144,
    }, "Q4_K_M"),
    **{
        f"gpt-oss {size}": ({
            "model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880,
            "num_hidden_layers": layers, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
            "num_local_experts": count, "num_experts_per_tok": 4, "sliding_window": 128,
            "quantization_config": {"quant_method": "mxfp4"},
        }, "")
        for size, layers, count in (("20B", 24, 32), ("120B", 36, 128))
    },
    "Gemma 4 26B-A4B Q4_K_M": ({
        "model_type": "gemma4_text", "vocab_size": 262144, "hidden_size": 2816, "intermediate_size": 2112,
        "num_hidden_layers": 30, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256,
        "global_head_dim": 512, "num_global_key_value_heads": 2, "attention_k_eq_v": True, "sliding_window": 1024,
        "hidden_size_per_layer_input": 0, "rms_norm_eps": 1e-6, "enable_moe_block": True, "num_experts": 128,
        "top_k_experts": 8, "moe_intermediate_size": 704, "tie_word_embeddings": True,
    }, "Q4_K_M"),
    "Qwen3.6 35B-A3B Q4_K_M": (QWEN | {
        "model_type": "qwen3_5_moe_text", "hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16,
        "num_key_value_heads": 2, "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    }, "Q4_K_M"),
    "GLM-4.5-Air 106B-A12B Q4_K_M": ({
        "model_type": "glm4_moe", "vocab_size": 151552, "hidden_size": 4096, "intermediate_size": 10944,
        "num_hidden_layers": 46, "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128,
        "partial_rotary_factor": 0.5, "n_routed_experts": 128, "num_experts_per_tok": 8, "n_shared_experts": 1,
        "moe_intermediate_size": 1408, "first_k_dense_replace": 1, "norm_topk_prob": True, "attention_bias": True,
        "routed_scaling_factor": 1.0,
    }, "Q4_K_M"),
    "Qwen3-Coder-Next 80B-A3B Q4_K_M": ({
        "model_type": "qwen3_next", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5120,
        "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
        "partial_rotary_factor": 0.25, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "num_experts": 512, "num_experts_per_tok": 10,
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "norm_topk_prob": True,
        "max_position_embeddings": 262144, "rms_norm_eps": 1e-6,
    }, "Q4_K_M"),
    "MiniMax-M2 230B-A10B Q4_K_M": ({
        "model_type": "minimax_m2", "vocab_size": 200064, "hidden_size": 3072, "intermediate_size": 1536,
        "num_hidden_layers": 62, "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128,
        "rotary_dim": 64, "num_local_experts": 256, "num_experts_per_tok": 8, "max_position_embeddings": 196608,
    }, "Q4_K_M"),
    "GLM-4.7-Flash 30B-A3B Q4_K_M": ({
        "model_type": "glm4_moe_lite", "vocab_size": 154880, "hidden_size": 2048, "intermediate_size": 10240,
        "num_hidden_layers": 47, "num_attention_heads": 20, "num_key_value_heads": 20, "q_lora_rank": 768,
        "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256,
        "n_routed_experts": 64, "num_experts_per_tok": 4, "n_shared_experts": 1, "moe_intermediate_size": 1536,
        "first_k_dense_replace": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.8, "n_group": 1,
        "topk_group": 1, "max_position_embeddings": 202752,
    }, "Q4_K_M"),
    "Kimi Linear 48B-A3B Q4_K_M": ({
        "model_type": "kimi_linear", "vocab_size": 163840, "hidden_size": 2304, "intermediate_size": 9216,
        "num_hidden_layers": 27, "num_attention_heads": 32, "num_key_value_heads": 32, "q_lora_rank": None,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "num_experts": 256,
        "num_experts_per_token": 8, "num_shared_experts": 1, "moe_intermediate_size": 1024, "moe_renormalize": True,
        "first_k_dense_replace": 1, "routed_scaling_factor": 2.446, "max_position_embeddings": 1048576, "topk_group": 1,
        "linear_attn_config": {
            "full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "head_dim": 128, "num_heads": 32,
            "kda_layers": [each for each in range(1, 27) if each % 4], "short_conv_kernel_size": 4,
        },
    }, "Q4_K_M"),
    "LFM2 24B-A2B Q4_K_M": ({
        "model_type": "lfm2_moe", "vocab_size": 65536, "hidden_size": 2048, "intermediate_size": 11776,
        "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 8, "num_experts": 64,
        "num_experts_per_tok": 4, "moe_intermediate_size": 1536, "num_dense_layers": 2, "norm_topk_prob": True,
        "use_expert_bias": True, "conv_L_cache": 3, "tie_word_embeddings": True, "max_position_embeddings": 131328,
        "layer_types": ["conv", "conv", "full_attention", "conv"] * 10,
    }, "Q4_K_M"),
    "Nemotron 3 Nano 30B-A3B Q4_K_M": ({
        "model_type": "nemotron_h", "vocab_size": 131072, "hidden_size": 2688, "intermediate_size": 1856,
        "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", "num_hidden_layers": 52,
        "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "mamba_num_heads": 64,
        "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4, "n_routed_experts": 128,
        "num_experts_per_tok": 6, "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712,
        "n_shared_experts": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "n_group": 1, "topk_group": 1,
        "max_position_embeddings": 262144, "layer_norm_epsilon": 1e-5, "mlp_hidden_act": "relu2",
    }, "Q4_K_M"),
    "Qwen3.8-Flash-Next Q4_K_M": ({
        "model_type": "qwen4_exp_text", "vocab_size": 248320, "hidden_size": 2560, "num_hidden_layers": 48,
        "num_attention_heads": 24, "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16,
        "linear_num_value_heads": 48, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "output_gate_type": "sigmoid", "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 640,
        "shared_expert_intermediate_size": 640, "hc_count": 4, "hc_lowrank": 320, "indexer_n_heads": 4,
        "indexer_kv_heads": 1, "indexer_head_dim": 128, "indexer_budget": 2048, "indexer_compress_ratio": 4,
        "ple_layer_ids": [2], "split_ngram_parts": 128, "eos_token_id": 248044, "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6, "mtp_num_hidden_layers": 1,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10], "mrope_interleaved": True,
        },
    }, "Q4_K_M"),
}  # fmt: skip
HOSTS = (64, 128)  # GB of memory
SHORT_HOSTS = (32, 64, 128)
SHORT = ("gpt-oss 120B", "GLM-4.5-Air 106B-A12B", "Qwen3.6 35B-A3B", "Gemma 4 26B-A4B")  # as MIXTURES begin
MIXTURES_HEAD = "| | 32,768 tokens | 131,072 |"
STATES_HEAD = "| | 32,768 tokens | 131,072 | 262,144 |"
HEAD = (
    "| | weights, cache propose in | of the tokens | on each GPU | on the host | crosses each link | acceptance "
    "| a token | without speculation |"
)


def row(name: str, config: ModelConfig, num_gpus: int, context: int) -> str:
    title = f"{name}, {'one GPU' if num_gpus == 1 else f'{num_gpus} GPUs'}"
    hardware = replace(GPU, num_devices=num_gpus)
    try:
        plan = Request(config, None, Options(), hardware).plan(
            num_prompt_tokens=context - MAX_TOKENS, max_tokens=MAX_TOKENS
        )
    except (DoesNotFit, UsageError) as error:
        return f"| {title} | {error} |" + " |" * 7
    composition, predicted = plan.composition, plan.predicted
    return " | ".join(
        (
            f"| {title}",
            f"{'as stored' if config.stored_in else composition.weight_bits}, {composition.kv_bits} bits",
            f"{composition.budget:,}" if composition.budget else "all",
            f"{plan.placement.total_device_bytes / 1e9:.1f} GB",
            f"{plan.placement.total_host_bytes / 1e9:.1f} GB",
            f"{predicted.full_link_bytes / 1e9:.1f} GB",
            f"{predicted.acceptance:.3f}".lstrip("0"),
            milliseconds(predicted.seconds_per_token),
            f"{milliseconds(predicted.plain_seconds_per_token)} |",
        )
    )


def of_mixture(name: str, config: ModelConfig) -> list[str]:
    """A row for each card."""
    return [
        f"| {name}, {card} | "
        + " | ".join(_in_slots(config, memory, number, context) for context in CONTEXTS[:2])
        + " |"
        for card, memory, number in CARDS
    ]


def _in_slots(config: ModelConfig, memory: int, num_gpus: int, context: int) -> str:
    """The levels that propose, a token's seconds and those without speculation; the layers whose experts the CPU runs;
    the share of the others' experts that have a slot; the bytes of experts that a token fetches, and all that crosses
    each link a full pass; the host's memory."""
    for host in HOSTS:
        hardware = replace(GPU, num_devices=num_gpus, device_free_bytes=memory * 10**9, host_free_bytes=host * 10**9)
        before = context - MAX_TOKENS
        try:
            plan = Request(config, head_of(config), Options(), hardware).plan(
                num_prompt_tokens=before, max_tokens=MAX_TOKENS
            )
        except (DoesNotFit, UsageError):
            continue
        predicted, slots = plan.predicted, plan.placement.expert_slots
        if plan.placement.expert_places and host < HOSTS[-1]:
            continue
        assert config.experts is not None
        by_cpu = 0 if plan.placement.shares_experts else plan.placement.cpu_experts
        layers = config.num_expert_layers
        run = f"CPU {by_cpu} of {layers} layers, " if by_cpu else ""
        if not slots:
            here = "all experts, 0"
        elif by_cpu == layers:
            here = f"{run}0"
        else:
            here = f"{run}{slots / config.experts.count:.0%} of experts, {predicted.missed_bytes / 1e9:.2f}"
        times = f"{milliseconds(predicted.seconds_per_token)} of {milliseconds(predicted.plain_seconds_per_token)}"
        levels = _proposing(plan) or "lookups"
        more = f" (of {host} GB)" if host > HOSTS[0] else ""
        return (
            f"{levels}: {times}; {here} of {predicted.full_link_bytes / 1e9:.1f} GB; "
            f"host {plan.placement.total_host_bytes / 1e9:.0f} GB{more}{_read(plan, config)}"
        )
    return "does not fit"


def _read(plan: Plan, config: ModelConfig) -> str:
    """The share of experts with a place in host memory, and the bytes that a token reads from the file."""
    if not (places := plan.placement.expert_places):
        return ""
    assert config.experts is not None
    return f"; {places / config.experts.count:.0%} of experts there, {plan.predicted.read_bytes / 1e9:.2f} GB read"


def of_hosts(name: str, config: ModelConfig) -> list[str]:
    """A row for each card and host memory: a token's seconds and those without speculation, and what is read."""
    return [
        f"| {name}, {card} GB, host {host} GB | "
        + " | ".join(_on_host(config, card, host, context) for context in CONTEXTS[:2])
        + " |"
        for card in (12, 16, 24)
        for host in SHORT_HOSTS
    ]


def _on_host(config: ModelConfig, memory: int, host: int, context: int) -> str:
    hardware = replace(GPU, device_free_bytes=memory * 10**9, host_free_bytes=host * 10**9)
    try:
        plan = Request(config, head_of(config), Options(), hardware).plan(
            num_prompt_tokens=context - MAX_TOKENS, max_tokens=MAX_TOKENS
        )
    except (DoesNotFit, UsageError):
        return "does not fit"
    predicted = plan.predicted
    times = f"{milliseconds(predicted.seconds_per_token)} of {milliseconds(predicted.plain_seconds_per_token)}"
    return times + _read(plan, config)


def of_states(name: str, config: ModelConfig) -> list[str]:
    """A row for each card. The draft is the model's own next-token head."""
    return [
        f"| {name}, {card} | " + " | ".join(_of_context(config, memory, number, each) for each in CONTEXTS) + " |"
        for card, memory, number in CARDS
    ]


def _of_context(config: ModelConfig, memory: int, num_gpus: int, context: int) -> str:
    """The levels that propose, a token's seconds and those without speculation, and what crosses each link."""
    hardware = replace(GPU, num_devices=num_gpus, device_free_bytes=memory * 10**9)
    before = context - MAX_TOKENS
    try:
        plan = Request(config, head_of(config), Options(), hardware).plan(
            num_prompt_tokens=before, max_tokens=MAX_TOKENS
        )
    except (DoesNotFit, UsageError):
        return "does not fit"
    predicted = plan.predicted
    levels = _proposing(plan)
    link = f", {predicted.full_link_bytes / 1e9:.1f} GB" if predicted.full_link_bytes else ""
    times = f"{milliseconds(predicted.seconds_per_token)} of {milliseconds(predicted.plain_seconds_per_token)}"
    return f"{levels or 'lookups'}: {times}{link}"


def _proposing(plan: Plan) -> str:
    """The levels that propose, where a draft is the model's own next-token head."""
    return ", ".join({"draft": "head"}.get(level, level) for level in plan.composition.levels[:-1])


def stored(config: ModelConfig, form: str) -> ModelConfig:
    """The same model in llama.cpp's `form`; "": as in its config.json."""
    return in_form(config, form) if form else config


def milliseconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=120_000, metavar="TOKENS")
    context = parser.parse_args().context
    say(f"{context:,} tokens")
    lines = [HEAD, "|---" * 9 + "|"]
    for name, fields in MODELS.items():
        config = config_of(LLAMA | fields, name=name)
        lines += [row(name, config, number, context) for number in (1, 2)]
    lines += ["", HEAD, "|---" * 9 + "|"]
    for name, (fields, form) in STORED.items():
        config = stored(config_of(LLAMA | fields, name=name), form)
        lines += [row(name, config, number, context) for number in (1, 2)]
    lines += ["", STATES_HEAD, "|---" * 4 + "|"]
    for name, fields in STATES.items():
        for form in ("", "Q4_K_M"):
            lines += of_states(f"{name} {form or 'bf16'}", stored(config_of(fields, name=name), form))
    lines += ["", MIXTURES_HEAD, "|---" * 3 + "|"]
    for name, (fields, form) in MIXTURES.items():
        lines += of_mixture(name, stored(config_of(LLAMA | fields, name=name), form))
    lines += ["", MIXTURES_HEAD, "|---" * 3 + "|"]
    for name, (fields, form) in MIXTURES.items():
        if name.startswith(SHORT):
            lines += of_hosts(name, stored(config_of(LLAMA | fields, name=name), form))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
