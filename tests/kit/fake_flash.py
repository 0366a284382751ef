"""flash-attn's function for a paged cache, with its signature and its conditions, computed by torch. No tests in here.

After flash_attn 2.8: `flash_attn_interface.py` and what `mha_fwd_kvcache` checks in `csrc/flash_attn/flash_api.cpp`.
"""

from __future__ import annotations

import torch
from torch import Tensor


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> tuple[Tensor, Tensor]:
    """q [1, T, H, D], k_cache, v_cache [blocks, page, H_kv, D], block_table [1, pages] -> (out [1, T, H, D], lse
    [1, H, T])."""
    assert k is v is rotary_cos is rotary_sin is cache_batch_idx is cache_leftpad is alibi_slopes is None
    assert window_size == (-1, -1)
    assert softcap == 0.0
    assert return_softmax_lse
    check(q, k_cache, v_cache, cache_seqlens, block_table)
    assert isinstance(cache_seqlens, Tensor)
    assert block_table is not None
    tokens, num_rows, group = int(cache_seqlens), q.shape[1], q.shape[2] // k_cache.shape[2]
    keys, values = (
        cache[block_table[0].long()].flatten(0, 1)[:tokens].float().repeat_interleave(group, 1)
        for cache in (k_cache, v_cache)
    )
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    scores = torch.einsum("thd,shd->hts", q[0].float(), keys) * scale
    if causal:  # aligned to the bottom right corner
        last = torch.arange(tokens - num_rows, tokens)
        scores.masked_fill_(torch.arange(tokens) > last[:, None], -torch.inf)
    lse = scores.logsumexp(-1)
    out = torch.einsum("hts,shd->thd", (scores - lse[..., None]).exp(), values)
    nothing = lse == -torch.inf
    out.masked_fill_(nothing.T[..., None], 0.0)
    lse.masked_fill_(nothing, torch.inf)  # so the kernel says it, where it does not split
    return out.to(q.dtype)[None], lse[None]


def check(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: int | Tensor | None, block_table: Tensor | None
) -> None:
    """What the package refuses."""
    assert q.dtype in (torch.float16, torch.bfloat16)
    assert q.dtype == k_cache.dtype == v_cache.dtype
    assert q.stride(-1) == k_cache.stride(-1) == v_cache.stride(-1) == 1
    batch, _, num_heads, dim = q.shape
    num_blocks, page, num_kv_heads, kv_dim = k_cache.shape
    assert k_cache.shape == v_cache.shape
    assert batch == 1
    assert dim == kv_dim <= 256
    assert dim % 8 == 0  # else it copies the cache
    assert num_heads % num_kv_heads == 0
    assert page % 256 == 0
    assert isinstance(block_table, Tensor)
    assert block_table.dtype == torch.int32
    assert block_table.stride(-1) == 1
    assert block_table.shape[0] == batch
    assert block_table.shape[1] <= num_blocks
    # An int would be taken once for each block of the cache, and refused for there are not as many sequences.
    assert isinstance(cache_seqlens, Tensor)
    assert cache_seqlens.dtype == torch.int32
    assert cache_seqlens.is_contiguous()
    assert cache_seqlens.shape == (batch,)
