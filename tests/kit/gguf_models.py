"""Model folders as GGUF files, by the rules of llama.cpp's converter (its conversion/*.py). No tests in here.

Names of tensors and keys are those of the package gguf.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from gguf.quants import quantize
from safetensors.torch import load_file
from tokenizers import pre_tokenizers
from torch import Tensor
from transformers import AutoConfig

from kit import gguf_flash
from kit.stored import made_up, places
from offload.formats.encodings import ENCODINGS

ARCHITECTURES = {  # Hugging Face's model_type -> llama.cpp's architecture
    "llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "granite": "granite",
    "smollm3": "smollm3", "arcee": "arcee", "phi3": "phi3", "gemma": "gemma", "gemma2": "gemma2",
    "gemma3_text": "gemma3", "olmo2": "olmo2", "olmo3": "olmo2", "cohere": "command-r", "cohere2": "cohere2",
    "glm4": "glm4", "seed_oss": "seed_oss", "ernie4_5": "ernie4_5", "hunyuan_v1_dense": "hunyuan-dense",
    "exaone4": "exaone4", "starcoder2": "starcoder2", "nemotron": "nemotron", "ministral3": "mistral3",
    "qwen3_5_text": "qwen35", "qwen3_moe": "qwen3moe", "qwen3_5_moe_text": "qwen35moe", "gpt_oss": "gpt-oss",
    "glm4_moe": "glm4moe", "gemma4_text": "gemma4", "gemma4_unified_text": "gemma4", "qwen3_next": "qwen3next",
    "qwen2_vl_text": "qwen2vl", "qwen2_5_vl_text": "qwen2vl", "qwen3_vl_text": "qwen3vl",
    "qwen3_vl_moe_text": "qwen3vlmoe", "qwen3_omni_moe_text": "qwen3vlmoe", "glm4v_text": "glm4",
    "glm4v_moe_text": "glm4moe",
    "minimax_m2": "minimax-m2", "ernie4_5_moe": "ernie4_5-moe", "hunyuan_v1_moe": "hunyuan-moe",
    "exaone_moe": "exaone-moe", "olmoe": "olmoe", "qwen2_moe": "qwen2moe", "solar_open": "glm4moe",
    "lfm2": "lfm2", "lfm2_moe": "lfm2moe", "nemotron_h": "nemotron_h_moe", "granitemoehybrid": "granitehybrid",
    "glm4_moe_lite": "deepseek2", "deepseek_v2": "deepseek2", "deepseek_v3": "deepseek2", "mistral4": "mistral4",
    "afmoe": "afmoe", "laguna": "laguna", "cohere2_moe": "cohere2moe",
    "falcon_h1": "falcon-h1", "kimi_linear": "kimi-linear", "bailing_hybrid": "bailingmoe3",
    gguf_flash.FAMILY: gguf_flash.ARCH,
}  # fmt: skip
LIKE = {  # whose names the package has
    "laguna": "exaone-moe", "cohere2moe": "exaone-moe", "bailingmoe3": "kimi-linear", gguf_flash.ARCH: "qwen35moe",
}  # fmt: skip
PERMUTED = ("llama", "granite", "granitehybrid", "smollm3", "arcee", "mistral3")
CONVOLVED = ("lfm2", "lfm2moe")
NEMOTRON_H = ("nemotron_h", "nemotron_h_moe")
MAMBA = ("nemotron_h", "granitemoehybrid", "falcon_h1")
STATEFUL = ("qwen35", "qwen35moe", "qwen3next", gguf_flash.ARCH)
BY_CHANNEL = ("kimi-linear", "bailingmoe3")  # each channel of a state decays by itself
LATENT = ("deepseek2", "mistral4", *BY_CHANNEL)
PLUS_ONE = ("gemma", "gemma2", "gemma3", "nemotron", *STATEFUL)
OF_HEAD = {  # parts of a next-token head beside its layer
    "fc": "eh_proj", "norm": "shared_head_norm", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm",
}  # fmt: skip
OF_LING = {
    "eh_proj": "nextn.eh_proj", "enorm": "nextn.enorm", "hnorm": "nextn.hnorm", "final_layernorm": "layer_output_norm",
}  # fmt: skip
WHOLE_NAMES = {  # in a layer; the package has none for them
    "router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale",
    "layer_scalar": "layer_output_scale.weight", "self_attn.g_proj.weight": "attn_gate.weight",
    "mlp.experts.e_score_correction.bias": "exp_probs_b.bias", "mlp.expert_bias": "exp_probs_b.bias",
}  # fmt: skip
UNLISTED = {"lm_head.weight": "output.weight"}  # of LFM2's mixtures, which llama.cpp reads nevertheless
LAYER_NORM = {
    "cohere": "layer_norm_eps",
    "cohere2": "layer_norm_eps",
    "starcoder2": "norm_epsilon",
    "nemotron": "norm_eps",
    "nemotron_h": "layer_norm_epsilon",
    "cohere2_moe": "layer_norm_eps",
}
BESIDE_TEXT = re.compile(r"visual\.|vision_tower\.|audio_tower\.")
NUMBERS_SIZE = 0.05  # of random blocks, as a root of their mean square
NUMBERS = {"F32": np.float32, "F16": np.float16}


def write_gguf(
    folder: Path,
    path: Path,
    *,
    kind: str | Callable[[str], str] = "F32",
    tokenizer: str = "gpt2",
    change: Callable[[gguf.GGUFWriter], None] | None = None,
    without: str = "nothing",
    split: int = 0,
    numbers: Mapping[str, np.ndarray] | None = None,
    arch: str = "",
    fused: bool | None = None,
    joins_states: bool = False,
    joins_latent: bool = False,
) -> dict[str, np.ndarray]:
    """The model in `folder` as `path`. kind: of its matrices, of those of one name if it is a function; vectors are
    F32. tokenizer: "gpt2", "llama" or "" for none. split: tensors of a file. numbers: of tensors as the file has them.
    arch: another architecture's name. fused: whether experts' gates and ups are in one tensor; None: Gemma 4's are.
    joins_states: whether Qwen3-Next's queries, keys, values and gates are in one tensor, as in old files. joins_latent:
    whether heads' keys and values of latent attention are, likewise. Returns the numbers of the tensors, in fp32, by
    Hugging Face's names."""
    config = text_config(json.loads((folder / "config.json").read_text()))
    named, arch = arch or architecture_of(config), architecture_of(config)
    writer = gguf.GGUFWriter(path, named, split_max_tensors=split)
    _metadata(writer, config, arch, joins_latent=joins_latent)
    if tokenizer:
        _tokenizer(writer, tokenizer, config["vocab_size"])
    tensors = {
        text_name(name): tensor if tensor.dtype == torch.int64 else tensor.float()
        for file in folder.glob("*.safetensors")
        for name, tensor in load_file(file).items()
        if not BESIDE_TEXT.search(name)
    }
    if arch == gguf_flash.ARCH:
        gguf_flash.add_hashes(writer, tensors, config)
    if change:
        change(writer)
    number = next(n for n, name in gguf.MODEL_ARCH_NAMES.items() if name == LIKE.get(arch, arch))
    names, stored = gguf.get_tensor_name_map(number, num_blocks(config)), {}
    if arch == "bailingmoe3":
        tensors = as_kimis(tensors, config)
    stacks = stacked(tensors, config["model_type"])
    if config["model_type"] == "granitemoehybrid":
        stacks = of_granite(stacks, config)
    if arch == "qwen3next" and not joins_states:
        stacks = ungrouped(stacks, config)
    if arch == gguf_flash.ARCH:
        stacks = gguf_flash.rearranged(stacks, config)
    if fused or (fused is None and arch in ("gemma4", "mistral4")):
        stacks = joined(stacks)
    if arch in LATENT and not joins_latent:
        stacks = by_head(stacks, config)
    for name, tensor in sorted(stacks.items()):
        if without in name or (name == "lm_head.weight" and config.get("tie_word_embeddings")):
            continue
        renamed = (
            of_head(name, config)
            or gguf_flash.name_of(block_name(name, config))
            or in_layer(block_name(name, config))
            or names.get_name(block_name(name, config), (".weight", ".bias"))
            or UNLISTED.get(name, "")
        )
        assert renamed, name
        changed = converted(name, tensor, config, arch) if numbers is None else torch.from_numpy(numbers[name])
        stored[name] = _add(writer, renamed, changed, kind if isinstance(kind, str) else kind(name))
    for name, factors in rope_tensors(config, arch).items():
        writer.add_tensor(name, factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


def architecture_of(config: dict[str, Any]) -> str:
    """llama.cpp's architecture of a model; of some families it depends on what layers have."""
    family, types = config["model_type"], layer_types(config)
    if family == "nemotron_h" and "moe" not in types:
        return "nemotron_h"
    return "granite" if family == "granitemoehybrid" and "linear_attention" not in types else ARCHITECTURES[family]


def layer_types(config: dict[str, Any]) -> list[str]:
    found: list[str] = config.get("layers_block_type") or config.get("layer_types") or []
    return found


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The config of the text of a model that sees pictures, with transformers' defaults; of another one its own."""
    holder = config.get("thinker_config", config)
    if "vision_config" not in holder:
        return config
    text = holder.get("text_config") or {**holder, "model_type": f"{holder['model_type']}_text"}
    found: dict[str, Any] = AutoConfig.for_model(**text).to_dict()
    return found


def text_name(name: str) -> str:
    """The name of a tensor in a model of the text alone."""
    return name.removeprefix("thinker.").replace("language_model.", "")


def stacked(tensors: dict[str, Tensor], family: str) -> dict[str, Tensor]:
    """With one tensor for each matrix of a layer's experts, and each of their biases."""
    found: dict[str, Tensor] = {}
    parts: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors.items():
        before, _, rest = name.partition(".experts.")
        number, _, part = rest.partition(".")
        if not rest or rest.endswith("correction_bias"):
            found[name] = tensor
        elif number.isdecimal():
            parts.setdefault(f"{before}.experts.{part}", {})[int(number)] = tensor
        elif family == "gpt_oss":
            found |= of_gpt_oss(f"{before}.experts.", rest, tensor)
        elif family == "qwen3_vl_moe_text":
            found |= of_gemma4(f"{before}.experts.", rest, tensor.transpose(1, 2))
        else:
            found |= of_gemma4(f"{before}.experts.", rest, tensor)
    return found | {name: torch.stack([own[at] for at in range(len(own))]) for name, own in parts.items()}


def of_gpt_oss(prefix: str, part: str, tensor: Tensor) -> dict[str, Tensor]:
    """The tensors made of one of all experts: by outputs, and gates and ups apart."""
    kind = "bias" if part.endswith("_bias") else "weight"
    rows = tensor if kind == "bias" else tensor.transpose(1, 2)
    if part.startswith("down_proj"):
        return {f"{prefix}down_proj.{kind}": rows}
    return {f"{prefix}gate_proj.{kind}": rows[:, ::2], f"{prefix}up_proj.{kind}": rows[:, 1::2]}


def of_gemma4(prefix: str, part: str, tensor: Tensor) -> dict[str, Tensor]:
    """The tensors made of one of all experts: gates and ups apart."""
    if part == "down_proj":
        return {f"{prefix}down_proj.weight": tensor}
    gate, up = tensor.chunk(2, 1)
    return {f"{prefix}gate_proj.weight": gate, f"{prefix}up_proj.weight": up}


def of_granite(tensors: dict[str, Tensor], config: dict[str, Any]) -> dict[str, Tensor]:
    """With gates and ups apart, under names that the package knows."""
    network = "mlp.shared_expert." if config["num_local_experts"] else "mlp."
    of = {"block_sparse_moe.input_linear": "mlp.experts.", "shared_mlp.input_linear": network}
    of |= {"block_sparse_moe.output_linear": "mlp.experts.", "shared_mlp.output_linear": network}
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        part = next((part for part in of if part in name), None)
        if part is None:
            found[name] = tensor
            continue
        parts = ("gate_proj", "up_proj") if "input" in part else ("down_proj",)
        pieces = tensor.chunk(len(parts), -2)
        found |= {name.replace(part, of[part] + own): each for own, each in zip(parts, pieces, strict=True)}
    return found


def ungrouped(tensors: dict[str, Tensor], config: dict[str, Any]) -> dict[str, Tensor]:
    """With queries, keys and values of all key heads in one tensor, one after the other, and gates in another."""
    keys = config["linear_num_key_heads"]
    values = config["linear_num_value_heads"] // keys * config["linear_value_head_dim"]
    sizes, found = (config["linear_key_head_dim"], config["linear_key_head_dim"], values, values), dict[str, Tensor]()
    for name, tensor in tensors.items():
        if not name.endswith("in_proj_qkvz.weight"):
            found[name] = tensor
            continue
        *first, gates = (part.flatten(0, 1) for part in tensor.unflatten(0, (keys, -1)).split(sizes, 1))
        found |= {name.replace("qkvz", "qkv"): torch.cat(first), name.replace("qkvz", "z"): gates}
    return found


def by_head(tensors: dict[str, Tensor], config: dict[str, Any]) -> dict[str, Tensor]:
    """With keys, transposed, and values of latent attention in two tensors, [heads, outputs, inputs]."""
    plain, found = config["qk_nope_head_dim"], dict[str, Tensor]()
    for name, tensor in tensors.items():
        if not name.endswith("kv_b_proj.weight"):
            found[name] = tensor
            continue
        keys, values = tensor.unflatten(0, (config["num_attention_heads"], -1)).split([plain, config["v_head_dim"]], 1)
        found |= {name.replace("kv_b", "k_b"): keys.transpose(1, 2), name.replace("kv_b", "v_b"): values}
    return found


def joined(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """With one tensor for gates and ups of all experts, each gate before its up."""
    gate, up, both = (f".experts.{part}_proj." for part in ("gate", "up", "gate_up"))
    found = {name: tensor for name, tensor in tensors.items() if gate not in name and up not in name}
    return found | {
        name.replace(gate, both): torch.cat([tensor, tensors[name.replace(gate, up)]], 1)
        for name, tensor in tensors.items()
        if gate in name
    }


def in_layer(name: str) -> str:
    """llama.cpp's name of a tensor of a layer that the package has no name for: of all experts, and WHOLE_NAMES."""
    number, _, part = name.removeprefix("model.layers.").removeprefix("backbone.layers.").partition(".")
    if part in WHOLE_NAMES:
        return f"blk.{number}.{WHOLE_NAMES[part]}"
    matrix, _, kind = f".{part}".partition(".experts.")[2].partition(".")
    if matrix:
        matrix = {"w1": "gate", "w2": "down", "w3": "up"}.get(matrix, matrix)
        return f"blk.{number}.ffn_{matrix.removesuffix('_proj')}_exps.{kind}"
    return ""


def num_blocks(config: dict[str, Any]) -> int:
    """Layers, and those of the next-token head."""
    layers: int = config.get("num_hidden_layers") or len(layer_types(config))
    return layers + num_drafts(config)


def num_drafts(config: dict[str, Any]) -> int:
    """Layers of the next-token head."""
    count: int = config.get("mtp_num_hidden_layers", 0) or config.get("num_nextn_predict_layers", 0)
    return count


def block_name(name: str, config: dict[str, Any]) -> str:
    """The name of a tensor that llama.cpp's map knows: a next-token head's layers follow the others."""
    if name.startswith("mtp.layers."):
        _, _, number, rest = name.split(".", 3)
        return f"model.layers.{config['num_hidden_layers'] + int(number)}.{rest}"
    for own, known in (
        (".mixer.dt_bias", ".mixer.dt.bias"), (".dt_bias", ".dt_proj.bias"), ("correction_bias", "correction.bias"),
        (".expert_bias", ".expert_bias.bias"), ("block_sparse_moe.shared_experts.", "mlp.shared_experts."),
    ):  # fmt: skip
        name = name.replace(own, known)
    return name + (".weight" if name.endswith(".sinks") else "")


def as_kimis(tensors: dict[str, Tensor], config: dict[str, Any]) -> dict[str, Tensor]:
    """A Ling 3's with names of Kimi Linear, which the package knows; a next-token head's among its layers."""
    found, attending = dict[str, Tensor](), [kind == "full_attention" for kind in config["layer_types"]]
    for name, tensor in tensors.items():
        for own, known in (
            (".attention.", ".self_attn."), ("word_embeddings", "embed_tokens"), (".dense.", ".o_proj."),
            ("gate.expert_bias", "gate.e_score_correction_bias"), (".f_proj.", ".f_a_proj."),
        ):  # fmt: skip
            name = name.replace(own, known)
        if name.endswith("g_proj.weight"):
            number = int(name.split(".")[2])
            if number < len(attending) and not attending[number]:
                name = name.replace("g_proj", "g_a_proj")
        found[name] = tensor
    return found


def of_head(name: str, config: dict[str, Any]) -> str:
    """llama.cpp's name of a part of a next-token head, "" of any other tensor. The package has none for it."""
    kind, _, part = name.removesuffix(".weight").rpartition(".")
    number = re.fullmatch(r"model\.layers\.(\d+)", kind)
    if number and part in OF_LING:
        return f"blk.{number[1]}.{OF_LING[part]}.weight"
    return f"blk.{num_blocks(config) - num_drafts(config)}.nextn.{OF_HEAD[part]}.weight" if kind == "mtp" else ""


def converted(name: str, tensor: Tensor, config: dict[str, Any], arch: str) -> Tensor:
    if "linear_attn" in name:
        return with_states(name, tensor, config)
    if arch in BY_CHANNEL and name.endswith(("_conv1d.weight", "A_log")):
        return by_channel(name, tensor, arch)
    if name.endswith(("conv.conv.weight", "ple.conv1d.weight")):
        return tensor.squeeze(1)
    if arch == "falcon-h1":
        tensor = multiplied(name, tensor, config)
    if config["model_type"] in MAMBA and (".mixer." in name or ".mamba." in name):
        return with_mamba(name, tensor, config)
    if name.endswith("shared_expert_gate.weight"):
        return tensor.squeeze(0)
    if arch in PLUS_ONE and any(part in name for part in ("norm.weight", ".pre_fc_norm", ".ple.norm_")):
        return tensor + 1
    for letter, heads in (("q", "num_attention_heads"), ("k", "num_key_value_heads")):
        if arch in PERMUTED and f".{letter}_proj." in name:
            halves = tensor.unflatten(0, (config[heads], 2, -1))
            return halves.transpose(1, 2).flatten(0, 2)
        if config["model_type"] == "glm4v_text" and f".{letter}_proj." in name:  # neighbours of the half that rotates
            heads_rows = tensor.unflatten(0, (config[heads], 2, -1))
            pairs = heads_rows[:, 0].unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
            return torch.stack([pairs, heads_rows[:, 1]], 1).flatten(0, 2)
    return tensor


def multiplied(name: str, tensor: Tensor, config: dict[str, Any]) -> Tensor:
    """With the multipliers of Falcon-H1 in the weights."""
    states, (gate, down) = config["ssm_multipliers"], config["mlp_multipliers"]
    found = {
        "q_proj": config["attention_in_multiplier"], "v_proj": config["attention_in_multiplier"],
        "k_proj": config["attention_in_multiplier"] * config["key_multiplier"],
        "o_proj": config["attention_out_multiplier"], "mamba.out_proj": config["ssm_out_multiplier"],
        "gate_proj": gate, "down_proj": down, "lm_head": config["lm_head_multiplier"],
        "embed_tokens": config["embedding_multiplier"],
    }  # fmt: skip
    if "mamba.in_proj" in name:
        inner, keys = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
        sizes = torch.tensor([inner, inner, keys, keys, config["mamba_n_heads"]])
        rows = torch.tensor(states).repeat_interleave(sizes) * config["ssm_in_multiplier"]
        return tensor * rows[:, None]
    return tensor * next((factor for part, factor in found.items() if part in name), 1.0)


def with_mamba(name: str, tensor: Tensor, config: dict[str, Any]) -> Tensor:
    part = name.rpartition("mixer.")[2].rpartition("mamba.")[2]
    if part in ("A_log", "D"):
        return (-tensor.exp() if part == "A_log" else tensor).reshape(-1, 1)
    if part == "norm.weight":
        return tensor.reshape(_first(config, "n_groups", "mamba_n_groups"), -1)
    return tensor.squeeze() if part == "conv1d.weight" else tensor


def by_channel(name: str, tensor: Tensor, arch: str) -> Tensor:
    """Taps in four dimensions, and decays as the kernels of each take them."""
    if name.endswith("A_log"):
        return -tensor.exp() if arch == "kimi-linear" else tensor.exp().reshape(-1, 1)
    return tensor.reshape(1, len(tensor), 1, -1)


def with_states(name: str, tensor: Tensor, config: dict[str, Any]) -> Tensor:
    """Value heads in the order of their key heads, over and over: 0, 1, 0, 1 where folders have 0, 0, 1, 1."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]

    def tiled(rows: Tensor) -> Tensor:
        if config["model_type"] == "qwen3_next":
            return rows
        return rows.unflatten(0, (keys, values // keys, -1)).transpose(0, 1).flatten(0, 2)

    if name.endswith("linear_attn.norm.weight"):
        return tensor
    if name.endswith("out_proj.weight"):
        return tiled(tensor.T).T
    if "in_proj_qkv." in name or "conv1d" in name:
        both = 2 * keys * config["linear_key_head_dim"]
        return torch.cat([tensor[:both], tiled(tensor[both:])]).squeeze()
    return tiled(-tensor.exp() if name.endswith("A_log") else tensor)


def _add(writer: gguf.GGUFWriter, name: str, tensor: Tensor, kind: str) -> np.ndarray:
    numbers = np.ascontiguousarray(tensor.numpy())
    in_fp32 = numbers.ndim == 1 or any(
        each in name for each in (".bias", "_norm", "conv1d", "shortconv.conv", "ffn_gate_inp", "ssm_a", "ssm_d")
    )
    if in_fp32 or numbers.shape[-1] % 32:
        kind = "F32" if kind not in NUMBERS or in_fp32 else kind
    if kind in NUMBERS:
        stored = numbers.astype(NUMBERS[kind])
        writer.add_tensor(name, stored)
        return stored.astype(np.float32)
    if kind == "NVFP4":
        return _add_nvfp4(writer, name, numbers.shape)
    try:
        data = quantize(numbers, Type[kind])
    except NotImplementedError:
        flat = random_blocks((math.prod(numbers.shape[:-1]), numbers.shape[-1]), kind)
        data = flat.reshape(*numbers.shape[:-1], -1)
    writer.add_tensor(name, data, raw_dtype=Type[kind])
    return gguf.quants.dequantize(data, Type[kind])


def _add_nvfp4(writer: gguf.GGUFWriter, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Any blocks, and a scale of the tensor, or of each expert, but for Gemma 4's, where factors have its name; and one
    of inputs, which says nothing."""
    rows = made_up("NVFP4", math.prod(shape[:-1]), shape[-1], seed=shape[-1]).rows[:, : -ENCODINGS["NVFP4"].tail]
    data = np.ascontiguousarray(rows.numpy()).reshape(*shape[:-1], -1)
    scales = np.linspace(0.002, 0.003, shape[0] if len(shape) == 3 else 1, dtype=np.float32)
    writer.add_tensor(name, data, raw_dtype=Type.NVFP4)
    if writer.arch == "gemma4" and "ffn_down_exps" in name:
        return nvfp4_numbers(data, np.ones(1, np.float32))
    writer.add_tensor(name.removesuffix("weight") + "scale", scales)
    writer.add_tensor(name.removesuffix("weight") + "input_scale", np.full(1, 7, np.float32))
    return nvfp4_numbers(data, scales)


def nvfp4_numbers(data: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The numbers of blocks: a group's scale times the tensor's, then times the code, in fp32. The package has codes
    and a group's scale."""
    blocks = data.reshape(len(scales), -1, 36)
    steps = 2 * gguf.quants.NVFP4.ue4m3_to_fp32(blocks[..., :4]).astype(np.float32) * scales[:, None, None]
    plain = np.concatenate([np.full_like(blocks[..., :4], 0x38), blocks[..., 4:]], -1)  # scales of 1
    codes = gguf.quants.dequantize(plain, Type.NVFP4).reshape(*steps.shape, 16)
    return (steps[..., None] * codes).reshape(*data.shape[:-1], -1)


def random_blocks(shape: tuple[int, int], kind: str) -> np.ndarray:
    """Of a type that gguf does not quantise to: any bytes, but scales that leave numbers as large as a model's."""
    own, stored = ENCODINGS[kind], made_up(kind, *shape, seed=shape[0] + 7 * shape[1])
    blocks = stored.rows.numpy().reshape(shape[0], -1, own.nbytes)
    for scale in (1.0, None) if own.scale == "F16" else ():
        size = np.float16(scale or NUMBERS_SIZE / float(stored[:16].matrix(torch.float32).square().mean().sqrt()))
        for place in places(own):
            blocks[..., place : place + 2] = np.frombuffer(size.tobytes(), np.uint8)
    return blocks.reshape(shape[0], -1)


def _metadata(writer: gguf.GGUFWriter, config: dict[str, Any], arch: str, *, joins_latent: bool) -> None:
    """As TextModel.set_gguf_parameters and each architecture's have it."""
    rope = _rope(config)
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    head_dim = config.get("head_dim") or hidden // heads
    writer.add_block_count(num_blocks(config))
    writer.add_context_length(_first(config, "max_position_embeddings", "model_max_length"))
    writer.add_embedding_length(hidden)
    if arch not in NEMOTRON_H and (inner := _first(config, "prefix_dense_intermediate_size", "intermediate_size")):
        writer.add_feed_forward_length(inner if "prefix_dense_intermediate_size" in config else _inner_sizes(config))
    writer.add_head_count(config["num_attention_heads_per_layer"] if arch == "laguna" else heads)
    if arch in CONVOLVED:
        _convolutions(writer, config)
    elif arch in BY_CHANNEL:
        _by_channel(writer, config, arch)
    elif arch != "gemma4" and config["model_type"] not in MAMBA:
        writer.add_head_count_kv(1 if arch in LATENT and not joins_latent else config["num_key_value_heads"])
    if config["model_type"] in LAYER_NORM:
        writer.add_layer_norm_eps(config[LAYER_NORM[config["model_type"]]])
    if (eps := config.get("norm_eps" if arch in CONVOLVED else "rms_norm_eps")) is not None:
        writer.add_layer_norm_rms_eps(eps)
    if arch in LATENT:
        _latent(writer, config, joins_latent=joins_latent)
    elif config.get("head_dim") and arch not in ("granite", "gemma4"):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if rope.get("rope_theta") is not None:
        writer.add_rope_freq_base(rope["rope_theta"])
    if local := (config.get("rope_parameters") or {}).get("sliding_attention", {}).get("rope_theta"):
        writer.add_rope_freq_base_swa(local)
    share = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    if config["model_type"] in MAMBA:
        _mamba(writer, config, arch)
    if arch != "nemotron_h" and (
        count := _first(config, "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    ):
        used = _first(config, "top_k_experts", "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")
        writer.add_expert_count(count)
        writer.add_expert_used_count(used[0] if isinstance(used, list) else used)
        if arch not in ("olmoe", "granitehybrid"):
            writer.add_expert_feed_forward_length(_first(config, "moe_intermediate_size", "intermediate_size"))
    if arch in ("qwen35moe", "qwen3next", "qwen2moe", gguf_flash.ARCH):
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    if arch in ("glm4moe", "exaone-moe", "nemotron_h_moe", *LATENT):
        _sigmoid_experts(writer, config)
    if arch == gguf_flash.ARCH:
        gguf_flash.add_metadata(writer, config, num_blocks(config))
    if arch in OF_MIXTURES:
        OF_MIXTURES[arch](writer, config)
    if arch == "minimax-m2":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if arch == "ernie4_5-moe":
        _ernie_experts(writer, config)
    if arch == "hunyuan-moe":
        writer.add_expert_shared_feed_forward_length(config["intermediate_size"])
        writer.add_expert_shared_count(1)
    if arch == "gemma4":
        _gemma4(writer, config)
    if "mrope_section" in rope and arch not in STATEFUL:
        writer.add_rope_dimension_sections([*rope["mrope_section"], 0][:4])
        if arch.startswith("qwen3vl"):
            writer.add_num_deepstack_layers(1)
    if arch in STATEFUL:
        _states(writer, config, rope)
    if arch in (*PERMUTED, "phi3", "glm4", "glm4moe", "minimax-m2", "nemotron", "cohere2", "laguna", *STATEFUL):
        writer.add_rope_dimension_count(int(share * head_dim))
    _rope_scaling(writer, config, rope, arch)
    for key, add in (
        ("attention_multiplier", writer.add_attention_scale), ("embedding_multiplier", writer.add_embedding_scale),
        ("residual_multiplier", writer.add_residual_scale), ("logits_scaling", writer.add_logit_scale),
        ("logit_scale", writer.add_logit_scale), ("attn_logit_softcapping", writer.add_attn_logit_softcapping),
        ("final_logit_softcapping", writer.add_final_logit_softcapping),
    ):  # fmt: skip
        if config.get(key) is not None and arch != "falcon-h1":
            add(config[key])
    window, types = config.get("sliding_window"), config.get("layer_types")
    if window is not None and arch in (
        "gemma2",
        "gemma3",
        "olmo2",
        "cohere2",
        "exaone4",
        "exaone-moe",
        "phi3",
        "gpt-oss",
        "gemma4",
        *OF_MIXTURES,
    ):
        writer.add_sliding_window(window)
        if types and arch in ("olmo2", "exaone4", "exaone-moe", "gemma4", "cohere2moe"):
            writer.add_sliding_window_pattern([each == "sliding_attention" for each in types])
    elif arch == "phi3":
        writer.add_sliding_window(0)


def adjusted(config: dict[str, Any]) -> int:
    """The inner rows of a feed-forward network, as LFM2 has them."""
    size: int = config["intermediate_size"]
    if not config.get("block_auto_adjust_ff_dim"):
        return size
    multiple = config["block_multiple_of"]
    factored = int(config["block_ffn_dim_multiplier"] * int(2 * size / 3))
    return int(multiple * ((factored + multiple - 1) // multiple))


def _convolutions(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_head_count_kv([config["num_key_value_heads"] * ("attention" in each) for each in config["layer_types"]])
    writer.add_shortconv_l_cache(config["conv_L_cache"])
    if writer.arch == "lfm2moe":
        writer.add_leading_dense_block_count(config["num_dense_layers"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def _mamba(writer: gguf.GGUFWriter, config: dict[str, Any], arch: str) -> None:
    """Sizes of states, and by layer what those of one part have."""
    types = layer_types(config)
    if arch == "falcon-h1":
        types = ["full_attention"]  # and a state
    kv_heads = [config["num_key_value_heads"] if kind == "full_attention" else 0 for kind in types]
    writer.add_head_count_kv(kv_heads if arch not in ("granite", "falcon-h1") else kv_heads[0])
    if arch in NEMOTRON_H:
        inner = {"mlp": config["intermediate_size"], "moe": config["moe_intermediate_size"]}
        writer.add_feed_forward_length([inner.get(kind, 0) for kind in types])
    if arch == "nemotron_h_moe":
        writer.add_expert_shared_feed_forward_length(config["moe_shared_expert_intermediate_size"])
        if config.get("moe_latent_size"):
            writer.add_moe_latent_size(config["moe_latent_size"])
    if arch == "granitehybrid":
        writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])
        writer.add_rope_scaling_finetuned(config["position_embedding_type"] == "rope")
    if arch != "granite":
        heads = _first(config, "mamba_num_heads", "mamba_n_heads")
        writer.add_ssm_conv_kernel(_first(config, "conv_kernel", "mamba_d_conv"))
        writer.add_ssm_state_size(_first(config, "ssm_state_size", "mamba_d_state"))
        writer.add_ssm_group_count(_first(config, "n_groups", "mamba_n_groups"))
        writer.add_ssm_time_step_rank(heads)
        writer.add_ssm_inner_size(heads * _first(config, "mamba_head_dim", "mamba_d_head"))


def _trinity_experts(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_expert_shared_count(config["num_shared_experts"])
    writer.add_leading_dense_block_count(config["num_dense_layers"])
    writer.add_expert_weights_norm(True)
    writer.add_expert_weights_scale(config["route_scale"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def _laguna_experts(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    writer.add_expert_weights_norm(True)
    writer.add_expert_weights_scale(config["moe_routed_scaling_factor"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_leading_dense_block_count(config["mlp_layer_types"].index("sparse"))
    share = config["rope_parameters"]["sliding_attention"].get("partial_rotary_factor", 1.0)
    writer.add_rope_dimension_count_swa(int(config["head_dim"] * share))


def _cohere_experts(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    writer.add_leading_dense_block_count(config["mlp_layer_types"].index("sparse"))
    writer.add_expert_weights_norm(config["norm_topk_prob"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if count := config["num_shared_experts"]:
        writer.add_expert_shared_count(count)
        writer.add_expert_shared_feed_forward_length(config["intermediate_size"] * count)


OF_MIXTURES = {"afmoe": _trinity_experts, "laguna": _laguna_experts, "cohere2moe": _cohere_experts}


def _first(config: dict[str, Any], *keys: str) -> Any:
    """The first of these fields that the config has, None if it has none."""
    return next(filter(None, map(config.get, keys)), None)


def _ernie_experts(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_interleave_moe_layer_step(config["moe_layer_interval"])
    writer.add_leading_dense_block_count(config["moe_layer_start_index"])
    writer.add_expert_shared_count(config["moe_num_shared_experts"])
    if config["moe_num_shared_experts"]:
        writer.add_expert_shared_feed_forward_length(config["intermediate_size"] // config["num_key_value_heads"])


def _sigmoid_experts(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_expert_shared_count(_first(config, "n_shared_experts", "num_shared_experts"))
    is_softmax = config["model_type"] in ("deepseek_v2", "mistral4")
    kinds = gguf.ExpertGatingFuncType
    types = config.get("mlp_layer_types") or []
    writer.add_leading_dense_block_count(config.get("first_k_dense_replace", types.count("dense")))
    writer.add_expert_gating_func(kinds.SOFTMAX if is_softmax else kinds.SIGMOID)
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    if config.get("norm_topk_prob") or (config.get("moe_renormalize") and writer.arch != "kimi-linear"):
        writer.add_expert_weights_norm(True)
    writer.add_expert_group_count(_first(config, "n_group", "num_expert_group"))
    writer.add_expert_group_used_count(config["topk_group"])
    writer.add_nextn_predict_layers(num_drafts(config))


def _inner_sizes(config: dict[str, Any]) -> int | list[int]:
    """The size of feed-forward networks, or those of all layers where the ones that share caches are wider."""
    size, layers = adjusted(config), config["num_hidden_layers"]
    if not config.get("use_double_wide_mlp"):
        return size
    shared = config["num_kv_shared_layers"]
    return [size] * (layers - shared) + [2 * size] * shared


def _latent(writer: gguf.GGUFWriter, config: dict[str, Any], *, joins_latent: bool) -> None:
    rank, rotated, values = (config[key] for key in ("kv_lora_rank", "qk_rope_head_dim", "v_head_dim"))
    if config.get("q_lora_rank") is not None:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(rank)
    writer.add_rope_dimension_count(rotated)
    if joins_latent:
        writer.add_key_length(config["qk_nope_head_dim"] + rotated)
        writer.add_value_length(values)
        return
    writer.add_key_length(rank + rotated)
    writer.add_value_length(rank)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + rotated)
    writer.add_value_length_mla(values)


def _by_channel(writer: gguf.GGUFWriter, config: dict[str, Any], arch: str) -> None:
    kinds = config["layer_types"] + ["full_attention"] * num_drafts(config)
    writer.add_head_count_kv([int(kind == "full_attention") for kind in kinds])
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_kda_head_dim(config["linear_head_dim"])
    if arch == "bailingmoe3":
        writer.add_bool(f"{arch}.kda.safe_gate", config["kda_safe_gate"])
        writer.add_float32(f"{arch}.kda.gate_lower_bound", config["kda_lower_bound"])
        shared = config["moe_intermediate_size"] * config["num_shared_experts"]
        writer.add_expert_shared_feed_forward_length(shared)


def _gemma4(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Heads by layer. transformers writes those of layers without a window as `per_layer_config`."""
    full, kv_heads = full_heads(config), []
    for kind in config["layer_types"]:
        heads = full if kind == "full_attention" else config
        kv_heads.append(heads["num_key_value_heads"])
    writer.add_head_count_kv(kv_heads if len({*kv_heads}) > 1 else kv_heads[0])
    writer.add_key_length(full["head_dim"])
    writer.add_value_length(full["head_dim"])
    writer.add_key_length_swa(config["head_dim"])
    writer.add_value_length_swa(config["head_dim"])
    writer.add_rope_dimension_count(full["head_dim"])
    writer.add_rope_dimension_count_swa(config["head_dim"])
    writer.add_embedding_length_per_layer_input(config.get("hidden_size_per_layer_input", 0))
    writer.add_shared_kv_layers(config.get("num_kv_shared_layers", 0))


def full_heads(config: dict[str, Any]) -> dict[str, Any]:
    """The sizes of heads of Gemma 4's layers without a window."""
    own = next(iter(config["per_layer_config"].values()), {})
    return {key: own.get(key, config[key]) for key in ("head_dim", "num_key_value_heads")}


def _states(writer: gguf.GGUFWriter, config: dict[str, Any], rope: dict[str, Any]) -> None:
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * config["linear_num_value_heads"])
    drafts = num_drafts(config)
    if types := config.get("layer_types"):
        recurrent = [each == "linear_attention" for each in types] + [False] * drafts
        writer.add_array(f"{writer.arch}.attention.recurrent_layers", recurrent)
    writer.add_full_attention_interval(config.get("full_attention_interval", 4))
    if config["model_type"] != "qwen3_next":
        writer.add_rope_dimension_sections([*rope.get("mrope_section", [11, 11, 10]), 0, 0][:4])
    if drafts:
        writer.add_nextn_predict_layers(drafts)


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    rope = config.get("rope_parameters") or {"rope_theta": config.get("rope_theta")}
    return rope.get("full_attention", rope)


def _rope_scaling(writer: gguf.GGUFWriter, config: dict[str, Any], rope: dict[str, Any], arch: str) -> None:
    kind = rope.get("rope_type", "default")
    if kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if rope.get("attention_factor") is not None:
            writer.add_rope_scaling_yarn_attn_factor(rope["attention_factor"])
        for key, add in (
            ("beta_fast", writer.add_rope_scaling_yarn_beta_fast), ("beta_slow", writer.add_rope_scaling_yarn_beta_slow)
        ):  # fmt: skip
            if rope.get(key) is not None:
                add(rope[key])
    if arch in LATENT and (multiplier := rope.get("mscale_all_dim")) is not None:
        writer.add_rope_scaling_yarn_log_mul(0.1 * multiplier)
    if config["model_type"] == "ministral3":
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    if kind == "longrope":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)
        most, original = config["max_position_embeddings"], config["original_max_position_embeddings"]
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(most / original) / math.log(original)))


def rope_tensors(config: dict[str, Any], arch: str) -> dict[str, np.ndarray]:
    rope = _rope(config)
    if rope.get("rope_type") == "longrope":
        return {
            f"rope_factors_{which}.weight": np.array(rope[f"{which}_factor"], np.float32) for which in ("long", "short")
        }
    if rope.get("rope_type") == "proportional":
        pairs = full_heads(config)["head_dim"] // 2
        rotated = int(rope["partial_rotary_factor"] * pairs)
        return {"rope_freqs.weight": np.array([1.0] * rotated + [1e30] * (pairs - rotated), np.float32)}
    if rope.get("rope_type") != "llama3":
        return {}
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    frequencies = 1.0 / (rope["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    low, high, original = rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
    factors = []
    for frequency in frequencies:
        wavelength = 2 * math.pi / frequency
        smooth = min(max((original / wavelength - low) / (high - low), 0), 1)
        factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return {"rope_freqs.weight": torch.tensor(factors, dtype=torch.float32).numpy()}


def add_tokens(writer: gguf.GGUFWriter, values: Mapping[str, Any]) -> None:
    """The tokenizer of these metadata, by the last part of each key."""
    writer.add_tokenizer_model(values["model"])
    writer.add_token_list(values["tokens"])
    writer.add_token_types(values["token_type"])
    writer.add_token_scores(values["scores"])
    writer.add_token_merges(values["merges"])
    for name in ("bos", "eos", "unknown"):
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", values[f"{name}_token_id"])


def _tokenizer(writer: gguf.GGUFWriter, kind: str, count: int) -> None:
    """A token for each byte, then <s> and </s>, as `models.byte_tokenizer`, or SentencePiece's; unused ones up to
    `count`."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = letters if kind == "gpt2" else [f"<0x{byte:02X}>" for byte in range(256)]
    tokens, types = [*tokens, "<s>", "</s>"][:count], [*[1 if kind == "gpt2" else 6] * 256, 3, 3][:count]
    more = max(count - len(tokens), 0)
    writer.add_tokenizer_model(kind)
    if kind == "gpt2":
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_merges([])
    else:
        writer.add_token_scores([0.0] * (len(tokens) + more))
    writer.add_token_list([*tokens, *(f"[PAD{i}]" for i in range(more))])
    writer.add_token_types([*types, *[5] * more])
    if count >= 258:
        writer.add_bos_token_id(256)
        writer.add_eos_token_id(257)
        writer.add_add_bos_token(False)
