"""The `ModelConfig` of a GGUF file, from its metadata.

The metadata are translated to the fields of a Hugging Face config.json, which the family reads
(offload/config/families). The changes that llama.cpp's converter makes to weights are described here for each
architecture (its conversion/*.py): rows of q and k that are rotated as neighbours, norm weights with 1 added.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import replace

from offload.config.block import Block
from offload.config.config_json import config_of
from offload.config.encodings import encoded
from offload.config.families.common import with_rope
from offload.config.gguf_architectures import ARCHITECTURES, Architecture
from offload.config.gguf_fields import Metadata
from offload.config.gguf_flash import with_hashes
from offload.config.gguf_header import Header
from offload.config.gguf_layers import HEADS, INNER, KV_HEADS, LATENT_RANK, heads_of
from offload.config.gguf_names import (
    EXPERT_FACTORS,
    FUSED_EXPERTS,
    HEAD,
    JOINED_STATES,
    LAYER_TABLE,
    SCALE,
    TABLE,
    renamed,
)
from offload.config.gguf_rope import rope_settings, with_factors
from offload.config.mixers import Attention, DeltaRule, HeadStates
from offload.config.model import ModelConfig
from offload.config.names import IndexNames, NextTokenNames, RecurrenceNames, TensorNames
from offload.config.norm import Norm
from offload.errors import ModelError
from offload.formats.encodings import ENCODINGS

PLAIN = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}  # types of plain numbers, with their bytes
_INDEX = IndexNames("self_attn.indexer.q_proj", "self_attn.indexer.k_proj")
_GATE = re.compile(r"\.ffn_gate(?:_shexp)?\.weight$")
_DTYPES = {"F64": "float32", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def gguf_config(header: Header) -> ModelConfig:
    """The config of the model in a GGUF file. Raises ModelError."""
    architecture, values = architecture_of(header), Metadata(header)
    if values.is_head_alone():
        raise ModelError(
            f"{header.path} holds a next-token head (MTP) without its model, and a head drafts from its model's file "
            "here; give or fetch one file that has both, and no --draft"
        )
    config = config_of(_fields(header, architecture), name=str(header.path))
    if not values.has_head():  # many files lack what they count
        config = replace(config, next_token=None)
    config = with_hashes(values, with_factors(values, config))
    config = replace(_apart(_stacked(config, header), header), suppressed=values.suppressed())
    if architecture.neighbours or (architecture.halves_sections and values.has_sections()):
        config = with_rope(config, neighbours=architecture.neighbours)
    if architecture.has_one:
        config = _with_one(config)
    if isinstance(config.recurrence, HeadStates):
        config = _with_states(config, header, architecture)
    if config.indexer is not None:  # two tensors, and one that joins a head's rows: folders have one, and two
        config = replace(config, names=replace(config.names, index=_INDEX, next_token=NextTokenNames()))
    if values.has("attn_k_b.weight", config.attending[0]):  # old files have both in one tensor, as folders do
        own = config.names.attention
        config = replace(config, names=replace(config.names, k_b=f"{own}k_b_proj", v_b=f"{own}v_b_proj"))
    kinds = kinds_of(header, config)
    return encoded(config, lambda name: kind if (kind := kinds.get(name, "")) in ENCODINGS else "")


def kinds_of(header: Header, config: ModelConfig) -> dict[str, str]:
    """The type of each tensor, by the tensor's name in this program."""
    return {name: header.tensors[stored].kind for stored, name in names_of(header, config).items()}


def names_of(header: Header, config: ModelConfig) -> dict[str, str]:
    """The map from the names of the file's tensors to this program's, but for the scales of matrices in NVFP4."""
    scales = nvfp4_scales(header, config)
    stored = (name for name in header.tensors if name not in scales)
    found = renamed(stored, config.names, Metadata(header).head_layers())
    if config.with_ngrams and LAYER_TABLE in found:
        [found[LAYER_TABLE]] = config.ngram_parts(config.with_ngrams[0])
    return found


def nvfp4_scales(header: Header, config: ModelConfig) -> dict[str, str]:
    """The map from the scales of matrices in NVFP4, and of their inputs, to the matrices. Factors of experts that the
    model has anyway have such a name, too, and are none."""
    matrices = {name.removesuffix("weight"): name for name, each in header.tensors.items() if each.kind == "NVFP4"}
    found = {part + scale: name for part, name in matrices.items() for scale in (SCALE, f"input_{SCALE}")}
    has_factors = config.experts is not None and config.experts.scaled
    return {name: matrix for name, matrix in found.items() if not (has_factors and name.endswith(f".{EXPERT_FACTORS}"))}


def architecture_of(header: Header) -> Architecture:
    """The architecture that the header names. Raises ModelError for an unknown one."""
    name = header.values.get("general.architecture")
    if name not in ARCHITECTURES:
        raise ModelError(
            f"{header.path}: its architecture is {name!r}, known are {', '.join(sorted(ARCHITECTURES))}; "
            "fetch the model as safetensors if triforce models --families lists it"
        )
    return ARCHITECTURES[str(name)]


def notes(header: Header, dtype_bytes: int) -> list[str]:
    """Notes for the user about a model before it runs. ModelError."""
    told = [f"{header.path.name}: {note}" for note in Metadata(header).token_notes()]
    return [*told, *filter(None, [unpacked_note(header, dtype_bytes)])]


def is_unpacked(kind: str) -> bool:
    """Whether matrices in a type are unpacked while they are read."""
    return kind not in ENCODINGS and kind not in PLAIN


def unpacked_note(header: Header, dtype_bytes: int) -> str:
    """The note on matrices in types that are unpacked while they are read, "" if there are none."""
    sizes = Counter[str]()
    for tensor in header.tensors.values():
        if is_unpacked(tensor.kind):
            sizes[tensor.kind] += math.prod(tensor.shape) * dtype_bytes
    if not sizes:
        return ""
    named, total = " and ".join(sorted(sizes)), sum(sizes.values())
    return f"{header.path.name}: matrices in {named} are unpacked as they are read, to {total / 1e9:.3g} GB"


def _fields(header: Header, architecture: Architecture) -> dict[str, object]:
    """The fields of an equivalent config.json."""
    values = Metadata(header)
    values.refuse_unknown(architecture.reads)
    if TABLE not in header.tensors or len(header.tensors[TABLE].shape) != 2:
        raise ModelError(f"{header.path} has no matrix {TABLE}; a model's own file is needed, all parts of it")
    vocab_size, hidden_size = header.tensors[TABLE].shape
    if values.integer("embedding_length") != hidden_size:
        values.refuse("embedding_length", f"the columns of {TABLE}, {hidden_size}")
    heads = heads_of(values)[0] if HEADS in architecture.reads else values.alike(HEADS)
    head_dim = values.integer("attention.key_length", default=hidden_size // max(heads, 1))
    is_latent = LATENT_RANK in architecture.reads
    if not is_latent and values.integer("attention.value_length", default=head_dim) != head_dim:
        values.refuse("attention.value_length", f"the same as attention.key_length, {head_dim}")
    common: dict[str, object] = {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "num_hidden_layers": values.head_layers().start,
        "num_attention_heads": heads,
        "head_dim": head_dim,
        "max_position_embeddings": values.integer("context_length"),
        "tie_word_embeddings": HEAD not in header.tensors,
        "dtype": _dtype(header),
        "bos_token_id": values.token("bos"),
        "eos_token_id": values.ends(),
    }
    if INNER not in architecture.reads:
        common["intermediate_size"] = _inner_size(values)
    if architecture.norm_key:
        common[architecture.norm_field] = values.number(architecture.norm_key)
    if KV_HEADS not in architecture.reads:
        common["num_key_value_heads"] = values.alike(KV_HEADS, heads)
    common |= rope_settings(values, head_dim)
    own = architecture.own(values, common)
    return {**common, **own, "model_type": own.get("model_type", architecture.family)}


def _inner_size(values: Metadata) -> int:
    """The inner rows of a layer without experts. A file whose layers all have experts may leave that out."""
    of_layers, of_experts = INNER, "expert_feed_forward_length"
    is_left_out = values.data.get(of_layers, 0) == 0 and of_experts in values.data
    return values.alike(of_experts if is_left_out else of_layers)


def _dtype(header: Header) -> str:
    """The dtype in which most matrix elements are stored; bfloat16 stands for elements in blocks."""
    sizes = Counter[str]()
    for tensor in header.tensors.values():
        if len(tensor.shape) > 1:
            sizes[_DTYPES.get(tensor.kind, "bfloat16")] += math.prod(tensor.shape)
    return max(sizes, key=lambda name: sizes[name])


def _stacked(config: ModelConfig, header: Header) -> ModelConfig:
    """`config` with one tensor for each matrix of all experts, if it has some, or one for their gates and ups."""
    if config.experts is None:
        return config
    fused = any(name.endswith(FUSED_EXPERTS) for name in header.tensors)
    parts = {part: f"mlp.experts.{part}_proj" for part in ("gate", "up", "down")}
    parts |= dict.fromkeys(("gate", "up"), "mlp.experts.gate_up_proj") if fused else {}
    names = replace(config.names.experts, **parts, alternate=False, by_inputs=False)
    return replace(config, names=replace(config.names, experts=names))


def _apart(config: ModelConfig, header: Header) -> ModelConfig:
    """`config` for gates and ups in tensors of their own, where folders have them in one."""
    if not config.names.fused_gate_up or not any(_GATE.search(name) for name in header.tensors):
        return config
    default = TensorNames()
    return replace(config, names=replace(config.names, fused_gate_up="", up=default.up, down=default.down))


def _with_one(config: ModelConfig) -> ModelConfig:
    """`config` for weights to which the converter added the 1 of norms that multiply by 1 + weight. Their norms are
    fp32, so no bit of the sum is lost."""

    def own(norm: Norm) -> Norm:
        return replace(norm, plus_one=False, fp32=norm.fp32 or norm.plus_one)

    def changed(norm: Norm | None) -> Norm | None:
        return norm and own(norm)

    def attention(found: Attention) -> Attention:
        indexer = found.indexer and replace(found.indexer, norm=own(found.indexer.norm))
        return replace(found, qk_norm=changed(found.qk_norm), indexer=indexer)

    def block(found: Block) -> Block:
        return replace(
            found,
            mixer=attention(found.attention) if found.attends else found.mixer,
            before_attention=changed(found.before_attention),
            after_attention=changed(found.after_attention),
            before_feed_forward=changed(found.before_feed_forward),
            after_feed_forward=changed(found.after_feed_forward),
            streams=found.streams and replace(found.streams, norm=own(found.streams.norm)),
            ngrams=found.ngrams and replace(found.ngrams, norm=own(found.ngrams.norm)),
        )

    return replace(config.mapped(block), norm=own(config.norm))


def _with_states(config: ModelConfig, header: Header, architecture: Architecture) -> ModelConfig:
    """`config` for decays and value heads as the converter stored them. Files have queries, keys and values of all key
    heads in one tensor and the gates in another; older ones of Qwen3-Next have all four in one, as folders do. Where
    each channel decays by itself each has a tensor of its own, and outputs have the name of an attention's."""
    own = replace(config.names.recurrence, decays=architecture.decays)
    if isinstance(config.recurrence, DeltaRule) and config.recurrence.by_channel:
        own = replace(own, out=config.names.attention + config.names.out)
        return replace(config, names=replace(config.names, recurrence=own))

    def block(found: Block) -> Block:
        delta = found.mixer
        if not isinstance(delta, DeltaRule) or not architecture.tiled or delta.num_heads == delta.num_key_heads:
            return found
        return replace(found, mixer=replace(delta, tiled=0))

    is_old = any(name.endswith(JOINED_STATES) for name in header.tensors)
    parts = own.parts if is_old else (*RecurrenceNames().parts[:4], *own.parts[4:])
    names = replace(config.names, recurrence=replace(own, parts=parts))
    return replace(config.mapped(block), names=names)
