"""Digests that tell models, tokenizers and positions apart, quickly: a model's gigabytes are not read.

They find accidents, not malice: who wants two models to look alike can have that.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from offload.errors import ModelError
from offload.kernels.rope import inverse_frequencies
from offload.plan.config import ModelConfig
from offload.plan.planner import Plan
from offload.session.identity import Identity
from offload.transfer.checkpoint import Checkpoint

SAMPLE_BYTES = 4096
_DIGEST_BYTES = 16
# Of a config: what keys and values do not depend on, and what the digest of the positions says better.
_NOT_OF_THE_MODEL = ("bos_token_id", "eos_token_ids", "dtype", "max_positions", "rope", "rope_theta")
_TOKENIZER_FILE = "tokenizer.json"  # complete, where there is one; else what older ones are made of
_TOKENIZER_PARTS = (
    *("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json", "vocab.txt", "merges.txt"),
    *("added_tokens.json", "special_tokens_map.json"),
)
_MAX_NAME = 256


def identity_of(folder: Path, plan: Plan) -> Identity:
    """What a session of the model in `folder` is bound to under `plan`. Raises ModelError."""
    config = ModelConfig.from_folder(folder)
    return identify(folder, config, dtype=plan.dtype, capacity=plan.capacity, page_tokens=plan.page_tokens)


def identify(folder: Path, config: ModelConfig, *, dtype: str, capacity: int, page_tokens: int) -> Identity:
    """What a session of the model in `folder` is bound to. dtype: bf16, fp16 or fp32; capacity as for the rope table,
    whose frequencies depend on it in models with `dynamic` scaling. Raises ModelError."""
    with Checkpoint.open(folder) as checkpoint:
        files = checkpoint.files()
    name = "".join(letter for letter in folder.resolve().name if letter.isprintable())
    return Identity(
        model=model_digest(config, files),
        tokenizer=tokenizer_digest(folder),
        rope=rope_digest(config, capacity),
        dtype=dtype,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        page_tokens=page_tokens,
        model_name=name[:_MAX_NAME],
    )


def model_digest(config: ModelConfig, files: Sequence[Path]) -> str:
    """Of the config as far as it computes, and of each safetensors file (checked before) its size, its header and the
    beginning, middle and end of every tensor, SAMPLE_BYTES each. A model that was trained further differs there; one
    that differs from another in a few weights only may not. Raises ModelError."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    arithmetic = {name: value for name, value in asdict(config).items() if name not in _NOT_OF_THE_MODEL}
    digest.update(json.dumps(arithmetic, sort_keys=True).encode())
    for path in files:
        try:
            for piece in _samples(path):
                digest.update(piece)
        except OSError as error:
            raise ModelError(f"{path} cannot be read ({error.strerror}); download it again") from error
    return digest.hexdigest()


def tokenizer_digest(folder: Path) -> str:
    """Of tokenizer.json, or of the files that older tokenizers are made of. Raises ModelError."""
    names = (_TOKENIZER_FILE,) if (folder / _TOKENIZER_FILE).is_file() else _TOKENIZER_PARTS
    paths = [folder / name for name in names if (folder / name).is_file()]
    if not paths:
        raise ModelError(f"{folder} holds no tokenizer that a session could be bound to; {_TOKENIZER_FILE} is needed")
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for path in paths:
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def rope_digest(config: ModelConfig, capacity: int) -> str:
    """Of the frequencies and the attention scaling: all that the rows of a rope table come from, however many."""
    frequencies, scaling = inverse_frequencies(config, capacity)
    content = frequencies.numpy().tobytes() + struct.pack("<d", scaling)
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).hexdigest()


def _samples(path: Path) -> list[bytes]:
    with path.open("rb") as file:
        fd = file.fileno()
        prefix = file.read(8)
        header = file.read(int.from_bytes(prefix, "little"))
        entries = json.loads(header)
        ranges = sorted(entry["data_offsets"] for name, entry in entries.items() if name != "__metadata__")
        base = len(prefix) + len(header)
        pieces = [prefix, header, struct.pack("<Q", os.fstat(fd).st_size)]
        for start, stop in ranges:
            count = min(SAMPLE_BYTES, stop - start)
            places = (start, (start + stop - count) // 2, stop - count)
            pieces += [os.pread(fd, count, base + place) for place in places]
    return pieces
