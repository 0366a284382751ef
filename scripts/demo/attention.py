"""Causal attention for training on a CPU.

PyTorch's fused CPU kernel leaves most of the machine idle in the backward pass.  Two routes replace it: up to
`SHORT` positions, plain block-wise matrix products compiled as one piece (about 2.5 times as fast); beyond, the same
products with the scores recomputed in the backward pass (about twice as fast, and memory stays linear in length).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

SHORT = 2048  # positions


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention on [batch, heads, length, head_dim]."""
    if q.shape[2] <= SHORT:
        return attend_short(q, k, v)
    return LongAttention.apply(q, k, v)


@torch.compile(dynamic=False)
def attend_short(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Scores written out for each block of queries; the compiler differentiates it."""
    length = q.shape[2]
    size = max(128, length // 8)
    blocks = [
        short_block(q[:, :, i : i + size], k[:, :, : i + size], v[:, :, : i + size]) for i in range(0, length, size)
    ]
    return torch.cat(blocks, dim=2)


def short_block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The last len(q) queries against all keys: [batch, heads, len(q), head_dim]."""
    scores = (q @ k.transpose(-1, -2)).float() * q.shape[-1] ** -0.5
    return torch.softmax(hide_future(scores), dim=-1).to(q.dtype) @ v


def hide_future(scores: Tensor) -> Tensor:
    """Masks scores [..., queries, keys] whose queries are the last of the keys' positions."""
    queries, keys = scores.shape[-2:]
    last_seen = torch.arange(queries)[:, None] + (keys - queries)
    return scores.masked_fill(torch.arange(keys)[None] > last_seen, -torch.inf)


@torch.compile(dynamic=True)
def probabilities(products: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Products of queries and keys -> softmax in their type, and its log normalizer in float32 [..., queries, 1]."""
    scores = hide_future(products.float() * scale)
    top = scores.amax(-1, keepdim=True)
    powers = torch.exp(scores - top)
    total = powers.sum(-1, keepdim=True)
    return (powers / total).to(products.dtype), top + total.log()


@torch.compile(dynamic=True)
def score_gradients(
    products: Tensor, value_products: Tensor, normalizer: Tensor, shift: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Recomputed softmax, and the gradient of the products, both [..., queries, keys]."""
    share = torch.exp(hide_future(products.float() * scale) - normalizer)
    gradient = share * (value_products.float() - shift) * scale
    return share.to(products.dtype), gradient.to(products.dtype)


class LongAttention(torch.autograd.Function):
    """Causal attention a block of queries at a time; keeps q, k, v, the output and its normalizers."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        out, normalizers = torch.empty_like(q), []
        for rows, seen in blocks(q.shape[2]):
            share, normalizer = probabilities(q[:, :, rows] @ k[:, :, seen].transpose(-1, -2), q.shape[-1] ** -0.5)
            out[:, :, rows] = share @ v[:, :, seen]
            normalizers.append(normalizer)
        ctx.save_for_backward(q, k, v, out, torch.cat(normalizers, dim=2))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, out, normalizers = ctx.saved_tensors
        grad = grad.contiguous()
        shift = (grad.float() * out.float()).sum(-1, keepdim=True)
        dq = torch.empty_like(q)
        dk, dv = torch.zeros(k.shape), torch.zeros(v.shape)  # float32: many blocks add into them
        for rows, seen in blocks(q.shape[2]):
            share, d_products = score_gradients(
                q[:, :, rows] @ k[:, :, seen].transpose(-1, -2),
                grad[:, :, rows] @ v[:, :, seen].transpose(-1, -2),
                normalizers[:, :, rows],
                shift[:, :, rows],
                q.shape[-1] ** -0.5,
            )
            dq[:, :, rows] = d_products @ k[:, :, seen]
            dk[:, :, seen] += d_products.transpose(-1, -2) @ q[:, :, rows]
            dv[:, :, seen] += share.transpose(-1, -2) @ grad[:, :, rows]
        return dq, dk.to(k.dtype), dv.to(v.dtype)


def blocks(length: int) -> list[tuple[slice, slice]]:
    """Blocks of query rows with the keys they may see."""
    size = 512 if length <= 8192 else 256
    return [(slice(i, min(i + size, length)), slice(0, min(i + size, length))) for i in range(0, length, size)]
