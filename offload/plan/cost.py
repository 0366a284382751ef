"""What a round costs and what it buys: the choice of gamma and draft_gamma.

Seconds per token = (inner passes * (retrieval + drafts) + full pass + refresh) / tokens per round. The constants say how
a pass's time splits (docs/log.md). Only ratios matter; nothing is measured when a request is planned.
"""

from __future__ import annotations

from dataclasses import dataclass

from offload.plan.sizing import Sizing


@dataclass(frozen=True)
class Costs:
    """Of one kind of processor."""

    layer_seconds: float  # calls of one layer, besides what its bytes cost
    streaming_layer_seconds: float  # the same over a streaming cache, which attends twice
    few_rows_bytes_per_second: float  # a pass of one or two rows over weights and cache
    block_bytes_per_second: float  # a block of rows over weights and cache
    refresh_bytes_per_second: float  # choosing and fetching, over the bytes that the retrieval cache holds


CPU = Costs(2.5e-4, 5e-4, 18e9, 10.4e9, 2.7e9)  # two cores, measured
GPU = Costs(1e-4, 1e-4, 800e9, 800e9, 50e9)  # an RTX 4090, estimated from its data sheet

_LINK_BYTES_PER_SECOND = 25e9  # where the link has no set bandwidth
_TARGET_ACCEPTANCE, _RETRIEVAL_ACCEPTANCE = 0.9, 0.5


def choose_gammas(sizing: Sizing, capacity: int) -> tuple[int, int]:
    """(gamma, draft_gamma): what the user set, else the pair with the least predicted seconds per token."""
    options = sizing.options
    if not options.speculation:
        return 0, 0
    gammas = (0, 3, 7, 15, 31) if options.gamma is None else (options.gamma,)
    drafts = (0, 1, 2, 3) if options.draft_gamma is None else (options.draft_gamma,)
    if sizing.draft is None:
        drafts = (0,)
    pairs = [(gamma, draft if gamma else 0) for gamma in gammas for draft in drafts]
    return min(pairs, key=lambda pair: seconds_per_token(sizing, capacity, *pair))


def seconds_per_token(sizing: Sizing, capacity: int, gamma: int, draft_gamma: int) -> float:
    """Predicted, over a full cache of `capacity` tokens."""
    full = _full_pass(sizing, capacity, gamma)
    if not gamma:
        return full
    costs = _costs(sizing)
    target, item = sizing.target, sizing.itemsize
    kept = sizing.budget(capacity) * target.kv_bytes_per_token(item)
    inner = target.num_layers * costs.layer_seconds + kept / costs.few_rows_bytes_per_second
    inner += target.weight_bytes(item) / _weight_bytes_per_second(sizing, costs.few_rows_bytes_per_second)
    if sizing.draft is not None:
        draft = sizing.draft.num_layers * costs.streaming_layer_seconds
        inner += draft_gamma * (draft + sizing.draft.weight_bytes(item) / costs.few_rows_bytes_per_second)
    inner_passes = gamma / _expected(_RETRIEVAL_ACCEPTANCE, draft_gamma)
    round_seconds = full + inner_passes * inner + kept / costs.refresh_bytes_per_second
    return round_seconds / _expected(_TARGET_ACCEPTANCE, gamma)


def _full_pass(sizing: Sizing, capacity: int, gamma: int) -> float:
    """Computation block by block, and behind it the cache's way over the link."""
    costs = _costs(sizing)
    target, item = sizing.target, sizing.itemsize
    blocks = -(-(gamma + 1) // sizing.rows)
    weights, cache = target.weight_bytes(item), capacity * target.kv_bytes_per_token(item)
    seconds = target.num_layers * costs.layer_seconds + blocks * (weights + cache) / costs.block_bytes_per_second
    moved = sum(size for name, size in (("weights", weights), ("kv", cache)) if name in sizing.options.offload)
    return max(seconds, moved / _link_bytes_per_second(sizing))


def _weight_bytes_per_second(sizing: Sizing, resident: float) -> float:
    return min(resident, _link_bytes_per_second(sizing)) if "weights" in sizing.options.offload else resident


def _link_bytes_per_second(sizing: Sizing) -> float:
    return sizing.options.link_gbps * 1e9 if sizing.options.link_gbps else _LINK_BYTES_PER_SECOND


def _costs(sizing: Sizing) -> Costs:
    return CPU if sizing.hardware.is_cpu else GPU


def _expected(acceptance: float, gamma: int) -> float:
    """Tokens per round with independent acceptances (Leviathan et al. 2023, equation 1)."""
    return (1 - acceptance ** (gamma + 1)) / (1 - acceptance)
