"""Tiny quantised checkpoints: folders and GGUF files in several forms, and plain checkpoints of the same numbers. No
tests in here."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kit.gguf_models import write_gguf
from offload.config.reading import read_config
from offload.text import gguf_tokenizer
from offload.weights.checkpoint import Checkpoint, check_model
from offload.weights.tensors import expected_tensors

GROUP = 32


def in_fp8(name: str, weight: Tensor) -> dict[str, Tensor]:
    """By blocks of GROUP x GROUP, but for the values'."""
    if "v_proj" in name:
        return {}
    outputs, inputs = weight.shape
    blocks = weight.float().view(outputs // GROUP, GROUP, inputs // GROUP, GROUP)
    scale = blocks.abs().amax((1, 3)) / 448
    numbers = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn).view(outputs, inputs)
    return {"weight": numbers, "weight_scale_inv": scale}


def in_int4(name: str, weight: Tensor) -> dict[str, Tensor]:
    """compressed-tensors' packed integers, symmetric, in groups of GROUP inputs."""
    outputs, inputs = weight.shape
    groups = weight.float().view(outputs, inputs // GROUP, GROUP)
    scale = (groups.abs().amax(2) / 7).bfloat16()
    codes = (groups / scale.float()[..., None]).round().clamp(-8, 7).to(torch.int32).view(outputs, -1, 8) + 8
    words = (codes.long() << 4 * torch.arange(8)).sum(2)
    packed = torch.where(words >= 1 << 31, words - (1 << 32), words).int()
    return {"weight_packed": packed, "weight_scale": scale, "weight_shape": torch.tensor([outputs, inputs])}


def in_nvfp4(weight: Tensor) -> dict[str, Tensor]:
    """As ModelOpt has it: a scale for 16 inputs, one for the tensor."""
    outputs, inputs = weight.shape
    groups = weight.float().view(outputs, inputs // 16, 16)
    of_tensor = groups.abs().amax() / (6 * 448)
    scale = (groups.abs().amax(2) / (6 * of_tensor)).to(torch.float8_e4m3fn)
    numbers = (groups / (scale.float() * of_tensor)[..., None]).nan_to_num().view(outputs, inputs)
    codes = (torch.bucketize(numbers.abs(), E2M1_BOUNDS) + 8 * (numbers < 0)).to(torch.uint8)
    return {"weight": codes[:, ::2] | codes[:, 1::2] << 4, "weight_scale": scale, "weight_scale_2": of_tensor}


def in_several(name: str, weight: Tensor) -> dict[str, Tensor]:
    """ModelOpt's mixtures: queries, keys and values in FP8 with one scale, the rest, experts and the head in NVFP4."""
    if not any(f"{letter}_proj" in name for letter in "qkv"):
        return in_nvfp4(weight)
    scale = weight.float().abs().amax() / 448
    return {"weight": (weight.float() / scale).to(torch.float8_e4m3fn), "weight_scale": scale}


def in_nvfp4_inverse(name: str, weight: Tensor) -> dict[str, Tensor]:
    """As compressed-tensors has it: the tensor's scale divides."""
    parts = in_nvfp4(weight)
    return {
        "weight_packed": parts["weight"], "weight_scale": parts["weight_scale"],
        "weight_global_scale": 1 / parts["weight_scale_2"].view(1),
    }  # fmt: skip


E2M1_BOUNDS = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
WHOLE = ("NVFP4 and FP8",)  # forms that have the head as well
Form = tuple[Callable[[str, Tensor], dict[str, Tensor]], dict[str, Any]]
WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
FLOATS = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}
FORMS: dict[str, Form] = {
    "fp8": (
        in_fp8,
        {"quant_method": "fp8", "weight_block_size": [GROUP, GROUP], "modules_to_not_convert": ["lm_head", "v_proj"]},
    ),
    "int4": (
        in_int4,
        {
            "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS}},
        },
    ),
    "NVFP4 and FP8": (
        in_several,
        {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {}},
    ),
    "NVFP4, packed": (
        in_nvfp4_inverse,
        {
            "quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "ignore": ["lm_head"],
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": FLOATS}},
        },
    ),
}  # fmt: skip


MIXED = {"v_proj": "Q6_K", "down_proj": "Q6_K", "gate_proj": "Q5_K", "embed_tokens": "Q8_0", "lm_head": "Q6_K"}
IN_FOUR_BITS = {"down_proj": "IQ4_NL", "gate_proj": "NVFP4", "o_proj": "NVFP4", "layers": "MXFP4"}
DYNAMIC = {  # fourteen kinds in a file, as those named UD-Q2_K_XL have them
    "0.self_attn.q": "Q2_K", "0.self_attn.k": "Q4_K", "0.self_attn.v": "Q3_K", "0.self_attn.o": "IQ3_S",
    "0.mlp.gate": "Q5_K", "0.mlp.up": "IQ2_XS", "0.mlp.down": "IQ3_XXS", "1.self_attn.q": "IQ1_S",
    "1.self_attn.k": "IQ1_M", "1.self_attn.v": "Q6_K", "1.self_attn.o": "IQ2_S", "1.mlp.gate": "IQ2_XXS",
    "head": "Q8_0", "0.mlp.experts.gate": "IQ2_XXS", "0.mlp.experts.up": "Q2_K", "0.mlp.experts.down": "IQ3_S",
}  # fmt: skip
GGUF: dict[str, Callable[[str], str]] = {  # the type of a matrix
    "Q8_0": lambda name: "Q8_0",
    "Q4_K and others": lambda name: next((kind for part, kind in MIXED.items() if part in name), "Q4_K"),
    "fourteen kinds": lambda name: next((kind for part, kind in DYNAMIC.items() if part in name), "IQ4_XS"),
    "MXFP4, NVFP4 and others": lambda name: next((kind for part, kind in IN_FOUR_BITS.items() if part in name), "Q8_0"),
}
ALL = (*FORMS, *GGUF)


def store(folder: Path, form: str) -> Path:
    """Quantise the matrices of its layers, in forms of WHOLE the head too, or write all as a GGUF file. -> The
    model."""
    if form in GGUF:
        write_gguf(folder, file := folder.with_suffix(".gguf"), kind=GGUF[form])
        return file
    encode, stored = FORMS[form]
    tensors, algorithms = dict[str, Tensor](), dict[str, dict[str, str]]()
    for name, tensor in load_file(folder / "model.safetensors").items():
        left = (
            any(part in name for part in ("norm", "mlp.gate.", "mixer.gate.", "moe.gate.", "conv1d", "expert_gate"))
            or tensor.dim() != 2
        )
        left = left or ("layers" not in name and not (form in WHOLE and "lm_head" in name))
        module, parts = name.removesuffix("weight"), {} if left else encode(name, tensor)
        tensors |= {module + part: each for part, each in parts.items()} or {name: tensor}
        if parts:
            listed = module.partition(".experts.")[0] + ".experts" if ".experts." in module else module[:-1]
            algorithms[listed.replace("model.", "model.language_model.")] = {
                "quant_algo": "NVFP4" if "weight_scale_2" in parts else "FP8"
            }
    if "quantized_layers" in stored:
        stored = stored | {"quantized_layers": algorithms}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": stored, "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def twin(folder: Path, root: Path, dtype: torch.dtype) -> Path:
    """A plain checkpoint of the numbers that `folder` means, rounded to `dtype`."""
    root.mkdir(parents=True)
    config, tensors = read_config(folder), dict[str, Tensor]()
    with Checkpoint.open(folder) as checkpoint:
        check_model(checkpoint, config)
        for name, shape in expected_tensors(config).items():
            tensors[name] = torch.empty(shape, dtype=dtype)
            checkpoint.read_into(name, tensors[name])
    save_file(tensors, root / "model.safetensors", metadata={"format": "pt"})
    source = folder.with_suffix("") if folder.is_file() else folder
    for file in source.iterdir():
        if file.name not in ("model.safetensors", "config.json"):
            (root / file.name).write_bytes(file.read_bytes())
    if folder.is_file():
        gguf_tokenizer.write(folder, root)
    config_json = json.loads((source / "config.json").read_text())
    config_json.pop("quantization_config", None)
    (root / "config.json").write_text(json.dumps(config_json))
    return root


def by_expert(folder: Path) -> Path:
    """With a tensor for each expert's matrix, as the family's folders have them."""
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if ".experts." in name and not name.split(".experts.")[1][0].isdigit()]:
        before, after = name.split(".experts.")
        for number, part in enumerate(tensors.pop(name).chunk(8)):
            tensors[f"{before}.experts.{number}.{after}"] = part.clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
