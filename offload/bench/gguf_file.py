"""A model as one GGUF file, which llama.cpp reads. Format: ggml's docs/gguf.md, version 3.

A folder's is written from its tensors; a GGUF file's has the same tensors, byte for byte. No vocabulary is written but
where one is given: token i is called "ti", so prompts and texts are ids, the same for all who are compared.
"""

from __future__ import annotations

import math
import shutil
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from offload.bench.llama_cpp import token_name
from offload.config.block import TensorNames
from offload.config.gguf_header import TYPES, Header, TensorInfo, is_gguf, read_header
from offload.config.model import ModelConfig
from offload.config.reading import read_config
from offload.errors import DoesNotFit, ModelError
from offload.kernels.rope import inverse_frequencies
from offload.weights.checkpoint import Checkpoint, check_model
from offload.weights.tensors import expected_tensors

ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
_ALIGNMENT = 32  # bytes
_U32, _F32, _STRING, _ARRAY, _I32 = 4, 6, 8, 9, 5  # types of values
_NUMBERS = {_U32: "<I", _F32: "<f", _I32: "<i"}
_COPIED = 1 << 24  # bytes at a time
_QUANTISED = 32  # numbers of a block, in fewer bits
_NORMAL_TOKEN = 1
_PARTS = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
}  # fmt: skip

Value = int | float | str | list[str] | list[int]


@dataclass(frozen=True)
class _Kind:
    """A type of tensors. number: ggml's. block_bytes: of 32 numbers. dtype: of a tensor before `encode`, which makes
    the file's bytes of it."""

    number: int
    block_bytes: int
    dtype: torch.dtype
    encode: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class _Entry:
    """A tensor of the file. source: its Hugging Face name; "" for the frequencies, which follow from the config."""

    name: str
    source: str
    shape: tuple[int, ...]
    kind: _Kind

    @property
    def number(self) -> int:
        """ggml's, of its type."""
        return self.kind.number

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.kind.block_bytes // _QUANTISED


@dataclass(frozen=True)
class _Copied:
    """The same of a tensor of another GGUF file."""

    info: TensorInfo

    @property
    def name(self) -> str:
        return self.info.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.info.shape

    @property
    def number(self) -> int:
        return next(number for number, (name, *_) in TYPES.items() if name == self.info.kind)

    @property
    def nbytes(self) -> int:
        return self.info.nbytes


def write_gguf(folder: Path, file: Path, *, dtype: str, names: Sequence[str] = ()) -> None:
    """Write the model in `folder` to `file`, vectors in fp32 and matrices in `dtype`: bf16, fp16, fp32 or q4_0 (ggml's
    4 bits, and 8 for embeddings and head). Where `folder` is a GGUF file, its tensors are copied as they are. names: of
    all tokens, as a byte-level vocabulary has them; none: ids.

    A model without an end token has its last token as one: llama.cpp wants it. Needs the memory of the largest tensor,
    twice. Raises ModelError, also for rotary scaling that llama.cpp does not know, DoesNotFit where the disk is full.
    """
    config = read_config(folder)
    if is_gguf(folder):
        _copy(read_header(folder), metadata(config, names), file)
        return
    values, entries = metadata(config, names), _entries(config, dtype)
    _check_room(entries, file)
    with Checkpoint.open(folder) as checkpoint, file.open("wb") as out:
        check_model(checkpoint, config)
        out.write(b"".join(_header(values, entries)))
        for entry in entries:
            _pad(out)
            out.write(entry.kind.encode(_tensor(entry, checkpoint, config)).flatten().numpy().data)


def _copy(header: Header, values: dict[str, Value], file: Path) -> None:
    entries = [_Copied(info) for info in header.tensors.values()]
    _check_room(entries, file)
    with file.open("wb") as out:
        out.write(b"".join(_header(values, entries)))
        for entry in entries:
            _pad(out)
            with entry.info.path.open("rb") as source:
                source.seek(entry.info.start)
                for left in range(entry.nbytes, 0, -_COPIED):
                    out.write(source.read(min(left, _COPIED)))


def _check_room(entries: Sequence[_Entry | _Copied], file: Path) -> None:
    needed, free = sum(entry.nbytes for entry in entries), shutil.disk_usage(file.parent).free
    if needed > free:
        raise DoesNotFit(f"{file.parent} has {free / 1e9:.3g} GB free, {file.name} needs {needed / 1e9:.3g} GB")


def metadata(config: ModelConfig, names: Sequence[str] = ()) -> dict[str, Value]:
    """Keys and values of the file. names: of tokens; none: ids. Raises ModelError where llama.cpp cannot rotate as the
    model does."""
    name = ARCHITECTURES.get(config.family)
    if name is None or config.names != TensorNames() or config.windowed:
        raise ModelError(f"{config.family} models are not written as GGUF here; leave llama.cpp out of the comparison")
    end = config.eos_token_ids[0] if config.eos_token_ids else config.vocab_size - 1
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
    return {
        "general.architecture": name,
        **{f"{name}.{key}": value for key, value in model.items()},
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": list(names) or [token_name(token) for token in range(config.vocab_size)],
        "tokenizer.ggml.token_type": [_NORMAL_TOKEN] * config.vocab_size,
        "tokenizer.ggml.merges": ["t 0"],
        "tokenizer.ggml.bos_token_id": config.bos_token_id or 0,
        "tokenizer.ggml.eos_token_id": end,
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
            "rope.scaling.attn_factor": scaling / (1 + 0.1 * math.log(rope.factor)),  # what llama.cpp adds
            "rope.scaling.yarn_beta_fast": rope.beta_fast,
            "rope.scaling.yarn_beta_slow": rope.beta_slow,
        }
    if rope.kind == "default" or (rope.kind == "llama3" and _is_llama(config)):
        return {}
    kind = rope.kind if rope.truncate else f"{rope.kind} without truncate"
    raise ModelError(f"llama.cpp has no rope_type {kind} for {config.family} models; leave it out of the comparison")


def _entries(config: ModelConfig, dtype: str) -> list[_Entry]:
    entries = [
        _Entry(_name(source), source, shape, _kind(source, shape, dtype))
        for source, shape in expected_tensors(config).items()
    ]
    if config.rope.kind == "llama3":
        entries.append(_Entry("rope_freqs.weight", "", (config.head_dim // 2,), _KINDS["fp32"]))
    return entries


def _kind(source: str, shape: tuple[int, ...], dtype: str) -> _Kind:
    if len(shape) == 1:
        return _KINDS["fp32"]
    if dtype == "q4_0" and shape[-1] % _QUANTISED:
        raise ModelError(f"{source} has rows of {shape[-1]} numbers; ggml's 4 bits come in blocks of {_QUANTISED}")
    if dtype == "q4_0" and not source.startswith("model.layers."):
        return _KINDS["q8_0"]
    return _KINDS[dtype]


def _plain(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def _q4_0(tensor: Tensor) -> Tensor:
    """Blocks of 32: a step in fp16, and 16 bytes with codes 0 to 16 in the low halves. A number is step * (code - 8);
    the step is the number of the largest magnitude / -8."""
    blocks = tensor.view(-1, _QUANTISED)
    step = blocks.gather(1, blocks.abs().argmax(1, keepdim=True)) / -8
    inverse = torch.where(step == 0, 0.0, 1 / step)
    codes = (blocks * inverse + 8.5).clamp(0, 15).to(torch.uint8)
    half = _QUANTISED // 2
    return torch.cat([_plain(step.half()), codes[:, :half] | codes[:, half:] << 4], 1)


def _q8_0(tensor: Tensor) -> Tensor:
    """Blocks of 32: a step in fp16, the largest magnitude / 127, and 32 codes of 8 bits, with a sign."""
    blocks = tensor.view(-1, _QUANTISED)
    step = blocks.abs().amax(1, keepdim=True) / 127
    inverse = torch.where(step == 0, 0.0, 1 / step)
    return torch.cat([_plain(step.half()), _plain((blocks * inverse).round().to(torch.int8))], 1)


_KINDS = {
    "fp32": _Kind(0, 4 * _QUANTISED, torch.float32, _plain),
    "fp16": _Kind(1, 2 * _QUANTISED, torch.float16, _plain),
    "bf16": _Kind(30, 2 * _QUANTISED, torch.bfloat16, _plain),
    "q4_0": _Kind(2, 2 + _QUANTISED // 2, torch.float32, _q4_0),
    "q8_0": _Kind(8, 2 + _QUANTISED, torch.float32, _q8_0),
}


def _name(source: str) -> str:
    """blk.3.attn_q.weight for model.layers.3.self_attn.q_proj.weight"""
    part, _, kind = source.rpartition(".")
    layer, prefix = "", "model.layers."
    if part.startswith(prefix):
        number, _, part = part.removeprefix(prefix).partition(".")
        layer = f"blk.{number}."
    return f"{layer}{_PARTS[part]}.{kind}"


def _is_llama(config: ModelConfig) -> bool:
    return ARCHITECTURES[config.family] == "llama"


def _tensor(entry: _Entry, checkpoint: Checkpoint, config: ModelConfig) -> Tensor:
    if not entry.source:
        pairs = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        frequencies, _ = inverse_frequencies(config, config.context_limit)
        return torch.tensor(config.rope.theta).pow(-pairs) / frequencies
    tensor = torch.empty(entry.shape, dtype=entry.kind.dtype)
    checkpoint.read_into(entry.source, tensor)
    rotated = ("q_proj", "k_proj") if _is_llama(config) else ()
    return _neighbours(tensor, config.head_dim) if entry.source.split(".")[-2] in rotated else tensor


def _neighbours(tensor: Tensor, head_dim: int) -> Tensor:
    """Rows of q or k such that a head's pairs are rows 2i and 2i + 1, as llama.cpp's llama rotates them, not i and
    i + D/2."""
    halves: Tensor = tensor.unflatten(0, (-1, 2, head_dim // 2))
    return halves.transpose(1, 2).flatten(0, 2).contiguous()


def _header(values: dict[str, Value], entries: Sequence[_Entry | _Copied]) -> Iterator[bytes]:
    """All before the tensors, up to where the first begins but for padding."""
    yield b"GGUF" + struct.pack("<IQQ", 3, len(entries), len(values))
    for key, value in values.items():
        yield _string(key) + _value(value)
    offset = 0
    for entry in entries:
        dimensions = struct.pack(f"<I{len(entry.shape)}Q", len(entry.shape), *reversed(entry.shape))
        yield _string(entry.name) + dimensions + struct.pack("<IQ", entry.number, offset)
        offset += -(-entry.nbytes // _ALIGNMENT) * _ALIGNMENT


def _value(value: Value) -> bytes:
    """A value with its type before it."""
    if isinstance(value, list):
        kind = _STRING if isinstance(value[0], str) else _I32
        items = (_string(item) if isinstance(item, str) else struct.pack(_NUMBERS[kind], item) for item in value)
        return struct.pack("<IIQ", _ARRAY, kind, len(value)) + b"".join(items)
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _string(value)
    kind = _F32 if isinstance(value, float) else _U32
    return struct.pack("<I", kind) + struct.pack(_NUMBERS[kind], value)


def _string(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def _pad(out: BinaryIO) -> None:
    out.write(bytes(-out.tell() % _ALIGNMENT))
