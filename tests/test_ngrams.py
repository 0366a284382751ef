"""The n-gram embedding of a layer against transformers' own: the numbers that follow from a config, the rows that
tokens choose, and what they add to the layer's streams."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import DynamicCache
from transformers.models.qwen4_exp import Qwen4ExpTextConfig
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextNGramEmbedding, Qwen4ExpTextPLELayer

from kit.processor import OPERATORS, of
from offload.config import ngrams as described
from offload.config.ngrams import NGrams
from offload.config.norm import Norm
from offload.kernels import ngrams as kernels
from offload.kernels.convolution import dilated_convolution
from offload.kernels.ngrams import NGramNorms
from offload.kernels.norms import NormWeights
from offload.kernels.recurrence import Held, RecurrenceWeights, Replayed
from test_delta import with_a_bug

EOS, VOCAB, STREAMS, HIDDEN = 2, 96, 4, 24
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": 4, "num_attention_heads": 2,
    "num_key_value_heads": 1, "hc_count": STREAMS, "hc_lowrank": 16, "ple_layer_ids": [2], "ple_embed_dim": 64,
    "ngram_size": 3, "heads_per_ngram": 4, "ngram_vocab_size_base": 211, "make_ngram_vocab_size_divisible_by": 8,
    "split_ngram_parts": 4, "eos_token_id": EOS, "rms_norm_eps": 1e-4,
}  # fmt: skip


def config(**fields: object) -> Qwen4ExpTextConfig:
    return Qwen4ExpTextConfig(**SIZES | fields)


def of_config(own: Qwen4ExpTextConfig, index: int = 0) -> NGrams:
    num_heads = (own.ngram_size - 1) * own.heads_per_ngram
    sizes = described.head_sizes(own.ngram_vocab_size_base, num_heads, index=index)
    eos = own.eos_token_id
    return NGrams(
        own.ngram_size,
        own.heads_per_ngram,
        own.ple_embed_dim // num_heads,
        described.multipliers(own.seed, own.vocab_size, own.ngram_size, index=index),
        sizes,
        described.padded(sum(sizes), own.make_ngram_vocab_size_divisible_by),
        eos[0] if isinstance(eos, list) else eos,
        own.hidden_size,
        own.hc_count,
        own.ple_conv_kernel_size,
        own.ngram_size,
        Norm(own.rms_norm_eps, plus_one=True, fp32=True),
    )


# What follows from a config.


def test_the_numbers_of_the_released_model() -> None:
    """Of Qwen3.8-Flash-Next: seed 1234, 248,320 tokens, heads from 20,000,000 on."""
    assert described.multipliers(1234, 248_320, 3) == (23703573157769, 20109073645365, 8052911324071)
    sizes = described.head_sizes(20_000_000, 16)
    assert (sizes[0], sizes[-1], sum(sizes)) == (20_000_003, 20_000_171, 320_001_446)
    assert described.padded(sum(sizes), 128) == 320_001_536
    own = of_config(config(ngram_vocab_size_base=20_000_000, heads_per_ngram=8, hidden_size=2560, ple_embed_dim=2560))
    assert own.table == (320_001_446 // 8 * 8 + 8, 160, "")
    assert own.products == {"ngram_keys": (10_240, 2560, ""), "ngram_values": (2560, 2560, "")}
    assert {size for size, _ in own.norms.values()} == {10_240}
    assert (own.convolution.width, own.convolution.channels) == (10, 10_240)


@pytest.mark.parametrize("index", range(3))
@pytest.mark.parametrize(
    "fields",
    [{}, {"seed": 7, "vocab_size": 248_320}, {"ngram_size": 4, "ple_embed_dim": 48}, {"ngram_vocab_size_base": 2}],
    ids=["tiny", "seed", "longer n-grams", "smallest heads"],
)
def test_all_numbers_are_transformers_own(fields: dict[str, object], index: int) -> None:
    theirs = Qwen4ExpTextNGramEmbedding(config(**fields), config(**fields).ple_embed_dim, 1, index)
    own = of_config(config(**fields), index)
    assert list(own.multipliers) == theirs.layer_multipliers.tolist()
    assert list(own.head_sizes) == theirs.head_vocab_sizes
    assert list(own.offsets) == theirs.head_offsets
    assert (own.num_rows, own.row_size) == tuple(theirs.ngram_embedding.weight.shape)


def test_primes_are_those_that_nothing_divides() -> None:
    primes = [each for each in range(2, 5000) if all(each % other for other in range(2, int(each**0.5) + 1))]
    assert list(described.head_sizes(0, len(primes))) == primes
    large = (1 << 61) - 1  # a Mersenne prime; strong pseudoprimes to base 2 and to the first bases
    assert described.head_sizes(large, 1) == (large,)
    for composite in (2047, 3215031751, 3825123056546413051):
        assert described.head_sizes(composite, 1)[0] > composite


# The rows that tokens choose.


def text(count: int, seed: int, *, eos: float = 0.2) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCAB, (count,), generator=generator)
    return torch.where(torch.rand(count, generator=generator) < eos, EOS, ids)


@cache
def embedding(index: int = 0, **fields: object) -> Qwen4ExpTextNGramEmbedding:
    """Its table has the row's number, so that it says which rows it reads."""
    own = config(ple_embed_dim=8, **fields)
    theirs = Qwen4ExpTextNGramEmbedding(own, own.ple_embed_dim, 1, index).double()
    theirs.ngram_embedding.weight.data = torch.arange(len(theirs.ngram_embedding.weight)).double()[:, None]
    return theirs


def whole(own: NGrams, ids: Tensor, module: ModuleType = kernels) -> Tensor:
    found: Tensor = module.chosen_rows(own, torch.cat([torch.full((own.context,), own.eos), ids]))
    return found


def check_hashes(module: ModuleType) -> None:
    for seed in range(30):
        ids = text(40, seed, eos=(0.0, 0.1, 0.4)[seed % 3])
        theirs = embedding()(ids[None], None)[0].long()
        own = of_config(config())
        assert torch.equal(whole(own, ids, module), theirs)
        for start in (0, 1, 2, 3, 17, 39):
            given = torch.cat([torch.full((own.context,), EOS), ids])[start:]
            assert torch.equal(module.chosen_rows(own, given), theirs[start:])


def test_rows_are_transformers_own_from_every_start() -> None:
    check_hashes(kernels)


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("vocab", [96, 248_320, 1 << 20])
def test_rows_of_longer_n_grams_and_of_other_vocabularies(vocab: int, index: int) -> None:
    fields = {"ngram_size": 5, "heads_per_ngram": 2, "vocab_size": vocab}
    ids = torch.randint(vocab, (60,), generator=torch.Generator().manual_seed(1))
    ids[[3, 7, 8, 30, 33]] = EOS
    theirs = embedding(index, **fields)(ids[None], None)[0].long()
    assert torch.equal(whole(of_config(config(ple_embed_dim=8, **fields), index), ids), theirs)


def test_products_wrap_as_in_64_bits() -> None:
    """Ids and multipliers for which they do; with Python's own integers as the truth."""
    own = replace(of_config(config()), multipliers=((1 << 63) - 25, (1 << 62) + 9, 8_052_911_324_071))
    ids = torch.tensor([5, 95, 1 << 40, 77, EOS, 3])
    found, given = whole(own, ids).tolist(), [EOS, EOS, *ids.tolist()]

    def signed(number: int) -> int:
        return (number + (1 << 63)) % (1 << 64) - (1 << 63)

    for place in range(len(ids)):
        one, two = given[place + 1], given[place]
        two = EOS if one == EOS else two
        mixed = signed(given[place + 2] * own.multipliers[0]) ^ signed(one * own.multipliers[1])
        wanted = [mixed % size + first for size, first in zip(own.head_sizes[:4], own.offsets[:4], strict=True)]
        mixed ^= signed(two * own.multipliers[2])
        wanted += [mixed % size + first for size, first in zip(own.head_sizes[4:], own.offsets[4:], strict=True)]
        assert found[place] == wanted


HASH_BUGS = {
    "eos is ignored": ("torch.where(previous == own.eos, own.eos, earlier)", "earlier"),
    "an eos cuts its own context": (
        "earlier if distance == 1 else torch", "torch.where(ids[own.context :] == own.eos, own.eos, earlier) "
        "if distance == 1 else torch",
    ),
    "multipliers are floats": ("(previous * factor)", "(previous * int(float(factor)))"),
    "the longest n-grams first": ("torch.cat(found, 1)", "torch.cat(found[::-1], 1)"),
    "no XOR": ("mixed ^ (previous * factor)", "mixed + (previous * factor)"),
    "an id too late": ("ids[own.context - distance :]", "ids[own.context - distance + 1 :]"),
    "no offsets": (" + offsets[heads]", ""),
}  # fmt: skip


@pytest.mark.parametrize("bug", HASH_BUGS)
def test_mistakes_in_the_choice_of_rows_are_found(bug: str) -> None:
    broken = with_a_bug(kernels, *HASH_BUGS[bug])
    with pytest.raises((AssertionError, RuntimeError)):
        check_hashes(broken)


# What embeddings add to the streams.


@cache
def layer(dtype: torch.dtype) -> Qwen4ExpTextPLELayer:
    """With random numbers everywhere: convolutions of zeros would hide all of what comes behind them."""
    theirs, generator = Qwen4ExpTextPLELayer(config(), 1, 0), torch.Generator().manual_seed(3)
    for name, each in theirs.named_parameters():
        size = 0.4 if "norm" in name else 1.0 if "embedding" in name else 0.3
        each.data = size * torch.randn(each.shape, generator=generator)
    return theirs.to(dtype).eval()


def streams(count: int, dtype: torch.dtype, seed: int = 5) -> Tensor:
    return (2 * torch.randn(count, STREAMS * HIDDEN, generator=torch.Generator().manual_seed(seed))).to(dtype)


def norms_of(theirs: Qwen4ExpTextPLELayer, norm: Norm) -> NGramNorms:
    every = (theirs.norm_key, theirs.norm_query, theirs.norm_conv)
    return NGramNorms(*(NormWeights(norm, 1 + each.weight.detach().float()) for each in every))


def added(module: ModuleType, ids: Tensor, rows: Tensor, passes: Sequence[int], operators: str = "torch") -> Tensor:
    """What a sequence's tokens add to the streams, in passes of so many tokens, which are all replayed."""
    theirs, own = layer(rows.dtype), of_config(config())
    recurrence, weights = own.convolution, RecurrenceWeights(theirs.conv1d.weight.detach()[:, 0].T.float().contiguous())
    run = dilated_convolution if operators == "torch" else of(operators).recurrences[type(recurrence)]
    room = recurrence.width - 1 + max(passes)
    held = Held(torch.empty(recurrence.state_shape), torch.zeros(room, recurrence.kept, dtype=rows.dtype))
    table, found, start, before = theirs.ple_embedding.ngram_embedding.weight.detach(), [], 0, 0
    with torch.inference_mode():
        for count in passes:
            given = torch.cat([torch.full((own.context,), own.eos), ids])[start : start + count + own.context]
            e = table[module.chosen_rows(own, given)].flatten(1)
            keys, values = theirs.key_proj(e), theirs.value_proj(e)
            gated, normed = module.gated_values(
                own, norms_of(theirs, own.norm), keys, values, rows[start : start + count]
            )
            found.append(gated + run(recurrence, weights, held, normed, Replayed(before), settles=False))
            start, before = start + count, count
    return torch.cat(found)


def check_layer(module: ModuleType, dtype: torch.dtype, operators: str = "torch") -> None:
    """In 16 bits nearly all numbers have the very bits."""
    ids, rows = text(30, 4), streams(30, dtype)
    with torch.inference_mode():
        theirs = layer(dtype)(rows[None], ids[None], None)[0]
    for passes in ([30], [12, 1, 17], [1] * 30):
        found = added(module, ids, rows, passes, operators)
        assert found.dtype == dtype
        if dtype == torch.float32:
            assert_close(found, theirs, rtol=2e-5, atol=2e-6)
        else:
            assert_close(found.float(), theirs.float(), rtol=0.02, atol=0.02)
            assert (found == theirs).float().mean() > 0.9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("operators", OPERATORS)
def test_what_is_added_is_transformers_own(operators: str, dtype: torch.dtype) -> None:
    check_layer(kernels, dtype, operators)


def test_transformers_own_passes_add_the_same() -> None:
    """With its cache of ids and of rows: what the passes here are compared with holds for its passes, too."""
    ids, rows, own = text(30, 4), streams(30, torch.float32), config(layer_types=["linear_attention"] * 4)
    past, found = DynamicCache(config=own), []
    with torch.inference_mode():
        for start, stop in ((0, 12), (12, 13), (13, 30)):
            found.append(layer(torch.float32)(rows[None, start:stop], ids[None, start:stop], past)[0])
    assert_close(torch.cat(found), added(kernels, ids, rows, [12, 1, 17]), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_rows_bits_do_not_depend_on_the_rows_beside_it(dtype: torch.dtype) -> None:
    own, count = replace(of_config(config()), hidden_size=2560), 19
    generator = torch.Generator().manual_seed(1)

    def some(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    norms = NGramNorms(*(NormWeights(own.norm, 1 + some(own.channels).float()) for _ in range(3)))
    keys, values, rows = some(count, own.channels), some(count, own.hidden_size), some(count, own.channels)
    together = kernels.gated_values(own, norms, keys, values, rows)
    for row in range(count):
        alone = kernels.gated_values(own, norms, *(each[row : row + 1] for each in (keys, values, rows)))
        assert all(torch.equal(one[0], all_rows[row]) for one, all_rows in zip(alone, together, strict=True))


LAYER_BUGS = {
    "the sign is lost": (".sqrt() * scores.sign()", ".sqrt()"),
    "norms before gates": (
        "normed_heads(gated, norms.values, size)",
        "normed_heads(values.repeat(1, own.streams), norms.values, size)",
    ),
    "gates of normed values": (
        "* values[:, None])",
        "* normed_heads(values.repeat(1, own.streams), norms.values, size).unflatten(1, (own.streams, size)))",
    ),
    "no root": ("scores.abs().clamp_min(_LEAST).sqrt()", "scores.abs()"),
    "scores are not divided": (" / sqrt(size)", ""),
    "streams are not normed": ("normed_heads(streams, norms.queries, size)", "streams"),
    "norms over all streams": ("normed_heads(keys, norms.keys, size)", "norms.keys(keys)"),
    "one gate for all streams": ("gates[:, :, None] *", "gates[:, :1, None].expand(-1, own.streams, 1) *"),
    "scores of other tokens": ("_while_even(products.float())", "_while_even(products.float()).roll(1, 0)"),
}


@pytest.mark.parametrize("bug", LAYER_BUGS)
def test_mistakes_in_what_is_added_are_found(bug: str) -> None:
    broken = with_a_bug(kernels, *LAYER_BUGS[bug])
    with pytest.raises(AssertionError):
        check_layer(broken, torch.float32)


@pytest.mark.parametrize("change", [{"dilation": 1}, {"taps": 3}], ids=["dilation 1", "a tap too few"])
def test_another_convolution_is_found(change: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    made: Callable[..., NGrams] = of_config
    monkeypatch.setattr("test_ngrams.of_config", lambda *given: replace(made(*given), **change))
    with pytest.raises((AssertionError, RuntimeError)):
        check_layer(kernels, torch.float32)
