"""Models written as one GGUF file, which llama.cpp reads, with the package gguf.

A model folder's tensors are converted; a GGUF file's tensors are copied byte for byte. Without given names the
vocabulary names token i "ti", so that prompts and texts are ids, the same for all compared programs.
"""

from __future__ import annotations

import offload  # noqa: F401  # isort: skip  # before torch, which reads its threads' wait policy once

import json
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from gguf.quants import quantize
from llama_cpp import token_name
from torch import Tensor

from offload.config.gguf_header import Header, is_gguf, read_header
from offload.config.model import ModelConfig
from offload.config.names import TensorNames
from offload.config.reading import read_config
from offload.errors import DoesNotFit, ModelError
from offload.kernels.rope import inverse_frequencies
from offload.weights.checkpoint import Checkpoint, check_model
from offload.weights.tensors import expected_tensors

ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
MATRICES = {"fp32": Kind.F32, "fp16": Kind.F16, "bf16": Kind.BF16, "q4_0": Kind.Q4_0}

Value = bool | int | float | str | list[str] | list[int]
KindOf = Callable[[str, tuple[int, ...]], Kind]  # of a tensor's name and shape, by ggml's names
Numbers = np.ndarray[Any, Any]
Store = Callable[[str, Numbers, Kind], Numbers]  # name, numbers in fp32, kind -> bytes


@dataclass(frozen=True)
class Entry:
    """A tensor of the file. shape: in numbers. read: returns its bytes in `kind`."""

    name: str
    shape: tuple[int, ...]
    kind: Kind
    read: Callable[[], np.ndarray[Any, Any]]

    @property
    def nbytes(self) -> int:
        numbers, size = gguf.GGML_QUANT_SIZES[self.kind]
        return math.prod(self.shape) // numbers * size


def write_gguf(folder: Path, file: Path, *, dtype: str, names: Sequence[str] = ()) -> None:
    """Write the model in `folder` to `file`, vectors in fp32 and matrices in `dtype`: bf16, fp16, fp32 or q4_0 (ggml's
    4 bits, and 8 for embeddings and head). Where `folder` is a GGUF file, its tensors are copied as they are. names: of
    all tokens, as a byte-level vocabulary has them; none: ids.

    A model without an end token has its last token as one: llama.cpp wants it. Needs the memory of the largest tensor
    in fp32, three times. Raises ModelError, also for rotary scaling that llama.cpp does not know, DoesNotFit where the
    disk is full.
    """
    config = read_config(folder)
    values = metadata(config) | ids(config, names)
    if is_gguf(folder):
        _write(values, list(_copied(read_header(folder))), file)
        return
    store_with(folder, file, values, partial(_kind, dtype=dtype), lambda _, numbers, kind: quantize(numbers, kind))


def store_with(folder: Path, file: Path, values: dict[str, Value], kind_of: KindOf, store: Store) -> None:
    """Write the model in `folder` to `file`, each tensor in the kind and bytes that the functions return for it."""
    config = read_config(folder)
    with Checkpoint.open(folder) as checkpoint:
        check_model(checkpoint, config)
        _write(values, list(_entries(config, checkpoint, kind_of, store)), file)


def _write(values: dict[str, Value], entries: Sequence[Entry], file: Path) -> None:
    needed, free = sum(entry.nbytes for entry in entries), shutil.disk_usage(file.parent).free
    if needed > free:
        raise DoesNotFit(f"{file.parent} has {free / 1e9:.3g} GB free, {file.name} needs {needed / 1e9:.3g} GB")
    architecture = values.pop("general.architecture")
    with closing(gguf.GGUFWriter(file, architecture)) as writer:
        for key, value in values.items():
            kind = gguf.GGUFValueType.UINT32 if type(value) is int else gguf.GGUFValueType.get_type(value)
            writer.add_key_value(key, value, kind)
        for entry in entries:
            writer.add_tensor_info(entry.name, entry.shape, np.dtype(np.float32), entry.nbytes, raw_dtype=entry.kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for entry in entries:
            writer.write_tensor_data(entry.read())


def metadata(config: ModelConfig) -> dict[str, Value]:
    """Keys and values of the model. Raises ModelError if llama.cpp lacks its rotary scaling."""
    name = ARCHITECTURES.get(config.family)
    if name is None or config.names != TensorNames() or config.windowed:
        raise ModelError(f"{config.family} models are not written as GGUF here; leave llama.cpp out of the comparison")
    model: dict[str, Value] = {
        "context_length": config.context_limit,
        "embedding_length": config.hidden_size,
        "block_count": config.num_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": float(config.norm.eps),
        "rope.dimension_count": config.head_dim,
        "rope.freq_base": float(config.rope.theta),
        "vocab_size": config.vocab_size,
    }
    model |= _rope_scaling(config)
    return {"general.architecture": name, **{f"{name}.{key}": value for key, value in model.items()}}


def ids(config: ModelConfig, names: Sequence[str] = ()) -> dict[str, Value]:
    """Keys and values of a vocabulary of ids, or of `names`, that cuts no texts."""
    return _special(config) | {
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": list(names) or [token_name(token) for token in range(config.vocab_size)],
        "tokenizer.ggml.token_type": [int(gguf.TokenType.NORMAL)] * config.vocab_size,
        "tokenizer.ggml.merges": ["t 0"],
    }


def vocabulary(config: ModelConfig, folder: Path, cuts: str) -> dict[str, Value]:
    """Keys and values of the byte-level vocabulary in `folder`. cuts: llama.cpp's name of how it cuts texts."""
    document = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    names = {token: name for name, token in document["model"]["vocab"].items()}
    kinds = dict.fromkeys(names, int(gguf.TokenType.NORMAL))
    for added in document["added_tokens"]:
        kind = gguf.TokenType.CONTROL if added["special"] else gguf.TokenType.USER_DEFINED
        names[added["id"]], kinds[added["id"]] = added["content"], int(kind)
    tokens = range(config.vocab_size)
    return _special(config) | {
        "tokenizer.ggml.pre": cuts,
        "tokenizer.ggml.tokens": [names.get(token, f"[PAD{token}]") for token in tokens],
        "tokenizer.ggml.token_type": [kinds.get(token, int(gguf.TokenType.UNUSED)) for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in document["model"]["merges"]],
        "tokenizer.ggml.add_bos_token": False,
    }


def _special(config: ModelConfig) -> dict[str, Value]:
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.bos_token_id": config.bos_token_id or 0,
        "tokenizer.ggml.eos_token_id": config.eos_token_ids[0] if config.eos_token_ids else config.vocab_size - 1,
    }


def _rope_scaling(config: ModelConfig) -> dict[str, Value]:
    rope = config.rope
    if rope.kind == "linear":
        return {"rope.scaling.type": "linear", "rope.scaling.factor": rope.factor}
    if rope.kind == "yarn" and rope.truncate:
        _, scaling = inverse_frequencies(config, config.context_limit)
        return {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": rope.factor,
            "rope.scaling.original_context_length": rope.original_max_positions or config.max_positions,
            "rope.scaling.attn_factor": scaling / (1 + 0.1 * math.log(rope.factor)),  # llama.cpp adds the divisor
            "rope.scaling.yarn_beta_fast": rope.beta_fast,
            "rope.scaling.yarn_beta_slow": rope.beta_slow,
        }
    if rope.kind == "default" or (rope.kind == "llama3" and _is_llama(config)):
        return {}
    kind = rope.kind if rope.truncate else f"{rope.kind} without truncate"
    raise ModelError(f"llama.cpp has no rope_type {kind} for {config.family} models; leave it out of the comparison")


def ggml_name(source: str, config: ModelConfig) -> str:
    """ggml's name of a tensor. source: Hugging Face's."""
    (architecture,) = (key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == ARCHITECTURES[config.family])
    names = gguf.get_tensor_name_map(architecture, config.num_layers)
    return str(names.get_name(source, try_suffixes=(".weight", ".bias")))


def _copied(header: Header) -> Iterator[Entry]:
    """The tensors of another GGUF file, which may be split into several."""
    for info in header.tensors.values():
        read = partial(np.memmap, info.path, np.uint8, "r", info.start, (info.nbytes,))
        yield Entry(info.name, info.shape, Kind[info.kind], read)


def _entries(config: ModelConfig, checkpoint: Checkpoint, kind_of: KindOf, store: Store) -> Iterator[Entry]:
    """The model's tensors by ggml's names."""
    for source, shape in expected_tensors(config).items():
        name = ggml_name(source, config)
        kind = kind_of(name, shape)

        def read(name: str = name, source: str = source, shape: tuple[int, ...] = shape, kind: Kind = kind) -> Numbers:
            return store(name, _tensor(source, shape, checkpoint, config), kind)

        yield Entry(name, shape, kind, read)
    if config.rope.kind == "llama3":
        yield Entry("rope_freqs.weight", (config.head_dim // 2,), Kind.F32, lambda: _divisors(config).numpy())


def _kind(name: str, shape: tuple[int, ...], dtype: str) -> Kind:
    if len(shape) == 1:
        return Kind.F32
    block, _ = gguf.GGML_QUANT_SIZES[MATRICES[dtype]]
    if shape[-1] % block:
        raise ModelError(f"{name} has rows of {shape[-1]} numbers; ggml's 4 bits come in blocks of {block}")
    if dtype == "q4_0" and not name.startswith("blk."):
        return Kind.Q8_0
    return MATRICES[dtype]


def _is_llama(config: ModelConfig) -> bool:
    return ARCHITECTURES[config.family] == "llama"


def _divisors(config: ModelConfig) -> Tensor:
    """Divisors of the frequencies of a head's pairs, [D / 2] fp32."""
    pairs = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies, _ = inverse_frequencies(config, config.context_limit)
    return torch.tensor(config.rope.theta).pow(-pairs) / frequencies


def _tensor(source: str, shape: tuple[int, ...], checkpoint: Checkpoint, config: ModelConfig) -> np.ndarray[Any, Any]:
    """The tensor in fp32, with rows in llama.cpp's rotary order."""
    tensor = torch.empty(shape, dtype=torch.float32)
    checkpoint.read_into(source, tensor)
    rotated = ("q_proj", "k_proj") if _is_llama(config) else ()
    return (_neighbours(tensor, config.head_dim) if source.split(".")[-2] in rotated else tensor).numpy()


def _neighbours(tensor: Tensor, head_dim: int) -> Tensor:
    """Rows of q or k in the order of llama.cpp's llama, which rotates rows 2i and 2i + 1 of a head, not i and i +
    D/2."""
    halves: Tensor = tensor.unflatten(0, (-1, 2, head_dim // 2))
    return halves.transpose(1, 2).flatten(0, 2).contiguous()
