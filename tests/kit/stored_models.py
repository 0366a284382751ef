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


def in_fp8(weight: Tensor) -> dict[str, Tensor]:
    """By blocks of GROUP x GROUP."""
    outputs, inputs = weight.shape
    blocks = weight.float().view(outputs // GROUP, GROUP, inputs // GROUP, GROUP)
    scale = blocks.abs().amax((1, 3)) / 448
    numbers = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn).view(outputs, inputs)
    return {"weight": numbers, "weight_scale_inv": scale}


def in_int4(weight: Tensor) -> dict[str, Tensor]:
    """compressed-tensors' packed integers, symmetric, in groups of GROUP inputs."""
    outputs, inputs = weight.shape
    groups = weight.float().view(outputs, inputs // GROUP, GROUP)
    scale = (groups.abs().amax(2) / 7).bfloat16()
    codes = (groups / scale.float()[..., None]).round().clamp(-8, 7).to(torch.int32).view(outputs, -1, 8) + 8
    words = (codes.long() << 4 * torch.arange(8)).sum(2)
    packed = torch.where(words >= 1 << 31, words - (1 << 32), words).int()
    return {"weight_packed": packed, "weight_scale": scale, "weight_shape": torch.tensor([outputs, inputs])}


Form = tuple[Callable[[Tensor], dict[str, Tensor]], dict[str, Any]]
WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
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
}  # fmt: skip


MIXED = {"v_proj": "Q6_K", "down_proj": "Q6_K", "gate_proj": "Q5_K", "embed_tokens": "Q8_0", "lm_head": "Q6_K"}
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
    "MXFP4 and others": lambda name: "IQ4_NL" if "down_proj" in name else "MXFP4" if "layers" in name else "Q8_0",
}
ALL = (*FORMS, *GGUF)


def store(folder: Path, form: str) -> Path:
    """Quantise the matrices of its layers, fp8: but for the values', or write all as a GGUF file. -> The model."""
    if form in GGUF:
        write_gguf(folder, file := folder.with_suffix(".gguf"), kind=GGUF[form])
        return file
    encode, stored = FORMS[form]
    tensors = dict[str, Tensor]()
    for name, tensor in load_file(folder / "model.safetensors").items():
        left = any(part in name for part in ("norm", "mlp.gate.", *(["v_proj"] if form == "fp8" else [])))
        left = left or "layers" not in name or tensor.dim() < 2
        module = name.removesuffix("weight")
        tensors |= {name: tensor} if left else {module + part: each for part, each in encode(tensor).items()}
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
