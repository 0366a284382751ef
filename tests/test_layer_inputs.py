"""The inputs of layers: rows of a table that are read from its file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kit.families import random_tiny, save_tiny
from kit.gguf_models import write_gguf
from kit.models import load
from offload.config.reading import read_config
from offload.formats.stored import StoredMatrix
from offload.weights.layer_inputs import LayerInputWeights
from offload.weights.linear import numbers

NAME = "gemma4, inputs of layers"


def _inputs(path: Path, dtype: torch.dtype = torch.float32) -> LayerInputWeights:
    found = load(path, dtype=dtype).weights.inputs
    assert found is not None
    return found


def test_the_table_is_in_its_file_and_takes_no_memory(tmp_path: Path) -> None:
    config = read_config(save_tiny(NAME, tmp_path))
    assert config.layer_table is not None
    table = config.vocab_size * 6 * config.layer_table.size * 4
    assert config.layer_table_bytes(4) == table
    own = [
        each.numel()
        for name, each in random_tiny(NAME).named_parameters()
        if "per_layer" in name and "layers." not in name
    ]
    rest = replace(config, layer_table=None)
    assert config.num_parameters() - rest.num_parameters() == sum(own)


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0", "Q4_K"])
def test_columns_of_one_layer_are_those_of_the_whole_row(tmp_path: Path, kind: str) -> None:
    """Also where they begin within a block."""
    sizes = {"hidden_size_per_layer_input": 64, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 8}
    layers = ["sliding_attention", "full_attention"] * 4
    folder = save_tiny(NAME, tmp_path / "folder", head_dim=64, global_head_dim=128, layer_types=layers, **sizes)
    write_gguf(folder, tmp_path / "file.gguf", kind=lambda name: kind if "embed_tokens_per_layer" in name else "F32")
    inputs, tokens = _inputs(tmp_path / "file.gguf"), torch.tensor([3, 88, 0, 3])
    assert isinstance(inputs.table, StoredMatrix) == (kind in ("Q8_0", "Q4_K"))
    whole = inputs.rows(tokens)
    assert whole.shape == (4, 512)
    assert torch.equal(torch.cat([inputs.rows(tokens, layer) for layer in range(8)], 1), whole)
    table = numbers(inputs.table, torch.float32) if isinstance(inputs.table, StoredMatrix) else inputs.table.float()
    assert torch.equal(whole, table[tokens])


def test_a_table_in_16_bits_is_read_as_it_is_and_runs_in_32(tmp_path: Path) -> None:
    random_tiny(NAME).bfloat16().save_pretrained(tmp_path)
    inputs = _inputs(tmp_path)
    assert isinstance(inputs.table, torch.Tensor)
    assert inputs.table.dtype == torch.bfloat16
    assert inputs.rows(torch.tensor([5])).dtype == torch.float32
