"""What a round costs and what it buys: the choice of gamma and draft_gamma.

Seconds per token = (inner passes * (retrieval + drafts) + full pass) / tokens per round. The constants say how a pass's
time splits on a CPU with two cores (docs/log.md). Only ratios matter; nothing is measured when a request is planned.
"""

from __future__ import annotations

from offload.plan.sizing import ROWS, Sizing

_LAYER_SECONDS = 3.5e-4  # calls and products of one layer, besides what its bytes cost
_CPU_BYTES_PER_SECOND = 15e9
_GPU_BYTES_PER_SECOND = 800e9
_BLOCK_COST = 2.2  # reading the full cache for a block of rows, over reading it for one row, on a CPU
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
    return min(((g, d) for g in gammas for d in drafts), key=lambda pair: _seconds_per_token(sizing, capacity, *pair))


def _seconds_per_token(sizing: Sizing, capacity: int, gamma: int, draft_gamma: int) -> float:
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
