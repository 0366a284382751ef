"""GGUF files of mixtures of experts with parts beside them (`gpt-oss`, `qwen35moe`, `glm4moe`, `gemma4`), besides the
contract: what a file claims and this program has not is refused by its name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from kit import gguf_models
from kit.families import save_tiny
from kit.gguf_models import ARCHITECTURES, write_gguf
from kit.models import Sizes, load, random_tokens, target_cache
from offload.config.reading import read_config
from offload.errors import ModelError
from offload.weights.checkpoint import Checkpoint, check_model
from test_parity import in_prefill

SIZES = Sizes(capacity=61, rows=4, prefill_block=7, page=8, pages=2)
Change = Callable[[gguf.GGUFWriter], None]


def logits(path: Path) -> torch.Tensor:
    decoder = load(path)
    return in_prefill(decoder, target_cache(decoder, SIZES), random_tokens(40), SIZES.prefill_block)


def made(name: str, root: Path, change: Change | None = None) -> Path:
    write_gguf(save_tiny(name, root / "folder"), root / "model.gguf", change=change)
    return root / "model.gguf"


@pytest.mark.few(4)
@pytest.mark.parametrize("kind", ["F32", "Q4_0"])
@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_5_moe", "glm4_moe", "gemma4, sparse"])
def test_gates_and_ups_in_one_tensor_are_those_of_two(tmp_path: Path, name: str, kind: str) -> None:
    """As llama.cpp's converter writes them for Gemma 4, and for others when it is told to."""
    folder = save_tiny(name, tmp_path / "folder", moe_intermediate_size=32)
    apart, fused = tmp_path / "apart.gguf", tmp_path / "fused.gguf"
    write_gguf(folder, apart, kind=kind, fused=False)
    write_gguf(folder, fused, kind=kind, fused=True)
    assert torch.equal(logits(apart), logits(fused))


@pytest.mark.parametrize("name", ["solar_open", "solar_open, groups"])
def test_a_file_of_solar_open_is_one_of_glm(tmp_path: Path, name: str) -> None:
    """As llama.cpp's converter writes it."""
    path = made(name, tmp_path)
    assert read_config(path).family == "glm4_moe"
    assert torch.equal(logits(path), logits(tmp_path / "folder"))


@pytest.mark.parametrize("name", ["exaone_moe", "cohere2_moe"])
def test_a_next_token_head_that_is_not_supported_is_left_alone(tmp_path: Path, name: str) -> None:
    folder, path = save_tiny(name, tmp_path / "folder"), tmp_path / "model.gguf"
    count = json.loads((folder / "config.json").read_text())["num_hidden_layers"]

    def change(writer: gguf.GGUFWriter) -> None:
        for key, value in (("block_count", count + 1), ("nextn_predict_layers", 1)):
            writer.kv_data[0].pop(f"{writer.arch}.{key}", None)
            writer.add_uint32(f"{writer.arch}.{key}", value)
        for part in ("attn_q", "ffn_gate_inp", "ffn_up_exps", "nextn.eh_proj", "nextn.shared_head_norm"):
            writer.add_tensor(f"blk.{count}.{part}.weight", np.ones((2, 4), np.float32))

    write_gguf(folder, path, change=change)
    found = read_config(path)
    assert (found.num_layers, found.next_token) == (count, None)
    with Checkpoint.open(path) as checkpoint:
        check_model(checkpoint, found)
    assert torch.equal(logits(path), logits(folder))


def test_gates_and_ups_in_one_tensor_and_in_two_are_refused(tmp_path: Path) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        for part in ("gate", "up"):
            writer.add_tensor(f"blk.0.ffn_{part}_exps.weight", np.ones((8, 16, 32), np.float32))

    path = made("gemma4, sparse", tmp_path, change)
    with (
        Checkpoint.open(path) as checkpoint,
        pytest.raises(ModelError, match=r"2 unexpected \(model\.layers\.0\.mlp\.experts\.gate_proj.*up_proj"),
    ):
        check_model(checkpoint, read_config(path))


def test_a_gate_stored_as_a_matrix_of_one_row_is_the_vector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a converter writes it that keeps the folder's shape."""
    found, converted = logits(made("qwen3_5_moe", tmp_path)), gguf_models.converted

    def change(name: str, tensor: torch.Tensor, config: dict[str, object], arch: str) -> torch.Tensor:
        return tensor if name.endswith("shared_expert_gate.weight") else converted(name, tensor, config, arch)

    monkeypatch.setattr(gguf_models, "converted", change)
    path = made("qwen3_5_moe", tmp_path)
    with Checkpoint.open(path) as checkpoint:
        assert checkpoint.shape("model.layers.0.mlp.shared_expert_gate.weight") == (1, 32)
    assert torch.equal(logits(path), found)


def test_yarn_is_not_truncated_in_gpt_oss(tmp_path: Path) -> None:
    """Which a file does not say; a folder that says otherwise is no gpt-oss of OpenAI's."""
    rope = read_config(made("gpt_oss", tmp_path)).rope
    assert (rope.kind, rope.truncate) == ("yarn", False)


def test_layers_of_gpt_oss_have_windows_as_the_file_lists_them_or_each_other_one(tmp_path: Path) -> None:
    def windows(change: Change | None = None) -> list[int | None]:
        return [block.attention.window for block in read_config(made("gpt_oss", tmp_path, change)).blocks]

    assert windows() == [12, None, 12]
    assert windows(lambda writer: writer.add_sliding_window_pattern([False, True, True])) == [None, 12, 12]


@pytest.mark.parametrize("name", ["qwen3_5_moe", "glm4_moe"])
def test_a_next_token_head_of_several_layers_is_left_alone(tmp_path: Path, name: str) -> None:
    """Their tensors have the names of any layer, with experts, and further ones."""
    folder, path = save_tiny(name, tmp_path / "folder"), tmp_path / "model.gguf"
    config = json.loads((folder / "config.json").read_text())
    count = config["num_hidden_layers"]
    counts = {"mtp_num_hidden_layers": 2} if name == "qwen3_5_moe" else {"num_nextn_predict_layers": 2}
    write_gguf(folder, tmp_path / "plain.gguf")
    (folder / "config.json").write_text(json.dumps(config | counts))

    def change(writer: gguf.GGUFWriter) -> None:
        for layer in (count, count + 1):
            for part in ("attn_q", "ffn_gate_inp", "ffn_up_exps", "ffn_gate_inp_shexp", "nextn.eh_proj", "nextn.embed"):
                writer.add_tensor(f"blk.{layer}.{part}.weight", np.ones((2, 4), np.float32))
            writer.add_tensor(f"blk.{layer}.nextn.shared_head_norm.weight", np.ones(4, np.float32))

    write_gguf(folder, path, change=change)
    found = read_config(path)
    assert (found.num_layers, found.next_token) == (count, None)
    with Checkpoint.open(path) as checkpoint:
        check_model(checkpoint, found)
    assert torch.equal(logits(path), logits(tmp_path / "plain.gguf"))


@pytest.mark.parametrize("stored", [None, 0])
@pytest.mark.parametrize("name", ["qwen3_5_moe", "gpt_oss"])
def test_a_file_of_experts_alone_may_not_say_the_size_of_other_layers(
    tmp_path: Path, name: str, stored: int | None
) -> None:
    """As configs of Qwen3.5's mixtures of experts do not."""
    expected = read_config(made(name, tmp_path))

    def change(writer: gguf.GGUFWriter) -> None:
        key = f"{writer.arch}.feed_forward_length"
        del writer.kv_data[0][key]
        if stored is not None:
            writer.add_uint32(key, stored)

    assert read_config(made(name, tmp_path, change)).blocks == expected.blocks


def test_what_a_file_of_glm_does_not_say_is_as_llama_cpp_takes_it(tmp_path: Path) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        for key in ("gating_func", "weights_scale", "weights_norm", "group_count", "group_used_count"):
            del writer.kv_data[0][f"glm4moe.expert_{key}"]
        del writer.kv_data[0]["glm4moe.leading_dense_block_count"]

    config = read_config(made("glm4_moe", tmp_path, change))
    found = [block.experts for block in config.blocks]
    assert [(each.scoring, each.renormalised, each.factor) for each in found if each] == [("sigmoid", False, 1.0)] * 3


def put(key: str, value: float | bool) -> Change:
    def change(writer: gguf.GGUFWriter) -> None:
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}[type(value)]
        add(f"{writer.arch}.{key}", value)

    return change


@pytest.mark.parametrize(
    ("name", "key", "value", "said"),
    [
        ("glm4_moe", "expert_gating_func", 1, "is 1; it must be absent, 0 or 2: only sigmoids of the experts' scores"),
        ("glm4_moe", "expert_shared_count", 0, "is 0; it must be a whole number from 1"),
        ("glm4_moe", "expert_weights_scale", -1.0, "is -1.0; it must be"),
        ("glm4_moe", "expert_shared_feed_forward_length", 16, "is 16; it must be absent or 0: it changes"),
        ("minimax_m2", "expert_gating_func", 1, "is 1; it must be absent, 0 or 2: only sigmoids"),
        ("ernie4_5_moe", "expert_gating_func", 2, "is 2; it must be absent, 0 or 1: only a softmax"),
        ("hunyuan_v1_moe", "expert_shared_count", 2, "is 2; it must be 1: one network as large as an expert"),
        ("hunyuan_v1_moe", "expert_shared_feed_forward_length", 32, "is 32; it must be 16: one network"),
        (
            "afmoe",
            "expert_weights_norm",
            False,
            "is false; it must be true: weights of experts that do not add up",
        ),
        (
            "laguna",
            "expert_weights_norm",
            False,
            "is false; it must be true: weights of experts that do not add up",
        ),
        ("laguna", "expert_shared_count", 2, "is 2; it must be absent or 1: one network is beside the experts"),
        ("cohere2_moe", "expert_gating_func", 1, "is 1; it must be absent, 0 or 2: only sigmoids"),
        ("cohere2_moe", "expert_weights_scale", 2.0, "is 2.0; it must be absent or 1.0"),
        ("olmoe", "expert_feed_forward_length", 32, "is 32; it must be absent or 0"),
        ("qwen2_moe", "expert_weights_norm", True, "is true; it must be absent or 0"),
        ("gpt_oss", "expert_gating_func", 2, "is 2; it must be absent or 0: it changes the arithmetic"),
        ("gpt_oss", "expert_weights_scale", 2.0, "is 2.0; it must be absent or 0"),
        ("gpt_oss", "rope.freq_base_swa", 100.0, "is 100.0; it must be absent or rope.freq_base, 500.0"),
        ("gpt_oss", "attention.sliding_window", 0, "is 0; it must be a whole number from 1"),
        ("qwen3_5_moe", "expert_gating_func", 2, "is 2; it must be absent or 0"),
        ("qwen3_5_moe", "expert_group_count", 4, "is 4; it must be absent or 0"),
        ("qwen3_5_moe", "expert_shared_feed_forward_length", 0, "is 0; it must be a whole number from 1"),
    ],
)
def test_what_changes_the_arithmetic_is_refused_by_name(
    tmp_path: Path, name: str, key: str, value: float | bool, said: str
) -> None:
    path = made(name, tmp_path, put(key, value))
    family = json.loads((tmp_path / "folder" / "config.json").read_text())["model_type"]
    with pytest.raises(ModelError) as error:
        read_config(path)
    assert f"{ARCHITECTURES[family]}.{key} {said}" in str(error.value)


@pytest.mark.parametrize(
    ("name", "key", "value", "said"),
    [
        ("glm4_moe", "leading_dense_block_count", 2, r"missing \(model\.layers\.1\.mlp\.down_proj"),
        ("glm4_moe", "expert_shared_count", 2, r"shared_experts\.down_proj\.weight \[32, 16\], not \[32, 32\]"),
        ("glm4_moe", "expert_count", 7, r"layers\.1\.mlp\.experts\.down_proj\.weight \[256, 16\], not \[224, 16\]"),
        ("gpt_oss", "expert_count", 7, r"mlp\.experts\.down_proj\.bias \[256\], not \[224\]"),
        ("gpt_oss", "expert_feed_forward_length", 48, r"mlp\.experts\.down_proj\.weight \[256, 16\], not \[256, 48\]"),
        ("qwen3_5_moe", "expert_shared_feed_forward_length", 48, r"down_proj\.weight \[32, 24\], not \[32, 48\]"),
    ],
)
def test_shapes_that_the_metadata_deny_are_refused(tmp_path: Path, name: str, key: str, value: int, said: str) -> None:
    path = made(name, tmp_path, put(key, value))
    with Checkpoint.open(path) as checkpoint, pytest.raises(ModelError, match=said):
        check_model(checkpoint, read_config(path))


@pytest.mark.parametrize(
    ("name", "without"),
    [("gpt_oss", "sinks"), ("gpt_oss", "router.bias"), ("glm4_moe", "correction_bias"),
     ("qwen3_5_moe", "shared_expert_gate"), ("gemma4, sparse", "router.scale"), ("gemma4, sparse", "per_expert_scale"),
     ("gemma4, sparse", "layernorm_2")],
)  # fmt: skip
def test_a_part_that_is_not_there_is_missing(tmp_path: Path, name: str, without: str) -> None:
    write_gguf(save_tiny(name, tmp_path / "folder"), path := tmp_path / "model.gguf", without=without)
    with Checkpoint.open(path) as checkpoint, pytest.raises(ModelError, match=rf"[0-9] missing \(.*{without}"):
        check_model(checkpoint, read_config(path))
