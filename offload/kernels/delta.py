"""The gated delta rule by torch's operators, and what is held of a layer's tokens (docs/exactness.md).

Each token after the other, in fp32: a state does not depend on which tokens ran together, in a pass or in a prefill.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from offload.config.block import DeltaRule
from offload.kernels.norms import NormWeights


@dataclass(frozen=True)
class DeltaWeights:
    """The vectors of a layer's delta rule, fp32. taps: of the convolution [width, channels], oldest first. decay: by
    head, -exp(A_log). time_bias: added to the decays' inputs, by head. norm: of each head's output."""

    taps: Tensor
    decay: Tensor
    time_bias: Tensor
    norm: NormWeights


@dataclass(frozen=True)
class Held:
    """What is held of one layer's tokens. state: [heads, key_dim, value_dim] fp32, after the tokens up to some place.
    inputs: [width - 1 + M, kept] in the dtype of projected rows: without their gates, the rows of the last width - 1
    tokens before that place, then those of the tokens after it."""

    state: Tensor
    inputs: Tensor


@dataclass(frozen=True)
class Replayed:
    """The tokens between the state's place and the first new row. count: their number. there: the same, int64 [1] on
    the GPU, from where a graph reads it; None elsewhere."""

    count: int
    there: Tensor | None = None


class RunDeltaRule(Protocol):
    """The delta rule over new rows. rows: projected, [T, sum(parts)]. Returns the normed and gated output [T, out_size]
    in their dtype.

    The replayed tokens, whose rows are in `held`, bring the state to the first new row's place. settles: the state is
    then brought past the new rows, too, and their last width - 1 are what is held of them; else `held` has all of
    them, T <= M.
    """

    def __call__(
        self, delta: DeltaRule, weights: DeltaWeights, held: Held, rows: Tensor, replayed: Replayed, *, settles: bool
    ) -> Tensor: ...


def delta_rule(
    delta: DeltaRule, weights: DeltaWeights, held: Held, rows: Tensor, replayed: Replayed, *, settles: bool
) -> Tensor:
    """See `RunDeltaRule`."""
    before, count = delta.width - 1, replayed.count
    new, gates = _without_gates(delta, rows)
    for _ in _advanced(delta, weights, held.state, held.inputs[: before + count]):
        pass
    inputs = torch.cat([held.inputs[count : before + count], new])
    state = held.state if settles else held.state.clone()
    outs = zip(_advanced(delta, weights, state, inputs), gates.float(), strict=True)
    gated = [weights.norm(out).mul_(silu(gate)).flatten() for out, gate in outs]
    kept = inputs[-before:] if settles else inputs
    held.inputs[: len(kept)] = kept
    return torch.stack(gated).to(rows.dtype) if gated else rows.new_empty(0, delta.out_size)


def _without_gates(delta: DeltaRule, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Projected rows [T, sum(parts)] -> what later states depend on [T, kept], and the gates [T, heads, value_dim]."""
    mixed, gates, others = rows.split((delta.channels, delta.out_size, 2 * delta.num_heads), 1)
    return torch.cat([mixed, others], 1), gates.unflatten(1, (delta.num_heads, -1))


def _advanced(delta: DeltaRule, weights: DeltaWeights, state: Tensor, inputs: Tensor) -> Iterator[Tensor]:
    """Bring `state` past the tokens of `inputs` [width - 1 + T, kept], in place: each token's output [heads,
    value_dim]. Tensors of one token each: an operator may round a number by its place among others."""
    before, heads = delta.width - 1, delta.num_heads
    for token in range(len(inputs) - before):
        mixed, steps, times = inputs[token : token + delta.width].float().split((delta.channels, heads, heads), 1)
        q, k, v = silu((mixed * weights.taps).sum(0)).split((delta.key_size, delta.key_size, delta.out_size))
        query, key = (_for_heads(delta, each).unsqueeze(1) for each in (q, k))  # [heads, 1, key_dim]
        state *= (weights.decay * softplus(times[-1] + weights.time_bias)).exp_()[:, None, None]
        step = steps[-1].sigmoid().mul_(delta.steps).unsqueeze(1)
        update = step * (v.unflatten(0, (heads, -1)) - (key @ state).squeeze(1))
        state += key.transpose(1, 2) * update.unsqueeze(1)
        yield (query @ state).squeeze(1).mul_(delta.key_dim**-0.5)


def _for_heads(delta: DeltaRule, numbers: Tensor) -> Tensor:
    """A token's query or key [key_size], divided by its l2 norm, for each value head: [heads, key_dim]."""
    by_head = numbers.unflatten(0, (delta.num_key_heads, delta.key_dim))
    normed = by_head * (by_head.square().sum(1, keepdim=True) + delta.eps).rsqrt()
    found: Tensor = normed[list(delta.key_heads)]
    return found
