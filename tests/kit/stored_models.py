"""Tiny quantised checkpoints: folders and GGUF files in several forms, and plain checkpoints of the same numbers. No
tests in here."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import pad

from kit.gguf_models import write_gguf
from offload.config.next_token import head_of
from offload.config.reading import read_config
from offload.text import gguf_tokenizer
from offload.weights.checkpoint import Checkpoint, check_head, check_model
from offload.weights.tensors import expected_tensors

GROUP = 32
E4M3 = torch.float8_e4m3fn


def in_blocks(weight: Tensor, size: int) -> dict[str, Tensor]:
    """In e4m3, with a scale for each block of size x size, the last ones shorter."""
    rows, columns = (-(-each // size) for each in weight.shape)
    padded = pad(weight.float(), (0, size * columns - weight.shape[1], 0, size * rows - weight.shape[0]))
    scale = padded.view(rows, size, columns, size).abs().amax((1, 3)) / 448
    return {"weight": (weight / spread(scale, size, weight)).to(E4M3), "weight_scale_inv": scale}


def spread(scale: Tensor, size: int, weight: Tensor) -> Tensor:
    """The scale of each number of a matrix in such blocks."""
    return scale.repeat_interleave(size, 0).repeat_interleave(size, 1)[: weight.shape[0], : weight.shape[1]]


def in_fp8(name: str, weight: Tensor) -> dict[str, Tensor]:
    """By blocks of GROUP x GROUP, but for the values'."""
    return {} if "v_proj" in name else in_blocks(weight, GROUP)


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
    scale = (groups.abs().amax(2) / (6 * of_tensor)).to(E4M3)
    numbers = (groups / (scale.float() * of_tensor)[..., None]).nan_to_num().view(outputs, inputs)
    codes = (torch.bucketize(numbers.abs(), E2M1_BOUNDS) + 8 * (numbers < 0)).to(torch.uint8)
    return {"weight": codes[:, ::2] | codes[:, 1::2] << 4, "weight_scale": scale, "weight_scale_2": of_tensor}


def in_several(name: str, weight: Tensor) -> dict[str, Tensor]:
    """ModelOpt's mixtures: queries, keys and values in FP8 with one scale, the rest, experts and the head in NVFP4."""
    if not any(f"{letter}_proj" in name for letter in "qkv"):
        return in_nvfp4(weight)
    scale = weight.float().abs().amax() / 448
    return {"weight": (weight.float() / scale).to(E4M3), "weight_scale": scale}


def in_nvfp4_inverse(name: str, weight: Tensor) -> dict[str, Tensor]:
    """As compressed-tensors has it: the tensor's scale divides."""
    parts = in_nvfp4(weight)
    return {
        "weight_packed": parts["weight"], "weight_scale": parts["weight_scale"],
        "weight_global_scale": 1 / parts["weight_scale_2"].view(1),
    }  # fmt: skip


TABLE_SCALE = torch.tensor([0.0125]).bfloat16()  # of a whole table of n-grams


def _of_table(weight: Tensor) -> dict[str, Tensor]:
    """A part of a table in e4m3, whose scale all parts share."""
    return {"weight": (weight / TABLE_SCALE.float()).clamp(-448, 448).to(E4M3)}


def as_alibaba(name: str, weight: Tensor) -> dict[str, Tensor]:
    """Experts, a next-token head's too, in FP8 by blocks of 128 x 128 with scales in bf16; a table of n-grams in FP8;
    all else plain."""
    if ".shard_" in name:
        return _of_table(weight)
    parts = in_blocks(weight, 128) if ".experts." in name else {}
    return {part: each.bfloat16() if "scale" in part else each for part, each in parts.items()}


def as_radixark(name: str, weight: Tensor) -> dict[str, Tensor]:
    """Experts in NVFP4, but a next-token head's; a table of n-grams in FP8; all else plain."""
    if ".shard_" in name:
        return _of_table(weight)
    plain = ".experts." not in name or name.startswith("mtp.")
    return {} if plain else in_nvfp4(weight) | {"input_scale": torch.tensor(0.25)}


def as_nvidia(name: str, weight: Tensor) -> dict[str, Tensor]:
    """The same with a next-token head's experts in FP8."""
    return as_alibaba(name, weight) if name.startswith("mtp.") else as_radixark(name, weight)


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


RELEASED: dict[str, Form] = {  # as Qwen3.8-Flash-Next is published
    "FP8": (
        as_alibaba,
        {
            "quant_method": "fp8", "activation_scheme": "dynamic", "weight_per_tensor": False, "act_per_tensor": False,
            "weight_block_size": [128, 128], "modules_to_not_convert": [],
            "modules_to_convert": ["ple.ple_embedding.ngram_embedding"],
        },
    ),
    "NVFP4 by a list": (
        as_radixark,
        {
            "quant_method": "modelopt", "quant_algo": "NVFP4",
            "ignore": [
                "lm_head", "model.embed_tokens", "model.language_model.embed_tokens", "mtp.*", "model.mtp.*",
                "*.self_attn.*", "*.linear_attn.*", "*.mlp.gate*", "*.mlp.shared_expert.*",
                "*.mlp.shared_expert_gate*", "*hyper_connection*", "*.ple.*", "model.visual.*",
            ],
        },
    ),
    "NVFP4 by a map": (
        as_nvidia,
        {
            "quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {},
            "ignore": ["lm_head", "model.language_model.embed_tokens", "model.visual*"],
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
    """Quantise the matrices of its layers, in forms of WHOLE the head too, or write all as a GGUF file. Models that are
    RELEASED so are in a wrapper. -> The model."""
    if form in GGUF:
        write_gguf(folder, file := folder.with_suffix(".gguf"), kind=GGUF[form])
        return file
    encode, stored = (FORMS | RELEASED)[form]
    tensors, algorithms, plain = dict[str, Tensor](), dict[str, dict[str, str]](), list[str]()
    for name, tensor in load_file(folder / "model.safetensors").items():
        left = (
            any(part in name for part in ("norm", "mlp.gate.", "mixer.gate.", "moe.gate.", "conv1d", "expert_gate"))
            or tensor.dim() != 2
        )
        left = left or ("layers" not in name and not (form in WHOLE and "lm_head" in name))
        module, parts = name.removesuffix("weight"), {} if left else encode(name, tensor)
        tensors |= {module + part: each for part, each in parts.items()} or {name: tensor}
        whole, is_part, _ = module.partition("shard_")
        listed = module.partition(".experts.")[0] + ".experts" if ".experts." in module else whole[:-1]
        listed = listed.replace("model.", "model.language_model.")
        if parts and is_part:
            tensors[f"{whole}weight_scale"] = TABLE_SCALE
        if parts:
            kind = "NVFP4" if "weight_scale_2" in parts else "FP8_PB_WO" if "weight_scale_inv" in parts else "FP8"
            algorithms[listed] = {"quant_algo": kind}
        elif tensor.dim() > 1:
            plain.append(listed)
    if "quantized_layers" in stored:
        stored = stored | {"quantized_layers": algorithms}
    if stored.get("modules_to_not_convert") == []:
        stored = stored | {"modules_to_not_convert": plain}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": stored, "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    return _wrapped(folder) if form in RELEASED else folder


def _wrapped(folder: Path) -> Path:
    """The folder as one of a model that sees pictures, whose quantization_config is the wrapper's."""
    tensors, text = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    renamed = {re.sub("^model\\.", "model.language_model.", name): tensor for name, tensor in tensors.items()}
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
    outer = {"quantization_config": text.pop("quantization_config"), "text_config": text, "dtype": text["dtype"]}
    outer |= {"model_type": text["model_type"].removesuffix("_text"), "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(outer | {"architectures": ["AnyForConditionalGeneration"]}))
    return folder


def twin(folder: Path, root: Path, dtype: torch.dtype) -> Path:
    """A plain checkpoint of the numbers that `folder` means, a next-token head's too, rounded to `dtype`."""
    root.mkdir(parents=True)
    config, tensors = read_config(folder), dict[str, Tensor]()
    with Checkpoint.open(folder) as checkpoint:
        check_model(checkpoint, config)
        expected = expected_tensors(config)
        if (head := head_of(config)) is not None:
            check_head(checkpoint, head)
            expected |= expected_tensors(head)
        for name, shape in expected.items():
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
