"""GGUF files of models with recurrent states (`qwen35`) and short convolutions (`lfm2`): value heads and decays as
llama.cpp's converter stores them, next-token heads; what a file claims and has not is refused by its name."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import test_next_token as heads
from kit.contract import FILES, KINDS, PROMPT, Pair, alone
from kit.families import save_tiny
from kit.gguf_models import write_gguf
from kit.heads import IN_FILES
from kit.models import TOKENIZER_SIZE, Sizes, load, random_tokens, target_cache
from kit.quantised import level_stats
from offload.config.gguf_header import read_header
from offload.config.reading import read_config
from offload.errors import ModelError, UsageError
from offload.formats.stored import StoredMatrix
from offload.plan.shards import Shard, check_divides
from offload.weights.checkpoint import Checkpoint, check_model
from test_parity import in_prefill

SIZES = Sizes(capacity=61, rows=4, prefill_block=7, page=8, pages=2)
Change = Callable[[gguf.GGUFWriter], None]


def test_a_file_says_what_its_folder_says(pairs: Callable[[str], Pair]) -> None:
    path, draft = pairs("qwen3_5 in a file, F32")
    assert alone((path, draft), "fp32") == alone((path.parent / "folder", draft), "fp32")
    assert len({*alone((path, draft), "fp32")}) > 4


def test_transformers_reads_the_file_as_the_folder(tmp_path: Path) -> None:
    """Its own reader undoes what the converter did, so these files are the converter's."""
    folder = save_tiny("qwen3_5", tmp_path / "folder", tokenizer=True, vocab_size=TOKENIZER_SIZE)
    write_gguf(folder, tmp_path / "model.gguf")
    theirs = AutoModelForCausalLM.from_pretrained(str(tmp_path), gguf_file="model.gguf", dtype=torch.float32)
    tensors = load_file(folder / "model.safetensors")
    assert theirs.state_dict().keys() == tensors.keys()
    for name, tensor in theirs.state_dict().items():
        torch.testing.assert_close(tensor, tensors[name], rtol=1e-6, atol=1e-6, msg=name)


def test_the_second_ranks_first_value_head_is_served_by_the_third_of_four_key_heads(
    pairs: Callable[[str], Pair],
) -> None:
    delta = Shard(1, 2).config(read_config(pairs("qwen3_5 in a file, F32")[0])).recurrence
    assert delta is not None
    assert (delta.num_heads, delta.num_key_heads, delta.key_heads) == (6, 4, (2, 3, 0, 1, 2, 3))


def test_ranks_cut_no_block_of_a_states_output(tmp_path: Path) -> None:
    """Of 768 columns, which are three blocks."""
    folder = save_tiny("qwen3_5", tmp_path / "folder", **{**FILES["qwen3_5"], "linear_value_head_dim": 64})
    for kind, refused, usable in (("Q8_0", 3, "1, 2, 4"), ("Q4_K and others", 2, "1")):
        write_gguf(folder, tmp_path / "model.gguf", kind=KINDS[kind])
        with pytest.raises(UsageError, match=rf"12 heads with a state .*--gpus may be {usable}$"):
            check_divides(read_config(tmp_path / "model.gguf"), refused)


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_an_old_file_with_queries_keys_values_and_gates_in_one_tensor_is_a_newer_one(tmp_path: Path, kind: str) -> None:
    """Of Qwen3-Next, from before llama.cpp's converter took them apart."""
    folder = save_tiny("qwen3_next", tmp_path / "folder")
    write_gguf(folder, newer := tmp_path / "newer.gguf", kind=kind)
    write_gguf(folder, old := tmp_path / "old.gguf", kind=kind, joins_states=True)
    assert "blk.0.ssm_in.weight" in read_header(old).tensors
    assert "blk.0.attn_qkv.weight" in read_header(newer).tensors
    assert read_config(old).blocks == read_config(newer).blocks
    assert torch.equal(logits(old), logits(newer))


def test_states_of_qwen3_next_in_both_forms_at_once_are_refused(tmp_path: Path) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("blk.0.ssm_in.weight", np.ones((4, 32), np.float32))

    write_gguf(save_tiny("qwen3_next", tmp_path / "folder"), path := tmp_path / "model.gguf", change=change)
    with pytest.raises(ModelError, match=r"blk\.0\..* is there under two names"), Checkpoint.open(path):
        pass


def logits(path: Path) -> Tensor:
    decoder = load(path)
    return in_prefill(decoder, target_cache(decoder, SIZES), random_tokens(40), SIZES.prefill_block)


@pytest.mark.parametrize("name", IN_FILES)
def test_a_next_token_head_is_the_folders(tmp_path: Path, name: str) -> None:
    """Its layer follows the others, which are the same without it, and it has the names of folders."""
    folder = heads.with_head(save_tiny(name, tmp_path / "folder", tokenizer=True, **heads.shapes_of(name)))
    files, form = {kind: tmp_path / f"{kind}.gguf" for kind in ("whole", "plain")}, heads.FORMS[name]
    write_gguf(folder, files["whole"])
    write_gguf(folder, files["plain"], without=form.prefix.partition("layers.0.")[0])
    config = read_config(files["whole"])
    assert replace(config, next_token=None) == read_config(files["plain"])
    assert config.next_token == config.blocks[form.layer]
    with Checkpoint.open(files["whole"]) as checkpoint:
        check_model(checkpoint, config)
        ours, theirs = ({*names} for names in (load_file(folder / "model.safetensors"), checkpoint.names()))
        alone, tables = {part for part in ours if ".experts." in part}, {f"{part}.weight" for part in form.more}
        otherwise = {part for part in ours if part.endswith(("kv_b_proj.weight", "attention.o_proj.weight"))}  # Ling's
        assert ours - alone - tables - otherwise <= theirs
        assert bool(alone) == any(".experts." in part for part in theirs)
    assert torch.equal(logits(files["whole"]), logits(files["plain"]))
    torch.testing.assert_close(heads.head_logits(files["whole"]), heads.head_logits(folder), rtol=0, atol=2e-4)


@pytest.mark.few(2)
@pytest.mark.parametrize("offload", [frozenset(), frozenset(("weights",))], ids=["", "streamed"])
@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
@pytest.mark.parametrize("name", IN_FILES)
def test_a_next_token_head_drafts_what_it_does_not_decide(
    tmp_path: Path, name: str, kind: str, offload: frozenset[str]
) -> None:
    sizes = heads.shapes_of(name) | {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
    folder = heads.with_head(save_tiny(name, tmp_path / "folder", tokenizer=True, **sizes))
    write_gguf(folder, path := tmp_path / "model.gguf", kind=kind)
    alone = replace(heads.SIZES, gamma=0, draft_gamma=0)
    with heads.engine(path, alone, draft=False, dtype="bf16") as made:
        expected = heads.say(made, PROMPT)
    with heads.engine(path, replace(heads.SIZES, budget=0), dtype="bf16", offload=offload) as made:
        assert heads.say(made, PROMPT) == expected
        assert level_stats(made, "target").drafted_by["draft"] > 0
        homes = made.worker.models.decoders["draft"].weights.experts
        assert all(isinstance(each.bank.places[0].up, StoredMatrix) == (kind == "Q8_0") for each in homes if each)


@pytest.mark.parametrize("part", ["join", "norm"])
@pytest.mark.parametrize("name", IN_FILES)
def test_a_head_without_all_its_parts_is_none(tmp_path: Path, name: str, part: str) -> None:
    folder, path = heads.with_head(save_tiny(name, tmp_path / "folder")), tmp_path / "model.gguf"
    form = heads.FORMS[name]
    write_gguf(folder, path, without=form.join if part == "join" else form.norms[2])
    config = read_config(path)
    assert config.next_token is None
    with Checkpoint.open(path) as checkpoint:
        check_model(checkpoint, config)


def test_a_head_with_a_table_of_its_own_is_none(tmp_path: Path) -> None:
    folder, path = heads.with_head(save_tiny("qwen3_5", tmp_path / "folder")), tmp_path / "model.gguf"

    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("blk.4.nextn.embed_tokens.weight", np.ones((96, 32), np.float32))

    write_gguf(folder, path, change=change)
    config = read_config(path)
    assert config.next_token is None
    with Checkpoint.open(path) as checkpoint:
        check_model(checkpoint, config)


def test_a_layer_behind_the_last_one_that_is_no_head_is_refused(tmp_path: Path) -> None:
    folder, path = heads.with_head(save_tiny("qwen3_5", tmp_path / "folder")), tmp_path / "model.gguf"

    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_block_count(4)
        writer.add_nextn_predict_layers(0)
        writer.add_array("qwen35.attention.recurrent_layers", [True, True, True, False])

    write_gguf(folder, path, change=change)
    with Checkpoint.open(path) as checkpoint, pytest.raises(ModelError, match=r"15 unexpected \(model\.layers\.4\."):
        check_model(checkpoint, read_config(path))


@pytest.mark.parametrize("without", ["model.layers.", "model."])
@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe", "qwen4_exp"])
def test_a_file_of_a_head_alone_is_refused_with_what_to_do(tmp_path: Path, name: str, without: str) -> None:
    """llama.cpp's converter writes such files, with the model's table and head or without."""
    folder, path = heads.with_head(save_tiny(name, tmp_path / "folder")), tmp_path / "model.gguf"
    write_gguf(folder, path, without=without)
    with pytest.raises(ModelError, match=r"model\.gguf holds a next-token head \(MTP\) without its .*--draft$"):
        read_config(path)


@pytest.mark.parametrize("every", [2, None])
def test_layers_have_states_as_the_file_lists_them_or_all_but_every_nth(tmp_path: Path, every: int | None) -> None:
    folder, path = save_tiny("qwen3_5", tmp_path / "folder"), tmp_path / "model.gguf"
    config = json.loads((folder / "config.json").read_text())
    types = config.pop("layer_types")
    assert types == ["linear_attention"] * 3 + ["full_attention"]
    (folder / "config.json").write_text(json.dumps(config))

    def change(writer: gguf.GGUFWriter) -> None:
        if every:
            writer.add_full_attention_interval(every)

    write_gguf(folder, path, change=change)
    assert read_config(path).attending == ((1, 3) if every else (3,))


def put(key: str, value: Any) -> Change:
    def change(writer: gguf.GGUFWriter) -> None:
        add = writer.add_array if isinstance(value, list) else writer.add_uint32
        add(f"{writer.arch}.{key}", value)

    return change


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("nextn_predict_layers", 4, r"qwen35\.nextn_predict_layers is 4; it must be a whole number from 0 to 3"),
        ("nextn_predict_layers", 1, r"layer_types is .*full_attention in one layer at least"),
        ("ssm.inner_size", 71, r"qwen35\.ssm\.inner_size is 71; it must be a multiple of ssm\.time_step_rank, 6"),
        ("ssm.group_count", 4, r"linear_num_value_heads is 6; it must be a multiple of linear_num_key_heads 4"),
        ("ssm.group_count", 0, r"qwen35\.ssm\.group_count is 0; it must be a whole number from 1"),
        ("ssm.conv_kernel", 1, r"linear_conv_kernel_dim is 1; it must be 2 or more"),
        ("full_attention_interval", 1, None),  # the list counts
        ("attention.recurrent_layers", [True, False], r"recurrent_layers is a list of 2; it must be a list of 4, one"),
        ("attention.recurrent_layers", 1, r"recurrent_layers is 1; it must be a list"),
        ("attention.recurrent_layers", [True] * 4, r"layer_types is .*full_attention in one layer at least"),
        ("ssm.dt_b_c_rms", 1, r"qwen35\.ssm\.dt_b_c_rms is 1; it must be absent or 0: it changes the arithmetic"),
        ("expert_count", 8, r"qwen35\.expert_count is 8; it must be absent or 0"),
    ],
)
def test_metadata_that_contradict_are_refused_by_name(tmp_path: Path, key: str, value: Any, said: str | None) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(save_tiny("qwen3_5", tmp_path / "folder"), path, tokenizer="", change=put(key, value))
    if said is None:
        assert read_config(path).attending == (3,)
        return
    with pytest.raises(ModelError, match=said):
        read_config(path)


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("ssm.group_count", 3, r"linear_attn\.conv1d\.weight \[104, 4\], not \[120, 4\]"),
        ("ssm.state_size", 16, r"linear_attn\.conv1d\.weight \[104, 4\], not \[136, 4\]"),
        ("ssm.inner_size", 36, r"linear_attn\.conv1d\.weight \[104, 4\], not \[68, 4\]"),
        ("ssm.conv_kernel", 3, r"linear_attn\.conv1d\.weight \[104, 4\], not \[104, 3\]"),
        ("ssm.time_step_rank", 12, r"linear_attn\.A_log \[6\], not \[12\]"),
        ("attention.recurrent_layers", [True, True, False, False], r"missing \(model\.layers\.2\.self_attn"),
    ],
)
def test_shapes_that_the_metadata_deny_are_refused(tmp_path: Path, key: str, value: Any, named: str) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(save_tiny("qwen3_5", tmp_path / "folder"), path, change=put(key, value))
    with Checkpoint.open(path) as checkpoint, pytest.raises(ModelError, match=named):
        check_model(checkpoint, read_config(path))


def test_a_decay_under_another_name_is_unexpected(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"

    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("blk.0.ssm_a.weight", np.ones(6, np.float32))

    write_gguf(save_tiny("qwen3_5", tmp_path / "folder"), path, change=change)
    with (
        Checkpoint.open(path) as checkpoint,
        pytest.raises(ModelError, match=r"1 unexpected \(model\.layers\.0\.ssm_a"),
    ):
        check_model(checkpoint, read_config(path))


def test_the_architecture_beside_it_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(save_tiny("qwen3_5", tmp_path / "folder"), path, arch="glm5-next")
    with pytest.raises(ModelError, match=r"its architecture is 'glm5-next', known are .*qwen3, qwen35, qwen35moe, "):
        read_config(path)


def test_the_last_norm_of_lfm2_may_have_either_name(tmp_path: Path) -> None:
    folder = save_tiny("lfm2", tmp_path / "folder")
    norm = load_file(folder / "model.safetensors")["model.embedding_norm.weight"].numpy()

    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("output_norm.weight", norm)

    write_gguf(folder, older := tmp_path / "older.gguf")
    write_gguf(folder, newer := tmp_path / "newer.gguf", without="embedding_norm", change=change)
    assert "token_embd_norm.weight" in read_header(older).tensors
    assert "token_embd_norm.weight" not in read_header(newer).tensors
    assert torch.equal(logits(older), logits(newer))


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("attention.head_count_kv", 2, r"lfm2\.attention\.head_count_kv is 2; it must be a list"),
        ("attention.head_count_kv", [0, 2, 1, 0], r"a list of as many as layers, the same in all that attend, and 0"),
        ("attention.head_count_kv", [0, 2, 2], r"a list of as many as layers, the same in all that attend, and 0"),
        ("attention.head_count_kv", [0] * 4, r"a list of as many as layers, the same in all that attend, and 0"),
        ("attention.sliding_window", 4, r"lfm2\.attention\.sliding_window is 4; it must be absent or 0"),
        ("shortconv.l_cache", 1, r"conv_L_cache is 1; it must be 2 or more"),
        ("shortconv.l_cache", 0, r"lfm2\.shortconv\.l_cache is 0; it must be a whole number from 1"),
    ],
)
def test_metadata_of_convolutions_that_contradict_are_refused_by_name(
    tmp_path: Path, key: str, value: Any, said: str
) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(save_tiny("lfm2", tmp_path / "folder"), path, tokenizer="", change=put(key, value))
    with pytest.raises(ModelError, match=said):
        read_config(path)
