"""The common part of all families' config.json files, and the declarations with which a family adds its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

from offload.config.block import Block
from offload.config.mixers import Attention
from offload.config.model import ModelConfig
from offload.config.names import TensorNames
from offload.config.networks import FeedForward
from offload.config.norm import Norm
from offload.config.rope import RopeDefaults, read_rope
from offload.fields import Fields, whole

DTYPES = ("float32", "bfloat16", "float16")
_OTHER_DTYPES = {"float": "float32", "half": "float16"}  # torch's other names of dtypes


@dataclass(frozen=True)
class Family:
    """A family of models. name: its model_type. about: the models of the family. describe: makes the model from the
    fields of a config.json, ModelError. reads: fields that it implements, and that would change the arithmetic in other
    families. refuses: unsupported features of the family, besides features that no family supports; for readers. sizes:
    sizes that a config inside a wrapper may leave out."""

    name: str
    about: str
    describe: Callable[[Fields], ModelConfig]
    reads: Set[str] = frozenset()
    refuses: str = ""
    sizes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Wrapper:
    """A model_type whose config.json contains the config of a language model of any family, for example beside that of
    an image encoder.

    about: the models of this type. default_family: the family if the inner config names none. body: the prefix of the
    language model's tensor names. reads: fields beside the inner config that look as if they changed its arithmetic.
    outer: outer fields that apply where the inner config has none. within: the field that holds the inner config and
    what is beside it, "" for the whole. may_be_flat: the inner config's fields may be among the outer ones. head: the
    name of the language model's output matrix.
    """

    name: str
    about: str
    default_family: str
    body: str
    reads: Set[str] = frozenset()
    outer: tuple[str, ...] = ("dtype", "torch_dtype", "tie_word_embeddings")
    refuses: str = "pictures"
    within: str = ""
    may_be_flat: bool = False
    head: str = "lm_head.weight"


@dataclass(frozen=True)
class Defaults:
    """The defaults of transformers for a family's config. kv_heads: None means as many as heads. head_dim: None means
    hidden_size / heads. norm_key: the field of the norms' epsilon.

    derives_head_dim: a head_dim of null means hidden_size / heads and is not an error. floors_head_dim: that quotient
    is rounded down.
    """

    max_positions: int = 2048
    kv_heads: int | None = None
    head_dim: int | None = None
    derives_head_dim: bool = True
    floors_head_dim: bool = False
    eps: float = 1e-6
    norm_key: str = "rms_norm_eps"
    tied: bool = False
    rope: RopeDefaults = field(default_factory=RopeDefaults)


def sizes(vocab: int, hidden: int, intermediate: int, layers: int, heads: int) -> dict[str, int]:
    """The sizes of a `Family`, by field name."""
    return {
        "vocab_size": vocab, "hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }  # fmt: skip


def decoder(
    source: Fields,
    family: str,
    defaults: Defaults,
    *,
    norm: Callable[[float], Norm] = Norm,
    attention: Mapping[str, Any] | None = None,
    feed_forward: Mapping[str, Any] | None = None,
    block: Mapping[str, Any] | None = None,
    without_positions: Sequence[int] = (),
    **model: Any,
) -> ModelConfig:
    """The model of `source`, whose layers are Llama's except for the given fields of their descriptions. norm: makes
    the norm of a given epsilon. without_positions: numbers of the layers that do not rotate. Raises ModelError."""
    hidden_size, vocab_size = source.integer("hidden_size", 1 << 20), source.integer("vocab_size", 1 << 24)
    max_positions = source.integer("max_position_embeddings", 1 << 30, default=defaults.max_positions)
    num_heads, num_kv_heads, head_dim = _read_heads(source, defaults, hidden_size)
    rope = read_rope(source, max_positions=max_positions, head_dim=head_dim, defaults=defaults.rope)
    row_norm = norm(epsilon(source, defaults))
    common = Block(
        Attention(num_heads, num_kv_heads, head_dim, rope, **(attention or {})),
        FeedForward(source.integer("intermediate_size", 1 << 22), **(feed_forward or {})),
        **{"before_attention": row_norm, "before_feed_forward": row_norm} | dict(block or {}),
    )
    bare = replace(common, mixer=replace(common.attention, rope=None))
    layers = range(source.integer("num_hidden_layers", 1 << 12))
    return ModelConfig(
        family,
        vocab_size,
        hidden_size,
        tuple(bare if layer in without_positions else common for layer in layers),
        max_positions,
        norm=row_norm,
        tie_embeddings=source.flag("tie_word_embeddings", defaults.tied),
        bos_token_id=_token_id(source, "bos_token_id", vocab_size),
        eos_token_ids=token_ids(source, "eos_token_id", vocab_size),
        dtype=_read_dtype(source),
        **model,
    )


def token_ids(source: Fields, key: str, vocab_size: int) -> tuple[int, ...]:
    """No id, one id or a list of ids, each from 0 to `vocab_size` - 1; repeats are dropped. -1 alone is no id."""
    value, token = source.data.get(key), whole(0, vocab_size - 1)
    is_none = value is None or (type(value) is int and value == -1)
    ids = value if isinstance(value, list) else [] if is_none else [value]
    if not all(map(token.fits, ids)):
        source.refuse(key, f"a token id or a list of ids from 0 to {vocab_size - 1}")
    return tuple(dict.fromkeys(ids))


def _token_id(source: Fields, key: str, vocab_size: int) -> int | None:
    """One id, or None where the field is absent."""
    ids = token_ids(source, key, vocab_size)
    if isinstance(source.data.get(key), list):
        source.refuse(key, "one token id, not a list")
    return ids[0] if ids else None


def epsilon(source: Fields, defaults: Defaults) -> float:
    """The epsilon of all norms."""
    return source.number(defaults.norm_key, default=defaults.eps, most=1.0)


def biases(source: Fields, key: str = "attention_bias") -> dict[str, Any]:
    """The bias fields of an attention that has biases everywhere or nowhere; absent means nowhere."""
    bias = source.flag(key, False)
    return {"bias": bias, "out_bias": bias}


def norms_after(norm: Norm) -> dict[str, Norm | None]:
    """The norm fields of a block with norms only after its parts; `NAMES_AFTER` has their tensor names."""
    return {
        "before_attention": None, "after_attention": norm, "before_feed_forward": None, "after_feed_forward": norm,
    }  # fmt: skip


NAMES_AFTER = TensorNames(after_attention="post_attention_layernorm", after_feed_forward="post_feedforward_layernorm")


def with_rope(config: ModelConfig, **fields: Any) -> ModelConfig:
    """`config` with other fields of `Rope` in the layers that have positions."""

    def change(block: Block) -> Block:
        if not block.attends or block.attention.rope is None:
            return block
        return replace(block, mixer=replace(block.attention, rope=replace(block.attention.rope, **fields)))

    return config.mapped(change)


def _read_dtype(source: Fields) -> str:
    key = "torch_dtype" if source.data.get("dtype") is None else "dtype"
    name = source.choice(key, (*DTYPES, *_OTHER_DTYPES), default="float32")
    return _OTHER_DTYPES.get(name, name)


def _read_heads(source: Fields, defaults: Defaults, hidden_size: int) -> tuple[int, int, int]:
    """The (heads, KV heads, head_dim). head_dim times heads need not be hidden_size (Mistral-Nemo, Qwen3)."""
    num_heads = source.integer("num_attention_heads", 1 << 14)
    unnamed = num_heads if "num_key_value_heads" in source.data else defaults.kv_heads or num_heads
    num_kv_heads = source.integer("num_key_value_heads", num_heads, default=unnamed)
    if num_heads % num_kv_heads:
        source.refuse("num_key_value_heads", f"a divisor of num_attention_heads {num_heads}")
    head_dim = source.integer("head_dim", 1 << 12, default=_head_dim(source, defaults, hidden_size, num_heads))
    if head_dim % 2:
        source.refuse("head_dim", f"even for rotary positions, {head_dim} is odd")
    return num_heads, num_kv_heads, head_dim


def _head_dim(source: Fields, defaults: Defaults, hidden_size: int, num_heads: int) -> int | None:
    """The head_dim for a config that has none."""
    if source.data.get("head_dim") is not None:
        return None
    if "head_dim" not in source.data and defaults.head_dim is not None:
        return defaults.head_dim
    if not defaults.derives_head_dim:
        source.refuse("head_dim", f"given, and not null, in {source.data.get('model_type')}")
    if hidden_size % num_heads and not defaults.floors_head_dim:
        source.refuse("head_dim", f"given where heads ({num_heads}) do not divide hidden_size ({hidden_size})")
    return hidden_size // num_heads
