"""The gated delta rule by torch's operators, see `kernels.recurrence`.

Each token after the other, in fp32: a state does not depend on which tokens ran together, in a pass or in a prefill.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from offload.config.mixers import DeltaRule, HeadStates
from offload.kernels.exponentials import grown, sigmoid, silu, softplus
from offload.kernels.recurrence import Held, RecurrenceWeights, Replayed

Advance = Callable[[Tensor, Tensor], Iterator[Tensor]]  # a state past inputs, in place: each token's output


def delta_rule(
    delta: DeltaRule, weights: RecurrenceWeights, held: Held, rows: Tensor, replayed: Replayed, *, settles: bool
) -> Tensor:
    """`RunRecurrence` by torch's operators, one token after the other, in fp32."""
    out, gates = by_tokens(delta, partial(_advanced, delta, weights), held, rows, replayed, settles=settles)
    assert weights.norm is not None
    factors = silu(gates) if delta.gate == "silu" else sigmoid(gates)
    return weights.norm(out).mul_(factors).flatten(1).to(rows.dtype)


def by_tokens(
    states: HeadStates, advanced: Advance, held: Held, rows: Tensor, replayed: Replayed, *, settles: bool
) -> tuple[Tensor, Tensor]:
    """Bring `held` past the rows: (their outputs, their gates), fp32 [T, heads, value_dim]. advanced: see `Advance`."""
    before, count = states.width - 1, replayed.count
    new, gates = _without_gates(states, rows)
    for _ in advanced(held.state, held.inputs[: before + count]):
        pass
    inputs = torch.cat([held.inputs[count : before + count], new])
    state = held.state if settles else held.state.clone()
    outs = list(advanced(state, inputs))
    out = torch.stack(outs) if outs else rows.new_empty(0, states.num_heads, states.value_dim, dtype=torch.float32)
    kept = inputs[-before:] if settles else inputs
    held.inputs[: len(kept)] = kept
    return out, gates.float()


def _without_gates(states: HeadStates, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Projected rows [T, sum(parts)] -> what later states depend on [T, kept], and the gates [T, heads, value_dim]."""
    mixed, gates, others = rows.split((states.channels, states.out_size, sum(states.rates)), 1)
    return torch.cat([mixed, others], 1), gates.unflatten(1, (states.num_heads, -1))


def _advanced(delta: DeltaRule, weights: RecurrenceWeights, state: Tensor, inputs: Tensor) -> Iterator[Tensor]:
    """Bring `state` past the tokens of `inputs` [width - 1 + T, kept], in place: each token's output [heads,
    value_dim]."""
    assert weights.decay is not None
    assert weights.time_bias is not None
    q, k, v, (steps, times) = convolved(delta, weights, inputs)
    queries = _normed(delta, q).mul_(delta.key_dim**-0.5)
    keys, values = _normed(delta, k), v.unflatten(1, (delta.num_heads, -1))
    steps = (delta.steps / grown(steps)).unsqueeze(2)
    decays = _decays(delta, weights.decay, times + weights.time_bias)
    for token in range(len(values)):
        query, key = queries[token].unsqueeze(1), keys[token].unsqueeze(1)  # [heads, 1, key_dim]
        state *= decays[token]
        update = steps[token] * (values[token] - (key @ state).squeeze(1))
        state += key.transpose(1, 2) * update.unsqueeze(1)
        yield (query @ state).squeeze(1)


def _decays(delta: DeltaRule, rates: Tensor, times: Tensor) -> Tensor:
    """The factors of states [T, heads, 1 or key_dim, 1]. rates: -exp(A_log), by head. times: [T, num_times], with their
    bias."""
    by_head, rates = times.unflatten(1, (delta.num_heads, -1)), rates[:, None]
    logs = rates * softplus(by_head) if delta.least is None else delta.least * sigmoid(by_head * -rates)
    return logs.exp_().unsqueeze(3)


def convolved(
    states: HeadStates, weights: RecurrenceWeights, inputs: Tensor
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
    """The activated convolution of the tokens of inputs [width - 1 + T, kept]: queries, keys [T, key_size] and values
    [T, out_size]; and the parts from which steps and decays follow. All in fp32."""
    count = len(inputs) - states.width + 1
    mixed, *others = inputs.float().split((states.channels, *states.rates), 1)
    taken = torch.zeros_like(mixed[:count])
    taken = taken if weights.taps_bias is None else taken + weights.taps_bias
    for tap, weight in enumerate(weights.taps):
        taken += mixed[tap : tap + count] * weight
    q, k, v = silu(taken).split((states.key_size, states.key_size, states.out_size), 1)
    return q, k, v, tuple(each[states.width - 1 :] for each in others)


def for_heads(states: HeadStates, rows: Tensor) -> Tensor:
    """Queries or keys [T, key_size] for each value head: [T, heads, key_dim]."""
    by_head = rows.unflatten(1, (states.num_key_heads, states.key_dim))
    found: Tensor = by_head.index_select(1, torch.tensor(states.key_heads, device=rows.device))
    return found


def _normed(delta: DeltaRule, rows: Tensor) -> Tensor:
    """`for_heads` of queries or keys divided by their l2 norm."""
    by_head = rows.unflatten(1, (delta.num_key_heads, delta.key_dim))
    return for_heads(delta, (by_head * (by_head.square().sum(2, keepdim=True) + delta.eps).rsqrt()).flatten(1))
