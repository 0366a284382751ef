"""The gated delta rule by torch's operators, see `kernels.recurrence`.

Each token after the other, in fp32: a state does not depend on which tokens ran together, in a pass or in a prefill.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from offload.config.block import DeltaRule
from offload.kernels.recurrence import Held, RecurrenceWeights, Replayed


def delta_rule(
    delta: DeltaRule, weights: RecurrenceWeights, held: Held, rows: Tensor, replayed: Replayed, *, settles: bool
) -> Tensor:
    """`RunRecurrence` by torch's operators, one token after the other, in fp32."""
    assert weights.norm is not None
    before, count = delta.width - 1, replayed.count
    new, gates = _without_gates(delta, rows)
    for _ in _advanced(delta, weights, held.state, held.inputs[: before + count]):
        pass
    inputs = torch.cat([held.inputs[count : before + count], new])
    state = held.state if settles else held.state.clone()
    outs = list(_advanced(delta, weights, state, inputs))
    out = torch.stack(outs) if outs else rows.new_empty(0, delta.num_heads, delta.value_dim, dtype=torch.float32)
    kept = inputs[-before:] if settles else inputs
    held.inputs[: len(kept)] = kept
    return weights.norm(out).mul_(_silu(gates.float())).flatten(1).to(rows.dtype)


def _without_gates(delta: DeltaRule, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Projected rows [T, sum(parts)] -> what later states depend on [T, kept], and the gates [T, heads, value_dim]."""
    mixed, gates, others = rows.split((delta.channels, delta.out_size, 2 * delta.num_heads), 1)
    return torch.cat([mixed, others], 1), gates.unflatten(1, (delta.num_heads, -1))


def _advanced(delta: DeltaRule, weights: RecurrenceWeights, state: Tensor, inputs: Tensor) -> Iterator[Tensor]:
    """Bring `state` past the tokens of `inputs` [width - 1 + T, kept], in place: each token's output [heads,
    value_dim]."""
    assert weights.decay is not None
    assert weights.time_bias is not None
    count, (heads, key_dim, value_dim) = len(inputs) - delta.width + 1, delta.state_shape
    mixed, steps, times = inputs.float().split((delta.channels, heads, heads), 1)
    taken = torch.zeros_like(mixed[:count])
    for tap, weight in enumerate(weights.taps):
        taken += mixed[tap : tap + count] * weight
    q, k, v = _silu(taken).split((delta.key_size, delta.key_size, delta.out_size), 1)
    queries = _for_heads(delta, q).mul_(key_dim**-0.5)
    keys, values = _for_heads(delta, k), v.unflatten(1, (heads, value_dim))
    steps = (delta.steps / _grown(steps[delta.width - 1 :])).unsqueeze(2)
    times = times[delta.width - 1 :] + weights.time_bias
    decays = (weights.decay * _softplus(times)).exp_()[:, :, None, None]
    for token in range(count):
        query, key = queries[token].unsqueeze(1), keys[token].unsqueeze(1)  # [heads, 1, key_dim]
        state *= decays[token]
        update = steps[token] * (values[token] - (key @ state).squeeze(1))
        state += key.transpose(1, 2) * update.unsqueeze(1)
        yield (query @ state).squeeze(1)


def _for_heads(delta: DeltaRule, rows: Tensor) -> Tensor:
    """Queries or keys [T, key_size], divided by their l2 norm, for each value head: [T, heads, key_dim]."""
    by_head = rows.unflatten(1, (delta.num_key_heads, delta.key_dim))
    normed: Tensor = by_head * (by_head.square().sum(2, keepdim=True) + delta.eps).rsqrt()
    return normed.index_select(1, torch.tensor(delta.key_heads, device=rows.device))


# Not torch's own functions, which round the last numbers of a tensor differently: bits would depend on its size.


def _grown(x: Tensor) -> Tensor:
    """1 + e^-x."""
    return x.neg().exp_().add_(1)


def _silu(x: Tensor) -> Tensor:
    return x / _grown(x)


def _softplus(x: Tensor) -> Tensor:
    return x.clamp(min=0).add_(x.abs().neg_().exp_().log1p_())
