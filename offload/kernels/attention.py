"""Attention over pages of keys and values that returns (out, lse), and the merge of such partial results.

Rows are folded for grouped-query attention: the `G = H / H_kv` query heads that share a KV head become `G * T` rows of
it, so every key is read once. Letters: T new rows, R = G * T folded rows, P pages of S tokens, D head dimension.
The merge by log-sum-exp is that of FlashAttention (Dao et al. 2022, section 3.1).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from offload.machine import cpu_features


@dataclass(frozen=True)
class Part:
    """Attention over a part of the keys, of folded rows, or of rows [T, H] where that is said.

    out [H_kv, R, D] fp32: normalised over this part. lse [H_kv, R] fp32: log of the softmax's denominator, -inf for a
    row that sees no key, whose out is 0. mass [H_kv, R, C] fp32 or None: each row's softmax mass per chunk, normalised
    over this part.
    """

    out: Tensor
    lse: Tensor
    mass: Tensor | None = None


def fold(q: Tensor, num_kv_heads: int) -> Tensor:
    """q [T, H, D] -> [H_kv, G * T, D], row g * T + t."""
    num_rows, num_heads, head_dim = q.shape
    grouped = q.view(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
    return grouped.permute(1, 2, 0, 3).reshape(num_kv_heads, -1, head_dim)


def unfold(out: Tensor, num_rows: int) -> Tensor:
    """out [H_kv, G * T, D] -> [T, H * D]; num_rows: T."""
    num_kv_heads, _, head_dim = out.shape
    return out.view(num_kv_heads, -1, num_rows, head_dim).permute(2, 0, 1, 3).reshape(num_rows, -1)


def attended_rows(held: Tensor, *, joined: bool) -> tuple[Tensor, Tensor]:
    """Rows of a cache, [2, ..., D] -> keys and values, [..., D] each, or with `joined` both the same, [..., 2 D]."""
    keys, values = held
    if not joined:
        return keys, values
    both = torch.cat([keys, values], -1)
    return both, both


def count_up(first: int, num_rows: int, query: Tensor) -> Tensor:
    """Numbers [R] int64 for the folded rows of query [H_kv, R, D]: row t of `num_rows` gets first + t in each head."""
    return torch.arange(first, first + num_rows, device=query.device).repeat(query.shape[1] // num_rows)


def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    num_visible: Tensor | None,
    *,
    first_visible: Tensor | None = None,
    chunk: int | None = None,
    scale: float | None = None,
    cap: float | None = None,
) -> Part:
    """Exact attention with all scores in memory, for a few rows at a time.

    q [H_kv, R, D]; keys, values [P, H_kv, S, D], same dtype, finite everywhere. Row r sees the tokens from
    first_visible[r] (None: 0) to num_visible[r] - 1 (None: all P * S), both [R] int. chunk: a divisor of S; if given,
    the result has the mass per chunk of that many tokens. scale: on products of queries and keys, None: D^-0.5.
    cap: c; c tanh(score / c) in place of a score.

    The shapes alone determine the order of every sum, and hidden keys add exact zeros, so a row's bits depend neither
    on the contents of hidden keys nor on the other rows. Memory: 6 bytes per score for 16-bit dtypes.
    """
    num_pages, num_kv_heads, page, head_dim = keys.shape
    rows = q.shape[1]
    batch = (num_pages * num_kv_heads, rows)
    repeated = q.expand(num_pages, -1, -1, -1).reshape(*batch, head_dim)
    flat_keys = keys.reshape(-1, page, head_dim).transpose(1, 2)
    scores = torch.baddbmm(q.new_zeros(()), repeated, flat_keys, beta=0, alpha=scale or head_dim**-0.5)
    weights = scores.float().view(num_pages, num_kv_heads, rows, page)
    if cap is not None:
        weights.div_(cap).tanh_().mul_(cap)
    if num_visible is not None:
        weights.masked_fill_(_hidden(num_visible, num_pages, page, first_visible), -torch.inf)
    top = weights.amax(dim=(0, 3))
    top = top.masked_fill(top == -torch.inf, 0.0)
    weights.sub_(top[:, :, None]).exp_()
    # Sum over pages as the last dimension: over the first one, the order of the sum would depend on the number of rows.
    total = weights.sum(3).permute(1, 2, 0).contiguous().sum(2)
    out = torch.bmm(weights.to(values.dtype).view(*batch, page), values.reshape(-1, page, head_dim))
    denominator = total.clamp(min=torch.finfo(torch.float32).tiny)
    mass = None
    if chunk is not None:
        per_chunk = weights.view(num_pages, num_kv_heads, rows, page // chunk, chunk).sum(-1)
        mass = per_chunk.permute(1, 2, 0, 3).reshape(num_kv_heads, rows, -1) / denominator[..., None]
    out = out.view(num_pages, num_kv_heads, rows, head_dim).float().sum(0) / denominator[..., None]
    return Part(out, top + total.log(), mass)


def attend_whole_pages(q: Tensor, keys: Tensor, values: Tensor, scale: float | None = None) -> Part:
    """Exact attention of every row over all keys, by torch's fused kernel, for many rows.

    q [H_kv, R, D]; keys, values [P, H_kv, S, D]; on a GPU 16-bit and D at most 256. There pages are the batch, memory:
    P outputs, no scores. On a CPU see `attend_joined`.
    """
    if not q.is_cuda:
        return attend_joined(q, keys, values, None, scale=scale)
    pages = q.expand(keys.shape[0], -1, -1, -1)
    scale = scale or q.shape[-1] ** -0.5
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(pages, keys, values, scale=scale)
    total = lse.logsumexp(0)
    return Part(out.float().mul_((lse - total).exp()[..., None]).sum(0), total)


def attend_joined(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    num_visible: Tensor | None,
    *,
    first_visible: Tensor | None = None,
    scale: float | None = None,
) -> Part:
    """`attend` by torch's fused kernel for CPUs, for many rows: their bits depend on each other.

    The pages are copied one after the other for it, since its time grows with the number of calls and of parts to
    merge. Memory: that copy, twice where the kernel orders it anew for matrix units or attends in fp32.
    """
    dtype = q.dtype if _orders_for_matrix_units() else torch.float32
    q = q.to(dtype)
    joined = (pages.transpose(0, 1).flatten(1, 2)[None].to(dtype) for pages in (keys, values))
    mask = None
    if num_visible is not None:
        hidden = _hidden(num_visible, 1, keys.shape[0] * keys.shape[2], first_visible)[0, 0]
        mask = torch.zeros(hidden.shape, dtype=q.dtype).masked_fill_(hidden, -torch.inf)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q[None], *joined, attn_mask=mask, scale=scale or q.shape[-1] ** -0.5
    )
    part = Part(out[0].float(), lse[0])
    if num_visible is not None:  # what the kernel gives for a row without keys is not said anywhere
        sees_none = num_visible <= (0 if first_visible is None else first_visible.clamp(min=0))
        part.out.masked_fill_(sees_none[:, None], 0.0)
        part.lse.masked_fill_(sees_none, -torch.inf)
    return part


@cache
def _orders_for_matrix_units() -> bool:
    """Whether the fused kernel can order 16-bit numbers for a CPU's matrix units (AMX), or need not. It does where the
    CPU has some, by code that torch has for AVX-512 only: with ATEN_CPU_CAPABILITY=avx2 it raises."""
    return "amx_bf16" not in cpu_features() or torch.backends.cpu.get_cpu_capability() not in ("DEFAULT", "AVX2")


def sink_part(sink_logits: Tensor | None, query: Tensor) -> Part | None:
    """The sink logits [H] fp32 as the attention of folded rows query [H_kv, G * T, D] over a key without a value: to be
    merged with their parts once. None: there are none."""
    if sink_logits is None:
        return None
    num_kv_heads, rows, _ = query.shape
    of_groups = sink_logits.view(num_kv_heads, -1, 1)
    lse = of_groups.expand(-1, -1, rows // of_groups.shape[1]).reshape(num_kv_heads, rows)
    return Part(lse.new_zeros(()).expand(query.shape), lse)


def merge(first: Part, second: Part) -> Part:
    """Attention over both parts' keys, without `mass`. A part that a row sees no key of changes none of its bits."""
    # Not logaddexp: torch rounds it differently in the last elements of a tensor, so bits would depend on its size.
    top = torch.maximum(first.lse, second.lse)
    top = top.masked_fill(top == -torch.inf, 0.0)
    first_share, second_share = (first.lse - top).exp(), (second.lse - top).exp()
    total = first_share + second_share
    out = first.out * first_share[..., None] + second.out * second_share[..., None]
    return Part(out / total.clamp(min=torch.finfo(torch.float32).tiny)[..., None], top + total.log())


def _hidden(num_visible: Tensor, num_pages: int, page: int, first_visible: Tensor | None = None) -> Tensor:
    """[P, 1, R, S] bool: the keys that each row must not see."""
    index = torch.arange(num_pages * page, device=num_visible.device).view(num_pages, 1, 1, page)
    hidden = index >= num_visible.view(1, 1, -1, 1)
    return hidden if first_visible is None else hidden | (index < first_visible.view(1, 1, -1, 1))
