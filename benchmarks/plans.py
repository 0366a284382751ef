"""Plans for models that people with one or two 24 GB GPUs run over long texts: bytes by place, milliseconds a token.

usage: python benchmarks/plans.py [--context 120000]

Prints the table of docs/memory.md. Nothing is measured: GPUs are RTX 4090s by their typical rates, with 128 GB of host
memory, and the models' shapes those of their published config.json files.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from report import say

from offload.config.model import ModelConfig
from offload.config.reading import config_of
from offload.errors import DoesNotFit, UsageError
from offload.plan.hardware import RTX_4090, Hardware
from offload.plan.planner import Options, make_plan

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
HEAD = (
    "| | weights, cache propose in | of the tokens | on each GPU | on the host | crosses each link | acceptance "
    "| a token | without speculation |"
)


def row(name: str, config: ModelConfig, num_gpus: int, context: int) -> str:
    title = f"{name}, {'one GPU' if num_gpus == 1 else f'{num_gpus} GPUs'}"
    hardware = replace(GPU, num_devices=num_gpus)
    try:
        plan = make_plan(
            config, None, Options(), hardware, num_prompt_tokens=context - MAX_TOKENS, max_tokens=MAX_TOKENS
        )
    except (DoesNotFit, UsageError) as error:
        return f"| {title} | {error} |" + " |" * 7
    composition, predicted = plan.composition, plan.predicted
    return " | ".join(
        (
            f"| {title}",
            f"{composition.weight_bits}, {composition.kv_bits} bits",
            f"{composition.budget:,}" if composition.budget else "all",
            f"{plan.placement.total_device_bytes / 1e9:.1f} GB",
            f"{plan.placement.total_host_bytes / 1e9:.1f} GB",
            f"{predicted.full_link_bytes / 1e9:.1f} GB",
            f"{predicted.acceptance:.3f}".lstrip("0"),
            milliseconds(predicted.seconds_per_token),
            f"{milliseconds(predicted.plain_seconds_per_token)} |",
        )
    )


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
    print("\n".join(lines))


if __name__ == "__main__":
    main()
