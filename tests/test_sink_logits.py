"""Sink logits, gpt-oss's attention sinks: every attention against a plain softmax with a further column, whole models
against transformers' own attention of gpt-oss, and their way from a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from kit.contract import DRAFTED, MODES, NUM_NEW, PROMPT, SHAPES, Pair, alone, say
from kit.fake_flash import flash_attn_with_kvcache
from kit.families import save_tiny
from kit.forked import Forked, forked_ranks
from kit.gguf_models import write_gguf
from kit.models import (
    TOKENIZER_SIZE,
    LateLink,
    byte_tokenizer,
    load,
    random_model,
    random_tokens,
    resident_rows,
    save,
    target_cache,
)
from kit.processor import OPERATORS, best, built, of, on_this_machine
from kit.quantised import engine_of, level_stats
from kit.sunk import NAMES, in_rank, random_sunk, read_as_sunk, save_sunk
from offload.config.reading import read_config
from offload.kernels.device import NONE, DeviceKernels
from offload.kernels.gpu.flash import PAGE_STEP, FlashTiles
from offload.kernels.prefill import OperatorTiles, PrefillAttention
from offload.kernels.rope import Scoring, ScoringWeights, scorings
from offload.kernels.runs import Run, RunAttention
from offload.session.fingerprints import model_digest
from offload.transfer.memory import Memory
from offload.weights.checkpoint import Checkpoint
from offload.weights.layout import LayerLayout
from offload.weights.loader import load_weights
from offload.weights.tensors import expected_tensors
from paper import on_paper
from test_families import LENGTH, SIZES
from test_operators import DIM, DTYPES, GROUPED, KV_HEADS, TOLERANCE, attending, in_fp64, normal, some_runs, still
from test_parity import assert_same_logits, in_decoding, in_prefill

HEADS = KV_HEADS * GROUPED
SINKS = torch.tensor([-30.0, 0.5, 4.0, -1.0, 2.0, 7.0])  # from no weight at all to nearly all of a row's
WRONG: dict[str, Callable[[Tensor], Tensor | None]] = {
    "left out": lambda sinks: None,
    "added twice": lambda sinks: sinks + math.log(2),
    "of the next head": lambda sinks: sinks.roll(1),
    "in another order of the query groups": lambda sinks: sinks.view(KV_HEADS, GROUPED).T.flatten(),
    "in powers of two": lambda sinks: sinks * math.log(2),
    "scaled like a score": lambda sinks: sinks * DIM**-0.5,
}


@pytest.fixture(params=["torch", *on_this_machine()])
def kernels(request: pytest.FixtureRequest) -> DeviceKernels:
    return NONE if request.param == "torch" else built(request.param)


def executor(kernels: DeviceKernels, dtype: torch.dtype, *, chunk: int | None = None) -> RunAttention:
    return kernels.attention(dtype=dtype, page=16, chunk=chunk)


def exact_runs(dtype: torch.dtype) -> tuple[list[Run], list[Tensor]]:
    """Several pages, a window and what they hold."""
    (*runs, _), (*held, _) = some_runs(dtype)
    return runs, held


def both_kinds(kernels: DeviceKernels, dtype: torch.dtype) -> list[tuple[RunAttention, list[Run]]]:
    """Attention over exact runs, and over codes beside an exact page, as caches in 4 bits have them."""
    *exact, codes = some_runs(dtype)[0]
    page = Run(normal(2, KV_HEADS, 120, DIM, seed=4, dtype=dtype), 120)
    return [(executor(kernels, dtype), exact), (kernels.attention(dtype=dtype), [page, codes])]


@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_rows", [1, 19])
def test_attention_equals_a_softmax_with_a_further_column(
    kernels: DeviceKernels, num_rows: int, dtype: torch.dtype, cap: float | None
) -> None:
    """Over several runs: out, lse and masses. None of the usual mistakes would pass."""
    runs, held = exact_runs(dtype)
    q, index = 2 * normal(num_rows, HEADS, DIM, seed=num_rows, dtype=dtype), 105 - num_rows
    part = attending(executor(kernels, dtype), runs, q, index, cap=cap, sinks=SINKS).part()
    out, _ = attending(executor(kernels, dtype), runs, q, index, cap=cap, sinks=SINKS).merge()
    assert out.dtype == dtype
    assert torch.equal(part.out.flatten(1).to(dtype), out)

    def check(sinks: Tensor | None) -> None:
        wanted, _, lse = in_fp64(runs, held, q, index, cap, sinks)
        assert_close(part.out.flatten(1).double(), wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
        assert_close(part.lse.double(), lse, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])

    check(SINKS)
    for wrong in WRONG.values():
        with pytest.raises(AssertionError, match="not close"):
            check(wrong(SINKS))


def test_masses_are_of_the_whole_softmax(kernels: DeviceKernels) -> None:
    """So those of a row that looks at its sinks count for less."""
    runs, held = exact_runs(torch.float32)
    q = normal(19, HEADS, DIM, seed=4)
    attention = partial(attending, runs=runs, q=q, index=86, masses=True, sinks=SINKS)
    _, mass = attention(executor(kernels, q.dtype, chunk=16)).merge()
    part = attention(executor(kernels, q.dtype, chunk=16)).part()
    _, weights, _ = in_fp64(runs, held, q, 86, sinks=SINKS)
    assert mass is not None
    assert part.mass is not None
    assert_close(mass.sum(-1).double(), weights.sum(-1), atol=2e-6, rtol=2e-5)
    assert_close(part.mass.unflatten(1, (KV_HEADS, -1)).sum(2), mass, atol=1e-6, rtol=1e-5)
    assert mass.sum(-1).max() < GROUPED - 0.1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_they_share_a_row_with_its_keys_by_log_sum_exp(kernels: DeviceKernels, dtype: torch.dtype) -> None:
    """Over codes, too, whose queries the kernels round: out times sigmoid(lse - sink)."""
    q, sinks = normal(5, HEADS, DIM, seed=3, dtype=dtype), SINKS + 3
    for attention, runs in both_kinds(kernels, dtype):
        plain = attending(attention, runs, q, 100).part()
        part = attending(attention, runs, q, 100, sinks=sinks).part()
        share = (plain.lse - sinks).sigmoid()
        assert share.min() < 0.2
        assert share.max() > 0.99
        assert_close(part.out, plain.out * share[..., None], atol=2e-6, rtol=1e-5)
        assert_close(part.lse, torch.logaddexp(plain.lse, sinks.expand_as(plain.lse)), atol=2e-6, rtol=1e-5)


@pytest.mark.few(3)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_has_the_same_bits_beside_any_rows(kernels: DeviceKernels, dtype: torch.dtype) -> None:
    most, index = 40, 65
    q = normal(most, HEADS, DIM, seed=5, dtype=dtype)
    for attention, runs in both_kinds(kernels, dtype):
        wanted = attending(attention, runs, q, index, sinks=SINKS).merge()[0]
        for first, count in ((0, 1), (39, 1), (7, 2), (3, 16), (5, 17), (1, 39)):
            rows = q[first : first + count]
            out = attending(attention, runs, rows, index + first, sinks=SINKS).merge()[0]
            assert torch.equal(out, wanted[first : first + count])


def test_a_sink_that_weighs_nothing_changes_no_bit(kernels: DeviceKernels) -> None:
    """Nor does it overflow where it has all the weight, or where scores are enormous."""
    q = normal(5, HEADS, DIM, seed=6)
    for attention, runs in both_kinds(kernels, q.dtype):
        for rows in (q, 300 * q):
            plain = attending(attention, runs, rows, 100).merge()[0]
            for sink in (-torch.inf, -1e5):
                sinks = torch.full((HEADS,), sink)
                assert torch.equal(attending(attention, runs, rows, 100, sinks=sinks).merge()[0], plain)
            sinks = torch.full((HEADS,), 1e5)
            part = attending(attention, runs, rows, 100, sinks=sinks).part()
            assert not part.out.any()
            assert_close(part.lse, sinks.expand_as(part.lse), atol=0.0, rtol=1e-6)


def test_a_row_that_sees_no_key_sees_its_sink(kernels: DeviceKernels) -> None:
    run = Run(normal(2, 2, KV_HEADS, 16, DIM, seed=1), 32, 100)
    q = normal(4, HEADS, DIM, seed=7)
    part = attending(executor(kernels, q.dtype), [run], q, 98, sinks=SINKS).part()
    assert not part.out[:2].any()
    assert part.out[2:].any()
    assert_close(part.lse[:2], SINKS.expand(2, -1), atol=1e-6, rtol=1e-6)


TILES: dict[str, Callable[[], PrefillAttention]] = {
    "torch's fused kernel": lambda: OperatorTiles(KV_HEADS),
    "torch's products": lambda: OperatorTiles(KV_HEADS, fused=False),
    "flash-attn": lambda: FlashTiles(flash_attn_with_kvcache),
}


@pytest.mark.parametrize(
    ("tiles", "window"), [*((tiles, None) for tiles in TILES), ("torch's fused kernel", 40), ("torch's products", 40)]
)
def test_a_prefill_over_tiles_equals_a_softmax_with_a_further_column(tiles: str, window: int | None) -> None:
    """Rows that begin in the second tile and end in the third, so that some see two tiles and some three."""
    dtype = torch.float16 if tiles == "flash-attn" else torch.float32
    page, first, count = PAGE_STEP, 2 * PAGE_STEP - 30, 60
    pages = normal(2, 3, KV_HEADS, page, DIM, seed=8, dtype=dtype)
    q = 2 * normal(count, HEADS, DIM, seed=9, dtype=dtype)

    block = TILES[tiles]().block(q, first, Scoring(still(dtype), sink_logits=SINKS), window)
    for at in range(3):
        if window is None or at:  # a cache gives no tile that no row sees
            block.attend(pages[:, at : at + 1], at * page)
    out = block.attended()

    keys, values = pages.transpose(1, 2).flatten(2, 3).double()
    row, at_key = first + torch.arange(count)[:, None], torch.arange(3 * page)
    seen = (at_key <= row) & (at_key > row - (window or 3 * page))
    scores = torch.einsum("thgd,hnd->thgn", q.double().unflatten(1, (KV_HEADS, -1)), keys) / DIM**0.5
    scores = scores.masked_fill(~seen[:, None, None], -torch.inf)

    def check(sinks: Tensor | None) -> None:
        logits = torch.full((HEADS,), -torch.inf) if sinks is None else sinks
        column = logits.double().view(1, KV_HEADS, -1, 1).expand(count, -1, -1, 1)
        weights = torch.cat([scores, column], 3).softmax(-1)[..., :-1]
        wanted = torch.einsum("thgn,hnd->thgd", weights, values).flatten(1)
        assert_close(out.double(), wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])

    check(SINKS)
    for wrong in WRONG.values():
        with pytest.raises(AssertionError, match="not close"):
            check(wrong(SINKS))


# Whole models.


@pytest.fixture(autouse=True)
def _read_as_sunk(monkeypatch: pytest.MonkeyPatch) -> None:
    read_as_sunk(monkeypatch)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("sunk")
    return cache(lambda name: save_sunk(name, root / f"{NAMES.index(name)}"))


@pytest.mark.parametrize("operators", OPERATORS)
@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_prefill_decoding_and_both_mixed_give_the_logits_of_transformers(
    folders: Callable[[str], Path], name: str, operators: str
) -> None:
    tokens = random_tokens(LENGTH)
    theirs, decoder = random_sunk(name)(torch.tensor([tokens])).logits[0], load(folders(name), kernels=of(operators))
    assert_same_logits(in_prefill(decoder, target_cache(decoder, SIZES), tokens, SIZES.prefill_block), theirs)
    assert_same_logits(in_decoding(decoder, target_cache(decoder, SIZES), tokens, 5), theirs)
    mixed = target_cache(decoder, SIZES, link=LateLink(late_in=True, late_out=True))
    decoder.prefill(mixed, tokens[:16], resident_rows(decoder, 7))
    parts = [in_decoding(decoder, mixed, tokens[16:22], 3), in_prefill(decoder, mixed, tokens[22:41], 9)]
    parts.append(in_decoding(decoder, mixed, tokens[41:], 1))
    assert_same_logits(torch.cat(parts), theirs[16:])


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    root = tmp_path_factory.mktemp("pairs")

    def saved(name: str) -> Pair:
        at, fields = root / f"{NAMES.index(name)}", fields_of(name)
        draft = save_sunk(name, at / "draft", noise=0.02, tokenizer=True, **fields)
        return save_sunk(name, at / "target", tokenizer=True, **fields), draft

    return cache(saved)


def fields_of(name: str) -> dict[str, Any]:
    return SHAPES if name == "llama" else {**SHAPES, "sliding_window": 45}


@pytest.mark.few(3)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_every_mode_says_what_the_target_says_alone(pairs: Callable[[str], Pair], name: str, mode: str) -> None:
    """Streamed or resident, by retrieved chunks, the cache or the weights in few bits, and a draft with sinks, too."""
    pair, (sizes, offload) = pairs(name), MODES[mode]
    with engine_of(pair, sizes, prompt_tokens=400, offload=offload) as engine:
        assert say(engine) == alone(pair)
        assert level_stats(engine, "target").accepted > 0 or sizes.lookup


@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_are_those_of_transformers(pairs: Callable[[str], Pair], name: str) -> None:
    model, text = random_sunk(name, **fields_of(name)), list(PROMPT)
    ends = {*read_config(pairs(name)[0]).eos_token_ids, byte_tokenizer().eos_token_id}
    with torch.inference_mode():
        while len(text) < len(PROMPT) + NUM_NEW and text[-1] not in ends:
            text.append(int(model(torch.tensor([text])).logits[0, -1, :TOKENIZER_SIZE].argmax()))
    assert alone(pairs(name), "fp32") == text[len(PROMPT) :]


@pytest.fixture
def forked_here() -> Iterator[list[Forked]]:
    with forked_ranks(in_rank) as started:
        yield started


@pytest.mark.few(1)
@pytest.mark.usefixtures("forked_here")
@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_say_the_same(pairs: Callable[[str], Pair], name: str) -> None:
    """Each has the sinks of its own query heads."""
    sizes = MODES["cache in 4 bits"][0] if name == "llama" else DRAFTED
    with engine_of(pairs(name), sizes, prompt_tokens=400, ranks=2, dtype="fp32") as engine:
        assert say(engine) == alone(pairs(name), "fp32")


# Their way from a checkpoint.


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_they_are_read_in_fp32_whatever_the_model_is_computed_in(
    folders: Callable[[str], Path], dtype: torch.dtype
) -> None:
    decoder, model = load(folders("llama"), dtype=dtype), random_sunk("llama")
    for own, layer in zip(decoder.weights.scoring, model.model.layers, strict=True):
        assert own.sink_logits is not None
        assert torch.equal(own.sink_logits, layer.self_attn.sinks)


@pytest.mark.parametrize("link_bits", [16, 12])
def test_they_stay_where_attention_is_wherever_their_layers_are(pairs: Callable[[str], Pair], link_bits: int) -> None:
    """Each layer its own, where all of them are packed by way of one buffer, too."""
    best()
    (folder, _), model = pairs("llama"), random_sunk("llama", **fields_of("llama"))
    with Checkpoint.open(folder) as checkpoint:
        weights = load_weights(
            checkpoint, read_config(folder), Memory(torch.device("cpu")), dtype=torch.bfloat16,
            link=LateLink(late_in=True, late_out=True), link_bits=link_bits,
        )  # fmt: skip
    for own, layer in zip(weights.scoring, model.model.layers, strict=True):
        assert own.sink_logits is not None
        assert torch.equal(own.sink_logits, layer.self_attn.sinks)


@pytest.mark.parametrize("name", ["llama", "hunyuan"])
def test_what_scores_take_of_layers_on_a_gpu_is_copied_there(
    folders: Callable[[str], Path], name: str, tmp_path: Path
) -> None:
    """Bug: it was pinned first, as if it were on the host, so no Hunyuan model could be loaded."""
    folder = folders(name) if name in NAMES else save_tiny(name, tmp_path)
    with on_paper() as gpu, Checkpoint.open(folder) as checkpoint:
        config = read_config(folder)
        weights = load_weights(checkpoint, config, Memory(torch.device("cuda:0")), dtype=torch.float32)
        theirs = load(folder).weights.scoring
        for own, plain in zip(weights.scoring, theirs, strict=True):
            for ours, wanted in zip(_tensors(own), _tensors(plain), strict=True):
                assert ours.is_cuda
                assert torch.equal(ours.cpu(), wanted)
        assert gpu.problems == []


def _tensors(own: ScoringWeights) -> list[Tensor]:
    found = [*(own.factors or ()), *([] if own.sink_logits is None else [own.sink_logits])]
    assert found
    return found


def test_a_description_counts_them(folders: Callable[[str], Path]) -> None:
    """In parameters, in bytes and in a session's digest, which models without them keep."""
    sunk = read_config(folders("llama"))
    plain = sunk.mapped(lambda block: replace(block, mixer=replace(block.attention, sink_logits=False)))
    added = sunk.num_heads * sunk.num_layers
    assert sunk.num_parameters() - plain.num_parameters() == added
    assert sunk.num_parameters() == sum(map(math.prod, expected_tensors(sunk).values()))
    assert sunk.weight_bytes(2) - plain.weight_bytes(2) == 4 * added
    assert LayerLayout.of(sunk, torch.bfloat16).views["sink_logits"].dtype == torch.float32
    assert not sunk.is_llama_shaped
    assert model_digest(sunk, []) != model_digest(plain, [])


def test_a_scoring_is_not_made_without_them(folders: Callable[[str], Path]) -> None:
    sunk = read_config(folders("llama"))
    with pytest.raises(AssertionError):
        scorings(sunk, 8, 8, "cpu", torch.float32)
    given = load(folders("llama")).weights.scoring
    made = scorings(sunk, 8, 8, "cpu", torch.float32, weights=given)
    assert all(each.sink_logits is own.sink_logits for each, own in zip(made, given, strict=True))


def test_they_are_read_from_a_gguf_file(tmp_path: Path) -> None:
    model, path = random_sunk("llama"), tmp_path / "model.gguf"
    sinks = [layer.self_attn.sinks.detach() for layer in model.model.layers]

    def change(writer: gguf.GGUFWriter) -> None:
        for layer, logits in enumerate(sinks):
            writer.add_tensor(f"blk.{layer}.attn_sinks.weight", logits.numpy())

    write_gguf(save(random_model(), tmp_path), path, change=change)
    for own, logits in zip(load(path).weights.scoring, sinks, strict=True):
        assert own.sink_logits is not None
        assert torch.equal(own.sink_logits, logits)
