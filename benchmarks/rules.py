"""Rules that choose chunks, for comparison: the program's own, those of other papers, and an oracle.

A rule is written "name" or "name:key=value,...", as in "mass:dilation=0.75,reach=2".

    mass              softmax mass of the last verification, anew each time; keys: dilation, reach (in blocks), decay
                      (0 unless given, unlike in the program), last (rows that count, from the block's end), values=1
                      (times the norm of the chunk's values)
    mass-once         the same of the prompt's last rows, once
    published         mean keys against the last verified query, anew each time; published-once: once, as published
    recent            the first chunk and the last ones (StreamingLLM, arXiv 2309.17453)
    evict             half of the budget for the last chunks, half for those with the most mass over all rounds so far;
                      what was left out once never comes back (H2O, arXiv 2306.14048, on chunks)
    oracle            the mass of the very rows that will be judged
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from offload.cache.selection import ByMass, ByMeanKey, Seen, Selection, Selector, choose

DILATION = Selection().dilation
KEYS = {"dilation", "reach", "decay", "last", "values"}  # of the rules by mass


class Foreseen(Seen, Protocol):
    """The part of a text that a replay knows beyond the last verification."""

    def mass_ahead(self) -> Tensor:
        """The mass that the rows of the next block will put on chunks: [L, H_kv, C or more] fp32."""
        ...

    def value_norms(self) -> Tensor:
        """Of each chunk, the norm of its mean value: [L, H_kv, C or more] fp32."""
        ...


@dataclass(frozen=True)
class Weighed:
    """Masses of the last `last` rows only, by what they add to the output if `values`."""

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
    """A selector that chooses when it is told to, once or at each refresh, by masses weighed as said."""

    selector: Selector
    selects_anew: bool
    last: int = 0  # 0: all rows
    values: bool = False

    @property
    def needs_mass(self) -> bool:
        return self.selector.needs_mass

    def scores(self, full: Foreseen, num_rows: int, chunk: int, num_chunks: int) -> Tensor:
        seen = Weighed(full, self.last or num_rows, self.values) if self.last or self.values else full
        return self.selector.scores(seen, num_rows, chunk, num_chunks)

    def forget(self) -> None:
        self.selector.forget()


class Recent:
    """The later, the better."""

    needs_mass = selects_anew = True  # the mass tells the shape of the scores

    def scores(self, full: Seen, num_rows: int, chunk: int, num_chunks: int) -> Tensor:
        mass = full.mass(num_rows)[..., :num_chunks]
        return torch.arange(num_chunks, dtype=torch.float32, device=mass.device).expand_as(mass)

    def forget(self) -> None: ...


class Evict:
    """Keeps what it can of what it kept before."""

    needs_mass = selects_anew = True

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
        self._kept = choose(scores, self._num_slots)
        return scores

    def forget(self) -> None:
        self._total = self._kept = None


class Oracle:
    """Knows what is going to be looked at."""

    needs_mass = selects_anew = True

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
