"""A request is planned once, by arithmetic alone, into a frozen `Plan`; the engine is built from it and nothing else.

Planning is deterministic: the same request on the same kind of machine gives the same plan, and so the same seed gives
the same text. Nothing here is measured at run time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from offload.errors import DoesNotFit, UsageError
from offload.plan.config import ModelConfig
from offload.plan.cost import choose_gammas
from offload.plan.hardware import Hardware
from offload.plan.options import PAGE_TOKENS, Options
from offload.plan.sizing import WALK, Sizing

__all__ = ["Options", "Plan", "make_plan"]

LevelName = Literal["draft", "retrieval", "target"]

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All decisions for one request. Bytes by purpose, per tier; tokens unless the name says otherwise."""

    device: str
    device_name: str
    dtype: str
    num_prompt_tokens: int
    max_tokens: int
    capacity: int  # tokens that the caches are made for
    levels: tuple[LevelName, ...]  # bottom to top
    gamma: int
    draft_gamma: int
    rows: int
    walk: int
    page_tokens: int
    tile_tokens: int
    budget: int
    chunk: int
    selection: str
    sinks: int
    window: int
    offload: tuple[str, ...]
    link_bytes_per_second: float | None
    device_bytes: dict[str, int]
    host_bytes: dict[str, int]
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def make_plan(
    target: ModelConfig,
    draft: ModelConfig | None,
    options: Options,
    hardware: Hardware,
    *,
    num_prompt_tokens: int,
    max_tokens: int,
) -> Plan:
    """Raises DoesNotFit where the context or the memory is too small, with what would fit."""
    notes: list[str] = []
    capacity, max_tokens = _fit_context(target, options, num_prompt_tokens, max_tokens, notes)
    sizing = Sizing(target, draft, options, hardware, _dtype(target, options, hardware))
    _check_memory(sizing, capacity, num_prompt_tokens)
    gamma, draft_gamma = choose_gammas(sizing, capacity)
    levels: tuple[LevelName, ...] = ("target",)
    if gamma:
        levels = ("draft", "retrieval", "target") if draft_gamma else ("retrieval", "target")
    device_bytes, host_bytes = sizing.bytes(capacity, gamma, draft_gamma)
    return Plan(
        device=hardware.device,
        device_name=hardware.device_name,
        dtype=sizing.dtype,
        num_prompt_tokens=num_prompt_tokens,
        max_tokens=max_tokens,
        capacity=capacity,
        levels=levels,
        gamma=gamma,
        draft_gamma=draft_gamma,
        rows=sizing.rows,
        walk=WALK,
        page_tokens=PAGE_TOKENS,
        tile_tokens=sizing.tile_tokens(capacity),
        budget=sizing.budget(capacity),
        chunk=sizing.chunk,
        selection=options.selection,
        sinks=options.sinks,
        window=options.window,
        offload=tuple(sorted(options.offload)),
        link_bytes_per_second=options.link_gbps * 1e9 if options.link_gbps else None,
        device_bytes=device_bytes,
        host_bytes=host_bytes,
        notes=tuple(notes),
    )


def _fit_context(
    target: ModelConfig, options: Options, num_prompt_tokens: int, max_tokens: int, notes: list[str]
) -> tuple[int, int]:
    """(capacity, max_tokens) in tokens: room for the prompt and the output within the context."""
    limit = target.context_limit
    context = options.context or limit
    if context > limit:
        raise DoesNotFit(
            f"context {context} is asked for and the model's limit is {limit} tokens; try --context {limit}"
        )
    if num_prompt_tokens == 0:
        raise UsageError("the prompt is empty; give at least one character")
    if num_prompt_tokens >= context:
        whose = "--context" if options.context else "the model's limit"
        raise DoesNotFit(
            f"the prompt has {num_prompt_tokens} tokens and {whose} is {context}; with --max-tokens {max_tokens} "
            f"at most {max(context - max_tokens, 1)} prompt tokens fit: shorten the prompt"
            + (f" or raise --context (up to {limit})" if options.context and options.context < limit else "")
        )
    room = context - num_prompt_tokens
    if max_tokens > room:
        notes.append(f"--max-tokens {max_tokens} cut to {room}: the context of {context} tokens ends there")
    max_tokens = min(max_tokens, room)
    return num_prompt_tokens + max_tokens, max_tokens


def _dtype(target: ModelConfig, options: Options, hardware: Hardware) -> str:
    if options.dtype != "auto":
        return options.dtype
    if hardware.is_cpu:  # fp16 products are far slower than both on CPUs
        return "bf16" if hardware.fast_bf16 and target.dtype != "float32" else "fp32"
    return {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}[target.dtype]


def _check_memory(sizing: Sizing, capacity: int, num_prompt_tokens: int) -> None:
    """Raise DoesNotFit, with the largest context that would fit, where a tier is too small."""
    hardware = sizing.hardware

    def missing(tokens: int) -> str | None:
        device, host = (sum(tier.values()) for tier in sizing.bytes(tokens, *choose_gammas(sizing, tokens)))
        tiers = [("memory", device + host, hardware.host_free_bytes)]
        if not hardware.is_cpu:
            tiers = [
                ("device memory", device, hardware.device_free_bytes),
                ("host memory", host, hardware.host_free_bytes),
            ]
        for name, needed, free in tiers:
            if needed > free:
                return f"{needed / GIB:.1f} GiB of {name}, {free / GIB:.1f} GiB are free"
        return None

    if (short := missing(capacity)) is None:
        return
    fits = _largest(lambda tokens: missing(tokens) is None, capacity)
    remedy = f"the largest context that fits is {fits} tokens" if fits else "not even one token of context fits"
    if not hardware.is_cpu and sizing.options.offload != {"weights", "kv"}:
        remedy += "; --offload weights,kv moves them to the host"
    raise DoesNotFit(f"a context of {capacity} tokens ({num_prompt_tokens} of prompt) needs {short}; {remedy}")


def _largest(fits: Callable[[int], bool], limit: int) -> int:
    """The largest number up to `limit` that fits, by bisection; 0 for none."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
