"""Folders in MXFP4, as gpt-oss's are: transformers' numbers, any rows and columns of them, in one tensor for all
experts or one for each, and logits of models with experts in it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from kit.families import random_tiny, save_tiny
from kit.models import SMALL, Sizes, load, random_tokens, target_cache
from kit.processor import OPERATORS, of
from offload.config.config_json import config_of
from offload.config.encodings import matrices
from offload.config.model import ModelConfig
from offload.config.reading import read_config
from offload.errors import ModelError
from offload.formats.encodings import ENCODINGS
from offload.formats.stored import StoredMatrix
from offload.kernels.experts import ExpertWeights
from offload.plan.shards import Shard
from offload.transfer.memory import Memory
from offload.weights.checkpoint import Checkpoint, check_model
from offload.weights.experts import load_experts
from test_parity import assert_same_logits, in_decoding, in_prefill

HIDDEN, SIZE, EXPERTS = 96, 64, 4
FIELDS = {
    "hidden_size": HIDDEN, "moe_intermediate_size": SIZE, "num_experts": EXPERTS, "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
}  # fmt: skip
STORED = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.gate", "model.embed_tokens", "lm_head"],
}
OWN = "mlp.experts"
STACKED = f"model.layers.0.{OWN}"
KIND = ENCODINGS["MXFP4"]
Tensors = dict[str, Tensor]


def random_parts(*shape: int, seed: int) -> tuple[Tensor, Tensor]:
    """Codes [..., rows, blocks, 16] and scales [..., rows, blocks], as many of those that are numbers as there is room
    for."""
    generator = torch.Generator().manual_seed(seed)
    *rows, inputs = shape
    codes = torch.randint(256, (*rows, inputs // 32, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(255, codes.shape[:-1], generator=generator, dtype=torch.uint8)
    scales.view(-1)[:255] = torch.arange(255)[: scales.numel()]
    return codes, scales


def transformers_numbers(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """[experts * rows, inputs], by transformers."""
    return convert_moe_packed_tensors(codes, scales, dtype=dtype).transpose(1, 2).flatten(0, 1)


def config_json(**fields: object) -> dict[str, object]:
    model = random_tiny("qwen3_moe", **FIELDS)
    return model.config.to_dict() | {"architectures": ["Qwen3MoeForCausalLM"], "quantization_config": STORED} | fields


def stacked_config() -> ModelConfig:
    """Of gpt-oss's form, of one layer."""
    fields = {"hidden_size": HIDDEN, "intermediate_size": SIZE, "num_local_experts": EXPERTS, "num_hidden_layers": 1}
    model = random_tiny("gpt_oss", **fields)
    return config_of(model.config.to_dict() | {"quantization_config": STORED})


def stacked(folder: Path, change: Callable[[Tensors], None] = lambda tensors: None) -> Tensors:
    """The experts' tensors of a layer, written to a folder."""
    shapes = {"gate_up_proj": (EXPERTS, 2 * SIZE, HIDDEN), "down_proj": (EXPERTS, HIDDEN, SIZE)}
    tensors = Tensors()
    for seed, (name, shape) in enumerate(shapes.items()):
        codes, scales = random_parts(*shape, seed=seed)
        tensors |= {f"{STACKED}.{name}_blocks": codes, f"{STACKED}.{name}_scales": scales}
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return tensors


def opened(folder: Path) -> Checkpoint:
    checkpoint = Checkpoint.open(folder)
    checkpoint.gather(stacked_config())
    return checkpoint


@pytest.mark.parametrize("piece", [1 << 16, 7])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_stacked_numbers_are_those_of_transformers(
    tmp_path: Path, dtype: torch.dtype, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every scale: subnormal and infinite numbers, too."""
    monkeypatch.setattr("offload.weights.e2m1._PIECE", piece)
    tensors = stacked(tmp_path)
    with opened(tmp_path) as checkpoint:
        for name, shape in (("gate_up_proj", (2 * EXPERTS * SIZE, HIDDEN)), ("down_proj", (EXPERTS * HIDDEN, SIZE))):
            parts = [tensors[f"{STACKED}.{name}_{part}"] for part in ("blocks", "scales")]
            found = torch.empty(checkpoint.shape(f"{STACKED}.{name}.weight"), dtype=dtype)
            checkpoint.read_into(f"{STACKED}.{name}.weight", found)
            assert checkpoint.encoding(f"{STACKED}.{name}.weight") == "MXFP4"
            assert found.shape == shape
            assert torch.equal(found, transformers_numbers(*parts, torch.bfloat16).to(dtype))
            assert found.isinf().any()


@pytest.mark.parametrize("rows", [range(0, 128, 2), range(129, 256, 2), range(260, 290, 2), range(7, 400, 3), range(5)])
@pytest.mark.parametrize("columns", [None, range(32, 96), range(32, 64)])
def test_any_rows_with_a_step_and_whole_blocks_of_columns_are_read(
    tmp_path: Path, rows: range, columns: range | None
) -> None:
    """Gates are the even rows of an expert, ups the odd ones."""
    tensors, name = stacked(tmp_path), f"{STACKED}.gate_up_proj"
    whole = transformers_numbers(tensors[f"{name}_blocks"], tensors[f"{name}_scales"], torch.float32)
    wanted = whole[list(rows)][:, list(columns or range(HIDDEN))]
    with opened(tmp_path) as checkpoint:
        blocks = torch.empty(len(rows), KIND.row_bytes(wanted.shape[1]), dtype=torch.uint8)
        checkpoint.read_stored(f"{name}.weight", blocks, rows=rows, columns=columns)
        numbers = torch.empty(wanted.shape)
        checkpoint.read_into(f"{name}.weight", numbers, rows=rows, columns=columns)
        with pytest.raises(ModelError, match="blocks of 32 columns, which 16 to 48 would cut"):
            checkpoint.read_stored(f"{name}.weight", blocks, rows=rows, columns=range(16, 48))
    assert torch.equal(StoredMatrix(blocks, KIND).matrix(torch.float32), wanted)
    assert torch.equal(numbers, wanted)


def test_rows_with_a_step_are_read_of_plain_numbers_too(tmp_path: Path) -> None:
    whole = torch.randn(12, 8)
    save_file({"plain": whole}, tmp_path / "model.safetensors")
    with Checkpoint.open(tmp_path) as checkpoint:
        found = torch.empty(4, 6)
        checkpoint.read_into("plain", found, rows=range(1, 12, 3), columns=range(2, 8))
    assert torch.equal(found, whole[1::3, 2:])


def test_a_part_is_read_without_the_others(tmp_path: Path) -> None:
    """Of 64 readings of a layer of gpt-oss each would regroup all of its experts."""
    tensors = stacked(tmp_path)
    tensors[f"{STACKED}.down_proj_scales"][0, 0, 0] = 255
    save_file(tensors, tmp_path / "model.safetensors")
    with opened(tmp_path) as checkpoint:
        out = torch.empty(HIDDEN, KIND.row_bytes(SIZE), dtype=torch.uint8)
        checkpoint.read_stored(f"{STACKED}.down_proj.weight", out, rows=range(HIDDEN, 2 * HIDDEN))
        with pytest.raises(ModelError, match="down_proj_scales has a scale of 255, which is NaN"):
            checkpoint.read_stored(f"{STACKED}.down_proj.weight", out, rows=range(HIDDEN))


def drop(name: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        del tensors[f"{STACKED}.{name}"]

    return change


def put(name: str, tensor: Tensor) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({f"{STACKED}.{name}": tensor})


BLOCKS, SCALES = (EXPERTS, HIDDEN, SIZE // 32, 16), (EXPERTS, HIDDEN, SIZE // 32)
FAULTS = [
    (drop("down_proj_scales"), f"there is no {STACKED}.down_proj_scales; name it in modules_to_not_convert"),
    (drop("gate_up_proj_blocks"), f"there is no {STACKED}.gate_up_proj_blocks"),
    (put("down_proj_scales", torch.ones(SCALES)), "down_proj_scales is stored as F32; it must be U8"),
    (put("down_proj_blocks", torch.ones(BLOCKS, dtype=torch.int8)), "down_proj_blocks is stored as I8; it must be U8"),
    (put("down_proj_scales", torch.ones(4, 96, 3, dtype=torch.uint8)),
     "has shape [4, 96, 2, 16] and .down_proj_scales [4, 96, 3]; by config.json there are 384 rows of 2 blocks of 16"),
    (put("down_proj_blocks", torch.ones(4, 96, 2, 8, dtype=torch.uint8)), "has shape [4, 96, 2, 8]"),
    (put("down_proj_blocks", torch.ones(4, 96, 32, dtype=torch.uint8)), "has shape [4, 96, 32]"),
    (put("down_proj_scales", torch.ones(2, dtype=torch.uint8)), "down_proj_scales [2]"),
]  # fmt: skip


@pytest.mark.parametrize(("fault", "said"), FAULTS, ids=[said[:40] for _, said in FAULTS])
def test_a_faulty_tensor_is_named(tmp_path: Path, fault: Callable[[Tensors], None], said: str) -> None:
    stacked(tmp_path, fault)
    with pytest.raises(ModelError) as caught:
        opened(tmp_path)
    assert said.replace(" .down", f" {STACKED}.down") in str(caught.value)


def test_inputs_that_are_no_whole_blocks_are_refused(tmp_path: Path) -> None:
    config = config_of(config_json(hidden_size=80))
    with Checkpoint.open(packed(tmp_path)) as checkpoint, pytest.raises(ModelError, match="has 80 inputs by config"):
        checkpoint.gather(config)


def test_experts_alone_are_in_mxfp4(tmp_path: Path) -> None:
    """As in transformers, whatever the list of the others has; and of them none that it names."""
    for left in (STORED["modules_to_not_convert"], None, [], ["lm_head"]):
        config = config_of(config_json(quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": left}))
        found = {name for name, matrix in matrices(config).items() if matrix.encoding}
        assert found == {name for name in matrices(config) if ".experts." in name}
        assert {matrix.encoding for name, matrix in matrices(config).items() if name in found} == {"MXFP4"}
    left = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.1.mlp"]}
    config = config_of(config_json(quantization_config=left))
    assert [block.encodings.experts for block in config.blocks] == [("MXFP4",) * 3, ()]
    with Checkpoint.open(packed(tmp_path)) as checkpoint, pytest.raises(ModelError) as caught:
        check_model(checkpoint, config)
    assert "leaves model.layers.1.mlp.experts.0.gate_proj as plain numbers, but there is" in str(caught.value)


def test_quantised_weights_without_a_description_are_told(tmp_path: Path) -> None:
    data = config_json()
    del data["quantization_config"]
    with Checkpoint.open(packed(tmp_path)) as checkpoint, pytest.raises(ModelError) as caught:
        check_model(checkpoint, config_of(data))
    assert "config.json has no quantization_config that says how" in str(caught.value)


def packed(folder: Path) -> Path:
    """A model whose experts each have tensors of their own, as transformers would dequantise them."""
    save_tiny("qwen3_moe", folder, **FIELDS)
    tensors = Tensors()
    for seed, (name, tensor) in enumerate(sorted(load_file(folder / "model.safetensors").items())):
        if f".{OWN}." not in name:
            tensors[name] = tensor
            continue
        codes, scales = random_parts(*tensor.shape, seed=seed)
        module, scales = name.removesuffix(".weight"), 122 + scales % 3
        tensors |= {f"{module}_blocks": codes, f"{module}_scales": scales}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | config_json()))
    return folder


def plain_model(folder: Path) -> AutoModelForCausalLM:
    """transformers' model with the same numbers."""
    stored, twin = load_file(folder / "model.safetensors"), folder / "twin"
    numbers = {name: tensor for name, tensor in stored.items() if f".{OWN}." not in name}
    for name in stored.keys() - numbers.keys():
        module, _, part = name.rpartition("_")
        if part == "blocks":
            parts = stored[name][None], stored[f"{module}_scales"][None]
            numbers[f"{module}.weight"] = transformers_numbers(*parts, torch.float32).contiguous()
    twin.mkdir()
    save_file(numbers, twin / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (twin / "config.json").write_text(json.dumps(config))
    return AutoModelForCausalLM.from_pretrained(twin, dtype=torch.float32).eval()


@pytest.mark.parametrize("operators", OPERATORS)
@torch.inference_mode()
def test_logits_are_those_of_transformers_with_the_same_numbers(operators: str, tmp_path: Path) -> None:
    kernels, folder = of(operators), packed(tmp_path)
    assert read_config(folder).stored_in == ("MXFP4",)
    tokens = random_tokens(40, vocabulary=int(str(SMALL["vocab_size"])))
    theirs = plain_model(folder)(torch.tensor([tokens])).logits[0]
    decoder, sizes = load(folder, kernels=kernels), Sizes()
    assert theirs.std() > 0.1
    assert_same_logits(in_prefill(decoder, target_cache(decoder, sizes), tokens, sizes.prefill_block), theirs)
    assert_same_logits(in_decoding(decoder, target_cache(decoder, sizes), tokens, 3), theirs)


def test_ranks_have_their_rows_and_columns_of_every_expert(tmp_path: Path) -> None:
    folder, both = packed(tmp_path), list[list[ExpertWeights]]()
    config, memory = read_config(folder), Memory(torch.device("cpu"))
    with Checkpoint.open(folder) as checkpoint:
        check_model(checkpoint, config)
        for shard in (Shard(), Shard(0, 2), Shard(1, 2)):
            homes, *_ = load_experts(
                checkpoint, config, memory, dtype=torch.float32, name="target", link=None, slots=0,
                on_bytes=lambda num_bytes: None, shard=shard,
            )  # fmt: skip
            assert homes is not None
            both.append(list(homes.bank.places))
    for whole, first, second in zip(*both, strict=True):
        for name, dim in (("gate", 0), ("up", 0), ("down", 1)):
            parts = [getattr(each, name).matrix(torch.float32) for each in (whole, first, second)]
            assert torch.equal(parts[0], torch.cat(parts[1:], dim))


def gpt_oss(folder: Path) -> AutoModelForCausalLM:
    """A folder of gpt-oss's form; transformers' model with the same numbers."""
    fields = {"hidden_size": HIDDEN, "intermediate_size": SIZE, "num_local_experts": EXPERTS}
    model = random_tiny("gpt_oss", **fields)
    stored = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for seed, (name, tensor) in enumerate(model.state_dict().items()):
        if name.endswith(("gate_up_proj", "down_proj")):
            count, inputs, outputs = tensor.shape
            codes, scales = random_parts(count, outputs, inputs, seed=seed)
            scales = 122 + scales % 3
            del stored[name]
            stored |= {f"{name}_blocks": codes, f"{name}_scales": scales}
            with torch.no_grad():
                tensor.copy_(convert_moe_packed_tensors(codes, scales, dtype=torch.float32))
    model.save_pretrained(folder)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": STORED}))
    return model


@pytest.mark.parametrize("operators", OPERATORS)
@torch.inference_mode()
def test_a_folder_of_gpt_osss_form_has_the_logits_of_transformers(operators: str, tmp_path: Path) -> None:
    """All experts of a layer in two tensors, gates and ups in alternate rows, with biases."""
    kernels, theirs = of(operators), gpt_oss(tmp_path)
    config = read_config(tmp_path)
    assert config.block.encodings.experts == ("MXFP4",) * 3
    tokens = random_tokens(40, vocabulary=int(str(SMALL["vocab_size"])))
    wanted = theirs(torch.tensor([tokens])).logits[0]
    decoder, sizes = load(tmp_path, kernels=kernels), Sizes()
    caches = [target_cache(decoder, sizes) for _ in range(2)]
    assert_same_logits(in_prefill(decoder, caches[0], tokens, sizes.prefill_block), wanted)
    assert_same_logits(in_decoding(decoder, caches[1], tokens, 3), wanted)
