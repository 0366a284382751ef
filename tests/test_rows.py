"""Blocks of rows: torch's operators give a row the same bits at every place of a block, or rows run one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kit.models import Sizes, full_cache, load, random_model, random_tokens, save, streaming_cache
from offload.config.mixers import Attention
from offload.kernels import rows as rows_module
from offload.kernels.rows import AttentionShape, attention_alike, products_alike, same_at_every_place
from offload.model import decoder as decoder_module
from offload.model.heads import gated_heads
from offload.model.level import Level, StreamingLevel
from offload.model.passes import forward

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PRODUCTS = ((96, 64, True), (64, 48, False))
SHAPE = AttentionShape(4, 2, 16, num_pages=3, page_tokens=32)
BLOCK = 16


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    yield
    products_alike.cache_clear()
    attention_alike.cache_clear()


def products(dtype: torch.dtype) -> bool:
    products_alike.cache_clear()
    return products_alike(PRODUCTS, BLOCK, dtype, torch.get_num_threads())


def attention(dtype: torch.dtype) -> bool:
    attention_alike.cache_clear()
    return attention_alike(SHAPE, BLOCK, dtype, torch.get_num_threads())


def shuffled(tensor: Tensor, dim: int) -> Tensor:
    """The same order for all of one size. Not backwards: a sum that halves a vector of 16 lanes again and again is the
    same from both ends, bit for bit. Seen with AVX-512 and heads of 16 numbers."""
    order = torch.randperm(tensor.shape[dim], generator=torch.Generator().manual_seed(1))
    return tensor.index_select(dim, order)


def other_order_at(places: slice, inner: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`linear` that sums the rows at some places of a block in another order."""

    def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        out = inner(x, weight, bias)
        if len(x) > 1:
            out[places] = inner(shuffled(x, 1), shuffled(weight, 1), bias)[places]
        return out

    return product


@pytest.mark.parametrize("place", range(4))
def test_the_check_of_places_finds_any_one_that_is_otherwise(place: int) -> None:
    rows = torch.arange(1.0, 5.0)[:, None]

    def otherwise(part: Tensor) -> list[Tensor]:
        out = part * 3
        out[place] += 1e-6
        return [part.clone(), out]

    assert same_at_every_place(lambda part: [part * 3], rows)
    assert not same_at_every_place(otherwise, rows)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize(
    "places",
    [slice(1, None, 2), slice(0, 1), slice(15, 16), slice(2, None, 3)],
    ids=["odd rows", "first row", "last row", "every third"],
)
def test_a_product_in_whose_blocks_a_rows_place_changes_its_bits_is_found(
    places: slice, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: rows were compared with those at the same place of a larger block alone."""
    assert products(dtype)
    monkeypatch.setattr(rows_module, "linear", other_order_at(places, rows_module.linear))
    assert not products(dtype)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("half", ["keys", "values"])
def test_attention_in_whose_blocks_a_rows_place_changes_its_bits_is_found(
    half: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend = rows_module.attend

    def otherwise(q: Tensor, keys: Tensor, values: Tensor, visible: Tensor | None) -> Any:
        found = attend(q, keys, values, visible)
        if half == "keys":
            q, keys = shuffled(q, 2), shuffled(keys, 3)
        else:
            keys, values = shuffled(keys, 2), shuffled(values, 2)
        found.out[:, 0] = attend(q, keys, values, visible).out[:, 0]
        return found

    assert attention(dtype)
    monkeypatch.setattr(rows_module, "attend", otherwise)
    assert not attention(dtype)


def test_rounding_of_1e_8_in_one_products_values_is_found_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row of one head. Sums of about 0.1 hide it, sums that are exactly 0 do not: so weights and values have a
    trial of their own."""
    bmm = torch.bmm

    def rounded(weights: Tensor, values: Tensor) -> Tensor:
        out = bmm(weights, values)
        out[0, 0] += 1e-8
        return out

    assert attention(torch.bfloat16)
    monkeypatch.setattr(torch, "bmm", rounded)
    assert not attention(torch.bfloat16)


@pytest.mark.few(2)
@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tokens_logits_have_the_same_bits_in_passes_of_any_number_of_rows(
    tmp_path: Path, dtype: str, alike: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole passes of a model over a cache of two tiles; where places do not round alike, rows run one by one."""
    target = load(save(random_model(), tmp_path), dtype=DTYPES[dtype])
    tokens, sizes = random_tokens(44, vocabulary=target.config.vocab_size), Sizes(rows=BLOCK, page=16, pages=2)
    rows = set[int]()
    if not alike:
        odd = other_order_at(slice(1, None, 2), torch.nn.functional.linear)

        def counted(x: Tensor, *args: Any) -> Tensor:
            rows.add(len(x))
            return odd(x, *args)

        monkeypatch.setattr("offload.kernels.cpu.product", counted)
        monkeypatch.setattr(decoder_module, "products_alike", lambda *args: False)
    runs = []
    for step in (20, 1, 2, 3, 5, 8, 11):
        level = Level("target", target, full_cache(target, sizes), vocab_size=target.config.vocab_size, block=BLOCK)
        forward(level, tokens[:20], 1)
        parts = [tokens[at : at + step] for at in range(20, 44, step)]
        runs.append(torch.cat([forward(level, part, len(part)) for part in parts]))
    assert all(torch.equal(run, runs[0]) for run in runs)
    assert rows == (set() if alike else {1})


def test_the_trial_runs_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = list[int]()
    same = rows_module.same_at_every_place
    monkeypatch.setattr(rows_module, "same_at_every_place", lambda *args: tried.append(1) or same(*args))
    target = load(save(random_model(), tmp_path), dtype=torch.float32)
    cache = full_cache(target, Sizes(rows=BLOCK))
    level = Level("target", target, cache, vocab_size=target.config.vocab_size, block=BLOCK)
    forward(level, [1, 2, 3], 1)
    count = len(tried)
    forward(level, [4], 1)
    assert len(tried) == count > 0


# A draft


class Unpadded(StreamingLevel):
    def _room(self, num_rows: int) -> int:
        return num_rows


def test_a_drafts_few_rows_are_padded_to_a_power_of_two_and_mean_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first pass with a new number of rows is slow on a CPU, and catching up would use every number."""
    draft = load(save(random_model(), tmp_path), dtype=torch.float32)
    tokens = random_tokens(300, vocabulary=draft.config.vocab_size)
    sizes = Sizes(sinks=4, window=40, gamma=31, draft_gamma=5, rows=8, capacity=400)
    seen: list[int] = []
    runs = []
    for kind in (StreamingLevel, Unpadded):
        cache = streaming_cache(draft, sizes)
        begin = cache.begin
        monkeypatch.setattr(cache, "begin", lambda phase, rows, begin=begin: (seen.append(rows), begin(phase, rows)))
        level, logits = kind("draft", draft, cache, vocab_size=draft.config.vocab_size), []
        for at, count, kept in ((0, 100, 100), (100, 3, 2), (102, 5, 5), (107, 13, 1), (108, 1, 1), (109, 37, 37)):
            logits.append(forward(level, tokens[at : at + count], min(count, 2)))
            level.truncate(at + kept)
            assert level.length == at + kept
        runs.append(torch.cat(logits))
    padded, exact = [4, 64, 4, 8, 16, 1, 64], [4, 40, 3, 5, 13, 1, 37]
    assert seen == [*padded, *exact]
    torch.testing.assert_close(runs[0], runs[1], rtol=1e-4, atol=1e-4)


def test_a_number_of_rows_that_is_past_padding_is_left_as_it_is(tmp_path: Path) -> None:
    draft = load(save(random_model(), tmp_path), dtype=torch.float32)
    for gamma in (60, 1):
        cache = streaming_cache(draft, Sizes(sinks=0, window=10, gamma=gamma, draft_gamma=0, rows=1))
        level = StreamingLevel("draft", draft, cache, vocab_size=draft.config.vocab_size)
        for rows in range(1, min(cache.max_rows, 100)):
            padded = level._room(rows)
            power = 1 << (rows - 1).bit_length()
            assert padded == (power if power <= min(64, cache.max_rows) else rows)


@pytest.mark.parametrize("gates_heads", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gates_of_heads_give_a_row_the_same_bits_beside_any_others(dtype: str, gates_heads: bool) -> None:
    """torch's own softplus does not."""
    attention = Attention(3, 1, 16, gate=True, gate_function="softplus", gates_heads=gates_heads)
    generator = torch.Generator().manual_seed(0)
    projected = torch.randn(37, sum(attention.parts), generator=generator).mul(4).to(DTYPES[dtype])
    attended = torch.randn(37, attention.q_size, generator=generator).to(DTYPES[dtype])
    gate = projected.split(attention.parts, 1)[-1]
    every = gated_heads(attention, attended, gate)
    for count in range(1, 37, 5):
        for first in range(0, 37 - count, 3):
            some = slice(first, first + count)
            assert torch.equal(gated_heads(attention, attended[some], gate[some]), every[some])
