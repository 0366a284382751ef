"""Scores of a text are transformers' own, however its rows are run: dense models, windows, caps, links, ranks, stored
matrices; and divergences are those that whole distributions give."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from kit.families import save_tiny
from kit.forked import Forked, forked_ranks
from kit.gguf_models import write_gguf
from kit.models import Sizes, changed, random_model, random_tokens, save, tiny_engine, tiny_plan
from kit.processor import best
from kit.stored_models import twin
from offload.engine import scores as scores_module
from offload.engine.engine import Engine
from offload.engine.scores import Distance, Scores, divergence, give_memory_back
from offload.errors import DoesNotFit, TriforceError, UsageError
from offload.model.decoder import Decoder

LENGTH, CONTEXT = 90, 256
TOKENS = random_tokens(LENGTH, seed=3, vocabulary=258)
SIZES = Sizes(prefill_block=16, page=16, capacity=CONTEXT)
ONE_BLOCK = replace(SIZES, prefill_block=128)
TOLERANCE = 1e-4  # nats
SHARED = "gemma4, shared caches"
FIELDS: dict[str, Any] = {"vocab_size": 264, "max_position_embeddings": CONTEXT}  # 258 tokens: the rest is padding
TINY = ("gemma2", "mistral, a window", "cohere")  # windows and a cap; windows; a scale of logits


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def made(name: str) -> Path:
        path = tmp_path_factory.mktemp("model") / "target"
        if name in (*TINY, SHARED):
            return save_tiny(name, path, tokenizer=True, **FIELDS)
        family, _, seed = name.partition(" ")
        return save(random_model(family, seed=int(seed or 0), **FIELDS), path, tokenizer=True)

    return made


@pytest.fixture
def forked() -> Iterator[list[Forked]]:
    with forked_ranks() as started:
        yield started


def engine_of(model: Path, sizes: Sizes = SIZES, *, ranks: int = 1, dtype: str = "fp32", offload: str = "") -> Engine:
    plan = tiny_plan(
        model,
        None,
        sizes,
        num_prompt_tokens=LENGTH - 1,
        max_tokens=1,
        dtype=dtype,
        offload=frozenset(offload.split()),
    )
    return tiny_engine(changed(plan, num_devices=ranks), model)


def scored(model: Path, sizes: Sizes = SIZES, **options: Any) -> Scores:
    with engine_of(model, sizes, **options) as engine:
        return engine.score(TOKENS)


@torch.inference_mode()
def distributions(model: Path, num_tokens: int = 258) -> Tensor:
    """transformers' logarithms of probabilities after each token but the last, fp64 [T - 1, V]."""
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    return loaded(torch.tensor([TOKENS])).logits[0, :-1, :num_tokens].double().log_softmax(1)


def assert_those_of(ours: Scores, theirs: Tensor) -> None:
    expected = theirs[torch.arange(LENGTH - 1), torch.tensor(TOKENS[1:])]
    assert ours.tokens == tuple(TOKENS)
    assert ours.log_probabilities.shape == expected.shape
    assert float((ours.log_probabilities - expected).abs().max()) < TOLERANCE
    assert ours.likeliest.tolist() == theirs.argmax(1).tolist()
    assert float((ours.likeliest_log_probabilities - theirs.max(1).values).abs().max()) < TOLERANCE


@pytest.mark.parametrize("name", ["llama-gqa", *TINY])
def test_scores_are_those_of_transformers(folder: Callable[[str], Path], name: str) -> None:
    assert_those_of(scored(folder(name)), distributions(folder(name)))


def test_the_mean_is_the_loss_that_transformers_computes(folder: Callable[[str], Path]) -> None:
    tokens = torch.tensor([TOKENS])
    save(random_model("qwen2", vocab_size=258), path := folder("qwen2") / "whole", tokenizer=True)  # nothing is padding
    loaded = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    loss = loaded(tokens, labels=tokens).loss.item()
    assert float(-scored(path).log_probabilities.mean()) == pytest.approx(loss, abs=TOLERANCE)


@pytest.mark.parametrize("offload", ["kv", "weights", "kv weights"])
@pytest.mark.parametrize("name", ["llama-gqa", "gemma2", SHARED])
def test_over_a_link_scores_are_the_same_to_the_bit(folder: Callable[[str], Path], name: str, offload: str) -> None:
    resident, streamed = scored(folder(name)), scored(folder(name), offload=offload)
    assert torch.equal(streamed.log_probabilities, resident.log_probabilities)
    assert torch.equal(streamed.likeliest, resident.likeliest)


@pytest.mark.parametrize("offload", ["", "kv"])
def test_many_blocks_of_rows_give_what_one_gives(
    folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, offload: str
) -> None:
    whole = scored(folder("llama-gqa"), ONE_BLOCK)
    for most_rows in (64, 5):
        monkeypatch.setattr(scores_module, "_MOST_ROWS", most_rows)
        parts = scored(folder("llama-gqa"), replace(SIZES, prefill_block=7), offload=offload)
        assert float((parts.log_probabilities - whole.log_probabilities).abs().max()) < 1e-5
        assert torch.equal(parts.likeliest, whole.likeliest)


def test_logits_are_made_of_few_rows_at_a_time(folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer where the vocabulary is large."""
    sizes, logits = list[int](), Decoder.logits

    def counted(decoder: Decoder, hidden: Tensor, **options: Any) -> Tensor:
        sizes.append(len(hidden))
        return logits(decoder, hidden, **options)

    monkeypatch.setattr(Decoder, "logits", counted)
    scored(folder("llama-gqa"), ONE_BLOCK)
    assert sizes == [64, LENGTH - 1 - 64]
    sizes.clear()
    monkeypatch.setattr(scores_module, "_LOGITS_BYTES", 10 * 264 * 32 + 1)
    scored(folder("llama-gqa"), ONE_BLOCK)
    assert max(sizes) == 10
    assert sum(sizes) == LENGTH - 1


@pytest.mark.usefixtures("forked")
def test_two_ranks_find_what_one_finds(folder: Callable[[str], Path]) -> None:
    for name, offload in (("llama-gqa", "kv"), ("gemma2", ""), (SHARED, "kv weights")):
        alone = scored(folder(name))
        with engine_of(folder(name), ranks=2, offload=offload) as engine:
            for _ in range(2):
                together = engine.score(TOKENS)
                assert float((together.log_probabilities - alone.log_probabilities).abs().max()) < TOLERANCE


def test_stored_matrices_score_as_their_numbers_do(tmp_path: Path) -> None:
    """A GGUF file of Q8_0, beside transformers over a plain checkpoint of what its matrices mean. In its vocabulary
    padding has names, too."""
    best()
    model = random_model("qwen2", hidden_size=64, intermediate_size=128, **FIELDS)
    source = save(model, tmp_path / "model", tokenizer=True)
    write_gguf(source, file := tmp_path / "model.gguf", kind="Q8_0")
    ours = scored(file)
    theirs = twin(file, tmp_path / "twin", torch.float32)
    assert_those_of(ours, distributions(theirs, FIELDS["vocab_size"]))
    with engine_of(file) as engine:
        assert_those_of(engine.score(TOKENS, num_tokens=258), distributions(theirs))
    assert float((ours.log_probabilities - scored(source).log_probabilities).abs().max()) > 10 * TOLERANCE


def test_divergences_are_those_of_whole_distributions(folder: Callable[[str], Path]) -> None:
    """The reference's engine is closed before the other is loaded."""
    with engine_of(folder("llama-gqa"), offload="kv") as engine:
        reference = engine.score(TOKENS, keep_rows=True).reference
        assert engine.score(TOKENS).reference is None
    assert reference is not None
    assert reference.rows.shape == (LENGTH - 1, 32)
    with engine_of(folder("llama-gqa 5")) as engine:
        found = engine.score(TOKENS, reference=reference)
    wanted, other = distributions(folder("llama-gqa")), distributions(folder("llama-gqa 5"))
    kl = (wanted.exp() * (wanted - other)).sum(1)
    assert found.divergences is not None
    assert float((found.divergences - kl).abs().max()) < 10 * TOLERANCE
    assert float(kl.min()) > 0.1  # and not the other way round, nor of the places beside
    assert_those_of(found, other)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_model_does_not_diverge_from_itself(folder: Callable[[str], Path], dtype: str) -> None:
    with engine_of(folder("gemma2"), dtype=dtype) as engine:
        reference = engine.score(TOKENS, keep_rows=True).reference
    with engine_of(folder("gemma2"), dtype=dtype, offload="weights") as engine:
        divergences = engine.score(TOKENS, reference=reference).divergences
    assert divergences is not None
    assert divergences.tolist() == [0.0] * (LENGTH - 1)


def test_divergence_has_a_direction() -> None:
    even, leaning = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.9, 0.1]]).log()
    assert float(divergence(even, leaning)) == pytest.approx(0.5108256)
    assert float(divergence(leaning, even)) == pytest.approx(0.3680642)


def test_a_text_is_scored_whole_whatever_was_cached(folder: Callable[[str], Path]) -> None:
    with engine_of(folder("mistral, a window")) as engine:
        first = engine.score(TOKENS)
        again = engine.score(TOKENS)
        shorter = engine.score(TOKENS[:30])
        assert engine.num_cached == 29
    assert torch.equal(first.log_probabilities, again.log_probabilities)
    assert len(shorter.log_probabilities) == 29
    assert float((shorter.log_probabilities - first.log_probabilities[:29]).abs().max()) < TOLERANCE


def test_progress_counts_the_tokens(folder: Callable[[str], Path]) -> None:
    seen = []
    with engine_of(folder("llama-gqa")) as engine:
        engine.score(TOKENS, on_progress=seen.append)
    assert {report.stage for report in seen} == {"prefill"}
    assert (seen[-1].done, seen[-1].total) == (LENGTH - 1, LENGTH - 1)
    assert len(seen) > 2


def test_what_cannot_be_scored_is_refused(folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_of(folder("llama-gqa")) as engine:
        with pytest.raises(UsageError, match="1 token has none that another comes before"):
            engine.score(TOKENS[:1])
        with pytest.raises(UsageError, match="empty"):
            engine.score([])
        with pytest.raises(UsageError, match="token 258"):
            engine.score([1, 258])
        with pytest.raises(DoesNotFit, match="91 prompt tokens"):
            engine.score([*TOKENS, 1])
        reference = engine.score(TOKENS, keep_rows=True).reference
        with pytest.raises(ValueError, match="89 rows"):
            engine.score(TOKENS[:50], reference=reference)
        for count in (0, 259):
            with pytest.raises(ValueError, match=f"{count} tokens, the model has 258"):
                engine.score(TOKENS, num_tokens=count)
        logits = Decoder.logits
        monkeypatch.setattr(Decoder, "logits", lambda *args, **options: logits(*args, **options) * float("nan"))
        with pytest.raises(TriforceError, match="token 1 is no number; try --dtype fp32"):
            engine.score(TOKENS)


@pytest.mark.parametrize("count", [1, 2, 3, 50, 99, 100, 101, 199, 200, 201, 1000])
def test_99_of_100_places_are_not_above_their_percentile_however_few_there_are(count: int) -> None:
    """A fault that no test noticed was one of few places."""
    values = torch.arange(1.0, count + 1)
    scores = Scores(tuple(range(count + 1)), values, values.long(), values, divergences=values.flip(0))
    found = Distance.of([scores], [scores]).percentile_99
    assert 100 * int((values <= found).sum()) >= 99 * count
    assert 100 * int((values < found).sum()) < 99 * count


def test_memory_that_is_given_back_leaves_the_process() -> None:
    """The heap kept the pages of a closed engine: 1.6 GB after a model of 1.5 billion parameters."""

    def resident() -> int:
        return int(psutil.Process().memory_info().rss)

    before = resident()
    blocks = [torch.ones(100_000, dtype=torch.uint8) for _ in range(2000)]
    last, full = torch.ones(100_000, dtype=torch.uint8), resident()
    del blocks
    give_memory_back()
    assert resident() - before < (full - before) / 4
    assert last.all()
