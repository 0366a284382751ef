"""Heads of attention: norms of queries and keys over all heads together, including those of other ranks; gates."""

from __future__ import annotations

import torch
from torch import Tensor

from offload.config.block import Attention
from offload.config.model import ModelConfig
from offload.kernels.norms import norm_over
from offload.model.sums import Sums
from offload.weights.layout import LayerWeights


def norms_over_ranks(config: ModelConfig, sums: Sums) -> bool:
    """Whether queries and keys are normed over heads of several ranks."""
    return config.block.attention.norms_whole and sums.size > 1


def normed_over_ranks(q: Tensor, k: Tensor, weights: LayerWeights, sums: Sums) -> tuple[Tensor, Tensor]:
    """q [T, H * D] and k [T, H_kv * D] of this rank's heads -> the same shapes, normed over all ranks' heads. KV heads
    may be replicated: every KV head is then on the same number of ranks, so the mean is unchanged."""
    assert weights.q_norm is not None
    assert weights.k_norm is not None
    squares = sums.total(torch.stack([part.float().square().sum(1) for part in (q, k)], 1))
    return (
        norm_over(q, weights.q_norm, squares[:, :1], sums.size * q.shape[1]),
        norm_over(k, weights.k_norm, squares[:, 1:], sums.size * k.shape[1]),
    )


def gated_heads(attended: Tensor, gate: Tensor, attention: Attention) -> Tensor:
    """The output of heads times the sigmoid of their gate: [T, H * D] and [T, gate_size] -> [T, H * D]."""
    if not attention.gates_heads:
        return attended * gate.sigmoid()
    by_head: Tensor = attended.unflatten(1, (-1, attention.head_dim)) * gate.sigmoid().unsqueeze(2)
    return by_head.flatten(1)
