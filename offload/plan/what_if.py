"""What-if plans: a request in 16 bits, the changes of the machine under which it would fit, and well-known models on
this machine before a download."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from offload.config.model import ModelConfig, llama_shaped
from offload.config.rope import Rope
from offload.errors import DoesNotFit, UsageError
from offload.plan.cost import Prediction
from offload.plan.options import Options
from offload.plan.placement import largest
from offload.plan.planner import Plan
from offload.plan.request import Request
from offload.speed.hardware import Hardware

_GPUS = (16, 24, 32, 48, 80, 96, 141)  # GB of GPUs on the market
_MOST_HOST = 2**14  # GB

CONTEXTS = (32_768, 131_072)
MAX_TOKENS = 256  # of output for each context

# Llama 2 in its variants with 128K positions; their rope scaling changes neither bytes nor FLOPs.
_LLAMA2: dict[str, Any] = {
    "family": "llama",
    "vocab_size": 32_000,
    "max_positions": 131_072,
    "eps": 1e-5,
    "dtype": "bfloat16",
}
LLAMA2_7B = llama_shaped(
    hidden_size=4096, intermediate_size=11_008, num_layers=32, num_heads=32, num_kv_heads=32, head_dim=128, **_LLAMA2
)
LLAMA2_13B = llama_shaped(
    hidden_size=5120, intermediate_size=13_824, num_layers=40, num_heads=40, num_kv_heads=40, head_dim=128, **_LLAMA2
)
LLAMA31_8B = llama_shaped(
    hidden_size=4096, intermediate_size=14_336, num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128,
    rope=Rope("llama3", factor=8.0, original_max_positions=8192, theta=5e5), **_LLAMA2 | {"vocab_size": 128_256},
)  # fmt: skip
LLAMA_68M = llama_shaped(
    hidden_size=768, intermediate_size=3072, num_layers=2, num_heads=12, num_kv_heads=12, head_dim=64,
    **_LLAMA2 | {"max_positions": 2048, "eps": 1e-6},
)  # fmt: skip
# Name -> (target, draft).
MODELS: dict[str, tuple[ModelConfig, ModelConfig | None]] = {
    "7B": (LLAMA2_7B, LLAMA_68M),
    "13B": (LLAMA2_13B, LLAMA_68M),
    "Llama-3.1-8B": (LLAMA31_8B, None),
}


def in_16_bits(request: Request, plan: Plan, *, num_prompt_tokens: int, max_tokens: int) -> Prediction | None:
    """The prediction for the same request with 16 bits of everything; None if `plan` has no fewer bits, or if that
    would not fit."""
    placement, composition = plan.placement, plan.composition
    if min(composition.weight_bits, composition.kv_bits, placement.link_bits, placement.weight_link_bits) == 16:
        return None
    exact = replace(request, options=replace(request.options, weight_bits=16, kv_bits=16, link_bits=16))
    try:
        return exact.plan(num_prompt_tokens=num_prompt_tokens, max_tokens=max_tokens).predicted
    except DoesNotFit:
        return None


def remedies(request: Request, *, num_prompt_tokens: int, max_tokens: int) -> list[str]:
    """The smallest changes of the machine under which the tokens fit, in words for the user."""

    def fits(**changes: Any) -> bool:
        try:
            changed = replace(request, hardware=replace(request.hardware, **changes))
            return changed.fits(num_prompt_tokens=num_prompt_tokens, max_tokens=max_tokens)
        except (DoesNotFit, UsageError):  # the devices cannot share the model
            return False

    return list(_remedies(request.hardware, fits))


def _remedies(hardware: Hardware, fits: Callable[..., bool]) -> Iterator[str]:
    if not hardware.is_cpu:
        for count in (2, 4, 8):
            if count > hardware.num_devices and fits(num_devices=count):
                yield f"{count} such GPUs"
                break
        for size in _GPUS:
            if size * 1e9 > hardware.device_free_bytes and fits(device_free_bytes=int(size * 1e9)):
                yield f"{'a GPU' if hardware.num_devices == 1 else 'GPUs'} of {size} GB"
                break
    free = -(-hardware.host_free_bytes // 10**9)
    if fits(host_free_bytes=_MOST_HOST * 10**9):
        spared = largest(lambda less: fits(host_free_bytes=(_MOST_HOST - less) * 10**9), _MOST_HOST)
        least = _MOST_HOST - spared
        if least > free:
            yield f"{least} GB of free host memory"


@dataclass(frozen=True)
class Expectation:
    """The expected run of a well-known model. plan: None if the request does not fit, with the reason in `problem`."""

    model: str
    context: int
    plan: Plan | None
    problem: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"plan": self.plan and self.plan.as_dict()}


def expectations(hardware: Hardware) -> list[Expectation]:
    """The plan of each model at each length, with default options."""
    found = []
    for model, (target, draft) in MODELS.items():
        for context in CONTEXTS:
            prompt = context - MAX_TOKENS
            try:
                plan = Request(target, draft, Options(), hardware).plan(num_prompt_tokens=prompt, max_tokens=MAX_TOKENS)
            except DoesNotFit as error:
                found.append(Expectation(model, context, None, str(error)))
            else:
                found.append(Expectation(model, context, plan))
    return found
