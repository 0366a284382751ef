"""Attention to what an index chooses: as transformers has it, and with the same bits wherever keys and values are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kit.families import random_tiny, save_tiny
from kit.models import GREEDY, LateLink, Sizes, load, random_tokens, resident_rows, target_cache, tiny_engine, tiny_plan
from kit.processor import OPERATORS, best, of
from offload.engine.engine import Engine, plan_request
from offload.engine.request import GenerationRequest
from offload.errors import UsageError
from offload.kernels import choosing, delta, pooled
from offload.kernels.norms import NormWeights
from offload.kernels.places import RowPlaces
from offload.kernels.rope import RopeTable
from offload.kv import Cache
from offload.kv.block_cache import BlockCache
from offload.kv.block_index import BlockIndex
from offload.kv.indexed import IndexedCache
from offload.kv.mixed import MixedCache
from offload.model import streams
from offload.model.decoder import Decoder
from offload.plan.options import Options
from offload.plan.planner import Plan
from test_parity import assert_same_logits, in_decoding, in_prefill

NAME = "qwen4_exp, n-grams"
LENGTHS = (60, 61, 62, 63)
SIZES = Sizes(capacity=80, rows=4, prefill_block=7, page=8, pages=2)
ENDS = (20, 41)  # places of ends of text within a prompt


def prompt(length: int) -> list[int]:
    tokens = random_tokens(length, seed=length)
    return [2 if at in ENDS else token for at, token in enumerate(tokens)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(NAME, tmp_path_factory.mktemp("indexed") / "model")


@pytest.fixture(scope="module")
def theirs() -> Callable[[int], Tensor]:
    model, found = random_tiny(NAME), dict[int, Tensor]()

    @torch.inference_mode()
    def logits(length: int) -> Tensor:
        if length not in found:
            found[length] = model(torch.tensor([prompt(length)])).logits[0]
        return found[length]

    return logits


def assert_no_ties(decoder: Decoder, tokens: list[int]) -> None:
    """No row has two equal scores at the edge of its choice, where transformers promises no order."""
    cache, seen = target_cache(decoder, SIZES), 0
    assert isinstance(cache, MixedCache)
    growing = cache.growing
    assert isinstance(growing, IndexedCache)

    def choose(q: Tensor, keys: Tensor, visible: Tensor, most: int) -> Tensor:
        nonlocal seen
        for scores, count in zip(choosing.scores_of(q, keys), visible.tolist(), strict=True):
            if count > most:
                ranked = scores[:count].sort(descending=True).values
                assert ranked[most - 1] > ranked[most]
                seen += 1
        return choosing.choose(q, keys, visible, most)

    growing._choose = choose
    in_decoding(decoder, cache, tokens, 4)
    assert seen > 30


@pytest.mark.parametrize("operators", OPERATORS)
@pytest.mark.parametrize("length", LENGTHS)
def test_beyond_the_budget_logits_are_those_of_transformers(
    folder: Path, theirs: Callable[[int], Tensor], length: int, operators: str
) -> None:
    """At all numbers of tokens of an incomplete block, with ends of text inside."""
    decoder, tokens = load(folder, kernels=of(operators)), prompt(length)
    assert_no_ties(decoder, tokens)
    assert_same_logits(in_prefill(decoder, target_cache(decoder, SIZES), tokens, 7), theirs(length))
    assert_same_logits(in_decoding(decoder, target_cache(decoder, SIZES), tokens, 5), theirs(length))


@pytest.mark.parametrize("operators", OPERATORS)
def test_a_prefill_and_passes_of_any_rows_have_the_same_bits(folder: Path, operators: str) -> None:
    decoder, tokens = load(folder, kernels=of(operators)), prompt(63)
    wanted = in_decoding(decoder, target_cache(decoder, SIZES), tokens, 1)
    for rows in (3, 16, 63):
        assert torch.equal(in_decoding(decoder, target_cache(decoder, SIZES), tokens, rows), wanted)


@pytest.mark.few(5)
@pytest.mark.parametrize("slots", [6, 10, 24])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("operators", OPERATORS)
def test_where_keys_and_values_are_changes_no_bit(folder: Path, operators: str, late: bool, slots: int) -> None:
    """With slots for little more than a row chooses, and copies that are done when somebody waits for them."""
    decoder, link = load(folder, kernels=of(operators)), LateLink(late_in=late, late_out=late)
    wanted = passes_and_prefills(decoder, target_cache(decoder, SIZES))
    cache = target_cache(decoder, replace(SIZES, block_slots=slots), link=link)
    assert torch.equal(passes_and_prefills(decoder, cache), wanted)


def passes_and_prefills(decoder: Decoder, cache: Cache) -> Tensor:
    tokens = prompt(63)
    parts = [in_decoding(decoder, cache, tokens[:30], 3), in_prefill(decoder, cache, tokens[30:44], 4)]
    return torch.cat([*parts, in_decoding(decoder, cache, tokens[44:], 5)])


@pytest.mark.parametrize("operators", OPERATORS)
def test_below_the_budget_bits_are_those_of_attention_to_everything(
    folder: Path, operators: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder, tokens = load(folder, kernels=of(operators)), prompt(19)
    chosen = in_decoding(decoder, target_cache(decoder, SIZES), tokens, 3)

    def attend_to_all(self: IndexedCache, layer: int, q: Tensor, k: Tensor, v: Tensor, index: object) -> Tensor:
        return self.attend(layer, q, k, v)

    monkeypatch.setattr(IndexedCache, "attend_chosen", attend_to_all)
    assert torch.equal(in_decoding(decoder, target_cache(decoder, SIZES), tokens, 3), chosen)
    longer = prompt(24)
    dense = in_decoding(decoder, target_cache(decoder, SIZES), longer, 3)
    monkeypatch.undo()
    assert not torch.equal(in_decoding(decoder, target_cache(decoder, SIZES), longer, 3), dense)


@pytest.mark.few(5)
@pytest.mark.parametrize("kept", range(40, 49))
@pytest.mark.parametrize("slots", [0, 10])
def test_rejected_rows_leave_nothing_in_an_index_or_in_slots(folder: Path, kept: int, slots: int) -> None:
    """Wherever the sequence is cut, within a block and between two."""
    decoder, tokens = load(folder), prompt(63)
    wanted = in_decoding(decoder, target_cache(decoder, SIZES), tokens, 1)
    link = LateLink(late_in=True, late_out=True) if slots else None
    cache = target_cache(decoder, replace(SIZES, block_slots=slots), link=link, undo=24)
    in_decoding(decoder, cache, tokens[:40], 4)
    wrong = [(token + 1) % 50 for token in tokens[kept:52]]
    in_decoding(decoder, cache, [*tokens[40:kept], *wrong], 12)
    cache.truncate(kept)
    assert cache.length == kept
    assert torch.equal(in_decoding(decoder, cache, tokens[kept:], 4), wanted[kept:])


def test_a_prefill_that_is_broken_off_leaves_the_incomplete_block(folder: Path) -> None:
    """It has written over raw keys, of some layers."""
    decoder, tokens = load(folder), prompt(63)
    wanted = in_decoding(decoder, target_cache(decoder, SIZES), tokens, 1)
    cache = target_cache(decoder, SIZES)
    in_decoding(decoder, cache, tokens[:42], 3)

    def broken(count: int) -> None:
        if count > 300:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        decoder.prefill(cache, random_tokens(700, seed=1), resident_rows(decoder, 7), on_tokens=broken)
    cache.truncate(42)
    assert cache.length == 42
    assert torch.equal(in_decoding(decoder, cache, tokens[42:], 4), wanted[42:])


# Mutants: each has to give other logits than transformers.


def _rope_at_the_last_token(patch: pytest.MonkeyPatch) -> None:
    real = pooled.pooled_keys

    def mutant(raw: Tensor, norm: NormWeights, rope: RopeTable, places: RowPlaces) -> Tensor:
        return real(raw, norm, rope, RowPlaces(places.positions + raw.shape[1] - 1, places.slots))

    patch.setattr("offload.kv.block_index.pooled_keys", mutant)


def _norm_before_the_mean(patch: pytest.MonkeyPatch) -> None:
    real = pooled.pooled_keys

    def mutant(raw: Tensor, norm: NormWeights, rope: RopeTable, places: RowPlaces) -> Tensor:
        return real(norm(raw), norm, rope, places)

    patch.setattr("offload.kv.block_index.pooled_keys", mutant)


def _own_block_always(patch: pytest.MonkeyPatch) -> None:
    """The block that a row completes need not compete."""

    def mutant(real: Callable[..., Tensor], q: Tensor, keys: Tensor, visible: Tensor, most: int) -> Tensor:
        found = real(q, keys, visible, most)
        found[:, -1] = torch.where(visible >= most, (visible - 1).to(found.dtype), found[:, -1])
        return found

    _choosing(patch, mutant)


def _one_block_too_few(patch: pytest.MonkeyPatch) -> None:
    _choosing(patch, lambda real, q, keys, visible, most: real(q, keys, (visible - 1).clamp(min=0), most))


def _higher_of_the_last(patch: pytest.MonkeyPatch) -> None:
    """Scores without the positive part."""
    patch.setattr(choosing.torch, "where", lambda condition, some, other: some)


def _choosing(patch: pytest.MonkeyPatch, mutant: Callable[..., Tensor]) -> None:
    real = IndexedCache.__init__

    def made(self: IndexedCache, *given: Any, **named: Any) -> None:
        real(self, *given, **named)
        self._choose = partial(mutant, self._choose)

    patch.setattr(IndexedCache, "__init__", made)


def _silu_of_gates(patch: pytest.MonkeyPatch) -> None:
    real = delta.sigmoid
    patch.setattr(delta, "sigmoid", lambda x: x * real(x))


def _factors_without_the_2(patch: pytest.MonkeyPatch) -> None:
    real = streams.mean_of

    def mutant(*given: Any) -> streams.Read:
        read = real(*given)
        return streams.Read(read.rows, read.factors / 2)

    patch.setattr("offload.model.torch_layers.mean_of", mutant)


def _stale_keys(patch: pytest.MonkeyPatch) -> None:
    """A block's key is the one of rejected tokens."""
    real = BlockIndex.add

    def mutant(self: BlockIndex, layer: int, start: int, *given: Any, **named: Any) -> Any:
        stale = self.keys.clone()
        found = real(self, layer, start, *given, **named)
        first = start // self.indexer.ratio
        if stale[layer, first].any():
            self.keys[layer, first] = stale[layer, first]
        return found

    patch.setattr(BlockIndex, "add", mutant)


FORMULAS = [
    _rope_at_the_last_token, _norm_before_the_mean, _own_block_always, _one_block_too_few, _higher_of_the_last,
    _silu_of_gates, _factors_without_the_2,
]  # fmt: skip


@pytest.mark.parametrize("mutate", FORMULAS, ids=lambda mutate: mutate.__name__)
def test_mutants_of_the_formula_differ_from_transformers(
    folder: Path, theirs: Callable[[int], Tensor], monkeypatch: pytest.MonkeyPatch, mutate: Callable[..., None]
) -> None:
    mutate(monkeypatch)
    decoder = load(folder)
    with pytest.raises(AssertionError):
        assert_same_logits(in_decoding(decoder, target_cache(decoder, SIZES), prompt(63), 5), theirs(63))


def _another_sequences_block(patch: pytest.MonkeyPatch) -> None:
    """A slot that was given away is read for the block that it had."""

    real = BlockCache.bring

    def mutant(self: BlockCache, layer: int, blocks: Tensor, positions: Tensor) -> Tensor:
        slot_of, before = self.table(layer).slot_of, self.table(layer).slot_of.clone()
        found = real(self, layer, blocks, positions)
        slot_of.copy_(torch.where(slot_of < 0, before, slot_of))
        return found

    patch.setattr(BlockCache, "bring", mutant)


def _slots_of_before_a_prefill(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockCache, "forget", lambda self, first: None)


def _rows_that_never_go_home(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("offload.pages.storage.PageStorage.write_rows", lambda self, layer, start, rows: None)


OF_SLOTS = [(_another_sequences_block, 8), (_slots_of_before_a_prefill, 24), (_rows_that_never_go_home, 8)]


@pytest.mark.parametrize(("mutate", "slots"), OF_SLOTS, ids=[mutate.__name__ for mutate, _ in OF_SLOTS])
def test_mutants_of_the_block_cache_change_bits(
    folder: Path, monkeypatch: pytest.MonkeyPatch, mutate: Callable[..., None], slots: int
) -> None:
    decoder = load(folder)
    wanted = passes_and_prefills(decoder, target_cache(decoder, SIZES))
    mutate(monkeypatch)
    cache = target_cache(decoder, replace(SIZES, block_slots=slots), link=LateLink(late_in=True, late_out=True))
    assert not torch.equal(passes_and_prefills(decoder, cache), wanted)


def test_a_stale_key_changes_bits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _stale_keys(monkeypatch)
    with pytest.raises(AssertionError):
        test_rejected_rows_leave_nothing_in_an_index_or_in_slots(folder, 41, 0)


# Whole engines.


@pytest.fixture(scope="module")
def spoken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    options = {"vocab_size": 264, "max_position_embeddings": 4096}
    return save_tiny(NAME, tmp_path_factory.mktemp("engines") / "model", tokenizer=True, **options)


ENGINE = Sizes(budget=0, rows=4, page=32, prefill_block=32, any_rows=True, capacity=600)
TEXT = random_tokens(300, seed=8, vocabulary=256)


def plan_of(folder: Path, sizes: Sizes = ENGINE, **options: Any) -> Plan:
    return tiny_plan(folder, None, sizes, num_prompt_tokens=320, max_tokens=60, **options)


def said(made: Engine, count: int = 30) -> list[int]:
    request = GenerationRequest(TEXT, GREEDY, max_tokens=count)
    return [token for step in made.generate(request) for token in step.tokens]


@contextmanager
def engine(folder: Path, **options: Any) -> Iterator[Engine]:
    best()
    with tiny_engine(plan_of(folder, **options), folder) as made:
        yield made


@pytest.mark.parametrize("offload", ["weights", "kv,weights"])
def test_greedy_texts_are_the_same_with_offload_and_with_drafts(spoken: Path, offload: str) -> None:
    with engine(spoken) as made:
        wanted = said(made)
    with engine(spoken, sizes=replace(ENGINE, gamma=6, lookup=True), offload=frozenset(offload.split(","))) as made:
        assert said(made) == wanted


def test_a_copy_of_the_cache_in_fewer_bits_or_of_a_part_is_refused(spoken: Path) -> None:
    for options, words in (({"budget": 64}, "budget is 64"), ({"kv_bits": 4}, "kv-bits is 4")):
        with pytest.raises(UsageError, match=f"{words}: a row attends to 19 tokens that the model's own index"):
            plan_request(spoken, None, Options(device="cpu", **options), num_prompt_tokens=100, max_tokens=9)  # type: ignore[arg-type]
