"""Our logits are transformers' logits: every family, every kind of rotary scaling, prefill, decoding and both mixed.

fp32, the same weights read from the same folder. Tolerance: 1e-4 of the largest logit (sums run in another order).
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from models import FAMILIES, LateLink, Sizes, full_cache, load, random_model, random_tokens, resident_rows, save
from offload.cache.full import FullCache
from offload.model.decoder import Decoder, Segment
from offload.model.level import Continuation, Level, prefill
from offload.plan.config import RopeScaling
from processor import OPERATORS, of

TOLERANCE = 1e-4
LENGTH = 61
PRETRAINED = 32  # positions; all scalings but "default" are shown beyond them
THETA = 500.0
# Name -> fields of config.json in the form of transformers 5 (rope_parameters) or of version 4 (rope_scaling).
ROPES: dict[str, dict[str, object]] = {
    "default": {"max_position_embeddings": 128, "rope_parameters": {"rope_type": "default", "rope_theta": THETA}},
    "linear": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": THETA}},
    # transformers stretches to the length of the forward, we to the capacity: they agree where these are equal
    "dynamic": {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": THETA}},
    "yarn": {
        "max_position_embeddings": 4 * PRETRAINED,
        "rope_parameters": {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": PRETRAINED, "rope_theta": THETA,
            "beta_fast": 4.0, "beta_slow": 1.0,
        },
    },
    "yarn, old form": {
        "max_position_embeddings": 4 * PRETRAINED,
        "rope_theta": THETA,
        "rope_scaling": {
            "type": "yarn", "factor": 4.0, "original_max_position_embeddings": PRETRAINED, "finetuned": True,
        },
    },
    "llama3": {
        "max_position_embeddings": 4 * PRETRAINED,
        "rope_parameters": {
            "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": PRETRAINED, "rope_theta": THETA,
        },
    },
}  # fmt: skip
SIZES = Sizes(capacity=LENGTH, rows=4, prefill_block=7, page=8, pages=2)


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, rope = request.param
    path = save(random_model(family), tmp_path_factory.mktemp("model"))
    config = json.loads((path / "config.json").read_text())
    config.pop("rope_parameters", None)
    (path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": PRETRAINED} | ROPES[rope]))
    return path


EVERY = [pytest.param((family, rope), id=f"{family}, {rope}") for family in FAMILIES for rope in ROPES]


@torch.inference_mode()
def reference(folder: Path, tokens: list[int]) -> Tensor:
    """transformers' logits after each token: [n, V]."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    logits: Tensor = model(torch.tensor([tokens])).logits[0]
    return logits


def assert_same_logits(ours: Tensor, theirs: Tensor) -> None:
    assert ours.shape == theirs.shape
    assert float((ours - theirs).abs().max()) <= TOLERANCE * float(theirs.abs().max())


@torch.inference_mode()
def in_prefill(decoder: Decoder, cache: FullCache, tokens: list[int], prefill_block: int) -> Tensor:
    """The logits of all rows of one forward in phase "prefill"."""
    cache.begin("prefill", len(tokens))
    rows = resident_rows(decoder, prefill_block)
    decoder.prefill(Segment(cache, torch.tensor(tokens)), rows)
    cache.advance(len(tokens))
    return decoder.logits(rows.rows)


def in_decoding(decoder: Decoder, cache: FullCache, tokens: list[int], step: int) -> Tensor:
    """The logits of all rows, `step` tokens to a forward of padded rows, every second one run wrongly first."""
    level = Level("target", decoder, cache, vocab_size=decoder.config.vocab_size, blocks=SIZES.blocks)
    logits = []
    for start in range(0, len(tokens), step):
        some = tokens[start : start + step]
        if start // step % 2:
            length = cache.length
            level.forward([*some[:1], 0, 1, 2, 3, 4, 5], 1)
            cache.truncate(length)
        logits.append(level.forward(some, len(some)))
    return torch.cat(logits)


@pytest.mark.few(36)
@pytest.mark.parametrize("operators", OPERATORS)
@pytest.mark.parametrize("folder", EVERY, indirect=True)
def test_prefill_decoding_and_both_mixed_give_the_logits_of_transformers(folder: Path, operators: str) -> None:
    tokens = random_tokens(LENGTH)
    theirs, decoder = reference(folder, tokens), load(folder, kernels=of(operators))
    assert_same_logits(in_prefill(decoder, full_cache(decoder, SIZES), tokens, SIZES.prefill_block), theirs)
    assert_same_logits(in_decoding(decoder, full_cache(decoder, SIZES), tokens, 5), theirs)
    link = LateLink(late_in=True, late_out=True)
    mixed = full_cache(decoder, SIZES, link=link)
    prefill(decoder, mixed, tokens[:20], rows=resident_rows(decoder, 7), on_tokens=lambda num_tokens: None)
    parts = [in_decoding(decoder, mixed, tokens[20:27], 3)]
    parts.append(in_prefill(decoder, mixed, tokens[27:50], 9))
    parts.append(in_decoding(decoder, mixed, tokens[50:], 1))
    assert_same_logits(torch.cat(parts), theirs[20:])


@pytest.mark.parametrize("operators", OPERATORS)
@pytest.mark.parametrize("folder", [(family, "default") for family in FAMILIES], indirect=True, ids=FAMILIES)
def test_sequences_of_any_lengths_in_one_pass_give_the_logits_of_transformers(folder: Path, operators: str) -> None:
    """More rows together, and in one of them, than the kernels take where torch's operators would do, too."""
    decoder = load(folder, kernels=of(operators))
    sizes, rows = replace(SIZES, capacity=256), (3, 90, 1)
    texts = [random_tokens(21 + count, seed=count) for count in rows]
    caches = [full_cache(decoder, sizes) for _ in texts]
    for cache, text in zip(caches, texts, strict=True):
        prefill(decoder, cache, text[:21], rows=resident_rows(decoder, 7), on_tokens=lambda num_tokens: None)
    level = Level("target", decoder, caches[0], vocab_size=decoder.config.vocab_size, blocks=SIZES.blocks)
    parts = [Continuation(cache, text[21:], len(text) - 21) for cache, text in zip(caches, texts, strict=True)]
    for text, ours in zip(texts, level.forward_all(parts), strict=True):
        assert_same_logits(ours, reference(folder, text)[21:])


@pytest.mark.parametrize("folder", [("llama-mha", rope) for rope in ROPES], indirect=True, ids=ROPES)
def test_another_token_or_another_scaling_is_far_outside_the_tolerance(folder: Path) -> None:
    tokens = random_tokens(LENGTH)
    theirs, decoder = reference(folder, tokens), load(folder)
    changed = [*tokens[:3], tokens[3] + 1, *tokens[4:]]
    plain = Decoder(replace(decoder.config, rope=RopeScaling()), decoder.weights)
    runs = [in_prefill(decoder, full_cache(decoder, SIZES), changed, SIZES.prefill_block)]
    if decoder.config.rope.kind != "default":
        runs.append(in_prefill(plain, full_cache(plain, SIZES), tokens, SIZES.prefill_block))
    for ours in runs:
        assert float((ours - theirs)[-1].abs().max()) > 20 * TOLERANCE * float(theirs.abs().max())


def test_a_real_model_gives_the_logits_of_transformers() -> None:
    root = os.environ.get("TRIFORCE_TEST_MODELS")
    if not root or not (Path(root) / "SmolLM2-135M-Instruct").is_dir():
        pytest.skip("TRIFORCE_TEST_MODELS names no folder with SmolLM2-135M-Instruct in it")
    folder = Path(root) / "SmolLM2-135M-Instruct"
    text = "The river Rhine rises in the Swiss Alps and flows north. Its largest tributaries are the Aare, the"
    tokens = AutoTokenizer.from_pretrained(folder)(text)["input_ids"]
    theirs, decoder = reference(folder, tokens), load(folder)
    sizes = replace(SIZES, capacity=64, page=16)
    cache = full_cache(decoder, sizes)
    assert_same_logits(in_prefill(decoder, cache, tokens[:10], 7), theirs[:10])
    assert_same_logits(in_decoding(decoder, cache, tokens[10:], 5), theirs[10:])
