"""Predictions for well-known models on this machine, so that it can be judged before a download."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from offload.errors import DoesNotFit
from offload.plan.config import ModelConfig
from offload.plan.hardware import Hardware
from offload.plan.planner import Options, Plan, make_plan
from offload.plan.rope_scaling import RopeScaling

CONTEXTS = (32_768, 131_072)
MAX_TOKENS = 256  # of each context

# Llama 2 in its variants with 128K positions; how they stretch them changes neither a byte nor a FLOP.
LLAMA2_7B = ModelConfig(
    family="llama",
    vocab_size=32_000,
    hidden_size=4096,
    intermediate_size=11_008,
    num_layers=32,
    num_heads=32,
    num_kv_heads=32,
    head_dim=128,
    max_positions=131_072,
    rms_norm_eps=1e-5,
    rope_theta=1e4,
    dtype="bfloat16",
)
LLAMA2_13B = replace(
    LLAMA2_7B, hidden_size=5120, intermediate_size=13_824, num_layers=40, num_heads=40, num_kv_heads=40
)
LLAMA31_8B = replace(
    LLAMA2_7B,
    vocab_size=128_256,
    intermediate_size=14_336,
    num_kv_heads=8,
    rope_theta=5e5,
    rope=RopeScaling("llama3", factor=8.0, original_max_positions=8192),
)
LLAMA_68M = replace(
    LLAMA2_7B,
    hidden_size=768,
    intermediate_size=3072,
    num_layers=2,
    num_heads=12,
    num_kv_heads=12,
    head_dim=64,
    max_positions=2048,
    rms_norm_eps=1e-6,
)
# Name -> (target, draft).
MODELS: dict[str, tuple[ModelConfig, ModelConfig | None]] = {
    "7B": (LLAMA2_7B, LLAMA_68M),
    "13B": (LLAMA2_13B, LLAMA_68M),
    "Llama-3.1-8B": (LLAMA31_8B, None),
}


@dataclass(frozen=True)
class Expectation:
    """`plan` is None where the request does not fit, and `problem` says why."""

    model: str
    context: int
    plan: Plan | None
    problem: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"plan": self.plan and self.plan.as_dict()}


def expectations(hardware: Hardware) -> list[Expectation]:
    """Each model at each length, as the planner would run it with nothing but defaults."""
    return list(_expectations(hardware))


def _expectations(hardware: Hardware) -> Iterator[Expectation]:
    for model, (target, draft) in MODELS.items():
        for context in CONTEXTS:
            prompt = context - MAX_TOKENS
            try:
                plan = make_plan(target, draft, Options(), hardware, num_prompt_tokens=prompt, max_tokens=MAX_TOKENS)
            except DoesNotFit as error:
                yield Expectation(model, context, None, str(error))
            else:
                yield Expectation(model, context, plan)
