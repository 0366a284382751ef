"""Tiny models with a random next-token head, as their authors' checkpoints have it. No tests in here."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

SHAPES = {
    "vocab_size": 264, "hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 8, "head_dim": 16,
    "max_position_embeddings": 1024, "linear_num_value_heads": 8, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}  # fmt: skip
LATENT = {key: value for key, value in SHAPES.items() if key != "head_dim"} | {
    "num_key_value_heads": 8, "kv_lora_rank": 128, "q_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32,
    "v_head_dim": 32,
}  # fmt: skip


@dataclass(frozen=True)
class Form:
    """A head as the authors' checkpoints have it. fields: of config.json. layer: of the model, which the head's is
    like. prefix: of the names in it. join, norms: names, the norms of an embedding, of a hidden row and of the output.
    more: tensors that are copies of the model's. plus_one: norms multiply by 1 + their weight. join_hidden, mean: the
    matrix of hidden rows and the prefix of the mean of streams, in place of the last norm, where hidden rows are
    streams."""

    fields: dict[str, int]
    layer: int
    prefix: str
    join: str
    norms: tuple[str, ...]
    more: tuple[str, ...] = ()
    plus_one: bool = True
    join_hidden: str = ""
    mean: str = ""


MTP = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm")
QWEN = Form({"mtp_num_hidden_layers": 1}, 3, "mtp.layers.0.", "mtp.fc", MTP)
FORMS = {
    "qwen3_5": QWEN,
    "qwen3_5_moe": QWEN,
    "qwen3_next": replace(QWEN, fields={}),
    "glm4_moe": Form(
        {"num_nextn_predict_layers": 1}, 2, "model.layers.3.", "model.layers.3.eh_proj",
        ("model.layers.3.enorm", "model.layers.3.hnorm", "model.layers.3.shared_head.norm"),
        ("model.layers.3.embed_tokens", "model.layers.3.shared_head.head"), plus_one=False,
    ),
}  # fmt: skip
FORMS["glm4_moe_lite"] = FORMS["glm4_moe"]
FORMS["bailing_hybrid"] = Form(
    {"num_nextn_predict_layers": 1}, 3, "model.layers.4.", "model.layers.4.eh_proj",
    ("model.layers.4.enorm", "model.layers.4.hnorm", "model.layers.4.final_layernorm"), plus_one=False,
)  # fmt: skip
FORMS["qwen4_exp"] = replace(
    QWEN, join="mtp.fc_embedding", join_hidden="mtp.fc_hidden", norms=MTP[:2], mean="mtp.hyper_connection_mixer.",
)  # fmt: skip
IN_FILES = ["qwen3_5", "qwen3_5_moe", "glm4_moe", "bailing_hybrid"]  # whose heads llama.cpp's converter writes
MIXTURES = [name for name in FORMS if name != "qwen3_5"]


def shapes_of(name: str) -> dict[str, int]:
    """Sizes of a model with whole groups of codes."""
    if name == "bailing_hybrid":
        return {key: size for key, size in LATENT.items() if key != "q_lora_rank"} | {"head_dim": 16}
    return LATENT if name == "glm4_moe_lite" else SHAPES


def form_of(folder: Path) -> Form:
    kind = json.loads((folder / "config.json").read_text())["model_type"]
    return FORMS[kind.removesuffix("_text")]


def with_head(folder: Path, *, seed: int = 3, layer: int | None = None) -> Path:
    """The model with a random next-token head. The copies of its tables are no copies, so that it shows if they are
    used. layer: that the head's is like; None: the form's."""
    form, path = form_of(folder), folder / "model.safetensors"
    form = form if layer is None else replace(form, layer=layer)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | form.fields))
    tensors, generator = load_file(path), torch.Generator().manual_seed(seed)
    hidden, before = config["hidden_size"], f"model.layers.{form.layer}."
    head: dict[str, tuple[int, ...]] = {
        form.prefix + name.removeprefix(before): tuple(tensor.shape)
        for name, tensor in tensors.items()
        if name.startswith(before)
    }
    head |= {f"{name}.weight": (hidden,) for name in form.norms} | {f"{form.join}.weight": (hidden, 2 * hidden)}
    if form.mean:
        own = {name: tensor for name, tensor in tensors.items() if name.startswith("model.hyper_connection_mixer.")}
        head |= {form.mean + name.rpartition("mixer.")[2]: tuple(tensor.shape) for name, tensor in own.items()}
        head |= {f"{name}.weight": (hidden, hidden) for name in (form.join, form.join_hidden)}
        head |= {f"{form.norms[1]}.weight": (config["hc_count"] * hidden,)}
    head |= {f"{name}.weight": (config["vocab_size"], hidden) for name in form.more}
    for name, shape in head.items():
        noise = torch.randn(shape, generator=generator)
        middle = 0.0 if form.plus_one else 1.0
        tensors[name] = middle + 0.2 * noise if "norm" in name else noise / shape[-1] ** 0.5
    save_file(tensors, path, metadata={"format": "pt"})
    return folder
