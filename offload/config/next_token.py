"""A next-token head (multi-token prediction, MTP): one layer that drafts for its model, whose embeddings and head it
shares. Its rows join the embedding of a token with the model's hidden row of the token before (model/next_token.py)."""

from __future__ import annotations

from dataclasses import replace

from offload.config.matrices import Matrix
from offload.config.model import ModelConfig

DRAFTED_TOKENS = 1 << 15  # first ones of a vocabulary, which a head drafts: merges of pairs are in order of frequency


def head_of(model: ModelConfig) -> ModelConfig | None:
    """The config of a model's next-token head by itself; None without one. Of a large vocabulary it drafts the first
    tokens only: its model's head would take more time than all else."""
    if model.next_token is None:
        return None
    drafted = DRAFTED_TOKENS if model.vocab_size >= 2 * DRAFTED_TOKENS else model.vocab_size
    names = replace(model.names, experts=model.names.next_token.experts or model.names.experts)
    own = {"blocks": (model.next_token,), "next_token": None, "last_mean_encodings": ("", "")}  # which is read unpacked
    return replace(model, vocab_size=drafted, names=names, is_head=True, **own)  # type: ignore[arg-type]


def join_of(head: ModelConfig) -> Matrix:
    """The matrix that joins an embedding and a hidden row."""
    return Matrix(head.hidden_size, 2 * head.hidden_size)


def rest_bytes(config: ModelConfig, dtype_bytes: int) -> int:
    """Bytes of a model's weights outside its layers, without a layer table, which is read from its file; of a
    next-token head those that it does not share with its model."""
    if not config.is_head:
        others = config.layers_weight_bytes(dtype_bytes) + config.layer_table_bytes(dtype_bytes)
        return config.weight_bytes(dtype_bytes) - others
    norms = (config.hidden_size + config.row_size + config.last_norm[1]) * config.norm.itemsize(dtype_bytes)
    mean = sum(each.nbytes(dtype_bytes) for each in config.of_last_mean.values())
    return join_of(config).nbytes(dtype_bytes) + norms + mean


def own_bytes(config: ModelConfig, dtype_bytes: int) -> int:
    """Bytes of all weights of a model; of a next-token head those that it does not share with its model."""
    return config.layers_weight_bytes(dtype_bytes) + rest_bytes(config, dtype_bytes)
