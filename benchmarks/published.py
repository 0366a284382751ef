"""TriForce's own rule for choosing chunks (arXiv 2404.11912, section 4.2), installed in an engine that chooses by
attention mass.

A chunk's score is its mean key times the last query of the prompt, summed over the query heads of a KV head. Chunks are
chosen once for a prompt; all later tokens are in the tail, which grows beyond the room that the plan has for it.

benchmarks/decode.py uses this rule for the setting `selection=published`.
"""

from __future__ import annotations

import offload  # noqa: F401  # isort: skip  # before torch, which reads its threads' wait policy once

from typing import Any

import torch
from torch import Tensor

from offload.kv import Phase
from offload.kv.fetch import Tail
from offload.kv.full import FullCache
from offload.kv.retrieval import RetrievalCache
from offload.kv.selection import Seen

_TOKENS = 2048  # rows read at a time


class LastQueries:
    """The queries of a full cache's last forward in phase "decode": [rows, H, D] of each layer, rotated."""

    def __init__(self, full: FullCache) -> None:
        self.full, self.of_layers = full, list[Tensor]()
        self._start: int | None = None
        self._begin, self._attend = full.begin, full.attend
        full.begin, full.attend = self._begun, self._attended  # type: ignore[method-assign]

    def of_row(self, row: int) -> Tensor:
        """The row's queries, [L, H, D]."""
        return torch.stack([queries[row] for queries in self.of_layers])

    def _begun(self, phase: Phase, num_rows: int, **options: Any) -> None:
        self._begin(phase, num_rows, **options)
        self.of_layers.clear()
        self._start = self.full.length + self.full.num_ahead if phase == "decode" else None

    def _attended(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self._start is not None:
            self.of_layers.append(self.full.scorings[layer].rotated(q, k, self._start)[0])
        return self._attend(layer, q, k, v)


class ByMeanKey:
    """A `Selector` that scores chunks by mean key times query: keys from the cache of `queries`, the query of the last
    accepted row."""

    def __init__(self, queries: LastQueries) -> None:
        self._queries = queries

    def scores(self, full: Seen, num_rows: int, chunk: int, num_chunks: int) -> Tensor:
        means = mean_rows(self._queries.full, chunk, num_chunks * chunk)[0]
        return scores_of(means, self._queries.of_row(num_rows - 1))

    def forget(self) -> None: ...


class ChosenOnce:
    """Makes `cache` choose chunks only at the first refresh for a prompt, without waiting for masses."""

    def __init__(self, cache: RetrievalCache) -> None:
        self._cache, self._choose = cache, cache.refresh
        cache.refresh, cache.prepare = self.refresh, self.prepare  # type: ignore[method-assign]

    def refresh(self, num_rows: int) -> None:
        if self._cache.chunks is None:
            self._choose(num_rows)
        else:
            keep(self._cache)

    def prepare(self, num_rows: int, *, wanted: bool) -> bool:
        self._cache.full.record_mass = False
        if wanted:
            self._cache.refresh(num_rows)
        return wanted


@torch.inference_mode()
def keep(cache: RetrievalCache) -> None:
    """A refresh that chooses nothing: chunks stay, and the tail gets the exact rows of tokens since the last one."""
    cache._open()
    length, first = cache.full.length, cache._tail_start
    cache._chosen.reserve(length - first)
    cache._chosen.fill(Tail(first, max(cache._exact, first), length, cache._tail_at), None)
    cache.length = cache._exact = length


def mean_rows(full: FullCache, chunk: int, num_tokens: int) -> Tensor:
    """Mean keys and values of the chunks of the first `num_tokens` tokens, [2, L, H_kv, C, D] fp32. Missing rows of the
    last chunk count as zeros."""
    full.wait_home()
    means, step = [], _TOKENS // chunk * chunk
    for start in range(0, num_tokens, step):
        rows = full.pages.reader.tokens(start, min(start + step, num_tokens)).float()
        padded = torch.nn.functional.pad(rows, (0, 0, 0, -rows.shape[3] % chunk))
        means.append(padded.unflatten(3, (-1, chunk)).mean(4))
    return torch.cat(means, 3).transpose(0, 1)


def scores_of(mean_keys: Tensor, query: Tensor) -> Tensor:
    """mean_keys [L, H_kv, C, D], query [L, H, D] -> [L, H_kv, C]"""
    per_head = query.unflatten(1, (mean_keys.shape[1], -1)).float().sum(2)
    return (mean_keys @ per_head[..., None]).squeeze(-1)


def install(cache: RetrievalCache | None) -> None:
    """Make `cache`, which is empty, choose by the published rule."""
    if cache is None:
        raise SystemExit("selection=published chooses chunks, and this plan retrieves none; add +budget=TOKENS")
    cache.selector = ByMeanKey(LastQueries(cache.full))
    ChosenOnce(cache)
