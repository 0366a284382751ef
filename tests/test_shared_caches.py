"""Layers that share the keys and values of others: one cache entry has many readers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kit.families import save_tiny
from kit.models import LateLink, Sizes, Stack, load, random_tokens, resident_rows, target_cache
from offload.config.model import ModelConfig
from offload.kv.retrieval import RetrievalCache
from offload.model.decoder import Decoder
from offload.model.torch_layers import TorchLayers
from test_families import reference
from test_parity import assert_same_logits, in_decoding, in_prefill

NAME = "gemma4, shared caches"  # windows in layers 0 and 2, none in 1; 3 and 4 read the keys of 2, and 5 those of 1
SIZES = Sizes(capacity=60, prefill_block=7)
GROWING = {  # 3 and 4 read the keys of 2
    "layer_types": ["full_attention"] * 5, "num_hidden_layers": 5, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return load(save_tiny(NAME, tmp_path_factory.mktemp("shared")))


@pytest.fixture(scope="module")
def growing(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return load(save_tiny(NAME, tmp_path_factory.mktemp("growing"), num_kv_shared_layers=2, **GROWING))


@pytest.fixture
def run_layers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The layers that a prefill runs, block by block."""
    ran, run = list[int](), TorchLayers._run_steps

    def noted(self: TorchLayers, layer: int, *arguments: Any, **more: Any) -> None:
        ran.append(layer)
        run(self, layer, *arguments, **more)

    monkeypatch.setattr(TorchLayers, "_run_steps", noted)
    return ran


def test_each_layer_reads_the_last_one_before_it_that_has_keys_and_sees_as_much(decoder: Decoder) -> None:
    config = decoder.config
    assert config.sources == {0: 0, 1: 1, 2: 2, 3: 2, 4: 2, 5: 1}
    assert (config.growing, config.windowed) == ((1,), (0, 2))
    assert (config.readers(config.growing), config.reads(config.growing)) == ((1, 5), (0, 0))
    assert (config.readers(config.windowed), config.reads(config.windowed)) == ((0, 2, 3, 4), (0, 1, 1, 1))
    assert config.kv_bytes_per_token(2) == config.read_kv_bytes(2) // 2 == 2 * 1 * 12 * 2


def test_a_prompt_runs_no_layer_that_adds_no_keys(decoder: Decoder, run_layers: list[int]) -> None:
    tokens, done = random_tokens(45), list[int]()
    cache = target_cache(decoder, SIZES)
    decoder.prefill(cache, tokens[:37], resident_rows(decoder, 16), on_tokens=done.append)
    assert run_layers == [0] * 3 + [1] * 3 + [2] * 3
    assert done[-1] == 37
    assert_same_logits(in_decoding(decoder, cache, tokens[37:], 4), reference(NAME, tokens)[37:])


def test_rows_that_are_all_wanted_run_all_layers_block_by_block(decoder: Decoder, run_layers: list[int]) -> None:
    """A window keeps the rows of a block, and no more of a prompt."""
    tokens = random_tokens(45)
    ours = in_prefill(decoder, target_cache(decoder, SIZES, undo=0), tokens, 16)
    assert run_layers == [*range(6)] * 3
    assert_same_logits(ours, reference(NAME, tokens))


@pytest.mark.parametrize("num_resident", [0, 1])
def test_a_streamed_tile_is_read_with_the_rows_that_an_earlier_layer_added(growing: Decoder, num_resident: int) -> None:
    """Bug of a draft of this: a layer's only tile had been fetched for its second reader before it was written."""
    tokens = random_tokens(45)
    there = Stack(growing, Sizes(capacity=60)).full
    sizes = Sizes(capacity=60, num_resident=num_resident)
    streamed = Stack(growing, sizes, link=LateLink(late_in=True, late_out=True)).full
    for step in (3, 5):
        theirs = in_decoding(growing, there, tokens, step)
        assert torch.equal(in_decoding(growing, streamed, tokens, step), theirs)
        for cache in (there, streamed):
            cache.truncate(0)


def test_retrieval_of_everything_drafts_what_the_target_says(growing: Decoder) -> None:
    """New rows are in the tail of each layer that reads them."""
    sizes = Sizes(gamma=8, budget=96, capacity=96)
    said = Stack(growing, sizes).generate(random_tokens(40), 24)
    assert said.num_accepted == said.num_drafted > 12
    assert len(set(said.tokens)) > 8
    assert said.tokens == Stack(growing, Sizes(capacity=96)).generate(random_tokens(40), 24).tokens


def test_each_layer_chooses_its_own_chunks_of_keys_that_it_shares(growing: Decoder) -> None:
    stack = Stack(growing, Sizes(gamma=3, budget=16, capacity=160))
    said = stack.generate(random_tokens(120), 12)
    assert isinstance(stack.retrieval, RetrievalCache)
    chunks = stack.retrieval.chunks
    assert chunks is not None
    assert len(chunks) == 5
    assert not torch.equal(chunks[2], chunks[3])
    assert not torch.equal(chunks[3], chunks[4])
    assert said.tokens == Stack(growing, Sizes(capacity=160)).generate(random_tokens(120), 12).tokens


def test_tensors_of_keys_that_no_layer_reads_are_left_alone(tmp_path: Path) -> None:
    folder = save_tiny(NAME, tmp_path)
    path = folder / "model.safetensors"
    more = {f"model.layers.5.self_attn.{part}.weight": torch.ones(4) for part in ("k_proj", "v_proj", "k_norm")}
    save_file(load_file(path) | more, path, metadata={"format": "pt"})
    tokens, decoder = random_tokens(20), load(folder)
    assert_same_logits(in_prefill(decoder, target_cache(decoder, SIZES), tokens, 7), reference(NAME, tokens))


def test_bytes_of_shared_caches_are_counted_once_and_read_by_each(growing: Decoder) -> None:
    config: ModelConfig = growing.config
    of_one: Callable[[ModelConfig], int] = lambda layer: layer.layer_kv_bytes(2)  # noqa: E731
    assert config.all_layers(of_one) == config.kv_bytes_per_token(2) == 3 * 48
    assert config.read_kv_bytes(2) == 5 * 48
    assert config.prefilled.num_layers == 3
