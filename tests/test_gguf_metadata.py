"""What a GGUF file's metadata leave out is what llama.cpp knows of the models: each number against the models' own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kit.gguf_models import write_gguf
from kit.models import random_model, save
from offload.config.gguf_architectures import ARCHITECTURES
from offload.config.gguf_fields import Metadata
from offload.config.gguf_header import Header, Value
from offload.config.gguf_rope import rope_settings, rotated_share
from offload.config.reading import read_config
from offload.kernels.rope import inverse_frequencies


def metadata(architecture: str, values: Mapping[str, Value]) -> Metadata:
    """Of a file without tensors."""
    named = {f"{architecture}.{key}": value for key, value in values.items()}
    return Metadata(Header(Path("model.gguf"), {"general.architecture": architecture, **named}, {}, ()))


@pytest.mark.parametrize(
    ("architecture", "layers", "hidden", "heads", "head_dim", "scalar"),
    [
        ("gemma2", 26, 2304, 8, 256, 256),  # 2B
        ("gemma2", 42, 3584, 16, 256, 256),  # 9B
        ("gemma2", 46, 4608, 32, 128, 144),  # 27B
        ("gemma3", 34, 2560, 8, 256, 256),  # 4B
        ("gemma3", 48, 3840, 16, 256, 256),  # 12B
        ("gemma3", 62, 5376, 32, 128, 168),  # 27B
    ],
)
def test_the_scale_of_gemmas_queries_is_that_of_the_published_model(
    architecture: str, layers: int, hidden: int, heads: int, head_dim: int, scalar: int
) -> None:
    """Of their config.json, `query_pre_attn_scalar`. A file does not say it."""
    common = {
        "num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "head_dim": head_dim,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }  # fmt: skip
    own = ARCHITECTURES[architecture].own(metadata(architecture, {"attention.sliding_window": 4096}), common)
    assert own["query_pre_attn_scalar"] == scalar


@pytest.mark.parametrize("told", [None, 1.0, 0.5])
def test_yarns_factor_of_attention_is_one_on_what_follows_from_the_scaling(tmp_path: Path, told: float | None) -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
    folder = save(random_model(head_dim=32, rope_parameters=rope), tmp_path)
    add = None if told is None else lambda writer: writer.add_rope_scaling_attn_factors(told)
    write_gguf(folder, tmp_path / "model.gguf", change=add)
    _, attention = inverse_frequencies(read_config(tmp_path / "model.gguf"), 500)
    assert attention == pytest.approx((1.0 if told is None else told) * (1 + 0.1 * math.log(4.0)))


def test_as_many_numbers_of_a_head_rotate_as_the_file_says() -> None:
    """transformers takes a share of the head, rounded down: of 100 numbers it would take 57 for 58 / 100."""
    for head_dim in (64, 80, 96, 100, 128, 192, 256):
        for rotated in range(2, head_dim + 1, 2):
            found = rope_settings(metadata("llama", {"rope.dimension_count": rotated}), head_dim)["rope_parameters"]
            assert isinstance(found, dict)
            assert int(head_dim * found["partial_rotary_factor"]) == rotated


def test_so_do_as_many_pairs_as_have_a_factor_of_one() -> None:
    """Of 50 pairs 29 / 50 would be 28."""
    for pairs in (1, 6, 50, 64, 100, 128):
        for rotated in range(1, pairs + 1):
            factors = [1.0] * rotated + [1e30] * (pairs - rotated)
            values: Any = SimpleNamespace(factors=lambda name, most, found=factors: found)
            share = rotated_share(values, 2 * pairs)
            assert share <= 1
            assert int(pairs * share) == rotated


@pytest.mark.parametrize(("most", "few"), [("F16", "F32"), ("F32", "F16")])
def test_a_models_dtype_is_that_of_most_of_its_numbers(tmp_path: Path, most: str, few: str) -> None:
    folder = save(random_model(), tmp_path)
    write_gguf(folder, tmp_path / "model.gguf", kind=lambda name: few if "v_proj" in name else most)
    assert read_config(tmp_path / "model.gguf").dtype == {"F16": "float16", "F32": "float32"}[most]
