"""GGUF files of Qwen3.8-Flash-Next (`qwen4exp`): residual streams in any kind, indexers, next-token heads;
what a file claims and this program has not is refused by its name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

import test_next_token as heads
from kit.contract import FILES, PROMPT
from kit.families import save_tiny
from kit.gguf_models import write_gguf
from kit.heads import shapes_of, with_head
from kit.models import Sizes, load, random_tokens, target_cache
from kit.quantised import level_stats
from kit.stored import GGUF, YOUNG
from offload.config.gguf_header import read_header
from offload.config.reading import read_config
from offload.engine.engine import Engine, load_tokenizer, plan_request
from offload.errors import ModelError
from offload.formats.encodings import ENCODINGS
from offload.plan.options import Options
from offload.weights.checkpoint import Checkpoint, check_model
from test_parity import in_prefill
from test_placement import TEMPORARY

SIZES = Sizes(capacity=61, rows=4, prefill_block=7, page=8, pages=2)
Change = Callable[[gguf.GGUFWriter], None]
FEW: dict[str, object] = {"indexer_budget": 16, "indexer_n_heads": 2}  # of the 60 tokens here
LARGE: dict[str, object] = {
    "head_dim": 32, "indexer_head_dim": 16, "hc_lowrank": 32, "moe_intermediate_size": 32, "ple_embed_dim": 256,
}  # fmt: skip
BLOCKS: dict[str, object] = {**FEW, "hidden_size": 64, "hc_lowrank": 256}  # streams in whole blocks of 256
MIXED = ("Q4_K", "Q5_K", "Q6_K", "IQ4_XS")
RATIOS = "attention.compress_ratios"


def logits(path: Path) -> Tensor:
    decoder = load(path)
    return in_prefill(decoder, target_cache(decoder, SIZES), random_tokens(60), SIZES.prefill_block)


def folder_of(root: Path, **fields: object) -> Path:
    return save_tiny("qwen4_exp", root / "folder", **{**FEW, **fields})


def file_of(root: Path, change: Change | None = None, **form: Any) -> Path:
    write_gguf(folder_of(root), root / "model.gguf", change=change, **form)
    return root / "model.gguf"


def test_a_file_says_what_its_folder_says_beyond_the_indexers_budget(tmp_path: Path) -> None:
    path = file_of(tmp_path)
    torch.testing.assert_close(logits(path), logits(tmp_path / "folder"), rtol=0, atol=2e-4)


@pytest.mark.few(4)
@pytest.mark.parametrize("kind", [*(name for name in GGUF if name not in YOUNG), "NVFP4", "F16", "mixed"])
def test_matrices_of_streams_stay_in_their_kinds(tmp_path: Path, kind: str) -> None:
    """Those of a layer that are multiplied together each in its own, too."""
    own = {"down": kind, "inject": kind, "up": kind}
    if kind == "mixed":
        own = {"down": "Q4_K", "inject": "Q8_0", "up": "IQ4_NL"}
    folder, path, twin = folder_of(tmp_path, **BLOCKS), tmp_path / "model.gguf", tmp_path / "twin.gguf"

    def of(name: str) -> str:
        part = next((part for part in own if f"_{part}" in name), "")
        return own[part] if "hyper_connection" in name and part else "F32"

    numbers = write_gguf(folder, path, kind=of)
    write_gguf(folder, twin, numbers=numbers)
    config = read_config(path)
    down, inject, up = (each if each in ENCODINGS else "" for each in own.values())
    assert config.last_mean_encodings == (down, up)
    assert all(block.encodings.streams in ((), (down, inject, up) * 2) for block in config.blocks)
    assert config.blocks[0].encodings.streams or not down
    torch.testing.assert_close(logits(path), logits(twin), rtol=0, atol=2e-4)


WHOLE = ("Q8_0", "IQ1_M", "IQ2_XS", "IQ3_XXS", "IQ3_S", "mixed")


@pytest.mark.few(3)
@pytest.mark.parametrize("kind", WHOLE)
def test_whole_files_are_read_in_the_kinds_that_people_have(tmp_path: Path, kind: str) -> None:
    """Attention, states, streams, routers' experts and the table of n-grams; "mixed": as Unsloth's dynamic files."""
    fields = FILES["qwen4_exp, n-grams"] | {"num_hidden_layers": 4, "hc_lowrank": 256}
    folder, path = save_tiny("qwen4_exp, n-grams", tmp_path / "folder", **fields), tmp_path / "a.gguf"

    def of(name: str) -> str:
        if "router" in name or name.endswith("mlp.gate.weight"):
            return "F32"
        if "ple_embedding" in name:
            return "Q8_0"  # rows of fewer than 256 numbers
        return MIXED[len(name) % len(MIXED)] if kind == "mixed" else kind

    numbers = write_gguf(folder, path, kind=of)
    write_gguf(folder, twin := tmp_path / "twin.gguf", numbers=numbers)
    found = {info.kind for info in read_header(path).tensors.values()} - {"F32"}
    assert found == {"Q8_0", *(MIXED if kind == "mixed" else (kind,))}
    torch.testing.assert_close(logits(path), logits(twin), rtol=0, atol=1e-3)


def headed(root: Path) -> Path:
    sizes = {**shapes_of("qwen3_5_moe"), "linear_num_value_heads": 6}
    return with_head(save_tiny("qwen4_exp, n-grams", root / "folder", tokenizer=True, **{**FEW, **sizes, **LARGE}))


def test_a_next_token_head_is_the_folders(tmp_path: Path) -> None:
    """Its layer follows the others, and one matrix joins its two kinds of rows."""
    folder, path = headed(tmp_path), tmp_path / "model.gguf"
    write_gguf(folder, path)
    write_gguf(folder, plain := tmp_path / "plain.gguf", without="mtp.")
    own = {name.removeprefix("blk.4.") for name in read_header(path).tensors if name.startswith("blk.4.nextn.")}
    parts = ("eh_proj", "enorm", "hnorm", "hc_head_norm", "hc_head_down", "hc_head_up")
    assert own == {f"nextn.{part}.weight" for part in parts}
    config = read_config(path)
    assert config.num_layers == 4
    assert replace(config, next_token=None) == read_config(plain)
    with Checkpoint.open(path) as checkpoint:
        check_model(checkpoint, config)
    assert torch.equal(logits(path), logits(plain))
    torch.testing.assert_close(heads.head_logits(path), heads.head_logits(folder), rtol=0, atol=2e-4)


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_a_next_token_head_drafts_what_it_does_not_decide(tmp_path: Path, kind: str) -> None:
    write_gguf(headed(tmp_path), path := tmp_path / "model.gguf", kind=kind)
    with heads.engine(path, replace(heads.SIZES, gamma=0, draft_gamma=0), draft=False, dtype="bf16") as made:
        expected = heads.say(made, PROMPT)
    with heads.engine(path, dtype="bf16") as made:
        assert heads.say(made, PROMPT) == expected
        assert level_stats(made, "target").drafted_by["draft"] > 0


def test_planned_bytes_of_a_file_in_blocks_are_allocated_bytes(tmp_path: Path) -> None:
    """A head's matrices beside its layer are unpacked, and the model's are not."""
    write_gguf(headed(tmp_path), path := tmp_path / "model.gguf", kind="Q8_0")
    plan = plan_request(path, path, Options(device="cpu", dtype="bf16"), num_prompt_tokens=500, max_tokens=20)
    with Engine.load(plan, path, path, load_tokenizer(path, path)) as made:
        heads.say(made, random_tokens(500, seed=1), num_tokens=20)
        ledger = made.worker.memory.allocated()
    for tier, planned in (("device", plan.placement.device_bytes), ("host", plan.placement.host_bytes)):
        for name in {*planned} - TEMPORARY - {"gathered chunks"}:
            assert ledger[tier][name] == pytest.approx(planned[name], rel=0.02), name  # type: ignore[index]


@pytest.mark.parametrize("without", ["mtp.fc", "mtp_mixer.hc_norm"])
def test_a_head_without_all_its_parts_is_none(tmp_path: Path, without: str) -> None:
    write_gguf(with_head(folder_of(tmp_path)), path := tmp_path / "model.gguf", without=without)
    config = read_config(path)
    assert config.next_token is None
    with Checkpoint.open(path) as checkpoint:
        check_model(checkpoint, config)


def put(key: str, value: Any) -> Change:
    def change(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0].pop(f"{writer.arch}.{key}", None)
        if value is not None:
            add = writer.add_array if isinstance(value, list) else writer.add_uint32
            add(f"{writer.arch}.{key}", value)

    return change


SAVED_BY_TRANSFORMERS = [0, 0, 0, 0]  # whose name of a layer with an indexer llama.cpp's converter does not know


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("hyper_connection.count", 1, r"hc_count is 1; it must be 2 or more"),
        ("hyper_connection.count", None, r"qwen4exp\.hyper_connection\.count is missing; it must be a whole number fr"),
        ("hyper_connection.low_rank", 0, r"qwen4exp\.hyper_connection\.low_rank is 0; it must be a whole number from"),
        ("hyper_connection.epsilon", 2, r"qwen4exp\.hyper_connection\.epsilon is 2; it must be absent or 0: it chan"),
        ("attention.indexer.head_count", 0, r"indexer\.head_count is 0; it must be a whole number from 1"),
        ("attention.indexer.key_length", 4, r"indexer_head_dim is 4; it must be even, from the 8 rotated numbers"),
        ("attention.indexer.top_k", 18, r"indexer_budget is 18; it must be a multiple of indexer_compress_ratio 4"),
        ("attention.indexer.types", [1, 1], r"indexer\.types is a list of 2; it must be absent or 0"),
        (RATIOS, SAVED_BY_TRANSFORMERS, r"a list of 4 with the same number over 0 in layers 3, .* full_attention in"),
        (RATIOS, [0, 0, 0], r"compress_ratios is a list of 3; it must be a list of 4 with the same number over 0"),
        (RATIOS, 4, r"compress_ratios is 4; it must be a list"),
        (RATIOS, None, r"compress_ratios is missing; it must be a list"),
        ("expert_weights_scale", 2, r"qwen4exp\.expert_weights_scale is 2; it must be absent or 0"),
    ],
)
def test_metadata_that_contradict_are_refused_by_name(tmp_path: Path, key: str, value: Any, said: str) -> None:
    path = file_of(tmp_path, put(key, value), tokenizer="")
    with pytest.raises(ModelError, match=said):
        read_config(path)


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("hyper_connection.low_rank", 8, r"input_mix_weight_down\.weight \[16, 128\], not \[8, 128\]"),
        ("hyper_connection.count", 2, r"hc_norm\.weight \[128\], not \[64\]"),
        ("attention.indexer.head_count", 3, r"indexer\.q_proj\.weight \[32, 32\], not \[48, 32\]"),
        ("attention.indexer.key_length", 32, r"indexer\.k_proj\.weight \[16, 32\], not \[32, 32\]"),
    ],
)
def test_shapes_that_the_metadata_deny_are_refused(tmp_path: Path, key: str, value: int, named: str) -> None:
    path = file_of(tmp_path, put(key, value))
    with Checkpoint.open(path) as checkpoint, pytest.raises(ModelError, match=named):
        check_model(checkpoint, read_config(path))


@pytest.mark.parametrize(
    "without",
    ["model.hyper_connection_mixer.hc_norm", "0.attn_hyper_connection.block_inject_weight", "indexer.k_layernorm"],
)
def test_a_part_that_is_not_there_is_missing(tmp_path: Path, without: str) -> None:
    path = file_of(tmp_path, without=without)
    with Checkpoint.open(path) as checkpoint, pytest.raises(ModelError, match=rf"1 missing \(.*{without}"):
        check_model(checkpoint, read_config(path))


@pytest.mark.parametrize(
    "name", ["output_norm", "blk.0.attn_norm", "blk.0.indexer.q_proj", "blk.3.hc_attn_scale", "output_hc_inject"]
)
def test_a_tensor_that_the_model_has_not_is_unexpected(tmp_path: Path, name: str) -> None:
    path = file_of(tmp_path, lambda writer: writer.add_tensor(f"{name}.weight", np.ones(4, np.float32)))
    with Checkpoint.open(path) as checkpoint, pytest.raises(ModelError, match=r"1 unexpected"):
        check_model(checkpoint, read_config(path))
