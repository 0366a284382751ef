"""The target proposes to itself over weights in 4 bits on a GPU on paper: made there, resident where the exact ones
stream, and of no consequence for the text."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from kit.models import GREEDY, perturbed, random_model, save
from offload.decode.sampling import SamplingParams
from offload.engine.engine import Engine
from offload.engine.request import GenerationRequest
from offload.formats.quantised import Codes, encode_with_torch
from offload.metrics import LevelStats
from offload.model.passes import forward
from offload.transfer.link import CudaEvent
from offload.weights.layers import ResidentLayers
from paper import on_paper
from paper.engines import DRAFTED, NUM_NEW, OTHER, PROMPT, Case, Pair, engine_on_paper, loaded, said
from paper.tensors import PaperTensor

SIZES = replace(DRAFTED, budget=0, weight_bits=4)
ALONE = replace(SIZES, draft_gamma=0)
RETRIEVED = replace(SIZES, budget=64)
CASES = {  # the busiest first, which are tried by default
    "retrieved, both streamed": Case(RETRIEVED, ("kv", "weights"), dtype="bf16"),
    "6 bits, both streamed": Case(replace(RETRIEVED, weight_bits=6), ("kv", "weights"), dtype="bf16"),
    "all on the GPU": Case(SIZES, dtype="bf16"),
    "all on the GPU, no draft": Case(ALONE, dtype="bf16"),
    "6 bits": Case(replace(SIZES, weight_bits=6), dtype="bf16"),
    "fp16": Case(ALONE, dtype="fp16"),
    "weights streamed": Case(SIZES, ("weights",), resident_layers=1, dtype="bf16"),
    "retrieved, all on the GPU": Case(RETRIEVED, dtype="bf16"),
    "retrieved, kv streamed": Case(RETRIEVED, ("kv",), resident_tiles=1, dtype="bf16"),
    "adaptive, both streamed": Case(replace(RETRIEVED, adaptive=True, lookup=True), ("kv", "weights"), dtype="bf16"),
}
OWN = ("self", "retrieval")  # the level at which the target proposes to itself
BUSIEST = CASES["retrieved, both streamed"]
EVERY = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """In whole groups and tiles, but for the vocabulary."""
    root = tmp_path_factory.mktemp("models")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 8, "head_dim": 16}
    model = random_model("qwen2", vocab_size=264, seed=11, eos_token_id=None, **sizes)
    target = save(model, root / "target", tokenizer=True)
    return target, save(perturbed(model, 0.03), root / "draft", tokenizer=True)


@cache
def plainly(case: Case, pair: Pair) -> list[list[int]]:
    with engine_on_paper(case, pair) as (engine, gpu):
        expected = [said(engine, prompt) for prompt in (PROMPT, OTHER)]
    assert gpu.problems == []
    return expected


def stats_of(engine: Engine, *names: str) -> LevelStats:
    return next(level for level in engine.stats.levels if level.name in names)


@pytest.mark.few(1)
@EVERY
def test_tokens_are_those_of_plain_decoding_and_every_access_is_ordered(case: Case, pair: Pair) -> None:
    expected = plainly(case.plain(), pair)
    drafted = accepted = 0
    with engine_on_paper(case, pair) as (engine, gpu):
        for prompt, wanted in zip((PROMPT, OTHER), expected, strict=True):
            assert said(engine, prompt) == wanted
            target = stats_of(engine, "target")
            drafted, accepted = drafted + target.drafted, accepted + target.accepted
            assert stats_of(engine, *OWN).passes > 0 or case.sizes.adaptive  # which a busy machine keeps from drafting
        assert 0 < accepted <= drafted or case.sizes.adaptive  # which may draft nothing
        again = engine.generate(GenerationRequest(PROMPT, GREEDY, max_tokens=NUM_NEW, speculation=False))
        assert [token for step in again for token in step.tokens] == expected[0]
    assert gpu.problems == []


def test_a_seed_repeats_its_text(pair: Pair) -> None:
    sampling = SamplingParams(temperature=1.0, seed=5)
    with engine_on_paper(BUSIEST, pair) as (engine, gpu):
        assert said(engine, PROMPT, sampling) == said(engine, PROMPT, sampling)
    assert gpu.problems == []


@pytest.mark.few(2)
@EVERY
def test_the_copy_is_of_the_layers_weights_and_on_the_gpu(case: Case, pair: Pair) -> None:
    with on_paper(), loaded(replace(case, offload=()), pair) as engine:
        exact = list(engine.worker.target.weights.layers)
        bits = case.sizes.weight_bits
        wanted = [{name: _codes_of(own.weight, bits) for name, own in layer.operators.items()} for layer in exact]
    with engine_on_paper(case, pair) as (engine, gpu):
        weights = engine.worker.models._quantised[bits].weights
        assert isinstance(weights.layers, ResidentLayers)
        for layer, codes in zip(weights.layers, wanted, strict=True):
            assert layer.operators.keys() == codes.keys()
            for name, own in layer.operators.items():
                ours = own.weight
                assert isinstance(ours, Codes)
                assert isinstance(ours.blocks, PaperTensor)
                assert torch.equal(ours.blocks.raw, codes[name])
    assert gpu.problems == []


def _codes_of(weight: PaperTensor, bits: int) -> torch.Tensor:
    raw = weight.raw.clone()
    codes = Codes(torch.zeros(Codes.shape_of_blocks(raw.shape, bits), dtype=torch.uint8))
    encode_with_torch(raw, codes)
    return codes.blocks


def test_codes_of_weights_that_have_not_arrived_are_reported(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["weights streamed"]
    with on_paper() as gpu, monkeypatch.context() as patch:
        patch.setattr(CudaEvent, "wait", lambda event: None)
        with loaded(case, pair):
            assert any("race: read" in problem and "quantised" in problem for problem in gpu.problems)


def test_a_pass_to_propose_moves_nothing_and_runs_as_a_graph_while_weights_stream(pair: Pair) -> None:
    with engine_on_paper(BUSIEST, pair) as (engine, gpu):
        engine.precompute(PROMPT)
        level, link = engine.levels["retrieval"], engine.worker.link
        assert link is not None
        for _ in range(3):
            launches, waits, moved = gpu.launches.total(), gpu.syncs.total(), link.stats.bytes_to_device
            forward(level, [1], 1)
        assert gpu.launches.total() - launches == 5
        assert gpu.syncs.total() == waits
        assert link.stats.bytes_to_device == moved
    assert gpu.problems == []
