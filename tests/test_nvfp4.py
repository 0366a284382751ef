"""NVFP4 in folders and GGUF files, beside the formats' tests: numbers of any bytes and scales, which modules are in it,
and parts of matrices, whose rows keep their scale."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kit.contract import FILES
from kit.families import save_tiny
from kit.gguf_models import nvfp4_numbers, write_gguf
from kit.models import random_model, save
from kit.stored_models import by_expert, in_nvfp4, in_several, store
from offload.config.config_json import config_of
from offload.config.encodings import matrices
from offload.config.model import ModelConfig
from offload.config.reading import read_config
from offload.config.schemes import Scheme
from offload.errors import ModelError
from offload.formats.encodings import ENCODINGS
from offload.formats.stored import StoredMatrix
from offload.kernels.device import NONE
from offload.weights import linear
from offload.weights.checkpoint import Checkpoint, check_model
from offload.weights.unpacking import Packed
from test_quantised_folders import PHI3, floats, four_or_eight

F32 = torch.float32
E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
CODES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
KINDS = {  # packing, dtype of scales, name of the tensor's scale, encoding
    "times": ("fp4", "F8_E4M3", "weight_scale_2", "NVFP4"),
    "over": ("packed_fp4", "F8_E4M3", "weight_global_scale", "NVFP4_INV"),
    "mxfp4": ("packed_fp4", "E8M0", "", "MXFP4"),
}
OF_TENSORS = (1.0, 0.37, -2.6, 0.0, 1e-30, 1e-40, 1e30, 3.4e38, float("inf"), float("nan"))
SIZES = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "num_attention_heads": 4}
LAYER = "model.layers.0."
MODELOPT: dict[str, Any] = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
Tensors = dict[str, Tensor]


@pytest.fixture(autouse=True)
def _by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are decoded by torch's operators, which the kernels are compared with elsewhere."""
    monkeypatch.setattr(linear.cpu, "kernels", lambda: NONE)


def same(found: Tensor, meant: Tensor) -> bool:
    """The same numbers, and any NaN is a NaN."""
    return torch.equal(found.isnan(), meant.isnan()) and torch.equal(
        found.nan_to_num(0, 1, 2), meant.nan_to_num(0, 1, 2)
    )


def decoded(kind: str, codes: Tensor, scales: Tensor, of_tensor: float) -> tuple[Tensor, Tensor]:
    """The numbers of codes uint8 [n, bytes] and scales uint8 [n, groups], in blocks and as plain ones."""
    packing, dtype, whole, encoding = KINDS[kind]
    scheme = Scheme(packing, 4, 2 * codes.shape[1] // scales.shape[1], scales=dtype, is_float=True)  # type: ignore[arg-type]
    parts = {"weight": codes, "weight_packed": codes} | ({whole: torch.tensor([of_tensor])} if whole else {})
    steps = scales.view(E4M3 if whole else E8M0)
    packed = Packed(scheme, len(codes), 2 * codes.shape[1], parts, steps)
    return StoredMatrix(packed.blocks(encoding), ENCODINGS[encoding]).matrix(F32), packed.numbers()


def meant(kind: str, codes: Tensor, scales: Tensor, of_tensor: float) -> Tensor:
    """By the formats' definitions: an even number is in the low half of a byte, and each operation rounds to fp32."""
    factor, numbers = torch.tensor(of_tensor), CODES[torch.stack([codes & 15, codes >> 4], -1).flatten(1).int()]
    steps = torch.exp2(scales.double() - 127).float() if kind == "mxfp4" else scales.view(E4M3).float()
    steps = steps * factor if kind == "times" else steps / factor if kind == "over" else steps
    return numbers * steps.repeat_interleave(numbers.shape[1] // steps.shape[1], 1)


@pytest.mark.few(30)
@pytest.mark.parametrize("of_tensor", OF_TENSORS)
@pytest.mark.parametrize("kind", KINDS)
def test_numbers_of_any_bytes_are_those_of_the_format(kind: str, of_tensor: float) -> None:
    """20,000 blocks of each order, and each byte of codes with each scale: zero, subnormal, the largest and NaN. In
    blocks steps are halved, of which those that are subnormal in fp32 lose their last bit."""
    generator, size = torch.Generator().manual_seed(7), 32 if kind == "mxfp4" else 16
    codes = torch.randint(256, (2000, 5 * 64), generator=generator, dtype=torch.uint8)
    scales = torch.randint(255, (2000, 10 * 64 // size), generator=generator, dtype=torch.uint8)
    every = torch.arange(256, dtype=torch.uint8).repeat(256 - (kind == "mxfp4"), 1)
    each = torch.arange(len(every), dtype=torch.uint8)[:, None].repeat(1, 512 // size)
    for some, steps in ((codes, scales), (every, each)):
        wanted, (found, plain) = meant(kind, some, steps, of_tensor), decoded(kind, some, steps, of_tensor)
        assert same(plain, wanted)
        tiny = (wanted.abs() < 6 * 2.0**-125) & (wanted != 0)
        assert same(torch.where(tiny, wanted, found), wanted)
        assert not tiny.any() or (found - wanted)[tiny].abs().max() <= 2.0**-145


def test_groups_of_32_are_two_of_16() -> None:
    """ModelOpt's W4A16_NVFP4 may have them."""
    codes = torch.randint(256, (9, 64), dtype=torch.uint8)
    scales = torch.randint(127, (9, 4), dtype=torch.uint8)
    for found in decoded("times", codes, scales, 0.37):
        assert same(found, meant("times", codes, scales, 0.37))


# Which modules of a folder are in it.


def write(folder: Path, stored: dict[str, Any] | None, encode: Callable[[str, Tensor], Tensors], **fields: Any) -> Path:
    """A model whose modules are stored by `encode`, which returns nothing for plain ones. stored: its
    quantization_config."""
    save(random_model("qwen2", tie_word_embeddings=False, **{**SIZES, **fields}), folder)
    tensors = Tensors()
    for name, tensor in load_file(folder / "model.safetensors").items():
        is_linear = tensor.dim() == 2 and "embed" not in name
        parts = encode(name, tensor) if is_linear else {}
        tensors |= {name.removesuffix("weight") + part: each for part, each in parts.items()} or {name: tensor}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    data = json.loads((folder / "config.json").read_text()) | {"dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(data | ({"quantization_config": stored} if stored else {})))
    return folder


def opened(folder: Path) -> tuple[Checkpoint, ModelConfig]:
    config, checkpoint = read_config(folder), Checkpoint.open(folder)
    check_model(checkpoint, config)
    return checkpoint, config


def kinds(config: ModelConfig) -> dict[str, str]:
    """The encodings of the first layer's matrices and of the head."""
    every = {name: matrix.encoding for name, matrix in matrices(config).items()}
    return {name.split(".")[-2]: kind for name, kind in every.items() if LAYER in name or "lm_head" in name}


def in_any(name: str, weight: Tensor) -> Tensors:
    """Values in FP8, an output plain, the rest in NVFP4."""
    if "v_proj" in name:
        return in_several(name, weight)
    return {} if "o_proj" in name or "lm_head" in name else in_nvfp4(weight)


@pytest.mark.parametrize("prefix", ["model.", ""])
def test_tensors_say_which_modules_are_in_it_where_lists_do_not(tmp_path: Path, prefix: str) -> None:
    """Folders of third parties name no module that is left. prefix: of tensors, which a base model lacks."""
    folder = write(tmp_path, MODELOPT, in_any)
    tensors = load_file(folder / "model.safetensors")
    renamed = {name.replace("model.", prefix): tensor for name, tensor in tensors.items()}
    save_file(renamed, folder / "model.safetensors")
    checkpoint, config = opened(folder)
    assert kinds(config) == {
        **dict.fromkeys(("q_proj", "k_proj", "gate_proj", "up_proj", "down_proj"), "NVFP4"),
        "v_proj": "FP8_F32/64", "o_proj": "", "lm_head": "",
    }  # fmt: skip
    with checkpoint:
        for name, matrix in matrices(config).items():
            assert checkpoint.encoding(name) == matrix.encoding
            checkpoint.read_into(name, torch.empty(checkpoint.shape(name)))


@pytest.mark.parametrize("sharded", [False, True])
def test_a_description_may_be_in_a_file_of_its_own(tmp_path: Path, sharded: bool) -> None:
    """hf_quant_config.json, as TensorRT-LLM's examples write it. config.json's own goes first."""
    folder = write(tmp_path, None, in_any)
    if sharded:
        names = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").rename(folder / "a.safetensors")
        (folder / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": dict.fromkeys(names, "a.safetensors")})
        )
    said = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": None}
    own = folder / "hf_quant_config.json"
    own.write_text(json.dumps({"producer": {}, "quant_method": "modelopt_fp4", "quantization": said}))
    checkpoint, config = opened(folder)
    checkpoint.close()
    assert kinds(config)["gate_proj"] == "NVFP4"
    assert config.quantisation is not None
    assert [remark.split(" ")[2] for remark in config.quantisation.remarks] == ["also", "scales"]
    own.write_text(json.dumps({"quantization": {**said, "quant_algo": None}}))
    assert read_config(folder).quantisation is None
    own.write_text(json.dumps({"quantization": {**said, "quant_algo": "INT4_AWQ"}}))
    with pytest.raises(ModelError, match="INT4_AWQ"):
        read_config(folder)
    data = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(data | {"quantization_config": MODELOPT}))
    assert kinds(read_config(folder))["gate_proj"] == "NVFP4"


MAP = {
    "model.language_model.layers.0.self_attn.qkv_proj": {"quant_algo": "FP8"},
    "model.language_model.layers.0.mlp": {"quant_algo": "NVFP4", "group_size": 16},
    "language_model.lm_head": {"quant_algo": "w4a16_nvfp4", "group_size": 32},
}
WRAPPED = {
    "qkv_proj": "FP8_F32/64", "o_proj": "", "gate_up_proj": "NVFP4", "down_proj": "", "embed_tokens": "",
    "lm_head": "NVFP4",
}  # fmt: skip


@pytest.mark.parametrize("wrapper", ["model.language_model.", "language_model.model.", "model."])
def test_a_map_of_modules_alone_says_how_they_are_stored(wrapper: str) -> None:
    """Before the weights are there. An entry is of all within a module; of 96 inputs 64 are no divisor."""
    named = {name.replace("model.language_model.", wrapper): own for name, own in MAP.items()}
    stored = {"quant_method": "modelopt_mixed", "quant_algo": "MIXED_PRECISION", "quantized_layers": named}
    config = config_of(PHI3 | {"quantization_config": stored})
    assert {name.split(".")[-2]: matrix.encoding for name, matrix in matrices(config).items()} == WRAPPED
    assert config.quantisation is not None
    assert "1 quantised matrices are kept as plain numbers, 12.3 kB in 16 bits" in config.quantisation.remarks[-1]
    alone = {name: {"quant_algo": "w4a16_nvfp4"} for name in named}  # of weights, not of activations
    config = config_of(PHI3 | {"quantization_config": stored | {"quantized_layers": alone}})
    assert config.quantisation is not None
    assert len(config.quantisation.remarks) == 1


def test_a_wrapped_model_has_the_names_of_its_map() -> None:
    text = PHI3 | {"model_type": "mistral", "num_key_value_heads": 2, "head_dim": 16, "sliding_window": None}
    del text["architectures"], text["original_max_position_embeddings"]
    stored = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": MAP}
    data = {"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"], "text_config": text}
    config = config_of(data | {"quantization_config": stored})
    found = {name.split(".")[-2]: matrix.encoding for name, matrix in matrices(config).items()}
    assert found["gate_proj"] == found["lm_head"] == "NVFP4"
    assert found["q_proj"] == found["embed_tokens"] == ""


def in_both(name: str, weight: Tensor) -> Tensors:
    """compressed-tensors': networks in NVFP4, attention in FP8 by rows, the head plain."""
    if "mlp" in name:
        parts = in_nvfp4(weight)
        inverse = 1 / parts["weight_scale_2"].view(1)
        return {"weight_packed": parts["weight"], "weight_scale": parts["weight_scale"], "weight_global_scale": inverse}
    scale = weight.float().abs().amax(1, keepdim=True) / 448
    return {} if "lm_head" in name else {"weight": (weight / scale).to(E4M3), "weight_scale": scale}


def test_groups_may_each_have_a_format(tmp_path: Path) -> None:
    """As in Unsloth's folders; scales of FP8 are in a later file than NVFP4's, and their dtype is not the model's."""
    stored = {
        "quant_method": "compressed-tensors", "format": "mixed-precision", "ignore": ["lm_head"],
        "config_groups": {
            "0": {"targets": ["re:.*mlp.*"], "weights": four_or_eight(4, 16), "format": "nvfp4-pack-quantized"},
            "1": {"targets": ["re:.*self_attn.*"], "weights": floats("channel"), "format": "float-quantized"},
        },
    }  # fmt: skip
    folder = write(tmp_path, stored, in_both)
    tensors = load_file(folder / "model.safetensors")
    weight_map = {
        name: f"{'a' if 'mlp' in name else 'b'}.safetensors"
        for name in sorted(tensors, key=lambda name: "mlp" not in name)
    }
    for shard in ("a.safetensors", "b.safetensors"):
        save_file({name: tensors[name] for name, own in weight_map.items() if own == shard}, folder / shard)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    checkpoint, config = opened(folder)
    assert kinds(config)["q_proj"] == "FP8_F32/64"
    assert kinds(config)["down_proj"] == "NVFP4_INV"
    with checkpoint:
        module = f"{LAYER}mlp.down_proj"
        found = torch.empty(64, 128)
        checkpoint.read_into(f"{module}.weight", found)
        scale = tensors[f"{module}.weight_global_scale"].item()
        parts = tensors[f"{module}.weight_packed"], tensors[f"{module}.weight_scale"].view(torch.uint8)
        assert same(found, meant("over", *parts, scale))


FAULTS: list[tuple[str, Callable[[Tensor], Tensor] | None, str]] = [
    ("weight_scale_2", None, "there is no {}.weight_scale_2; fetch it again"),
    ("weight_scale_2", lambda scale: scale.expand(2), "weight_scale_2 has shape [2]; by config.json it must be []"),
    ("weight_scale_2", torch.Tensor.half, "weight_scale_2 is stored as F16; by config.json it must be F32"),
    ("weight_scale", torch.Tensor.float, "weight_scale is stored as F32; by config.json it must be F8_E4M3"),
    ("weight_scale", lambda scale: scale[:, 1:], "weight_scale has shape [64, 7]; by config.json it must be [64, 8]"),
    ("weight", lambda codes: codes.view(torch.int8), "weight is stored as I8; by config.json it must be U8"),
    ("weight", lambda codes: codes[:, 1:], "weight has shape [64, 63]; by config.json it must be [64, 64]"),
]  # fmt: skip
DOWN = f"{LAYER}mlp.down_proj"


@pytest.mark.parametrize(("part", "fault", "said"), FAULTS, ids=[said for *_, said in FAULTS])
def test_a_faulty_tensor_is_named(
    part: str, fault: Callable[[Tensor], Tensor] | None, said: str, tmp_path: Path
) -> None:
    folder = write(tmp_path, MODELOPT | {"ignore": ["lm_head"]}, in_any)
    config, tensors = read_config(folder), load_file(folder / "model.safetensors")
    broken = tensors.pop(f"{DOWN}.{part}")
    if fault is not None:
        tensors[f"{DOWN}.{part}"] = fault(broken).contiguous()
    save_file(tensors, folder / "model.safetensors")
    with Checkpoint.open(folder) as checkpoint, pytest.raises(ModelError) as caught:
        check_model(checkpoint, config)
    assert said.format(DOWN) in str(caught.value)


def test_a_divisor_of_no_dimension_is_refused(tmp_path: Path) -> None:
    """compressed-tensors has steps in bf16 then, since torch takes a number's dtype for none: other numbers."""
    groups = {"0": {"targets": ["Linear"], "weights": four_or_eight(4, 16)}}
    stored = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "config_groups": groups}
    folder = write(
        tmp_path,
        stored | {"ignore": ["lm_head", "re:.*self_attn"]},
        lambda name, weight: in_both(name, weight) if "mlp" in name else {},
    )
    opened(folder)[0].close()
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{DOWN}.weight_global_scale"] = tensors[f"{DOWN}.weight_global_scale"].view(())
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"weight_global_scale has shape \[\]; by config.json it must be \[1\]"):
        opened(folder)


def test_factors_of_activations_are_refused_by_name(tmp_path: Path) -> None:
    def encode(name: str, weight: Tensor) -> Tensors:
        return in_nvfp4(weight) | {"pre_quant_scale": torch.ones(weight.shape[1])}

    with pytest.raises(ModelError, match=r"lm_head\.pre_quant_scale multiplies activations, .*TensorRT-LLM runs this"):
        opened(write(tmp_path, MODELOPT, encode))


@pytest.mark.parametrize("method", ["packed", "quark"])
def test_a_scale_of_mxfp4_that_is_no_number_is_refused(tmp_path: Path, method: str) -> None:
    """As of gpt-oss."""

    def encode(name: str, weight: Tensor) -> Tensors:
        outputs, inputs = weight.shape
        scales = torch.full((outputs, inputs // 32), 255 if DOWN in name else 120, dtype=torch.uint8)
        codes = torch.zeros(outputs, inputs // 2, dtype=torch.uint8)
        return {"weight_packed" if method == "packed" else "weight": codes, "weight_scale": scales}

    fp4 = {"dtype": "fp4", "group_size": 32, "scale_format": "e8m0"}
    groups = {"0": {"targets": ["Linear"], "weights": four_or_eight(4, 32)}}
    stored = {
        "packed": {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized", "config_groups": groups},
        "quark": {"quant_method": "quark", "global_quant_config": {}, "layer_quant_config": {"*[dj]": {"weight": fp4}}},
    }[method]  # fmt: skip
    checkpoint, config = opened(write(tmp_path, stored, encode))
    assert set(kinds(config).values()) == {"MXFP4"}
    with checkpoint:
        checkpoint.read_into(f"{LAYER}mlp.up_proj.weight", torch.empty(128, 64))
        with pytest.raises(ModelError, match=f"{DOWN}.weight_scale has a scale of 255, which is NaN"):
            checkpoint.read_into(f"{DOWN}.weight", torch.empty(64, 128))


# Parts of matrices.


def parts_are_those_of_the_whole(checkpoint: Checkpoint, name: str) -> None:
    kind, whole = ENCODINGS[checkpoint.encoding(name)], torch.empty(checkpoint.shape(name))
    checkpoint.read_into(name, whole)
    last = range(len(whole) - 9, len(whole), 2)
    for rows, columns in ((range(3, 40, 3), None), (last, None), (range(5), range(64, 128)), (range(7, 9), range(64))):
        wanted = whole[list(rows)][:, list(columns or range(whole.shape[1]))]
        place = torch.empty(len(rows), kind.row_bytes(wanted.shape[1]), dtype=torch.uint8)
        checkpoint.read_stored(name, place, rows=rows, columns=columns)
        assert same(StoredMatrix(place, kind).matrix(F32), wanted)
        numbers = torch.empty(wanted.shape)
        checkpoint.read_into(name, numbers, rows=rows, columns=columns)
        assert same(numbers, wanted)


def test_rows_and_columns_keep_the_scale_of_their_rows(tmp_path: Path) -> None:
    checkpoint, _ = opened(write(tmp_path, MODELOPT, in_any))
    with checkpoint:
        parts_are_those_of_the_whole(checkpoint, f"{DOWN}.weight")
        with pytest.raises(ModelError, match="blocks of 64 columns, which 32 to 96 would cut"):
            checkpoint.read_stored(f"{DOWN}.weight", torch.empty(64, 40, dtype=torch.uint8), columns=range(32, 96))


def test_an_experts_matrix_has_its_own_scale(tmp_path: Path) -> None:
    """Each of them ten times that of the one before."""
    fields = {"hidden_size": 128, "moe_intermediate_size": 64, "num_hidden_layers": 1}
    folder = by_expert(save_tiny("qwen3_moe", tmp_path, **fields))
    tensors, path = load_file(folder / "model.safetensors"), folder / "model.safetensors"
    for name, tensor in tensors.items():
        if ".experts." in name:
            tensor *= 10.0 ** (int(name.split(".experts.")[1][0]) - 4)
    save_file(tensors, path, metadata={"format": "pt"})
    store(folder, "NVFP4 and FP8")
    stored = load_file(path)
    checkpoint, config = opened(folder)
    assert config.block.encodings.experts == ("NVFP4",) * 3
    with checkpoint:
        scales = set()
        for name in [name for name in matrices(config) if ".experts." in name]:
            parts = (stored[name], stored[f"{name}_scale"].view(torch.uint8))
            scales.add(of_tensor := stored[f"{name}_scale_2"].item())
            found = torch.empty(checkpoint.shape(name))
            checkpoint.read_into(name, found)
            assert same(found, meant("times", *parts, of_tensor))
        assert max(scales) > 1e6 * min(scales)


# GGUF's type 40.


def gguf_file(root: Path, name: str = "qwen2", **fields: Any) -> tuple[Path, dict[str, np.ndarray]]:
    made = random_model(name, **{**SIZES, **fields}) if name == "qwen2" else None
    folder = save(made, root / "folder") if made is not None else save_tiny(name, root / "folder", **fields)
    return root / "model.gguf", write_gguf(folder, root / "model.gguf", kind="NVFP4")


@pytest.mark.parametrize("name", ["qwen2", "qwen3_moe"])
def test_a_files_numbers_are_the_librarys_times_its_scales(tmp_path: Path, name: str) -> None:
    """Those of experts are their own; of inputs there are some, too, which say nothing."""
    fields = {"hidden_size": 128, "moe_intermediate_size": 128, "head_dim": 64} if name == "qwen3_moe" else {}
    path, numbers = gguf_file(tmp_path, name, **fields)
    checkpoint, config = opened(path)
    assert config.stored_in == ("NVFP4",)
    with checkpoint:
        for stored, wanted in numbers.items():
            found = torch.empty(checkpoint.shape(stored))
            checkpoint.read_into(stored, found)
            assert same(found, torch.from_numpy(wanted).view(found.shape)), stored
            if checkpoint.encoding(stored) and wanted.shape[-1] == 128:
                parts_are_those_of_the_whole(checkpoint, stored)


def test_factors_of_experts_that_have_a_scales_name_are_the_routers(tmp_path: Path) -> None:
    """Gemma 4's, with the last matrix of each expert in NVFP4."""
    path, numbers = gguf_file(tmp_path, "gemma4, sparse", **FILES["gemma4, sparse"])
    checkpoint, _ = opened(path)
    with checkpoint:
        found = torch.empty(checkpoint.shape(f"{LAYER}mlp.experts.down_proj.weight"))
        checkpoint.read_into(f"{LAYER}mlp.experts.down_proj.weight", found)
        assert same(found, torch.from_numpy(numbers[f"{LAYER}experts.down_proj.weight"]).view(found.shape))
        factors = torch.empty(checkpoint.shape(f"{LAYER}router.per_expert_scale"))
        checkpoint.read_into(f"{LAYER}router.per_expert_scale", factors)
        assert same(factors, torch.from_numpy(numbers[f"{LAYER}router.per_expert_scale"]))


def rewritten(path: Path, change: Callable[[str, np.ndarray], np.ndarray | None]) -> Path:
    """The file with other tensors; those that are None are left out."""
    source, made = gguf.GGUFReader(path), path.with_name("changed.gguf")
    writer = gguf.GGUFWriter(made, "qwen2")
    for key, each in source.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            item = each.types[1] if len(each.types) > 1 else None
            writer.add_key_value(key, each.contents(), each.types[0], item)
    for tensor in source.tensors:
        data = change(tensor.name, tensor.data.copy())
        if data is not None:
            writer.add_tensor(tensor.name, data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return made


def test_any_bytes_are_read_as_ggml_reads_them(tmp_path: Path) -> None:
    """No sign of a scale, 127 as 0, and 1 for a scale that is not there."""
    blocks, name = np.random.default_rng(3).integers(0, 256, (128, 36), np.uint8), "blk.0.ffn_gate.weight"
    blocks[:, :4] = np.arange(512).reshape(128, 4) % 255  # all but one, in both signs

    def change(stored: str, data: np.ndarray) -> np.ndarray | None:
        return None if stored == "blk.0.ffn_gate.scale" else blocks.reshape(data.shape) if stored == name else data

    checkpoint, _ = opened(rewritten(gguf_file(tmp_path)[0], change))
    found = torch.empty(128, 64)
    with checkpoint:
        checkpoint.read_into(f"{LAYER}mlp.gate_proj.weight", found)
    unsigned = blocks.copy()
    unsigned[:, :4] &= 127
    assert same(found, torch.from_numpy(gguf.quants.dequantize(unsigned, gguf.GGMLQuantizationType.NVFP4)))
    assert same(found, torch.from_numpy(nvfp4_numbers(unsigned, np.ones(1, np.float32))))


def test_a_scale_that_no_e4m3_is_is_refused(tmp_path: Path) -> None:
    """Of 255, which no quantiser writes, ggml reads 480."""

    def change(stored: str, data: np.ndarray) -> np.ndarray:
        if stored == "blk.0.ffn_gate.weight":
            data[5, 36 * 0 + 2] = 255
        return data

    checkpoint, _ = opened(rewritten(gguf_file(tmp_path)[0], change))
    with checkpoint, pytest.raises(ModelError, match=r"ffn_gate\.weight has a scale of 255; download it again"):
        checkpoint.read_into(f"{LAYER}mlp.gate_proj.weight", torch.empty(128, 64))


def test_a_scale_of_another_shape_is_named(tmp_path: Path) -> None:
    path = rewritten(
        gguf_file(tmp_path)[0],
        lambda stored, data: np.ones(2, np.float32) if stored == "blk.1.attn_q.scale" else data,
    )
    with pytest.raises(ModelError, match=r"blk\.1\.attn_q\.scale is \[2\] in F32; it must be \[1\] in F32$"):
        Checkpoint.open(path)


def test_a_scale_beside_another_kind_is_not_known(tmp_path: Path) -> None:
    folder = save(random_model("qwen2", **SIZES), tmp_path / "folder")
    scale = np.ones(1, np.float32)
    write_gguf(
        folder, tmp_path / "a.gguf", kind="Q8_0", change=lambda writer: writer.add_tensor("blk.0.ffn_up.scale", scale)
    )
    with pytest.raises(ModelError, match=r"1 unexpected \(model\.layers\.0\.mlp\.up_proj\.scale\)"):
        opened(tmp_path / "a.gguf")
