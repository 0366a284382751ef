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
from offload.plan.hardware import Hardware

LevelName = Literal["draft", "retrieval", "target"]

PAGE_TOKENS = 512
ROWS = 16
WALK = 512
DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a user may ask for; None and "auto" leave the choice to the plan. Tokens and GB/s (1e9 bytes)."""

    context: int | None = None
    budget: int | None = None
    chunk: int | None = None
    gamma: int | None = None
    draft_gamma: int | None = None
    sinks: int = 16
    window: int = 240
    device: str = "auto"
    dtype: str = "auto"
    offload: frozenset[str] = frozenset()
    link_gbps: float | None = None
    speculation: bool = True
    selection: str = "mass"

    def __post_init__(self) -> None:
        _within("context", self.context, 2, 2**24)
        _within("budget", self.budget, 1, 2**24)
        _within("chunk", self.chunk, 1, PAGE_TOKENS)
        _within("gamma", self.gamma, 0, 255)
        _within("draft-gamma", self.draft_gamma, 0, 64)
        _within("sinks", self.sinks, 0, 4096)
        _within("window", self.window, 1, 2**20)
        if self.chunk is not None and PAGE_TOKENS % self.chunk:
            raise UsageError(f"chunk is {self.chunk}, it must be a power of two up to {PAGE_TOKENS}")
        if self.dtype not in ("auto", *DTYPE_BYTES):
            raise UsageError(f"dtype is {self.dtype!r}, it must be auto, bf16, fp16 or fp32")
        if not self.offload <= {"weights", "kv"}:
            unknown = ", ".join(sorted(self.offload - {"weights", "kv"}))
            raise UsageError(f"offload names {unknown}; it may name weights and kv")
        if self.link_gbps is not None and not 0.001 <= self.link_gbps <= 10_000:
            raise UsageError(f"link-gbps is {self.link_gbps}, it must be from 0.001 to 10000 GB/s")
        if self.link_gbps is not None and not self.offload:
            raise UsageError("link-gbps paces a link and nothing is offloaded; add --offload weights,kv")
        if self.selection not in ("mass", "published"):
            raise UsageError(f"selection is {self.selection!r}, it must be mass or published")


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
    sizing = _Sizing(target, draft, options, hardware, _dtype(target, options, hardware))
    _check_memory(sizing, capacity, num_prompt_tokens)
    chunk, budget = sizing.chunk, sizing.budget(capacity)
    gamma, draft_gamma = _choose_gammas(sizing, capacity)
    levels: tuple[LevelName, ...] = ("target",)
    if gamma:
        levels = ("draft", "retrieval", "target") if draft is not None and draft_gamma else ("retrieval", "target")
    device_bytes, host_bytes = sizing.bytes(capacity)
    return Plan(
        device=hardware.device,
        device_name=hardware.device_name,
        dtype=sizing.dtype,
        num_prompt_tokens=num_prompt_tokens,
        max_tokens=max_tokens,
        capacity=capacity,
        levels=levels,
        gamma=gamma,
        draft_gamma=draft_gamma if "draft" in levels else 0,
        rows=ROWS,
        walk=WALK,
        page_tokens=PAGE_TOKENS,
        tile_tokens=sizing.tile_tokens(capacity),
        budget=budget,
        chunk=chunk,
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


@dataclass(frozen=True)
class _Sizing:
    """Bytes of everything, as functions of the capacity."""

    target: ModelConfig
    draft: ModelConfig | None
    options: Options
    hardware: Hardware
    dtype: str

    @property
    def chunk(self) -> int:
        return self.options.chunk or 16

    @property
    def itemsize(self) -> int:
        return DTYPE_BYTES[self.dtype]

    def budget(self, capacity: int) -> int:
        """Retrieved tokens per layer: a 32nd of the context and at least 512 (docs/log.md), whole chunks."""
        wanted = self.options.budget or max(512, capacity // 32)
        return max(min(wanted, capacity) // self.chunk, 1) * self.chunk

    def tile_tokens(self, capacity: int) -> int:
        """About eight tiles a layer, from one page to eight: few calls, and little work on empty slots."""
        tokens = PAGE_TOKENS
        while tokens < 8 * PAGE_TOKENS and tokens * 16 <= capacity:
            tokens *= 2
        return tokens

    def kv_bytes(self, capacity: int) -> int:
        """The full cache: whole tiles, with room for a block of padded rows."""
        tile = self.tile_tokens(capacity)
        tiles = -(-(capacity + self.max_rows) // tile)
        return tiles * tile * self.target.kv_bytes_per_token(self.itemsize)

    @property
    def max_rows(self) -> int:
        gamma = self.options.gamma if self.options.gamma is not None else MAX_GAMMA
        return -(-(gamma + 1) // ROWS) * ROWS

    def bytes(self, capacity: int) -> tuple[dict[str, int], dict[str, int]]:
        """(device, host): bytes by purpose."""
        target, item, tile = self.target, self.itemsize, self.tile_tokens(capacity)
        device: dict[str, int] = {}
        host: dict[str, int] = {}
        layers = target.num_layers * target.layer_weight_bytes(item)
        (host if "weights" in self.options.offload else device)["target layers"] = layers
        device["embeddings"] = target.weight_bytes(item) - layers
        (host if "kv" in self.options.offload else device)["full cache"] = self.kv_bytes(capacity)
        per_layer = target.kv_bytes_per_token(item) // target.num_layers
        if "weights" in self.options.offload:
            device["weight staging"] = 2 * target.layer_weight_bytes(item)
        if "kv" in self.options.offload:
            device["kv staging"] = 2 * tile * per_layer
            device["prefill tiles"] = self.kv_bytes(capacity) // target.num_layers
        device["hidden rows"] = capacity * target.hidden_size * item
        device["block of rows"] = WALK * (3 * target.intermediate_size + 6 * target.hidden_size) * item
        if self.options.speculation:
            device["retrieval cache"] = (self.budget(capacity) + 2 * PAGE_TOKENS) * target.kv_bytes_per_token(item)
        if self.draft is not None and self.options.speculation:
            device["draft"] = self.draft.weight_bytes(item) + (
                self.options.sinks + 2 * (self.options.window + 512)
            ) * self.draft.kv_bytes_per_token(item)
        return device, host


def _check_memory(sizing: _Sizing, capacity: int, num_prompt_tokens: int) -> None:
    """Raise DoesNotFit, with the largest context that would fit, where a tier is too small."""
    hardware = sizing.hardware

    def missing(tokens: int) -> str | None:
        device, host = (sum(tier.values()) for tier in sizing.bytes(tokens))
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


# Cost model for the choice of gammas, in seconds (numbers.md: cost model). The constants say how a pass's time splits
# on a CPU with two cores (docs/log.md); only ratios matter.
MAX_GAMMA = 31
_LAYER_SECONDS = 2.5e-4  # calls and products of one layer, besides what its bytes cost
_CPU_BYTES_PER_SECOND = 20e9
_GPU_BYTES_PER_SECOND = 800e9
_BLOCK_COST = 2.5  # reading the full cache for a block of rows, over reading it for one row, on a CPU
_LINK_BYTES_PER_SECOND = 25e9  # where the link has no set bandwidth
_TARGET_ACCEPTANCE, _RETRIEVAL_ACCEPTANCE = 0.9, 0.45


def _choose_gammas(sizing: _Sizing, capacity: int) -> tuple[int, int]:
    """(gamma, draft_gamma): what the user set, else the pair with the least predicted seconds per token."""
    options = sizing.options
    if not options.speculation:
        return 0, 0
    gammas = (0, 3, 7, 15, 31) if options.gamma is None else (options.gamma,)
    drafts = (0, 1, 2, 3) if options.draft_gamma is None else (options.draft_gamma,)
    if sizing.draft is None:
        drafts = (0,)
    return min(((g, d) for g in gammas for d in drafts), key=lambda pair: _seconds_per_token(sizing, capacity, *pair))


def _seconds_per_token(sizing: _Sizing, capacity: int, gamma: int, draft_gamma: int) -> float:
    target, item, options = sizing.target, sizing.itemsize, sizing.options
    bandwidth = _CPU_BYTES_PER_SECOND if sizing.hardware.is_cpu else _GPU_BYTES_PER_SECOND
    link = options.link_gbps * 1e9 if options.link_gbps else _LINK_BYTES_PER_SECOND
    weights, cache = target.weight_bytes(item), capacity * target.kv_bytes_per_token(item)
    kept = sizing.budget(capacity) * target.kv_bytes_per_token(item)
    weight_seconds = weights / (link if "weights" in options.offload else bandwidth)
    blocks = -(-(gamma + 1) // ROWS)
    compute = cache * (_BLOCK_COST if sizing.hardware.is_cpu else 1.0) * blocks / bandwidth
    full = weight_seconds + max(compute, cache / link if "kv" in options.offload else 0.0)
    inner = weight_seconds + kept / bandwidth
    overhead = target.num_layers * _LAYER_SECONDS
    draft = 0.0
    if sizing.draft is not None:
        draft = sizing.draft.num_layers * _LAYER_SECONDS + sizing.draft.weight_bytes(item) / bandwidth
    per_inner = _expected(_RETRIEVAL_ACCEPTANCE, draft_gamma)
    inner_passes = gamma / per_inner
    round_seconds = full + overhead * blocks + inner_passes * (inner + overhead + draft_gamma * draft)
    return round_seconds / _expected(_TARGET_ACCEPTANCE, gamma)


def _expected(acceptance: float, gamma: int) -> float:
    """Tokens per round with independent acceptances (Leviathan et al. 2023, equation 1)."""
    return (1 - acceptance ** (gamma + 1)) / (1 - acceptance)


def _within(name: str, value: int | None, least: int, most: int) -> None:
    if value is not None and not least <= value <= most:
        raise UsageError(f"{name} is {value}, it must be from {least} to {most}")
