"""Engines of quantised checkpoints whose layers have experts: whatever proposes, wherever experts are and on any number
of ranks, they say the same. In fp32 that is what the plain numbers say."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from families import save_tiny
from forked import Forked, forked_ranks
from gguf_models import write_gguf
from offload.config.encodings import matrices
from offload.config.reading import read_config
from offload.errors import ModelError, UsageError
from offload.formats.stored import StoredMatrix
from offload.plan.shards import check_divides
from quantised import DRAFTED, PLAIN, engine_of, level_stats
from test_stored_models import GGUF, MODES, Pair, alone, say, store, twin

FORMS = ["fp8", "int4", *GGUF]
SHAPES: dict[str, object] = {
    "vocab_size": 264, "hidden_size": 256, "intermediate_size": 128, "num_attention_heads": 8, "head_dim": 64,
    "max_position_embeddings": 1024,
}  # fmt: skip


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    """A draft says what its target mostly says."""

    @cache
    def pair(form: str) -> Pair:
        root, size = tmp_path_factory.mktemp("models"), 512 if form in GGUF else 64
        fields = {**SHAPES, "moe_intermediate_size": size}
        folders = (
            save_tiny("qwen3_moe", root / name, tokenizer=True, noise=noise, **fields)
            for name, noise in (("target", 0.0), ("draft", 0.02))
        )
        target, draft = (store(folder, form) for folder in folders)
        return target, draft

    return pair


@pytest.fixture
def forked_here() -> Iterator[list[Forked]]:
    with forked_ranks() as started:
        yield started


@pytest.mark.few(3)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("form", FORMS)
def test_every_mode_says_what_plain_decoding_says(pairs: Callable[[str], Pair], form: str, mode: str) -> None:
    pair, (sizes, offload) = pairs(form), MODES[mode]
    with engine_of(pair, sizes, prompt_tokens=400, offload=offload) as engine:
        homes = [each for each in engine.worker.models.target.weights.experts if each is not None]
        assert all(isinstance(own.down, StoredMatrix) for each in homes for own in each.bank.places)
        assert say(engine) == alone(pair)
        assert level_stats(engine, "target").accepted > 0 or mode == "lookups"
        experts = engine.stats.decode_link.experts
        assert (experts.misses > 0) == ("weights" in offload)
        assert experts.fetched_bytes == experts.misses * homes[0].bank.step


@pytest.mark.few(2)
@pytest.mark.parametrize("form", FORMS)
def test_in_fp32_plain_decoding_says_what_the_plain_numbers_say(
    pairs: Callable[[str], Pair], tmp_path: Path, form: str
) -> None:
    plain = by_expert(twin(pairs(form)[0], tmp_path / "twin", torch.float32))
    assert alone(pairs(form), "fp32") == alone((plain, plain), "fp32")


def by_expert(folder: Path) -> Path:
    """With a tensor for each expert's matrix, as the family's folders have them."""
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if ".experts." in name and not name.split(".experts.")[1][0].isdigit()]:
        before, after = name.split(".experts.")
        for number, part in enumerate(tensors.pop(name).chunk(8)):
            tensors[f"{before}.experts.{number}.{after}"] = part.clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.few(1)
@pytest.mark.usefixtures("forked_here")
@pytest.mark.parametrize("form", FORMS)
def test_two_ranks_say_the_same(pairs: Callable[[str], Pair], form: str) -> None:
    with engine_of(pairs(form), replace(DRAFTED, draft_gamma=0), prompt_tokens=400, ranks=2, dtype="fp32") as engine:
        assert say(engine) == alone(pairs(form), "fp32")


def test_ranks_cut_no_block_of_an_expert(pairs: Callable[[str], Pair]) -> None:
    config = read_config(pairs("Q4_K and others")[0])
    check_divides(config, 2)
    with pytest.raises(UsageError, match=r"512 feed-forward rows of the model, in blocks of 256 do not divide so"):
        check_divides(config, 4)


def test_experts_of_a_layer_that_are_stored_otherwise_are_refused(pairs: Callable[[str], Pair], tmp_path: Path) -> None:
    """By name. One that is not quantised beside others that are, say."""
    config = read_config(pairs("int4")[0])
    name = "model.layers.0.mlp.experts.3.up_proj.weight"
    assert matrices(config)[name].encoding
    folder = tmp_path / "target"
    save_tiny("qwen3_moe", folder, **SHAPES, moe_intermediate_size=64)
    store(folder, "int4")
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace('"lm_head"]', '"lm_head", "re:.*experts.3.up_proj"]'))
    with pytest.raises(ModelError, match=r"layers.0.mlp.experts.0.up_proj.weight and its like .* all must be alike"):
        read_config(folder)


def test_experts_beyond_fp16_are_refused_in_fp16(tmp_path: Path) -> None:
    fields = {**SHAPES, "moe_intermediate_size": 512}
    target = save_tiny("qwen3_moe", tmp_path / "target", tokenizer=True, **fields)
    tensors = load_file(target / "model.safetensors")
    weight = "model.layers.1.mlp.experts.5.down_proj.weight"
    tensors[weight] = tensors[weight].float() * 1e5 / tensors[weight].abs().max()
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    write_gguf(target, file := tmp_path / "target.gguf", kind="Q8_0")
    for model in (target, file):
        engine_of((model, model), PLAIN, prompt_tokens=400).close()
        with pytest.raises(ModelError, match=r"^expert 5 of layer 1 has weights beyond fp16's range of 65504"):
            engine_of((model, model), PLAIN, prompt_tokens=400, dtype="fp16")
