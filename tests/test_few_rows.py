"""Passes of few rows on the CPU's kernels, through whole models: a row's bits depend on the tokens up to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from kit.models import LateLink, Sizes, full_cache, load, random_model, random_tokens, save, streaming_cache
from kit.processor import best, threads
from offload.kernels.cpu import FEW_ROWS
from offload.model.decoder import Decoder
from offload.model.level import Level, StreamingLevel
from offload.model.native_layers import NativeLayers
from offload.model.passes import Pass, forward
from offload.transfer.link import Link

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FAMILIES = ("llama-gqa", "llama-biased", "qwen2", "qwen3")
SIZES = Sizes(page=8, capacity=192, chunk=4, any_rows=True)
LAST = 5
TOKENS = random_tokens(90 + LAST, seed=2)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {family: save(random_model(family, seed=3), root / family) for family in FAMILIES}


def run(decoder: Decoder, cuts: Sequence[int], *, pages: int = 2, link: Link | None = None) -> tuple[Tensor, Tensor]:
    """All tokens in forwards of `cuts` rows and a last one of LAST rows: (logits, masses of the last one)."""
    sizes = replace(SIZES, pages=pages)
    cache = full_cache(decoder, sizes, mass=True, link=link)
    level = Level("target", decoder, cache, vocab_size=decoder.config.vocab_size, block=SIZES.block)
    logits, at = [], 0
    for count in (*cuts, LAST):
        logits.append(forward(level, TOKENS[at : at + count], count))
        at += count
    assert at == len(TOKENS)
    return torch.cat(logits), cache.mass(LAST)


@pytest.mark.few(6)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_have_the_same_bits_in_any_passes(folders: dict[str, Path], family: str, dtype: str) -> None:
    """In passes of 1 to 90 rows; tiles of 1 to 4 pages, resident or streamed; streamed weights; 1 to 4 threads."""
    decoder = load(folders[family], dtype=DTYPES[dtype], kernels=best())
    streamed = load(folders[family], dtype=DTYPES[dtype], kernels=best(), link=LateLink(late_in=False, late_out=True))
    wanted, masses = run(decoder, [1] * 90)
    late = LateLink(late_in=True, late_out=True)
    passes = [
        (1, partial(run, decoder, [64, 26])),
        (2, partial(run, decoder, [90])),
        (2, partial(run, decoder, [17, 1, 33, 2, 16, 21], pages=1)),
        (4, partial(run, decoder, [15, 48, 3, 24], pages=4, link=late)),
        (2, partial(run, streamed, [31, 32, 27], link=late)),
    ]
    for number, run_passes in passes:
        with threads(number):
            logits, mass = run_passes()
        assert torch.equal(logits, wanted)
        assert torch.equal(mass, masses)


@pytest.mark.few(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_are_as_near_to_fp32_as_by_torch(folders: dict[str, Path], family: str) -> None:
    """Logits and masses in fp32 differ by rounding alone; those in bf16 not more from them than torch's."""
    wanted, masses = run(load(folders[family]), [4] * 20 + [10])
    logits, mass = run(load(folders[family], kernels=best()), [4] * 20 + [10])
    assert_close(logits, wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()))
    assert_close(mass, masses[..., : mass.shape[-1]], rtol=1e-4, atol=1e-5)
    errors = []
    for kernels in ({"kernels": best()}, {}):
        decoder = load(folders[family], dtype=torch.bfloat16, **kernels)
        errors.append(float((run(decoder, [4] * 20 + [10])[0].float() - wanted).square().mean().sqrt()))
    assert errors[0] <= 1.1 * errors[1]


def test_a_pass_runs_on_the_kernels_where_that_is_asked_for(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the claims above would be about torch."""
    layers: list[int] = []
    layer = NativeLayers.run

    def counted(self: NativeLayers, index: int, *args: object, **named: object) -> None:
        layers.append(index)
        layer(self, index, *args, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(NativeLayers, "run", counted)
    decoder = load(folders["qwen3"], kernels=best())
    run(decoder, [90])
    assert layers == [*range(decoder.config.num_layers)] * 2
    layers.clear()
    run(load(folders["qwen3"]), [90])
    assert not layers


@pytest.mark.parametrize("count", [1, FEW_ROWS, FEW_ROWS + 6])
def test_sequences_share_passes_of_as_many_rows_as_have_the_bits_that_they_have_alone(
    folders: dict[str, Path], count: int
) -> None:
    """Of more rows than the kernels take, a draft's are run by torch, all of a sequence together."""
    decoder = load(folders["llama-gqa"], kernels=best())

    def levels() -> list[Level]:
        caches = [streaming_cache(decoder, replace(SIZES, window=96)) for _ in "12"]
        return [StreamingLevel("draft", decoder, cache, vocab_size=decoder.config.vocab_size) for cache in caches]

    texts = [random_tokens(count, seed=seed) for seed in (1, 2)]
    alone = [forward(level, text, count) for level, text in zip(levels(), texts, strict=True)]
    ready = levels()
    assert [level.shares(count) for level in ready] == [count <= FEW_ROWS] * 2
    asked = [Pass(level, text, count) for level, text in zip(ready, texts, strict=True)]
    ready[0].run(asked)
    shared = [logits for each in asked for logits in each.made]
    same = all(torch.equal(*each) for each in zip(shared, alone, strict=True))
    assert same == (count <= FEW_ROWS)


def test_a_pass_that_is_broken_off_changes_nothing_of_the_next(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are worked on in place, in memory that is kept."""
    decoder = load(folders["qwen2"], kernels=best())
    wanted, _ = run(decoder, [45, 45])
    layer = NativeLayers.run
    level = Level(
        "target", decoder, full_cache(decoder, SIZES), vocab_size=decoder.config.vocab_size, block=SIZES.block
    )

    def fails(self: NativeLayers, index: int, *args: object, **named: object) -> None:
        layer(self, index, *args, **named)  # type: ignore[arg-type]
        if index:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(NativeLayers, "run", fails)
        with pytest.raises(KeyboardInterrupt):
            forward(level, TOKENS[:60], 60)
    assert torch.equal(run(decoder, [45, 45])[0], wanted)
