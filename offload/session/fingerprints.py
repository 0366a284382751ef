"""Digests that identify a model, a tokenizer and its rotary positions without reading all weights.

They detect mix-ups, not attacks: two different models can be constructed to have the same digest.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any

from offload.config.gguf_header import Items, is_gguf, read_file, read_header
from offload.config.model import ModelConfig
from offload.config.reading import read_config
from offload.errors import ModelError
from offload.kernels.rope import inverse_frequencies
from offload.plan.planner import Plan
from offload.session.identity import STATE_FIELDS, Identity
from offload.text.tokenizer_files import OLDER_FILES
from offload.weights.checkpoint import Checkpoint

SAMPLE_BYTES = 4096
_SIZES = (
    *("family", "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads"),
    *("head_dim", "tie_embeddings"),
)
_DIGEST_BYTES = 16
_TOKENIZER_FILE = "tokenizer.json"  # complete on its own; older tokenizers have several files
_TOKENIZER_PARTS = (*OLDER_FILES, "added_tokens.json", "special_tokens_map.json")
_MAX_NAME = 256


def identity_of(folder: Path, plan: Plan) -> Identity:
    """The identity of a session of the model in `folder` under `plan`. Raises ModelError."""
    config = read_config(folder)
    return identify(
        folder, config, dtype=plan.request.dtype, capacity=plan.request.capacity, page_tokens=plan.placement.page_tokens
    )


def identify(folder: Path, config: ModelConfig, *, dtype: str, capacity: int, page_tokens: int) -> Identity:
    """The identity of a session of the model in `folder`. dtype: bf16, fp16 or fp32. capacity: tokens, as given to
    `rope_table`; the frequencies of `dynamic` scaling and of LongRoPE depend on it. Raises ModelError."""
    with Checkpoint.open(folder) as checkpoint:
        files = checkpoint.files()
    name = "".join(letter for letter in _own_name(folder) if letter.isprintable())
    apart = None if config.has_one_shape else config.windowed_block
    return Identity(
        model=model_digest(config, files),
        tokenizer=tokenizer_digest(folder),
        rope=rope_digest(config, capacity),
        dtype=dtype,
        num_layers=len(config.growing),
        num_kv_heads=config.num_kv_heads,
        head_dim=config.kv_dim,
        page_tokens=page_tokens,
        num_window_layers=len(config.windowed),
        window_kv_heads=apart.attention.num_kv_heads if apart else 0,
        window_head_dim=apart.attention.kv_dim if apart else 0,
        **_of_states(config),
        model_name=name[:_MAX_NAME],
    )


def _of_states(config: ModelConfig) -> dict[str, int]:
    """The identity's fields of layers with a state."""
    if (recurrence := config.recurrence) is None:
        return {}
    values = (len(config.stateful), *recurrence.state_shape, recurrence.width - 1, recurrence.kept)
    return dict(zip(STATE_FIELDS, values, strict=True))


def _own_name(folder: Path) -> str:
    """The model's name. A GGUF file is not resolved, since it may be a link to a file named by its digest."""
    return folder.name if is_gguf(folder) else folder.resolve().name


def model_digest(config: ModelConfig, files: Sequence[Path]) -> str:
    """Digest of the config fields that keys and values depend on, and of each (valid) file: its size, its
    header, and SAMPLE_BYTES from the beginning, middle and end of every tensor. It changes when a model is trained
    further, but may not when only a few weights differ. Raises ModelError."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    relevant = _relevant(config)
    digest.update(json.dumps(relevant, sort_keys=True).encode())
    for path in files:
        try:
            for piece in _samples(path):
                digest.update(piece)
        except OSError as error:
            raise ModelError(f"{path} cannot be read ({error.strerror}); download it again") from error
    return digest.hexdigest()


def _relevant(config: ModelConfig) -> dict[str, object]:
    """The config fields that keys and values depend on; rotary positions have a digest of their own. Models of Llama's
    form keep the field names of the first sessions."""
    attention = config.block.attention
    named: dict[str, object] = {name: getattr(config, name) for name in _SIZES} | {
        "rms_norm_eps": config.norm.eps,
        "qkv_bias": attention.bias,
        "o_bias": attention.out_bias,
        "mlp_bias": config.block.feed_forward.bias,
        "qk_norm": attention.qk_norm is not None,
    }
    others = len(config.tables) > 1 or config.windowed or config.stateful or config.stored_in or config.experts
    if not config.is_llama_shaped or others:
        named |= {"blocks": [_told(block) for block in config.blocks], "embedding_scale": config.embedding_scale}
    if config.quantisation is not None:
        named["stored"] = [_told(rule) for rule in config.quantisation.rules]
    return named


def _told(part: Any) -> dict[str, object]:
    """The fields of a description that differ from their defaults, so that a new field changes no digest."""
    told: dict[str, object] = {}
    for each in fields(part):
        value = getattr(part, each.name)
        default = each.default if each.default_factory is MISSING else each.default_factory()
        if value != default:
            name = each.metadata.get("digested_as", each.name)
            told[name] = _told(value) if is_dataclass(value) else value
    return told


def tokenizer_digest(folder: Path) -> str:
    """Digest of tokenizer.json, or of an older tokenizer's files, or of the tokenizer's metadata in a GGUF file. Raises
    ModelError."""
    if is_gguf(folder):
        return _gguf_tokenizer_digest(folder)
    names = (_TOKENIZER_FILE,) if (folder / _TOKENIZER_FILE).is_file() else _TOKENIZER_PARTS
    paths = [folder / name for name in names if (folder / name).is_file()]
    if not paths:
        raise ModelError(f"{folder} holds no tokenizer, so a session cannot be kept; {_TOKENIZER_FILE} is needed")
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for path in paths:
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def _gguf_tokenizer_digest(path: Path) -> str:
    digest, values = hashlib.blake2b(digest_size=_DIGEST_BYTES), read_header(path).values
    for key in sorted(key for key in values if key.startswith("tokenizer.")):
        value = values[key]
        digest.update(f"{key}\n".encode())
        digest.update(value.content() if isinstance(value, Items) else repr(value).encode())
    return digest.hexdigest()


def rope_digest(config: ModelConfig, capacity: int) -> str:
    """Digest of the frequencies and the attention scaling, which determine every row of a rope table."""
    frequencies, scaling = inverse_frequencies(config, capacity)
    content = frequencies.numpy().tobytes() + struct.pack("<d", scaling)
    if config.rope.growth:
        content += struct.pack("<d", config.rope.growth)
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).hexdigest()


def _samples(path: Path) -> list[bytes]:
    return _gguf_samples(path) if is_gguf(path) else _safetensors_samples(path)


def _gguf_samples(path: Path) -> list[bytes]:
    """The samples of a GGUF file. Names, types and shapes of the tensors stand for the header, since vocabulary and
    name do not affect keys and values."""
    tensors = sorted(read_file(path).tensors.values(), key=lambda tensor: tensor.start)
    pieces = [f"{tensor.name} {tensor.kind} {tensor.shape}\n".encode() for tensor in tensors]
    with path.open("rb") as file:
        for tensor in tensors:
            pieces += _of_tensor(file.fileno(), tensor.start, tensor.start + tensor.nbytes)
    return pieces


def _safetensors_samples(path: Path) -> list[bytes]:
    with path.open("rb") as file:
        fd = file.fileno()
        prefix = file.read(8)
        header = file.read(int.from_bytes(prefix, "little"))
        entries = json.loads(header)
        ranges = sorted(entry["data_offsets"] for name, entry in entries.items() if name != "__metadata__")
        base = len(prefix) + len(header)
        pieces = [prefix, header, struct.pack("<Q", os.fstat(fd).st_size)]
        for start, stop in ranges:
            pieces += _of_tensor(fd, base + start, base + stop)
    return pieces


def _of_tensor(fd: int, start: int, stop: int) -> list[bytes]:
    count = min(SAMPLE_BYTES, stop - start)
    return [os.pread(fd, count, place) for place in (start, (start + stop - count) // 2, stop - count)]
