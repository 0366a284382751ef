#!/usr/bin/env python3
"""Embed a trained checkpoint in a larger model with the same logits: a small model's text, a large model's traffic.

    python scripts/widen.py triforce_cli/models/demo-target models/wide-13b --like llama2-13b
    python scripts/widen.py models/SmolLM2-135M-Instruct models/wide --like llama-3.1-8b --dtype fp16

For benchmarks: weights and KV cache have the bytes of the imitated model, acceptance is that of a trained model. The
vocabulary stays, so the source's draft fits the result. From a source with hidden size h and heads of size d to hidden
size H and heads of size D:

* Hidden states are padded with zeros. RMS norm then divides by H instead of h: eps becomes eps h / H, norm weights are
  multiplied by sqrt(h / H).
* Other padding repeats the source wherever zeros meet it, so that weights and KV cache compress like trained ones:
  columns that meet hidden states' zeros; keys, where queries are zero; values and the MLP's inner rows, where o_proj's
  and down_proj's columns are.
* Scores are divided by sqrt(D) instead of sqrt(d): queries are multiplied by sqrt(D / d), keys stay as they are.
* Rotary pair i stays pair i, (i, i + D/2) instead of (i, i + d/2), and theta becomes theta ** (D / d): the frequency
  theta ** (-2i / d) is the same, and so is everything that linear, YaRN and llama3 scaling derive from it or from i.
  Dynamic scaling stretches theta by a power that depends on D, so it cannot have larger heads.
* Additional KV heads repeat the source's, with their query heads, and additional layers repeat the layer that they
  precede. They attend and are retrieved from like the source's, but their output is not used: their columns of o_proj,
  and in a repeated layer all of o_proj and down_proj, are zero. Query heads that pad a group of the source are zero.

In exact arithmetic the logits are the same; in fp32 they differ by the order of sums. In bf16 and fp16 the two factors
round norms and q_proj once more (a weight by at most 0.2 % in bf16), so logits are only close: the distribution moves
about as far as between fp32 and bf16 arithmetic. If H / h and D / d are powers of 4, nothing is rounded.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from offload.config.config_json import config_of
from offload.config.model import ModelConfig
from offload.errors import DoesNotFit, ModelError, TriforceError, UsageError
from offload.kernels.rope import inverse_frequencies
from offload.strict_json import read_json
from offload.units import size
from offload.weights.checkpoint import Checkpoint, check_model
from offload.weights.safetensors_folder import INDEX_FILE
from offload.weights.tensors import expected_tensors

FAMILIES = ("llama", "mistral", "qwen2")
# Fields of config.json. With the vocabulary they determine the bytes of the imitated model.
FLAGS = {
    "hidden_size": "--hidden",
    "num_hidden_layers": "--layers",
    "num_attention_heads": "--heads",
    "num_key_value_heads": "--kv-heads",
    "head_dim": "--head-dim",
    "intermediate_size": "--intermediate",
}
LIKE = {
    name: dict(zip((*FLAGS, "vocab_size"), sizes, strict=True))
    for name, sizes in {
        "llama2-7b": (4096, 32, 32, 32, 128, 11008, 32000),
        "llama2-13b": (5120, 40, 40, 40, 128, 13824, 32000),
        "llama-3.1-8b": (4096, 32, 32, 8, 128, 14336, 128256),
    }.items()
}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}
TEXT_FILES = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "chat_template*",
    "generation_config.json",
)  # fmt: skip
NOTHING = -1  # an index that takes no element of the source and gives a zero


@dataclass(frozen=True)
class Heads:
    """The source's head that each wide head repeats: query heads [H] (or NOTHING), KV heads [H_kv].

    used [H]: as `query`, but NOTHING where the columns of o_proj are zero, so that repeated heads count once.
    """

    query: tuple[int, ...]
    used: tuple[int, ...]
    kv: tuple[int, ...]


@dataclass(frozen=True)
class Axes:
    """For each axis of the wide weights: the source's index for each wide index, int64, or NOTHING."""

    vocabulary: Tensor
    hidden: Tensor
    inputs: Tensor  # hidden, with repeats in place of NOTHING
    zeros: Tensor  # NOTHING in the size of hidden, for operators whose output is zero
    inner: Tensor
    inner_rows: Tensor  # inner, with repeats
    query: Tensor
    key: Tensor
    value: Tensor
    used: Tensor


def widen(
    source: Path,
    dest: Path,
    sizes: Mapping[str, int],
    dtype: torch.dtype,
    on_shard: Callable[[int, int], None] = lambda shard, num_shards: None,
) -> ModelConfig:
    """Write the model in folder `source` with `sizes` (keys of FLAGS) and `dtype` to folder `dest`, which must be new
    or empty; it appears when it is complete. TriforceError. Peak memory: two layers in `dtype`, or two embeddings."""
    data = read_json(source / "config.json")
    narrow = config_of(data, name=str(source / "config.json"))
    if data.get("model_type") not in FAMILIES:
        raise ModelError(f"{source}: {data.get('model_type')} cannot be widened, only {', '.join(FAMILIES)}")
    wide_data = wide_config(data, narrow, sizes, dtype)
    name = f"the wide model, with heads of {sizes['head_dim']} instead of {narrow.head_dim}"
    wide = config_of(wide_data, name=name)
    check_rotary(narrow, wide)
    axes = axes_of(narrow, wide)
    with Checkpoint.open(source) as checkpoint, complete_or_absent(dest, wide.weight_bytes(dtype.itemsize)) as folder:
        check_model(checkpoint, narrow)
        shards = Widening(checkpoint, narrow, wide, axes, dtype).shards()
        write_shards(shards, folder, wide.num_layers + 2, on_shard)
        write_json(folder / "config.json", wide_data)
        for path in (path for pattern in TEXT_FILES for path in source.glob(pattern) if path.is_file()):
            shutil.copyfile(path, folder / path.name)
    return wide


def wide_config(
    data: Mapping[str, object], narrow: ModelConfig, sizes: Mapping[str, int], dtype: torch.dtype
) -> dict[str, object]:
    """The source's config.json with other sizes, eps and theta. Raises an error for sizes below the source's."""
    least = (narrow.hidden_size, narrow.num_layers, 1, 1, narrow.head_dim, narrow.intermediate_size)
    for (key, flag), limit in zip(FLAGS.items(), least, strict=True):
        if sizes[key] < limit:
            raise UsageError(f"{flag} is {sizes[key]}; for this source it must be at least {limit}")
    eps = narrow.norm.eps * narrow.hidden_size / sizes["hidden_size"]
    config = {**data, **{key: sizes[key] for key in FLAGS}, "rms_norm_eps": eps, "tie_word_embeddings": False}
    config["dtype"] = str(dtype).removeprefix("torch.")
    for key in ("torch_dtype", "layer_types"):  # the old name of dtype; one entry for each of the source's layers
        config.pop(key, None)
    theta = narrow.rope.theta ** (sizes["head_dim"] / narrow.head_dim)
    for key in ("rope_parameters", "rope_scaling"):
        rope = config.get(key)
        if isinstance(rope, Mapping) and "rope_theta" in rope:
            config[key] = {**rope, "rope_theta": theta}
    return {**config, "rope_theta": theta}


def check_rotary(narrow: ModelConfig, wide: ModelConfig) -> None:
    """Raises UsageError unless every pair rotates as in the source, also beyond the pretrained length."""
    capacity = 2 * narrow.context_limit
    frequencies, scaling = inverse_frequencies(narrow, capacity)
    wide_frequencies, wide_scaling = inverse_frequencies(wide, capacity)
    kept = wide_frequencies[: len(frequencies)]
    if scaling != wide_scaling or not torch.allclose(kept, frequencies, rtol=1e-5, atol=0.0):
        d = narrow.head_dim
        raise UsageError(
            f"{narrow.rope.kind} RoPE rotates heads of {wide.head_dim} unlike heads of {d}; take --head-dim {d} "
            f"(with {wide.head_dim / d:g} times as many --heads and --kv-heads the bytes are the same)"
        )


def heads_of(narrow: ModelConfig, wide: ModelConfig) -> Heads:
    """Assign the source's heads. Each query head keeps its KV head, which is repeated if the wide groups are smaller.

    Raises UsageError if the wide model has too few KV heads.
    """
    group, room = narrow.num_heads // narrow.num_kv_heads, wide.num_heads // wide.num_kv_heads
    copies = math.ceil(group / room)
    needed = narrow.num_kv_heads * copies
    if needed > wide.num_kv_heads:
        raise UsageError(
            f"{narrow.num_heads} query heads over {narrow.num_kv_heads} KV heads need {needed} KV heads of {room}; "
            f"the wide model has {wide.num_kv_heads}, give more --kv-heads"
        )
    query, used, kv = list[int](), list[int](), list[int]()
    for index in range(wide.num_kv_heads):
        repeated, copy = divmod(index % needed, copies)
        members = range(copy * room, (copy + 1) * room)
        own = [repeated * group + member if member < group else NOTHING for member in members]
        kv.append(repeated)
        query.extend(own)
        used.extend(own if index < needed else [NOTHING] * room)
    return Heads(tuple(query), tuple(used), tuple(kv))


def axes_of(narrow: ModelConfig, wide: ModelConfig) -> Axes:
    """The source's index for each index of the wide weights. UsageError if the heads do not fit."""
    heads, d, half = heads_of(narrow, wide), narrow.head_dim, narrow.head_dim // 2
    plain = padded(range(d), wide.head_dim)
    rotary = padded(range(half), wide.head_dim // 2) + padded(range(half, d), wide.head_dim // 2)
    rotary_keys = repeated(range(half), wide.head_dim // 2) + repeated(range(half, d), wide.head_dim // 2)
    hidden = torch.tensor(padded(range(narrow.hidden_size), wide.hidden_size))
    return Axes(
        vocabulary=torch.arange(narrow.vocab_size),
        hidden=hidden,
        inputs=torch.tensor(repeated(range(narrow.hidden_size), wide.hidden_size)),
        zeros=torch.full_like(hidden, NOTHING),
        inner=torch.tensor(padded(range(narrow.intermediate_size), wide.intermediate_size)),
        inner_rows=torch.tensor(repeated(range(narrow.intermediate_size), wide.intermediate_size)),
        query=by_head(heads.query, rotary, d),
        key=by_head(heads.kv, rotary_keys, d),
        value=by_head(heads.kv, repeated(range(d), wide.head_dim), d),
        used=by_head(heads.used, plain, d),
    )


def padded(indices: Sequence[int], size: int) -> list[int]:
    return [*indices, *[NOTHING] * (size - len(indices))]


def repeated(indices: Sequence[int], size: int) -> list[int]:
    return [indices[place % len(indices)] for place in range(size)]


def by_head(heads: Sequence[int], within: Sequence[int], head_dim: int) -> Tensor:
    """Heads of the source [n] and indices within a head [D] -> indices of the source's rows [n * D]."""
    return torch.tensor(
        [NOTHING if NOTHING in (head, index) else head * head_dim + index for head in heads for index in within]
    )


@dataclass(frozen=True)
class Widening:
    """A source model and the shape of the wide model that is made from it."""

    checkpoint: Checkpoint
    narrow: ModelConfig
    wide: ModelConfig
    axes: Axes
    dtype: torch.dtype

    def shards(self) -> Iterator[dict[str, Tensor]]:
        """The files of the wide model, each name -> tensor: the embedding, every layer, the last norm and the head."""
        embedding, num_wide = "model.embed_tokens.weight", self.wide.num_layers
        head = embedding if self.narrow.tie_embeddings else "lm_head.weight"
        table = (self.axes.vocabulary, self.axes.hidden)
        repeated = [index * self.narrow.num_layers // num_wide for index in range(num_wide + 1)]
        yield {embedding: spread(self.read(embedding), table)}
        for index, layer in enumerate(repeated[:-1]):
            yield self.layer(layer, index, used=repeated[index + 1] > layer)  # of repeated layers, only the last counts
        yield {
            "model.norm.weight": spread(self.read("model.norm.weight", self.norm_factor), (self.axes.hidden,)),
            "lm_head.weight": spread(self.read(head), table),
        }

    def layer(self, layer: int, index: int, *, used: bool) -> dict[str, Tensor]:
        """Layer `layer` of the source as wide layer `index`. used: False makes it add zero to the hidden states."""
        places = self.places(used=used)
        tensors, prefix = {}, f"model.layers.{layer}."
        for name in (name for name in expected_tensors(self.narrow) if name.startswith(prefix)):
            operator, _, kind = name.removeprefix(prefix).rpartition(".")
            indices, factor = places[operator]
            weight = self.read(name, factor)
            # a bias has only the first axis of its matrix
            tensors[f"model.layers.{index}.{operator}.{kind}"] = spread(weight, indices[: weight.ndim])
        return tensors

    def places(self, *, used: bool) -> dict[str, tuple[tuple[Tensor, ...], float]]:
        """For each operator of a layer: the index of each axis, and the factor on its weights."""
        axes = self.axes
        out = axes.hidden if used else axes.zeros
        return {
            "input_layernorm": ((axes.hidden,), self.norm_factor),
            "post_attention_layernorm": ((axes.hidden,), self.norm_factor),
            "self_attn.q_proj": ((axes.query, axes.inputs), math.sqrt(self.wide.head_dim / self.narrow.head_dim)),
            "self_attn.k_proj": ((axes.key, axes.inputs), 1.0),
            "self_attn.v_proj": ((axes.value, axes.inputs), 1.0),
            "self_attn.o_proj": ((out, axes.used), 1.0),
            "mlp.gate_proj": ((axes.inner_rows, axes.inputs), 1.0),
            "mlp.up_proj": ((axes.inner_rows, axes.inputs), 1.0),
            "mlp.down_proj": ((out, axes.inner), 1.0),
        }

    @property
    def norm_factor(self) -> float:
        return math.sqrt(self.narrow.hidden_size / self.wide.hidden_size)

    def read(self, name: str, factor: float = 1.0) -> Tensor:
        """The source's tensor times `factor`, multiplied in fp32 and rounded once. ModelError if it overflows."""
        weight = torch.empty(self.checkpoint.shape(name))
        self.checkpoint.read_into(name, weight)
        weight = (weight * factor).to(self.dtype)
        if not weight.isfinite().all():
            raise ModelError(f"{name} has weights beyond the range of {self.dtype}; try --dtype bf16 or fp32")
        return weight


def spread(weight: Tensor, indices: Sequence[Tensor]) -> Tensor:
    """weight [n] or [n, m], one index per axis -> wide [N] or [N, M], zero where an index is NOTHING."""
    wide = weight.new_zeros([len(index) for index in indices])
    filled = [(index != NOTHING).nonzero().squeeze(1) for index in indices]
    taken = [index[places] for index, places in zip(indices, filled, strict=True)]
    wide[torch.meshgrid(filled, indexing="ij")] = weight[torch.meshgrid(taken, indexing="ij")]
    return wide


@contextmanager
def complete_or_absent(dest: Path, num_needed: int) -> Iterator[Path]:
    """A folder beside `dest` that is renamed to `dest` at the end, and removed if the body fails.

    UsageError if `dest` is not empty, DoesNotFit if fewer than `num_needed` bytes are free on the disk.
    """
    dest = dest.resolve()
    if dest.exists() and (not dest.is_dir() or any(dest.iterdir())):
        raise UsageError(f"{dest} exists and is not an empty folder; remove it or give another DEST")
    dest.parent.mkdir(parents=True, exist_ok=True)
    num_free = shutil.disk_usage(dest.parent).free
    if num_needed > num_free:
        raise DoesNotFit(
            f"the wide model needs {size(num_needed)} of disk, {size(num_free)} are free in {dest.parent}; "
            "give a DEST on another disk or smaller sizes"
        )
    partial = dest.with_name(dest.name + ".partial")
    if partial.exists():
        raise UsageError(f"{partial} is left from an interrupted run; remove it")
    partial.mkdir()
    try:
        yield partial
        partial.replace(dest)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def write_shards(
    files: Iterator[dict[str, Tensor]], folder: Path, num_files: int, on_shard: Callable[[int, int], None]
) -> None:
    """Write one safetensors file at a time, then their index."""
    weight_map, total_bytes = {}, 0
    for number, tensors in enumerate(files, start=1):
        shard = f"model-{number:05d}-of-{num_files:05d}.safetensors"
        save_file(tensors, folder / shard, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, shard))
        total_bytes += sum(tensor.nbytes for tensor in tensors.values())
        on_shard(number, num_files)
    write_json(folder / INDEX_FILE, {"metadata": {"total_size": total_bytes}, "weight_map": weight_map})


def write_json(path: Path, data: Mapping[str, object]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n")


def summary(wide: ModelConfig, dtype: torch.dtype, like: str | None) -> str:
    """A line with the bytes of the wide model, and one with those of the model `like` that it imitates."""

    def of(config: ModelConfig, name: str) -> str:
        weights, kv = config.weight_bytes(dtype.itemsize), config.kv_bytes_per_token(dtype.itemsize)
        return f"{name}: {size(weights)} of weights, {size(kv)} of KV per token"

    lines = [of(wide, "the wide model")]
    if like is not None:
        fields = {"model_type": "llama", "max_position_embeddings": wide.max_positions, "rms_norm_eps": 1e-5}
        lines.append(of(config_of({**fields, **LIKE[like]}), f"{like} in the same dtype"))
    return "\n".join(lines)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Embed a trained checkpoint in a larger model with the same logits.")
    parser.add_argument("source", type=Path, metavar="SOURCE", help="model folder: Llama, Mistral or Qwen2")
    parser.add_argument("dest", type=Path, metavar="DEST", help="folder to write, new or empty")
    parser.add_argument("--like", choices=LIKE, help="take the sizes of this model")
    for key, flag in FLAGS.items():
        parser.add_argument(flag, type=int, dest=key, metavar="N", help=f"{key} (default: of --like)")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of the weights written (default: bf16)")
    return parser.parse_args(arguments)


def sizes_of(args: argparse.Namespace) -> dict[str, int]:
    """The sizes of --like, overridden by explicit ones. UsageError if one is missing."""
    given = {key: size for key, size in vars(args).items() if key in FLAGS and size is not None}
    sizes = {**LIKE.get(args.like, {}), **given}
    missing = [flag for key, flag in FLAGS.items() if key not in sizes]
    if missing:
        raise UsageError(f"{', '.join(missing)} not given; give every size, or --like {'|'.join(LIKE)}")
    return sizes


def report(shard: int, num_shards: int) -> None:
    print(f"{shard} of {num_shards} files", file=sys.stderr, flush=True)


def stop(error: Exception, exit_code: int) -> NoReturn:
    print(f"widen: {error}", file=sys.stderr)
    raise SystemExit(exit_code)


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    try:
        dtype = DTYPES[args.dtype]
        wide = widen(args.source, args.dest, sizes_of(args), dtype, report)
    except TriforceError as error:
        stop(error, error.exit_code)
    except (OSError, SafetensorError) as error:  # a full or read-only disk
        stop(error, 1)
    print(summary(wide, dtype, args.like))


if __name__ == "__main__":
    main()
