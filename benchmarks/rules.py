"""Rules that choose chunks, for comparison: the program's own, those of published methods, and an oracle.

A rule is written "name" or "name:key=value,...", as in "mass:dilation=0.75,reach=2".

    mass              softmax mass of the last verification, selected anew each time; keys: dilation, reach (in blocks),
                      decay (default 0, unlike in the program), last (number of last rows of the block that count),
                      values=1 (multiply by the norm of the chunk's values)
    mass-once         the same from the prompt's last rows, selected once
    published         mean keys times the last verified query, selected anew each time; published-once: selected once
    recent            the first chunk and the last ones (StreamingLLM, arXiv 2309.17453)
    evict             half of the budget for the last chunks, half for those with the most mass over all rounds so far;
                      an evicted chunk never returns (H2O, arXiv 2306.14048, on chunks)
    oracle            the mass of the rows of the next block itself
"""

from __future__ import annotations

import offload  # noqa: F401  # isort: skip  # before torch, which reads its threads' wait policy once

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from offload.kv.selection import DILATION, ByMass, Seen, Selector, choose

KEYS = {"dilation", "reach", "decay", "last", "values"}  # keys of the rules by mass


class Foreseen(Seen, Protocol):
    """A view of the cache with the additional data of a replay: mean keys, and the next block's masses."""

    def mean_key_scores(self, chunk: int) -> Tensor:
        """The product of the last row's query with the mean key of each whole chunk, [L, H_kv, C] fp32."""
        ...

    def mass_ahead(self) -> Tensor:
        """The next block's softmax mass per chunk: [L, H_kv, C or more] fp32."""
        ...

    def value_norms(self) -> Tensor:
        """The norm of each chunk's mean value: [L, H_kv, C or more] fp32."""
        ...


@dataclass(frozen=True)
class Weighed:
    """A view of the cache with masses of the last `last` rows only; values: multiplied by the norms of the chunks'
    values."""

    full: Foreseen
    last: int
    values: bool

    def mass(self, num_rows: int) -> Tensor:
        mass = self.full.mass(min(self.last, num_rows))
        return mass * self.full.value_norms() if self.values else mass

    def mean_key_scores(self, chunk: int) -> Tensor:
        return self.full.mean_key_scores(chunk)


@dataclass(frozen=True)
class Timed:
    """A selector with a choice of when it selects (once or at each refresh) and of how it weighs masses."""

    selector: Selector
    selects_anew: bool
    last: int = 0  # 0: all rows
    values: bool = False

    def scores(self, full: Foreseen, num_rows: int, chunk: int, num_chunks: int) -> Tensor:
        seen = Weighed(full, self.last or num_rows, self.values) if self.last or self.values else full
        return self.selector.scores(seen, num_rows, chunk, num_chunks)

    def forget(self) -> None:
        self.selector.forget()


class Recent:
    """A selector of the most recent chunks: scores grow with the chunk's position."""

    def scores(self, full: Seen, num_rows: int, chunk: int, num_chunks: int) -> Tensor:
        mass = full.mass(num_rows)[..., :num_chunks]  # for the shape of the scores
        return torch.arange(num_chunks, dtype=torch.float32, device=mass.device).expand_as(mass)

    def forget(self) -> None: ...


class ByMeanKey:
    """A selector by the published score: each chunk's mean key times the last query."""

    def scores(self, full: Foreseen, num_rows: int, chunk: int, num_chunks: int) -> Tensor:
        return full.mean_key_scores(chunk)[..., :num_chunks]

    def forget(self) -> None: ...


class Evict:
    """A selector that chooses only among chunks chosen before and new ones (H2O)."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._total: Tensor | None = None
        self._kept: Tensor | None = None  # bool

    def scores(self, full: Seen, num_rows: int, chunk: int, num_chunks: int) -> Tensor:
        mass = full.mass(num_rows)[..., :num_chunks]
        if self._total is None or self._kept is None:
            self._total, self._kept = torch.zeros_like(mass), torch.ones_like(mass, dtype=torch.bool)
        new = num_chunks - self._total.shape[-1]
        self._total = pad(self._total, (0, new)) + mass
        scores = self._total.masked_fill(~pad(self._kept, (0, new), value=True), -1.0)
        recent = self._num_slots // 2
        if recent:
            scores[..., -recent:] += self._total.amax() + 1.0
        best = choose(scores, self._num_slots)
        self._kept = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True)
        return scores

    def forget(self) -> None:
        self._total = self._kept = None


class Oracle:
    """A selector by the masses of the next block itself."""

    def scores(self, full: Foreseen, num_rows: int, chunk: int, num_chunks: int) -> Tensor:
        return full.mass_ahead()[..., :num_chunks]

    def forget(self) -> None: ...


def make(rule: str, *, block: int, num_slots: int) -> Timed:
    """The selector of `rule` for blocks of `block` tokens and a budget of `num_slots` chunks."""
    name, _, text = rule.partition(":")
    values = {key: float(value) for key, _, value in (item.partition("=") for item in text.split(",") if item)}
    if unknown := values.keys() - (KEYS if name.startswith("mass") else set()):
        raise SystemExit(f"rule {rule}: unknown {', '.join(sorted(unknown))}")
    mass = ByMass(
        dilation=values.get("dilation", DILATION),
        reach=round(values.get("reach", 1.0) * block),
        decay=values.get("decay", 0.0),
    )
    rules = {
        "mass": Timed(mass, True, int(values.get("last", 0)), bool(values.get("values", 0))),
        "mass-once": Timed(mass, False),
        "published": Timed(ByMeanKey(), True),
        "published-once": Timed(ByMeanKey(), False),
        "recent": Timed(Recent(), True),
        "evict": Timed(Evict(num_slots), True),
        "oracle": Timed(Oracle(), True),
    }
    if name not in rules:
        raise SystemExit(f"no rule {name}; there are {', '.join(rules)}")
    return rules[name]
