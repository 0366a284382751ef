"""Models of a process replay (scripts/process_replay.py) by name, each written once. No tests in here."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import plans

from kit.families import save_tiny
from kit.gguf_models import write_gguf
from kit.heads import SHAPES, with_head
from kit.models import TOKENIZER_SIZE, byte_tokenizer, save_pair
from test_quantised_folders import CASES, write

USUAL: dict[str, Any] = {"vocab_size": TOKENIZER_SIZE, "max_position_embeddings": 4096}
WIDE: dict[str, Any] = {  # whole blocks of every GGUF kind
    **USUAL, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 64,
}  # fmt: skip
FAMILIES = (
    "olmo2", "cohere, normed", "phi3, long", "nemotron, biased", "starcoder2, a window", "gemma2", "gemma3", "gemma4",
    "gemma4, sparse", "gpt_oss", "qwen3_moe, some dense", "glm4_moe, odd", "qwen3_5", "olmo_hybrid", "qwen3_5_moe",
    "muse_glimmer", "ministral3", "seed_oss", "exaone4", "granite, biased and tied",
)  # fmt: skip
FILES = {  # GGUF: the family and the kind of its matrices
    **{kind: ("ernie4_5", kind) for kind in ("Q4_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K")},
    "experts in Q4_0": ("gpt_oss", "Q4_0"),
    "states in Q8_0": ("qwen3_5", "Q8_0"),
}
FOLDERS = ("awq", "gptq", "packed", "fp8", "int8", "modelopt")
HEADS = ("qwen3_5", "glm4_moe", "qwen3_5_moe")
LARGE: dict[str, dict[str, object]] = {  # config.json alone, of which plans are made
    "Llama2-13B-128K": {
        "model_type": "llama", "vocab_size": 32000, "hidden_size": 5120, "intermediate_size": 13824,
        "num_hidden_layers": 40, "num_attention_heads": 40, "num_key_value_heads": 40,
    },
    "Gemma 3 27B": plans.MODELS["Gemma 3 27B"],
    "Qwen3.6 27B": plans.STATES["Qwen3.6 27B"],
    "gpt-oss 120B": plans.MIXTURES["gpt-oss 120B"][0],
}  # fmt: skip


def model_path(root: Path, name: str) -> Path:
    """The model of a name: a family, "pair", "wide", "file KIND", "folder FORMAT", "head FAMILY" or one of LARGE.
    It is written where it is missing: another commit's stays."""
    sort, _, rest = name.partition(" ")
    path = root / (f"{name}.gguf" if sort == "file" else name)
    if path.exists():
        return path
    torch.manual_seed(0)
    makers: dict[str, Callable[[Path], object]] = {
        "pair": partial(save_pair, context=USUAL["max_position_embeddings"]),
        "wide": partial(_tiny, "ernie4_5", fields=WIDE),
        "file": partial(_file, root, rest),
        "folder": partial(_quantised, rest),
        "head": lambda folder: with_head(save_tiny(rest, folder, tokenizer=True, **SHAPES)),
    }
    if name in LARGE:
        _config(path, LARGE[name])
    elif sort in makers:
        makers[sort](path)
    else:
        _tiny(name, path, fields=USUAL)
    return path


def _tiny(name: str, folder: Path, *, fields: Mapping[str, Any]) -> Path:
    return save_tiny(name, folder, tokenizer=True, **fields)


def _file(root: Path, name: str, path: Path) -> None:
    family, kind = FILES[name]
    folder = root / f"{family} of {name}"
    if not folder.exists():
        _tiny(family, folder, fields=WIDE | ({"intermediate_size": 256} if family == "gpt_oss" else {}))
    write_gguf(folder, path, kind=kind)


def _quantised(name: str, folder: Path) -> None:
    case = CASES[name]
    write(folder, replace(case, fields={**case.fields, **USUAL}))
    tensors = {part: _usual(part, tensor) for part, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors")
    byte_tokenizer().save_pretrained(folder)


def _usual(part: str, tensor: Tensor) -> Tensor:
    """Scales and codes as a model has them: the tests' random ones overflow."""
    if "scale" in part:
        return tensor.float().nan_to_num(0.01).clamp(-0.02, 0.02).to(tensor.dtype)
    return tensor.float().nan_to_num(0.0).to(tensor.dtype) if tensor.is_floating_point() else tensor


def _config(folder: Path, fields: Mapping[str, object]) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**plans.LLAMA, **fields}))
