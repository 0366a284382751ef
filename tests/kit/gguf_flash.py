"""Parts of Qwen3.8-Flash-Next in a GGUF file, by the rules of llama.cpp's converter (its conversion/qwen4exp.py). No
tests in here.

The package gguf has no names for them: these are those of llama.cpp's library.
"""

from __future__ import annotations

import re
from typing import Any

import gguf
import torch
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
_OF_NGRAMS = {
    "key_proj": "key", "value_proj": "value", "norm_key": "norm_key", "norm_query": "norm_query",
    "norm_conv": "norm_conv", "conv1d": "conv1d",
}  # fmt: skip
_TABLE = re.compile(r"(model\.layers\.\d+\.ple\.ple_embedding\.)ngram_embedding\.shard_(\d+)\.weight")
_HASHES = {  # keys of the integers that hash n-grams
    "layer_multipliers": "layer_multipliers", "ngram_heads_offsets": "head_offsets",
    "ngram_heads_vocab_sizes": "head_vocab_sizes",
}  # fmt: skip
IMAGE_TOKEN = 5
_NAME = re.compile(rf"model\.layers\.(\d+)\.({'|'.join(map(re.escape, _PREFIXES))})\.(\w+)\.weight")
_LAST = "model.hyper_connection_mixer."


def name_of(name: str) -> str:
    """llama.cpp's name of a tensor of streams, of an indexer or of n-grams, "" of any other."""
    if name.startswith(_LAST):
        return f"output_hc_{_PARTS[name.removeprefix(_LAST).removesuffix('.weight')]}.weight"
    if name.endswith("ple.ple_embedding.table"):
        return "per_layer_token_embd.weight"
    if grams := re.fullmatch(r"model\.layers\.(\d+)\.ple\.(\w+)\.weight", name):
        return f"blk.{grams[1]}.ple_{_OF_NGRAMS[grams[2]]}.weight"
    found = _NAME.fullmatch(name)
    return f"blk.{found[1]}.{_PREFIXES[found[2]]}{_PARTS[found[3]]}.weight" if found else ""


def rearranged(tensors: dict[str, Tensor], config: dict[str, Any]) -> dict[str, Tensor]:
    """With an indexer's queries and its key in two tensors, and in one a next-token head's projections and the parts of
    a table of n-grams; without what hashes these."""
    queries, found = config["indexer_n_heads"] * config["indexer_head_dim"], dict[str, Tensor]()
    for name, tensor in tensors.items():
        if name.endswith(_FUSED):
            halves = {"q_proj": tensor[:queries], "k_proj": tensor[queries:]}
            found |= {name.replace("index_qk_proj", half): rows for half, rows in halves.items()}
        elif name.startswith("mtp.hyper_connection_mixer."):
            found[name.replace("mtp.hyper_connection_mixer", "mtp.layers.0.mtp_mixer")] = tensor
        elif name not in _JOINED and tensor.dtype != torch.int64 and not _TABLE.fullmatch(name):
            found[name] = tensor
    parts = {(part[1], int(part[2])): tensors[name] for name in tensors if (part := _TABLE.fullmatch(name))}
    if parts:
        [prefix] = {prefix for prefix, _ in parts}
        found[f"{prefix}table"] = torch.cat([parts[prefix, number] for number in range(len(parts))])
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


def add_hashes(writer: gguf.GGUFWriter, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    """Metadata of n-grams, if the model has some. A file has them in 64 bits."""
    if not config.get("ple_layer_ids"):
        return
    rows, ends = (config["ngram_size"] - 1) * config["heads_per_ngram"], config["eos_token_id"]
    writer.add_array(f"{ARCH}.ple.layers", [layer - 1 for layer in config["ple_layer_ids"]])
    writer.add_uint32(f"{ARCH}.ple.ngram_size", config["ngram_size"])
    writer.add_uint32(f"{ARCH}.ple.heads_per_ngram", config["heads_per_ngram"])
    writer.add_uint32(f"{ARCH}.ple.conv_kernel", config["ple_conv_kernel_size"])
    writer.add_uint32(f"{ARCH}.ple.eos_token_id", ends[-1] if isinstance(ends, list) else ends)
    writer.add_uint32(f"{ARCH}.ple.image_token_id", IMAGE_TOKEN)
    writer.add_embedding_length_per_layer_input(config["ple_embed_dim"] // rows)
    for name, tensor in tensors.items():
        if key := _HASHES.get(name.rpartition(".")[2]):
            kinds = gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.UINT64
            writer.add_key_value(f"{ARCH}.ple.{key}", [int(each) for each in tensor], *kinds)
