"""Rules that choose chunks: those of the program, and those that benchmarks compare it with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from kit.models import Sizes, full_cache, load, random_model, random_tokens, retrieval_cache, save
from offload.kv.full import FullCache
from offload.kv.retrieval import RetrievalCache
from offload.kv.selection import ByMass, Selector, choose
from offload.model.level import Level
from offload.model.passes import forward

CHUNK = 4
SIZES = Sizes(gamma=4, budget=16, chunk=CHUNK)


@dataclass
class Shown:
    """Masses seen by one layer and KV head: `last` by each row of the last verification, `next` by the next one's."""

    last: Sequence[float]
    next: Sequence[float] = ()

    def mass(self, num_rows: int) -> Tensor:
        return num_rows * torch.tensor(self.last)[None, None]

    def mean_key_scores(self, chunk: int) -> Tensor:
        return -self.mass(1)

    def mass_ahead(self) -> Tensor:
        return torch.tensor(self.next)[None, None]

    def value_norms(self) -> Tensor:
        return torch.arange(len(self.last))[None, None]


def scores(selector: Selector, shown: Shown, *, num_rows: int = 1) -> list[float]:
    found: list[float] = selector.scores(shown, num_rows, CHUNK, len(shown.last))[0, 0].tolist()
    return found


@pytest.fixture
def rules(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[1] / "benchmarks"))
    return import_module("rules")


def test_reach_is_in_tokens_and_counts_whole_chunks() -> None:
    shown = Shown([0.0, 8.0, 0.0, 0.0, 0.0])
    assert scores(ByMass(reach=CHUNK, decay=0.0), shown) == [0.0, 8.0, 4.0, 0.0, 0.0]
    assert scores(ByMass(reach=CHUNK + 1, decay=0.0), shown) == [0.0, 8.0, 4.0, 4.0, 0.0]
    assert scores(ByMass(dilation=0.0, reach=CHUNK, decay=0.0), shown) == list(shown.last)


def test_decay_adds_a_share_of_earlier_masses_and_chunks_that_came_since_start_at_nothing() -> None:
    selector = ByMass(dilation=0.0, reach=CHUNK, decay=0.5)
    assert scores(selector, Shown([4.0, 0.0])) == [4.0, 0.0]
    assert scores(selector, Shown([0.0, 2.0, 1.0])) == [2.0, 2.0, 1.0]
    assert scores(selector, Shown([0.0, 0.0, 0.0])) == [1.0, 1.0, 0.5]
    selector.forget()
    assert scores(selector, Shown([0.0, 3.0])) == [0.0, 3.0]


def test_evicted_chunks_never_come_back(rules: ModuleType) -> None:
    evict = rules.make("evict", block=4, num_slots=4)
    kept = choose(evict.scores(Shown([0.0, 5.0, 1.0, 4.0, 0.0, 0.0]), 1, CHUNK, 6), 4)
    assert kept[0, 0].tolist() == [0, 1, 4, 5]  # the sinks, the most mass, two recent ones
    kept = choose(evict.scores(Shown([0.0, 1.0, 0.0, 99.0, 0.0, 0.0, 0.0]), 1, CHUNK, 7), 4)
    assert kept[0, 0].tolist() == [0, 1, 5, 6]


def test_rules_score_what_they_say(rules: ModuleType) -> None:
    shown = Shown([3.0, 1.0, 2.0], [0.0, 0.0, 7.0])

    def of(rule: str) -> list[float]:
        return scores(rules.make(rule, block=2 * CHUNK, num_slots=2), shown)

    assert of("recent") == [0.0, 1.0, 2.0]
    assert of("oracle") == [0.0, 0.0, 7.0]
    assert of("published") == of("published-once") == [-3.0, -1.0, -2.0]
    assert of("mass:dilation=0") == [3.0, 1.0, 2.0]
    assert of("mass:dilation=1,reach=0.5") == [3.0, 3.0, 2.0]
    assert of("mass:dilation=1,reach=1") == [3.0, 3.0, 3.0]
    assert of("mass:dilation=0,values=1") == [0.0, 1.0, 4.0]
    assert scores(rules.make("mass:dilation=0,last=2", block=4, num_slots=2), shown, num_rows=4) == [6.0, 2.0, 4.0]
    assert not rules.make("mass-once", block=4, num_slots=2).selects_anew
    for wrong in ("best", "recent:dilation=1", "mass:width=2"):
        with pytest.raises(SystemExit):
            rules.make(wrong, block=4, num_slots=2)


@pytest.fixture(scope="module")
def verified(tmp_path_factory: pytest.TempPathFactory) -> tuple[FullCache, Level]:
    """A target whose full cache holds 41 tokens, the last four of them verified in one pass."""
    decoder = load(save(random_model(), tmp_path_factory.mktemp("target")))
    full = full_cache(decoder, SIZES, mass=True)
    level = Level("target", decoder, full, vocab_size=decoder.config.vocab_size, block=SIZES.block)
    tokens = random_tokens(41)
    forward(level, tokens[:37], 1)
    forward(level, tokens[37:], 1)
    return full, level


def chosen(cache: RetrievalCache) -> Tensor:
    """[L, H_kv, n], rising."""
    assert cache.chunks is not None
    return cache.chunks.sort(-1).values


def test_a_cache_that_starts_over_holds_what_another_selector_would_have_chosen_at_first(
    verified: tuple[FullCache, Level],
) -> None:
    full, _ = verified
    cache, other = retrieval_cache(full, SIZES), retrieval_cache(full, SIZES)
    cache.refresh(4)
    by_mass = chosen(cache)
    cache.start_over(ByMass(reach=1, dilation=0.0), budget=8, chunk=2 * CHUNK)
    assert cache.length == 0
    assert cache.chunks is None
    cache.refresh(4)
    assert chosen(cache).shape[-1] == 1
    cache.start_over(ByMass(reach=SIZES.gamma), budget=SIZES.budget, chunk=CHUNK)
    cache.refresh(4)
    other.refresh(4)
    assert torch.equal(chosen(cache), by_mass)
    assert cache.nbytes() == other.nbytes()


def test_going_back_past_the_last_refresh_forgets_earlier_masses(verified: tuple[FullCache, Level]) -> None:
    """Else a text would depend on what was generated before it with the same prompt."""
    full, _ = verified
    cache = retrieval_cache(full, SIZES)
    cache.start_over(selector := ByMass(dilation=0.0, reach=4, decay=0.9), budget=16, chunk=CHUNK)
    cache.refresh(4)
    cache.truncate(41)
    cache.refresh(4)
    kept = selector.scores(full, 4, CHUNK, 10)
    cache.truncate(40)
    assert_close(selector.scores(full, 4, CHUNK, 10), full.mass(4)[..., :10])
    assert_close(kept, (1 + 0.9 + 0.9**2) * full.mass(4)[..., :10])  # of each time that it was asked, none forgotten


def test_a_refresh_waits_for_a_verification_that_recorded_masses(verified: tuple[FullCache, Level]) -> None:
    """They cost the full pass time: they are recorded where the cache is wanted, and nowhere else."""
    full, _ = verified
    cache, recorded = retrieval_cache(full, SIZES), []
    for wanted in (False, True, True, False):
        ready = cache.prepare(4, wanted=wanted)
        recorded.append((ready, cache.length, full.record_mass))
    assert recorded == [(False, 0, False), (False, 0, True), (True, 41, True), (False, 41, False)]
