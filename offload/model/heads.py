"""Heads of an attention: norms of queries and keys over those of all ranks, gates of their output, and heads of its
indexer."""

from __future__ import annotations

import torch
from torch import Tensor

from offload.config.mixers import Attention, Indexer
from offload.config.model import ModelConfig
from offload.kernels.norms import norm_over, normed_heads
from offload.kernels.pooled import IndexRows
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


def index_rows(
    indexer: Indexer, weights: LayerWeights, queries: Tensor, key: Tensor, real: Tensor | None = None
) -> IndexRows:
    """The index rows of projected queries [T, H_i * D_i] and of keys [T, D_i]. real: see `IndexRows`."""
    assert weights.index_q_norm is not None
    assert weights.index_k_norm is not None
    q = normed_heads(queries, weights.index_q_norm, indexer.head_dim)
    return IndexRows(q.unflatten(1, (indexer.num_heads, -1)), key, weights.index_k_norm, real)


def gated_heads(attention: Attention, attended: Tensor, gate: Tensor) -> Tensor:
    """The heads' output [T, H * D] times the rounded function of the gate's rows, [T, H * D] or of each head [T, H]."""
    opened = gate.sigmoid() if attention.gate_function == "sigmoid" else _softplus(gate)
    if not attention.gates_heads:
        return attended * opened
    heads: Tensor = attended.unflatten(1, (attention.num_heads, -1))
    return (heads * opened.unsqueeze(2)).flatten(1)


def _softplus(x: Tensor) -> Tensor:
    """log(1 + e^x), in fp32 and rounded. torch's own gives the last numbers of a tensor other bits than the same ones
    before."""
    wide = x.float()
    return ((-wide.abs()).exp().log1p() + wide.clamp_min(0)).to(x.dtype)
