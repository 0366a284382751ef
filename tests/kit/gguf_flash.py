"""Parts of Qwen3.8-Flash-Next in a GGUF file, by the rules of llama.cpp's converter (its conversion/qwen4exp.py). No
tests in here.

The package gguf has no names for them: these are those of llama.cpp's library.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

FAMILY, ARCH = "qwen4_exp_text", "qwen4exp"
_FUSED = "self_attn.indexer.index_qk_proj.weight"
_JOINED = ("mtp.fc_embedding.weight", "mtp.fc_hidden.weight")
_PREFIXES = {  # of names in a layer, and in a next-token head's
    "attn_hyper_connection": "hc_attn_", "mlp_hyper_connection": "hc_ffn_", "self_attn.indexer": "indexer.",
    "mtp_mixer": "nextn.hc_head_",
}  # fmt: skip
_PARTS = {
    "hc_norm": "norm", "input_mix_weight_down": "down", "input_mix_weight_up": "up", "block_inject_weight": "inject",
    "q_proj": "q_proj", "k_proj": "k_proj", "q_layernorm": "q_norm", "k_layernorm": "k_norm",
}  # fmt: skip
_NAME = re.compile(rf"model\.layers\.(\d+)\.({'|'.join(map(re.escape, _PREFIXES))})\.(\w+)\.weight")
_LAST = "model.hyper_connection_mixer."


def name_of(name: str) -> str:
    """llama.cpp's name of a tensor of streams or of an indexer, "" of any other."""
    if name.startswith(_LAST):
        return f"output_hc_{_PARTS[name.removeprefix(_LAST).removesuffix('.weight')]}.weight"
    found = _NAME.fullmatch(name)
    return f"blk.{found[1]}.{_PREFIXES[found[2]]}{_PARTS[found[3]]}.weight" if found else ""


def rearranged(tensors: dict[str, Tensor], config: dict[str, Any]) -> dict[str, Tensor]:
    """With an indexer's queries and its key in two tensors, and a next-token head's projections in one."""
    queries, found = config["indexer_n_heads"] * config["indexer_head_dim"], dict[str, Tensor]()
    for name, tensor in tensors.items():
        if name.endswith(_FUSED):
            parts = {"q_proj": tensor[:queries], "k_proj": tensor[queries:]}
            found |= {name.replace("index_qk_proj", part): rows for part, rows in parts.items()}
        elif name.startswith("mtp.hyper_connection_mixer."):
            found[name.replace("mtp.hyper_connection_mixer", "mtp.layers.0.mtp_mixer")] = tensor
        elif name not in _JOINED:
            found[name] = tensor
    if _JOINED[0] in tensors:
        found["mtp.fc.weight"] = torch.cat([tensors[name] for name in _JOINED], 1)
    return found


def add_metadata(writer: gguf.GGUFWriter, config: dict[str, Any], num_blocks: int) -> None:
    writer.add_uint32(f"{ARCH}.hyper_connection.count", config["hc_count"])
    writer.add_uint32(f"{ARCH}.hyper_connection.low_rank", config["hc_lowrank"])
    writer.add_indexer_head_count(config["indexer_n_heads"])
    writer.add_indexer_key_length(config["indexer_head_dim"])
    writer.add_indexer_top_k(config["indexer_budget"])
    types = config["layer_types"] + ["linear_attention"] * (num_blocks - len(config["layer_types"]))
    ratio = config["indexer_compress_ratio"]
    writer.add_array(
        f"{ARCH}.attention.compress_ratios", [0 if each == "linear_attention" else ratio for each in types]
    )


def with_head(folder: Path) -> Path:
    """The model with a random next-token head, whose layer is as its last one, as the authors' checkpoints have it."""
    file, generator = folder / "model.safetensors", torch.Generator().manual_seed(3)
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config | {"mtp_num_hidden_layers": 1}))
    last, hidden = f"model.layers.{config['num_hidden_layers'] - 1}.", config["hidden_size"]
    copied = {last: "mtp.layers.0.", _LAST: "mtp.hyper_connection_mixer."}
    shapes = {
        name.replace(before, after): tuple(tensor.shape)
        for name, tensor in tensors.items()
        for before, after in copied.items()
        if name.startswith(before)
    }
    shapes |= dict.fromkeys(_JOINED, (hidden, hidden))
    shapes |= {"mtp.pre_fc_norm_embedding.weight": (hidden,)}
    shapes |= {"mtp.pre_fc_norm_hidden.weight": (config["hc_count"] * hidden,)}
    tensors |= {name: torch.randn(shape, generator=generator) * 0.1 for name, shape in shapes.items()}
    save_file(tensors, file, metadata={"format": "pt"})
    return folder
