"""Rotary tables against the installed transformers, bit for bit, for every kind of scaling and both forms of config."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from offload.config.config_json import config_of
from offload.config.model import ModelConfig
from offload.kernels.rope import RopeTable, inverse_frequencies, rope_table, rotate

SHAPE = {
    "vocab_size": 64, "hidden_size": 256, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "head_dim": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "original_max_position_embeddings": 512}
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALINGS: dict[str, dict[str, object]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "linear-odd": {"rope_type": "linear", "factor": 3},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "dynamic-odd": {"rope_type": "dynamic", "factor": 1.7},
    "yarn": YARN | {"factor": 8.0},
    "yarn-old-llama": {"type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "finetuned": True},
    "yarn-no-truncate": YARN | {"factor": 4.0, "truncate": False},
    "yarn-betas": YARN | {"factor": 4.0, "beta_fast": 16, "beta_slow": 2},
    "yarn-attention": YARN | {"factor": 4.0, "attention_factor": 0.75},
    "yarn-mscale": YARN | {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.7},
    "yarn-mscale-alone": YARN | {"factor": 40.0, "mscale": 0.5},
    "yarn-implied": YARN | {"factor": None},
    "yarn-ramp-past-the-last-pair": YARN | {"factor": 4.0, "original_max_position_embeddings": 2**18},
    "yarn-flat-ramp": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 4, "truncate": True},
    "llama3": LLAMA3 | {"factor": 8.0, "original_max_position_embeddings": 512},
    "llama3-8192": LLAMA3 | {"factor": 32, "original_max_position_embeddings": 8192, "high_freq_factor": 6},
}
MAX_POSITIONS = 2048
THETAS = (10000.0, 500000)


def both_forms(scaling: dict[str, object], theta: float) -> list[dict[str, object]]:
    """The same settings as transformers 5 writes them and as transformers 4 wrote them."""
    new = {"rope_parameters": {**scaling, "rope_theta": theta}}
    old: dict[str, object] = {"rope_theta": theta, "rope_scaling": dict(scaling)}
    if scaling == {"rope_type": "default"}:
        old["rope_scaling"] = None
    return [SHAPE | {"model_type": "llama", "max_position_embeddings": MAX_POSITIONS} | form for form in (new, old)]


def reference(data: dict[str, object]) -> LlamaRotaryEmbedding:
    """transformers' own module, from a copy because it edits the dictionaries that it is given."""
    copy = {key: dict(value) if isinstance(value, dict) else value for key, value in data.items()}
    return LlamaRotaryEmbedding(LlamaConfig(**copy))


def reference_tables(module: LlamaRotaryEmbedding, num_positions: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    return module(torch.zeros(1, dtype=dtype), torch.arange(num_positions)[None])


def table_of(config: ModelConfig, num_positions: int, capacity: int) -> RopeTable:
    """Of the config's layers that know positions."""
    return rope_table(config, num_positions, capacity, "cpu", config.rope)


@pytest.mark.parametrize("theta", THETAS)
@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
def test_frequencies_equal_transformers_bit_for_bit(scaling: dict[str, object], theta: float) -> None:
    for data in both_forms(scaling, theta):
        module = reference(data)
        frequencies, attention_scaling = inverse_frequencies(config_of(data), MAX_POSITIONS)
        assert frequencies.dtype == torch.float32
        torch.testing.assert_close(frequencies, module.inv_freq, rtol=0, atol=0)
        assert attention_scaling == module.attention_scaling


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
def test_rotated_rows_equal_transformers_bit_for_bit(scaling: dict[str, object], dtype: torch.dtype) -> None:
    num_positions = 300
    data = both_forms(scaling, 10000.0)[0]
    cos, sin = reference_tables(reference(data), num_positions, dtype)
    table = table_of(config_of(data), num_positions, MAX_POSITIONS)
    x = torch.randn(num_positions, 3, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected, _ = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], cos, sin)
    rotated = rotate(x, table.cos, table.sin)
    assert rotated.dtype == dtype
    torch.testing.assert_close(rotated, expected[0].transpose(0, 1), rtol=0, atol=0)


def test_dynamic_frequencies_follow_capacity_as_transformers_follow_length() -> None:
    data = both_forms(SCALINGS["dynamic"], 10000.0)[0]
    config = config_of(data)
    for capacity in (1, MAX_POSITIONS, MAX_POSITIONS + 1, 5 * MAX_POSITIONS):
        module = reference(data)
        reference_tables(module, capacity, torch.float32)  # its frequencies are now those of this length
        frequencies, _ = inverse_frequencies(config, capacity)
        # transformers computes the base from a 0-dim tensor in fp32, we in double: one rounding apart
        torch.testing.assert_close(frequencies, module.inv_freq, rtol=2e-6, atol=0)
    short, long = (inverse_frequencies(config, capacity)[0] for capacity in (MAX_POSITIONS, 4 * MAX_POSITIONS))
    assert (long[1:] < short[1:]).all()


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
def test_a_longer_table_holds_the_shorter_one(scaling: dict[str, object]) -> None:
    """The number of rows changes none of them; only `capacity` may."""
    config = config_of(both_forms(scaling, 10000.0)[0])
    short, long = (table_of(config, rows, 4096) for rows in (5, 259))
    assert torch.equal(long.cos[:5], short.cos)
    assert torch.equal(long.sin[:5], short.sin)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_rotates_to_the_same_bits_alone_or_among_others_or_in_a_view(dtype: torch.dtype) -> None:
    config = config_of(both_forms(SCALINGS["yarn"], 10000.0)[0])
    table = table_of(config, 64, 64)
    fused = torch.randn(64, 7, 64, generator=torch.Generator().manual_seed(2)).to(dtype)
    together = rotate(fused, table.cos, table.sin)
    for row in (0, 13, 63):
        cos, sin = table.to(dtype).rows(row, row + 1)
        assert torch.equal(rotate(fused[row : row + 1], cos, sin)[0], together[row])
    assert torch.equal(rotate(fused[:, 2:5], table.cos, table.sin), together[:, 2:5])


def test_scores_depend_on_distance_only() -> None:
    """The defining property of rotary positions, which also fixes the sign convention."""
    config = config_of(both_forms(SCALINGS["default"], 10000.0)[0])
    table = table_of(config, 128, 128)
    q, k = torch.randn(2, 1, 1, 64, generator=torch.Generator().manual_seed(3))

    def score(q_position: int, k_position: int) -> float:
        rotated_q = rotate(q, table.cos[q_position, None], table.sin[q_position, None])
        return float((rotated_q * rotate(k, table.cos[k_position, None], table.sin[k_position, None])).sum())

    assert score(100, 93) == pytest.approx(score(7, 0), rel=1e-4)
    assert abs(score(100, 93) - score(93, 100)) > 1e-2


def test_rotation_leaves_rows_and_table_alone() -> None:
    """Only intermediate results are changed in place."""
    x, cos, sin = torch.full((2, 3, 64), 5.0), torch.full((2, 64), 2.0), torch.full((2, 64), 3.0)
    rotate(x, cos, sin)
    assert (x == 5.0).all()
    assert (cos == 2.0).all()
    assert (sin == 3.0).all()


@pytest.mark.parametrize("config_class", [LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config])
def test_every_family_gets_its_default_theta_from_transformers(config_class: type) -> None:
    data = config_class(**SHAPE | {"max_position_embeddings": 256, "sliding_window": None}).to_dict()
    module = LlamaRotaryEmbedding(config_class(**SHAPE | {"max_position_embeddings": 256}))
    frequencies, _ = inverse_frequencies(config_of(data), 256)
    assert torch.equal(frequencies, module.inv_freq)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_table_rounded_beforehand_turns_rows_to_the_same_bits(dtype: torch.dtype) -> None:
    table = table_of(config_of(both_forms(SCALINGS["yarn"], 10000.0)[0]), 64, 64)
    x = torch.randn(9, 2, 64, generator=torch.Generator().manual_seed(4)).to(dtype)
    rounded = table.to(dtype)
    assert rounded.cos.dtype == rounded.sin.dtype == dtype
    assert torch.equal(rotate(x, *rounded.rows(50, 59)), rotate(x, *table.rows(50, 59)))
