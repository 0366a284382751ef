"""Mamba-2 by torch's operators, see `kernels.recurrence`: each token after the other, in fp32, as `kernels.delta`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from torch import Tensor

from offload.config.mixers import Mamba2
from offload.kernels.delta import by_tokens, convolved, for_heads
from offload.kernels.exponentials import silu, softplus
from offload.kernels.recurrence import Held, RecurrenceWeights, Replayed


def mamba2(
    mamba: Mamba2, weights: RecurrenceWeights, held: Held, rows: Tensor, replayed: Replayed, *, settles: bool
) -> Tensor:
    """`RunRecurrence` by torch's operators, one token after the other, in fp32."""
    out, gates = by_tokens(mamba, partial(_advanced, mamba, weights), held, rows, replayed, settles=settles)
    out = out.mul_(silu(gates)).flatten(1)
    if weights.norm is not None:
        parts = out.unflatten(1, (mamba.num_key_heads, -1))
        scales = (parts.square().mean(2, keepdim=True) + weights.norm.norm.eps).rsqrt()
        out = (parts * scales).flatten(1) * weights.norm.weight
    return out.to(rows.dtype)


def _advanced(mamba: Mamba2, weights: RecurrenceWeights, state: Tensor, inputs: Tensor) -> Iterator[Tensor]:
    """Bring `state` past the tokens of `inputs` [width - 1 + T, kept], in place: each token's output [heads,
    value_dim]."""
    assert weights.decay is not None
    assert weights.time_bias is not None
    assert weights.skip is not None
    q, k, v, (times,) = convolved(mamba, weights, inputs)
    queries, keys, values = for_heads(mamba, q), for_heads(mamba, k), v.unflatten(1, (mamba.num_heads, -1))
    steps = softplus(times + weights.time_bias)
    decays, skip = (weights.decay * steps).exp_()[:, :, None, None], weights.skip.unsqueeze(1)
    for token, value in enumerate(values):
        query, key = queries[token].unsqueeze(1), keys[token].unsqueeze(1)  # [heads, 1, key_dim]
        state *= decays[token]
        state += key.transpose(1, 2) * (steps[token].unsqueeze(1) * value).unsqueeze(1)
        yield (query @ state).squeeze(1) + skip * value
