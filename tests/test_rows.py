"""Blocks of rows: any number of rows is cut into sizes that this machine was seen to compute alike."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from models import Sizes, full_cache, load, random_model, random_tokens, save
from offload.kernels import rows as rows_module
from offload.kernels.rows import Blocks, Shapes, equal_blocks
from offload.model.level import Level
from offload.plan.sizing import CPU_BLOCKS

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SIZES = st.sets(st.integers(1, 20), min_size=1).map(lambda sizes: Blocks(tuple(sorted(sizes))))


@given(SIZES, st.integers(0, 100))
def test_a_cut_holds_all_rows_in_blocks_of_the_given_sizes(blocks: Blocks, num_rows: int) -> None:
    cut = blocks.cut(num_rows)
    assert set(cut) <= set(blocks.sizes)
    assert sum(cut) >= num_rows
    assert blocks.padded(num_rows) == sum(cut)


@given(SIZES, st.integers(1, 100))
def test_a_padded_number_is_cut_the_same_way(blocks: Blocks, num_rows: int) -> None:
    """The level pads, and the cache cuts what comes: both must see the same blocks."""
    assert blocks.cut(blocks.padded(num_rows)) == blocks.cut(num_rows)


@given(SIZES, st.integers(1, 100))
def test_only_the_last_block_is_padded_and_as_little_as_can_be(blocks: Blocks, num_rows: int) -> None:
    *whole, last = blocks.cut(num_rows)
    assert set(whole) <= {blocks.sizes[-1]}
    smaller = [size for size in blocks.sizes if size < last]
    assert not smaller or sum(whole) + smaller[-1] < num_rows


def probe(dtype: torch.dtype) -> Blocks:
    shapes = Shapes(((96, 64, True), (64, 48, False)), 4, 2, 16, num_pages=3, page_tokens=32)
    rows_module.equal_blocks.cache_clear()
    return equal_blocks(shapes, 8, CPU_BLOCKS, dtype, torch.get_num_threads())


def other_order_for(size: int, inner: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`linear` that sums backwards where there are `size` rows."""

    def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if len(x) == size:
            return inner(x.flip(1), weight.flip(1).contiguous(), bias)
        return inner(x, weight, bias)

    return product


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_a_product_that_rounds_differently_for_some_number_of_rows_is_found(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = probe(dtype)
    assert {8, 16} <= set(usual.sizes)
    for size in (12, 16):
        with monkeypatch.context() as patch:
            patch.setattr(rows_module, "linear", other_order_for(size, rows_module.linear))
            assert probe(dtype).sizes == tuple(kept for kept in usual.sizes if kept != size)
    rows_module.equal_blocks.cache_clear()


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("half", ["keys", "values"])
def test_attention_that_rounds_differently_for_some_number_of_rows_is_found(
    half: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend = rows_module.attend

    def shuffled(q: Tensor, keys: Tensor, values: Tensor, visible: Tensor | None) -> object:
        if q.shape[1] == 2 * 16:  # two query heads for each KV head
            if half == "keys":
                q, keys = q.flip(2), keys.flip(3).contiguous()
            else:
                keys, values = keys.flip(2).contiguous(), values.flip(2).contiguous()
        return attend(q, keys, values, visible)

    usual = probe(dtype)
    monkeypatch.setattr(rows_module, "attend", shuffled)
    assert probe(dtype).sizes == tuple(size for size in usual.sizes if size != 16)
    rows_module.equal_blocks.cache_clear()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tokens_logits_have_the_same_bits_in_a_block_of_any_size_that_was_found_equal(
    tmp_path: Path, dtype: str
) -> None:
    """Whole passes of a model, cut in every way that the found sizes allow, over a cache of two tiles."""
    target = load(save(random_model(), tmp_path), dtype=DTYPES[dtype])
    config, tokens = target.config, random_tokens(60, vocabulary=target.config.vocab_size)
    sizes = Sizes(rows=8, page=16, pages=2)
    shapes = Shapes(
        (*config.layer_products(), (config.vocab_size, config.hidden_size, False)),
        config.num_heads, config.num_kv_heads, config.head_dim, sizes.pages, sizes.page,
    )  # fmt: skip
    found = equal_blocks(shapes, sizes.rows, CPU_BLOCKS, target.weights.embedding.dtype, torch.get_num_threads())
    runs = []
    for blocks, step in [(Blocks((8,)), 20), *((found, step) for step in (1, 2, 3, 5, 8, 11, 20))]:
        cache = full_cache(target, Sizes(rows=8, page=16, pages=2, equal_rows=blocks.sizes))
        level = Level("target", target, cache, vocab_size=config.vocab_size, blocks=blocks)
        level.forward(tokens[:20], 1)
        parts = [tokens[at : at + step] for at in range(20, 60, step)]
        runs.append(torch.cat([level.forward(part, len(part)) for part in parts]))
    assert all(torch.equal(run, runs[0]) for run in runs)
