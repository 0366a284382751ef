"""Saves a trained model the way transformers (and the engine) load it, and checks that both agree."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PretrainedConfig

from . import settings
from .model import LanguageModel

CONFIG_FIELDS = {
    "attention_bias",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "mlp_bias",
    "model_type",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "rms_norm_eps",
    "rope_parameters",
    "tie_word_embeddings",
    "vocab_size",
    # of mixtures
    "moe_intermediate_size",
    "norm_topk_prob",
    "num_experts",
    "num_experts_per_tok",
    "router_aux_loss_coef",
    # of Qwen3.8-Flash-Next
    "hc_count",
    "hc_lowrank",
    "indexer_budget",
    "indexer_compress_ratio",
    "indexer_head_dim",
    "indexer_kv_heads",
    "indexer_n_heads",
    "layer_types",
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_value_head_dim",
    "output_gate_type",
    "shared_expert_intermediate_size",
}
RENAMED = {"num_local_experts": "num_experts"}  # transformers' name: the one that Qwen's files have
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen4_exp_text": "Qwen4ExpForCausalLM",
}
TOLERANCE = 2e-3  # float32 logits, lean model against transformers


def export(model: LanguageModel, tokenizer: Path, folder: Path) -> None:
    """Writes bf16 weights, config.json, generation_config.json and the tokenizer files into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: value.to(torch.bfloat16).contiguous() for name, value in of_files(model).items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    write_json(folder / "config.json", config_fields(model.config()))
    write_json(
        folder / "generation_config.json",
        {
            "bos_token_id": settings.BOS_ID,
            "eos_token_id": settings.EOS_ID,
            "do_sample": True,
            "temperature": 0.6,
            "top_p": 0.9,
        },
    )
    for file in tokenizer.iterdir():
        shutil.copy(file, folder / file.name)
    check(model, folder)


def of_files(model: LanguageModel) -> dict[str, Tensor]:
    """The weights by their names in files, where each expert's matrices are apart."""
    weights = {}
    for name, value in model.state_dict().items():
        prefix, _, stacked = name.partition("experts.")
        if not stacked:
            weights[name] = value
        for number, own in enumerate(value if stacked else ()):
            parts = zip(("gate", "up"), own.chunk(2), strict=True) if stacked == "gate_up" else [("down", own)]
            weights |= {f"{prefix}experts.{number}.{part}_proj.weight": each for part, each in parts}
    return weights


def config_fields(config: PretrainedConfig) -> dict[str, object]:
    """config.json: what defines the model, without transformers' own defaults."""
    known = config.to_dict()
    kept = {own: value for name, value in known.items() if (own := RENAMED.get(name, name)) in CONFIG_FIELDS}
    rope = dict(known["rope_parameters"])
    # Loaders older than transformers 5 read these two instead of rope_parameters.
    legacy = {"rope_theta": rope["rope_theta"], "rope_scaling": None if rope["rope_type"] == "default" else rope}
    return {"architectures": [ARCHITECTURES[known["model_type"]]], **kept, **legacy}


def write_json(path: Path, value: dict[str, object]) -> None:
    """Indented JSON with a final newline."""
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


@torch.no_grad()
def check(model: LanguageModel, folder: Path) -> None:
    """Reloads with transformers and compares float32 logits on the same rounded weights."""
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rounded = type(model)(model.shape).eval()
    rounded.load_state_dict({name: value.bfloat16().float() for name, value in model.state_dict().items()})
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids: Tensor = tokenizer("It was the best of times, it was the worst of times. " * 12, return_tensors="pt").input_ids
    ids = ids[:, :128]
    assert ids[0, 0] == settings.BOS_ID
    worst = (loaded(ids).logits - rounded(ids, torch.float32)).abs().max().item()
    assert worst < TOLERANCE, f"transformers disagrees by {worst}"
