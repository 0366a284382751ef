"""A model whose checkpoint stores matrices in blocks: which ones, and in which."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from offload.config.block import Block, Encodings, TensorNames
from offload.config.model import ModelConfig


def encoded(config: ModelConfig, encoding_of: Callable[[str], str]) -> ModelConfig:
    """The same model, stored so. encoding_of: the encoding of the matrix with that name, as
    `weights.tensors.expected_tensors` has it, "" for plain numbers."""
    names = config.names

    def of_layer(index: int, block: Block) -> Block:
        layer = f"{names.body}layers.{index}."
        return replace(block, encodings=_of_layer(block, names, lambda name: encoding_of(layer + name)))

    blocks = tuple(of_layer(index, block) for index, block in enumerate(config.blocks))
    table = encoding_of(names.embeddings)
    head = table if config.tie_embeddings else encoding_of(names.head)
    return replace(config, blocks=blocks, table_encoding=table, head_encoding=head)


def _of_layer(block: Block, names: TensorNames, encoding_of: Callable[[str], str]) -> Encodings:
    """encoding_of: of the names within the layer."""
    attention, inner = block.attention, block.feed_forward
    letters = ["q", "k", *([] if attention.values_are_keys else ["v"]), *(["gate"] if attention.gate else [])]
    qkv = [names.fused_qkv or f"self_attn.{letter}_proj" for letter in letters]
    if attention.gate and names.fused_qkv:
        qkv[-1] = "self_attn.gate_proj"
    gate_up = [names.fused_gate_up or name for name in (["mlp.gate_proj"] if inner.gated else []) + [names.up]]

    def of(name: str) -> str:
        return encoding_of(f"{name}.weight")

    found = Encodings(tuple(map(of, qkv)), of("self_attn.o_proj"), tuple(map(of, gate_up)), of(names.down))
    return Encodings() if not any((*found.qkv, found.o, *found.gate_up, found.down)) else found
