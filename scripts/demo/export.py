"""Saves a trained model the way transformers (and the engine) load it, and checks that both agree."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoTokenizer, LlamaForCausalLM

from . import settings
from .model import Llama, llama_config
from .settings import Shape

CONFIG_FIELDS = (
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
)
TOLERANCE = 2e-3  # float32 logits, lean model against transformers


def export(model: Llama, tokenizer: Path, folder: Path) -> None:
    """Writes bf16 weights, config.json, generation_config.json and the tokenizer files into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: value.to(torch.bfloat16).contiguous() for name, value in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    write_json(folder / "config.json", config_fields(model.shape))
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


def config_fields(shape: Shape) -> dict[str, object]:
    """config.json: what defines the model, without transformers' own defaults."""
    known = llama_config(shape).to_dict()
    kept = {name: known[name] for name in CONFIG_FIELDS}
    rope = dict(known["rope_parameters"])
    # Loaders older than transformers 5 read these two instead of rope_parameters.
    legacy = {"rope_theta": rope["rope_theta"], "rope_scaling": None if shape.yarn_factor is None else rope}
    return {"architectures": ["LlamaForCausalLM"], **kept, **legacy}


def write_json(path: Path, value: dict[str, object]) -> None:
    """Indented JSON with a final newline."""
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


@torch.no_grad()
def check(model: Llama, folder: Path) -> None:
    """Reloads with transformers and compares float32 logits on the same rounded weights."""
    loaded = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rounded = Llama(model.shape)
    rounded.load_state_dict({name: value.bfloat16().float() for name, value in model.state_dict().items()})
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids: Tensor = tokenizer("It was the best of times, it was the worst of times. " * 12, return_tensors="pt").input_ids
    ids = ids[:, :128]
    assert ids[0, 0] == settings.BOS_ID
    worst = (loaded(ids).logits - rounded(ids, torch.float32)).abs().max().item()
    assert worst < TOLERANCE, f"transformers disagrees by {worst}"
