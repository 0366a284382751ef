"""GGUF files of Gemma 4 (`gemma4`), besides the contract: layers are of two kinds as the file says; what it claims and
has not is refused by its name."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from kit import gguf_models
from kit.contract import FILES
from kit.families import GEMMA4_ROPES, save_tiny
from kit.gguf_models import add_tokens, write_gguf
from offload.config.reading import read_config
from offload.errors import ModelError
from offload.weights.checkpoint import Checkpoint, check_model
from test_gguf_tokenizer import gemma_json, gemma_values

PATTERN, KV_HEADS, TRUES = "attention.sliding_window_pattern", "attention.head_count_kv", [True] * 5
Change = Callable[[gguf.GGUFWriter], None]


def test_a_file_says_what_its_folder_says(triforce, tmp_path: Path) -> None:
    """With its tokens, and its end of a turn."""
    values, text = gemma_values(), "<|turn>ab c\n\n\u00fc<turn|>\n<|turn>"
    fields = {**FILES["gemma4"], "vocab_size": len(values["tokens"]), "eos_token_id": [1, 5], "bos_token_id": 2}
    folder, file = save_tiny("gemma4", tmp_path / "folder", **fields), tmp_path / "model.gguf"
    write_gguf(folder, file, tokenizer="", change=lambda writer: add_tokens(writer, values))
    names = {"bos_token": "<bos>", "eos_token": "<eos>"}
    PreTrainedTokenizerFast(tokenizer_object=gemma_json(), **names).save_pretrained(folder)
    (tmp_path / "prompt.txt").write_text(text)
    texts = []
    for path in (folder, file):
        source = ("--model", str(path), "--draft", "none", "--prompt-file", str(tmp_path / "prompt.txt"))
        fixed = ("--max-tokens", "30", "--dtype", "fp32", "--temperature", "0", "--json")
        code, out, err = triforce("generate", *source, *fixed)
        assert code == 0, err
        texts.append((json.loads(out)["tokens"], json.loads(out)["text"]))
    assert texts[0] == texts[1]
    assert len(texts[0][0]) > 4
    assert read_config(file).eos_token_ids == (1, 5)


def made(root: Path, change: Change | None = None, *, name: str = "gemma4", without: str = "nothing") -> Path:
    """The model as a file. Of the dense one layers 5 and 6 have no window; heads have 8 numbers, in those 12, and 2 KV
    heads, in those 1."""
    folder = save_tiny(name, root / "folder", rope_parameters=GEMMA4_ROPES)
    write_gguf(folder, root / "model.gguf", tokenizer="", change=change, without=without)
    return root / "model.gguf"


def put(found: Mapping[str, Any]) -> Change:
    """Metadata in place of the model's own; None: left out."""

    def change(writer: gguf.GGUFWriter) -> None:
        adds = {list: writer.add_array, str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}
        for key, value in found.items():
            writer.kv_data[0].pop(f"gemma4.{key}", None)
            if value is not None:
                adds[type(value)](f"gemma4.{key}", value)

    return change


def windows(path: Path) -> list[bool]:
    return [block.attention.window == 9 for block in read_config(path).blocks]


def test_layers_have_windows_as_the_file_lists_them_or_all_but_every_sixth(tmp_path: Path) -> None:
    assert windows(made(tmp_path)) == [True] * 5 + [False] * 2
    other = [False, True] * 3 + [False]
    assert windows(made(tmp_path, put({PATTERN: other, KV_HEADS: 2}))) == other
    with pytest.raises(ModelError, match=rf"gemma4\.{PATTERN} is missing; it must be false for the last layer"):
        windows(made(tmp_path, put({PATTERN: None, KV_HEADS: 2})))  # of seven layers the sixth alone has none then


def test_one_number_of_kv_heads_is_all_layers(tmp_path: Path) -> None:
    path = made(tmp_path, put({KV_HEADS: 2}))
    assert [block.attention.num_kv_heads for block in read_config(path).blocks] == [2] * 7


def test_logits_are_capped_where_the_file_says_so(tmp_path: Path) -> None:
    assert read_config(made(tmp_path)).logits_cap == 3.0
    assert read_config(made(tmp_path, put({"final_logit_softcapping": None}))).logits_cap is None


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("attention.shared_kv_layers", 7, "is 7; it must be a whole number from 0 to 6"),
        ("feed_forward_length", [48] * 6 + [96], "is a list of 7; it must be the same in all layers"),
        ("attention.sliding_window", 0, "is 0; it must be a whole number from 1"),
        (PATTERN, TRUES, "is a list of 5; it must be a list of 7, one for each layer"),
        (PATTERN, [*TRUES, False, True], "is a list of 7; it must be false for the last layer"),
        (KV_HEADS, [2, 2], "is a list of 2; it must be a number, or a list of 7, one for each layer"),
        (KV_HEADS, [2, 2, 2, 2, 1, 1, 1], "it must be the same in all layers with a window, and in all others"),
        (KV_HEADS, [2, 2, 2, 2, 2, 1, 2], "it must be the same in all layers with a window, and in all others"),
        (KV_HEADS, 0, "is 0; it must be a whole number from 1"),
        ("attention.key_length_swa", 0, "is 0; it must be a whole number from 1"),
        ("attention.value_length_swa", 12, "is 12; it must be the size of these layers' heads, 8"),
        ("attention.value_length", 8, "is 8; it must be the same as attention.key_length, 12"),
        ("rope.dimension_count_swa", 4, "is 4; it must be the size of these layers' heads, 8"),
        ("rope.dimension_count", 6, "is 6; it must be the size of these layers' heads, 12"),
        ("rope.scaling.type", "yarn", "rope.scaling.factor is missing"),
        ("rope.scaling.factor", 2.0, "rope.scaling.type is missing; it must be absent or none"),
    ],
)
def test_metadata_that_contradict_are_refused_by_name(tmp_path: Path, key: str, value: Any, said: str) -> None:
    path = made(tmp_path, put({key: value}))
    with pytest.raises(ModelError) as error:
        read_config(path)
    assert said in str(error.value)
    assert key in str(error.value) or "scaling" in key


@pytest.mark.parametrize("count", [[0] * 7, [2, 2, 2, 2, 2, 3, 3], [3, 3, 3, 3, 3, 1, 1], [-1] * 7])
def test_kv_heads_that_divide_no_heads_are_refused(tmp_path: Path, count: list[int]) -> None:
    with pytest.raises(ModelError, match=r"num_key_value_heads|per_layer_config"):
        read_config(made(tmp_path, put({KV_HEADS: count})))


@pytest.mark.parametrize(
    ("factors", "said"),
    [
        (None, "has 0 numbers; it must have 6"),
        (
            [1.0] * 3 + [1e30] * 2,
            "has 5 numbers, of which the first 3 are 1 and the least of the others 1e\\+30; it must",
        ),
        ([1.0] * 4, "has 4 numbers, of which the first 4 are 1"),
        ([1e30] * 6, "has 6 numbers, of which the first 0 are 1"),
        (
            [1.0] * 3 + [8.0] * 3,
            "has 6 numbers, of which the first 3 are 1 and the least of the others 8; it must have 6, some of 1",
        ),
        (
            [1.0, 1e30, 1.0, 1e30, 1e30, 1e30],
            "has 6 numbers, of which the first 1 are 1 and the least of the others 1;",
        ),
        ([2.0] * 3 + [1e30] * 3, "has 6 numbers, of which the first 0 are 1 and the least of the others 2;"),
        ([1.0] * 5 + [np.inf], "has numbers that are not over 0"),
        ([1.0] * 5 + [np.nan], "has numbers that are not over 0"),
        ([1.0] * 5 + [-1e30], "has numbers that are not over 0"),
    ],
)
def test_factors_that_are_no_share_of_a_head_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factors: list[float] | None, said: str
) -> None:
    found = {} if factors is None else {"rope_freqs.weight": np.array(factors, np.float32)}
    monkeypatch.setattr(gguf_models, "rope_tensors", lambda config, arch: found)
    with pytest.raises(ModelError, match=rf"rope_freqs\.weight {said}"):
        read_config(made(tmp_path))


@pytest.mark.parametrize("pairs", [1, 2, 5, 6])
def test_as_many_pairs_rotate_as_have_a_factor_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pairs: int
) -> None:
    factors = np.array([1.0] * pairs + [1e30] * (6 - pairs), np.float32)
    monkeypatch.setattr(gguf_models, "rope_tensors", lambda config, arch: {"rope_freqs.weight": factors})
    rope = read_config(made(tmp_path)).rope
    assert (rope.rotated or 12, rope.theta) == (2 * pairs, 500.0)


SIZES_OF_WINDOWED = ("attention.key_length_swa", "attention.value_length_swa", "rope.dimension_count_swa")


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (dict.fromkeys(SIZES_OF_WINDOWED, 16), r"layers\.0\.self_attn\.k_norm\.weight \[8\], not \[16\]"),
        ({KV_HEADS: 4}, r"layers\.0\.self_attn\.k_proj\.weight \[16, 32\], not \[32, 32\]"),
        (
            {PATTERN: [False, *TRUES, False], KV_HEADS: 2},
            r"2 missing \(model\.layers\.5\.self_attn\.v_proj\.weight, .*layers\.0\.self_attn\.k_norm",
        ),
        ({"feed_forward_length": 96}, r"mlp\.down_proj\.weight \[32, 48\], not \[32, 96\]"),
    ],
)
def test_shapes_that_the_metadata_deny_are_refused(tmp_path: Path, found: dict[str, Any], said: str) -> None:
    path = made(tmp_path, put(found))
    with Checkpoint.open(path) as checkpoint, pytest.raises(ModelError, match=said):
        check_model(checkpoint, read_config(path))


@pytest.mark.parametrize(
    "without", ["layers.3.layer_scalar", "layers.3.self_attn.v_proj", "post_feedforward_layernorm"]
)
def test_a_part_that_is_not_there_is_missing(tmp_path: Path, without: str) -> None:
    path = made(tmp_path, without=without)
    with Checkpoint.open(path) as checkpoint, pytest.raises(ModelError, match=rf"[0-9] missing \(.*{without}"):
        check_model(checkpoint, read_config(path))


def test_values_of_one_layer_without_a_window_alone_are_refused(tmp_path: Path) -> None:
    """All of these layers have projections of values or none has."""

    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("blk.6.attn_v.weight", np.ones((12, 32), np.float32))

    path = made(tmp_path, change)
    with (
        Checkpoint.open(path) as checkpoint,
        pytest.raises(ModelError, match=r"1 unexpected \(model\.layers\.6\.self_attn\.v_proj"),
    ):
        check_model(checkpoint, read_config(path))


def test_tensors_of_experts_in_a_dense_model_are_unexpected(tmp_path: Path) -> None:
    path = made(tmp_path, put({"expert_count": 0}), name="gemma4, sparse")
    with (
        Checkpoint.open(path) as checkpoint,
        pytest.raises(ModelError, match=r"unexpected \(model\.layers\.0\.mlp\.exp"),
    ):
        check_model(checkpoint, read_config(path))
