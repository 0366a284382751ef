"""Folders of Qwen3.8-Flash-Next as they are published, in FP8 and in NVFP4: experts of both kinds, a table of n-grams
whose parts share a scale, and all else in plain numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.finegrained_fp8 import FP8Embedding

import test_next_token as heads
from kit.contract import CONTEXT, FLASH, MODELS, PLAIN, say
from kit.models import Sizes, changed, load, random_tokens, target_cache, tiny_engine, tiny_plan
from kit.stored_models import RELEASED, TABLE_SCALE, in_nvfp4, twin
from offload.config.config_json import config_of
from offload.config.encodings import matrices
from offload.config.model import ModelConfig
from offload.config.next_token import head_of
from offload.config.reading import read_config
from offload.engine.engine import Engine, load_tokenizer, plan_request
from offload.errors import ModelError
from offload.plan.options import Options
from offload.weights.checkpoint import Checkpoint, check_head, check_model
from test_nvfp4 import meant
from test_parity import in_prefill
from test_placement import TEMPORARY
from test_tables import opened as table_in_file

SIZES = Sizes(capacity=61, rows=4, prefill_block=7, page=8, pages=2)
LAYERS = "model.language_model.layers."
TABLE = f"{LAYERS}1.ple.ple_embedding.ngram_embedding"
SHARDS = [f"{TABLE}.shard_{part}" for part in range(4)]
KINDS = {  # of experts, and of the next-token head's
    "FP8": ("FP8_F32/128", "FP8_F32/128"),
    "NVFP4 by a list": ("NVFP4", ""),
    "NVFP4 by a map": ("NVFP4", "FP8_F32/128"),
}
Tensors = dict[str, Tensor]
Change = Callable[[Tensors], Tensors | None]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("published")
    return cache(lambda form: MODELS[f"{FLASH} in {form}"].make(root / form)[0])


@pytest.fixture(scope="module")
def twins(folders: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Plain folders of their numbers."""
    root = tmp_path_factory.mktemp("twins")
    return cache(lambda form: twin(folders(form), root / form, torch.float32))


def changed_folder(folder: Path, root: Path, change: Change) -> Path:
    """A copy of a folder with other tensors."""
    root.mkdir()
    (root / "config.json").write_text((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    save_file(change(tensors) or tensors, root / "model.safetensors", metadata={"format": "pt"})
    return root


def opened(folder: Path) -> tuple[Checkpoint, ModelConfig]:
    config, checkpoint = read_config(folder), Checkpoint.open(folder)
    check_model(checkpoint, config)
    return checkpoint, config


def kinds(config: ModelConfig) -> dict[str, set[str]]:
    """The encodings of experts, of the table of n-grams and of all other matrices."""
    found: dict[str, set[str]] = {"experts": set(), "shard_": set(), "": set()}
    for name, matrix in matrices(config).items():
        found[next(part for part in found if part in name)].add(matrix.encoding)
    return found


def table_of(folder: Path) -> Tensor:
    """The whole table, as fp32."""
    checkpoint, _ = opened(folder)
    with checkpoint:
        parts = [torch.empty(checkpoint.shape(f"{shard}.weight")) for shard in SHARDS]
        for shard, part in zip(SHARDS, parts, strict=True):
            checkpoint.read_into(f"{shard}.weight", part)
    return torch.cat(parts)


@pytest.mark.parametrize("form", RELEASED)
def test_experts_and_the_table_stay_as_they_are_stored(folders: Callable[[str], Path], form: str) -> None:
    config = read_config(folders(form))
    assert kinds(config) == {"experts": {KINDS[form][0]}, "shard_": {"FP8_F32/32"}, "": {""}}
    assert config.ngrams(1).table_encoding == "FP8_F32/32"
    head = head_of(config)
    assert head is not None
    assert kinds(head) == {"experts": {KINDS[form][1]}, "shard_": set(), "": {""}}


@pytest.mark.parametrize("form", RELEASED)
def test_config_json_alone_says_the_same_but_where_a_list_leaves_a_table_that_is_in_fp8(
    folders: Callable[[str], Path], form: str
) -> None:
    config = config_of(json.loads((folders(form) / "config.json").read_text()))
    left = "" if form == "NVFP4 by a list" else "FP8_F32/32"
    assert kinds(config) == {"experts": {KINDS[form][0]}, "shard_": {left}, "": {""}}


@pytest.mark.parametrize("form", RELEASED)
def test_logits_are_those_of_a_folder_of_its_numbers(
    folders: Callable[[str], Path], twins: Callable[[str], Path], form: str
) -> None:
    """Of the model, beyond its indexers' budget, and of its next-token head."""

    def logits(folder: Path) -> Tensor:
        decoder = load(folder)
        return in_prefill(decoder, target_cache(decoder, SIZES), random_tokens(60), SIZES.prefill_block)

    assert not read_config(twins(form)).stored_in
    ours, theirs = logits(folders(form)), logits(twins(form))
    assert theirs.std() > 0.1
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-4)
    torch.testing.assert_close(heads.head_logits(folders(form)), heads.head_logits(twins(form)), rtol=0, atol=2e-4)


def test_a_head_that_was_copied_with_its_experts_in_one_tensor_is_read(
    folders: Callable[[str], Path], tmp_path: Path
) -> None:
    """As the model's own folder has it, whose layers' experts are by number here."""
    folder = folders("NVFP4 by a list")
    copied = changed_folder(folder, tmp_path / "copy", lambda tensors: heads.stacked(tensors, "mtp."))
    for file in folder.iterdir():
        if "token" in file.name:
            (copied / file.name).write_bytes(file.read_bytes())
    assert "mtp.layers.0.mlp.experts.gate_up_proj" in load_file(copied / "model.safetensors")
    assert torch.equal(heads.head_logits(copied), heads.head_logits(folder))


def test_a_head_in_fp8_is_read_where_a_list_leaves_it(folders: Callable[[str], Path], tmp_path: Path) -> None:
    """Put together of two folders: scales by blocks tell what it is in."""
    joined, data = changed_folder(folders("NVFP4 by a map"), tmp_path / "joined", lambda tensors: None), {}
    for form in ("NVFP4 by a map", "NVFP4 by a list"):
        data |= json.loads((folders(form) / "config.json").read_text())
    (joined / "config.json").write_text(json.dumps(data))
    assert "ignore" in data["quantization_config"]
    checkpoint, config = opened(joined)
    head = head_of(config)
    assert head is not None
    assert kinds(head)["experts"] == {"FP8_F32/128"}
    with checkpoint:
        check_head(checkpoint, head)


@pytest.mark.parametrize("form", RELEASED)
def test_rows_of_the_table_are_those_of_transformers(folders: Callable[[str], Path], form: str) -> None:
    """Whose table multiplies in the dtype of its scale, bf16: one rounding of an exact product, as here."""
    codes = torch.cat([load_file(folders(form) / "model.safetensors")[f"{shard}.weight"] for shard in SHARDS])
    theirs = FP8Embedding(*codes.shape)
    theirs.weight.data, theirs.weight_scale.data = codes, TABLE_SCALE
    with torch.inference_mode():
        rows = theirs(torch.arange(len(codes)))
    assert rows.dtype == torch.bfloat16
    assert torch.equal(table_of(folders(form)).bfloat16(), rows)


@pytest.mark.parametrize("form", RELEASED)
def test_rows_that_are_read_from_the_file_give_the_same_text(folders: Callable[[str], Path], form: str) -> None:
    """And few of them are in memory. Keys, values and experts are on the host."""
    folder, texts = folders(form), list[list[int]]()
    plan = tiny_plan(
        folder, None, replace(PLAIN, budget=0), num_prompt_tokens=CONTEXT, max_tokens=60, dtype="bf16",
        offload=frozenset(("kv", "weights")),
    )  # fmt: skip
    for where in ("host", "file"):
        with tiny_engine(changed(plan, ngram_table=where, ngram_rows=24), folder) as engine:
            texts.append(say(engine))
            held = engine.worker.memory.allocated()["host"]
            assert ("n-gram tables" in held, "n-gram rows" in held) == (where == "host", where == "file")
            rows = engine.stats.decode_link.ngram_rows
            assert (rows.hits > 0, rows.misses > 0) == (where == "file",) * 2
    assert texts[0] == texts[1]
    assert len({*texts[0]}) > 2


@pytest.mark.parametrize("form", RELEASED)
def test_planned_bytes_are_allocated_bytes(folders: Callable[[str], Path], form: str) -> None:
    folder = folders(form)
    options = Options(device="cpu", dtype="bf16", offload=frozenset(("kv", "weights")))
    plan = plan_request(folder, folder, options, num_prompt_tokens=500, max_tokens=20)
    with Engine.load(plan, folder, folder, load_tokenizer(folder, folder)) as made:
        say(made, random_tokens(300, seed=1), num_tokens=20)
        ledger = made.worker.memory.allocated()
    assert plan.placement.host_bytes["n-gram tables"] == sum(table_of(folder).shape[:1]) * 36
    for tier, planned in (("device", plan.placement.device_bytes), ("host", plan.placement.host_bytes)):
        for name in {*planned} - TEMPORARY - {"gathered chunks"}:
            assert ledger[tier][name] == pytest.approx(planned[name], rel=0.02), name  # type: ignore[index]


def test_a_table_in_nvfp4_is_read_as_its_format_means(folders: Callable[[str], Path], tmp_path: Path) -> None:
    """As third parties publish it: parts with scales of their own, and one scale of the whole table. Rows of 160
    numbers, as those of 32 here, are no whole blocks, so it is unpacked."""
    kept = Tensors()

    def change(tensors: Tensors) -> None:
        parts = in_nvfp4(torch.cat([tensors.pop(f"{shard}.weight").float() for shard in SHARDS]))
        kept.update(parts)
        tensors[f"{TABLE}.weight_scale_2"] = parts["weight_scale_2"].view(1)
        del tensors[f"{TABLE}.weight_scale"]
        for part in ("weight", "weight_scale"):
            rows = parts[part].view(torch.uint8).chunk(len(SHARDS))
            stored = ((f"{shard}.{part}", own.clone()) for shard, own in zip(SHARDS, rows, strict=True))
            tensors.update((name, own if part == "weight" else own.view(torch.float8_e4m3fn)) for name, own in stored)

    folder = changed_folder(folders("NVFP4 by a list"), tmp_path / "packed", change)
    assert kinds(read_config(folder))["shard_"] == {""}
    numbers = meant("times", kept["weight"], kept["weight_scale"].view(torch.uint8), kept["weight_scale_2"].item())
    assert torch.equal(table_of(folder), numbers)
    rows = torch.tensor([0, 1855, 464, 463, 464, 700])
    with table_in_file(opened(folder)[0], names=[f"{shard}.weight" for shard in SHARDS]) as file:
        assert torch.equal(file.begin(rows)(), numbers[rows])


def without(name: str) -> Change:
    return lambda tensors: {key: each for key, each in tensors.items() if key != name}


def put(name: str, tensor: Tensor) -> Change:
    return lambda tensors: tensors | {name: tensor}


EXPERT = f"{LAYERS}0.mlp.experts.5.up_proj"
FAULTS: list[tuple[str, Change, str]] = [
    ("FP8", without(f"{TABLE}.weight_scale"), f"and there is no {SHARDS[0]}.weight_scale; fetch it again"),
    ("FP8", put(f"{TABLE}.weight_scale", torch.ones(2)), "weight_scale has shape [2]; by config.json it must be"),
    ("FP8", put(f"{SHARDS[2]}.weight", torch.ones(464, 32)), "shard_2.weight is stored as F32; by config.json"),
    ("FP8", without(f"{EXPERT}.weight_scale_inv"), f"there is no {EXPERT}.weight_scale; fetch it again"),
    ("FP8", put("lm_head.weight_scale_inv", torch.ones(3, 2)), "leaves lm_head as plain numbers, but there"),
    ("NVFP4 by a list", without(f"{TABLE}.weight_scale"), "shard_0.weight is stored as F8_E4M3"),
    ("NVFP4 by a map", without(f"{EXPERT}.weight_scale_2"), "experts.0.up_proj.weight and its like"),
    ("NVFP4 by a map", put(f"{EXPERT}.pre_quant_scale", torch.ones(256)), "pre_quant_scale multiplies activations"),
]  # fmt: skip


@pytest.mark.parametrize(("form", "fault", "said"), FAULTS, ids=[f"{form}: {said}" for form, _, said in FAULTS])
def test_a_faulty_tensor_is_named(
    folders: Callable[[str], Path], tmp_path: Path, form: str, fault: Change, said: str
) -> None:
    with pytest.raises(ModelError) as caught:
        opened(changed_folder(folders(form), tmp_path / "faulty", fault))
    assert said in str(caught.value)


def test_a_folder_with_the_models_later_name_is_the_same(folders: Callable[[str], Path]) -> None:
    text = (folders("FP8") / "config.json").read_text()
    renamed = json.loads(text.replace('"qwen4_exp', '"qwen3_8_flash_next'))
    assert renamed["text_config"]["model_type"] == "qwen3_8_flash_next_text"
    assert config_of(renamed) == config_of(json.loads(text))


def test_a_table_in_fp8_that_no_list_names_is_told(folders: Callable[[str], Path], tmp_path: Path) -> None:
    """Embeddings are plain unless a config names them."""
    folder = changed_folder(folders("FP8"), tmp_path / "unnamed", lambda tensors: None)
    text = (folder / "config.json").read_text()
    assert "modules_to_convert" in text
    (folder / "config.json").write_text(text.replace('"modules_to_convert"', '"unknown"'))
    with pytest.raises(ModelError) as caught:
        opened(folder)
    assert f"leaves {SHARDS[0]} as plain numbers, but there is {TABLE}.weight_scale" in str(caught.value)
