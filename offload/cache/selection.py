"""Which chunks of the full cache the retrieval cache holds: pure functions of scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import max_pool1d

Rule = Literal["mass", "published"]


@dataclass(frozen=True)
class Selection:
    """How chunks are scored, and when.

    rule "mass": by the softmax mass that the rows of the last verification put on them, anew after each verification,
    with forward dilation. Rule "published" (TriForce, arXiv 2404.11912, section 4.2): by the dot product of each
    chunk's mean key with the last prompt query, once.
    dilation, reach: a chunk also gets `dilation` times the best score among the chunks that cover the `reach` tokens
    before it: where the model copies, attention moves forward through its source while a block is drafted.
    """

    rule: Rule = "mass"
    dilation: float = 0.5
    reach: int = 16


def dilate(scores: Tensor, *, weight: float, num_chunks: int) -> Tensor:
    """scores [..., C] -> [..., C]: the larger of a chunk's own and `weight` times the best of `num_chunks` before."""
    if weight == 0.0 or num_chunks == 0:
        return scores
    flat = scores.reshape(-1, 1, scores.shape[-1])
    padded = torch.nn.functional.pad(flat, (num_chunks, -1))
    return torch.maximum(scores, weight * max_pool1d(padded, num_chunks, stride=1).reshape(scores.shape))


def choose(scores: Tensor, num_chosen: int) -> Tensor:
    """scores [L, H_kv, C] -> bool, the same shape: in each row the `num_chosen` best, chunk 0 (the sinks) always."""
    if num_chosen >= scores.shape[-1]:
        return torch.ones_like(scores, dtype=torch.bool)
    scores = scores.clone()
    scores[..., 0] = torch.inf
    best = scores.topk(num_chosen, -1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True)
