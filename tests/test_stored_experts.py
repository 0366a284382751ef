"""Quantised checkpoints whose layers have experts, besides the contract: what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from kit.contract import MIXTURE, PLAIN, Pair
from kit.families import save_tiny
from kit.gguf_models import write_gguf
from kit.quantised import engine_of
from kit.stored_models import store
from offload.config.encodings import matrices
from offload.config.reading import read_config
from offload.errors import ModelError, UsageError
from offload.plan.shards import check_divides


def test_ranks_cut_no_block_of_an_expert(pairs: Callable[[str], Pair]) -> None:
    config = read_config(pairs("qwen3_moe in Q4_K and others")[0])
    check_divides(config, 2)
    with pytest.raises(UsageError, match=r"512 feed-forward rows of the model, in blocks of 256 do not divide so"):
        check_divides(config, 4)


def test_experts_of_a_layer_that_are_stored_otherwise_are_refused(pairs: Callable[[str], Pair], tmp_path: Path) -> None:
    """By name. One that is not quantised beside others that are, say."""
    config = read_config(pairs("qwen3_moe in int4")[0])
    name = "model.layers.0.mlp.experts.3.up_proj.weight"
    assert matrices(config)[name].encoding
    folder = tmp_path / "target"
    save_tiny("qwen3_moe", folder, **MIXTURE, moe_intermediate_size=64)
    store(folder, "int4")
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace('"lm_head"]', '"lm_head", "re:.*experts.3.up_proj"]'))
    with pytest.raises(ModelError, match=r"layers.0.mlp.experts.0.up_proj.weight and its like .* all must be alike"):
        read_config(folder)


def test_experts_beyond_fp16_are_refused_in_fp16(tmp_path: Path) -> None:
    fields = {**MIXTURE, "moe_intermediate_size": 512}
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
