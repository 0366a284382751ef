"""The encodings of a model's matrices where its checkpoint stores some in blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from offload.config import next_token as heads
from offload.config.block import Attention, Block, Encodings, TensorNames
from offload.config.matrices import Matrix, layer_parts
from offload.config.model import ModelConfig
from offload.errors import ModelError


def encoded(config: ModelConfig, encoding_of: Callable[[str], str]) -> ModelConfig:
    """`config` with the encodings of its matrices. encoding_of: maps a matrix name, as in
    `weights.tensors.expected_tensors`, to its encoding, "" for plain numbers."""
    names = config.names

    def of_layer(index: int, block: Block) -> Block:
        layer = f"{names.body}layers.{index}."
        return replace(block, encodings=_of_layer(block, names, lambda name: encoding_of(layer + name)))

    blocks = tuple(of_layer(index, block) for index, block in enumerate(config.blocks))
    head_layer = f"{heads.BODY}layers.0."
    next_token = config.next_token and replace(
        config.next_token,
        encodings=_of_layer(config.next_token, names, lambda name: encoding_of(head_layer + name)),
    )
    table = encoding_of(names.embeddings)
    head = table if config.tie_embeddings else encoding_of(names.head)
    return replace(config, blocks=blocks, table_encoding=table, head_encoding=head, next_token=next_token)


def matrices(config: ModelConfig) -> dict[str, Matrix]:
    """All matrices of a checkpoint of `config`, by the names that `encoded` asks for; of a next-token head its own."""
    found = dict[str, Matrix]()
    if not config.is_head:
        found |= {config.names.embeddings: config.table}
        found |= {} if config.tie_embeddings else {config.names.head: config.head}
    for index, block in enumerate(config.blocks):
        layer, names = f"{config.names.body}layers.{index}.", _MatrixNames.of(block, config.names)
        parts = layer_parts(block, config.hidden_size)
        for operator, own in names.of_operators().items():
            for shares, part in zip(own, parts[operator], strict=True):
                for name in shares:
                    before = found.get(layer + name)  # parts with the same name are one matrix
                    outputs = part.outputs // len(shares) + (before.outputs if before else 0)
                    found[layer + name] = replace(part, outputs=outputs)
    return found


@dataclass(frozen=True)
class _MatrixNames:
    """The names of a layer's matrices within the layer, ordered as in `Encodings`: of each part those that hold equal
    shares of its rows. A fused matrix occurs once for each of its parts."""

    qkv: tuple[tuple[str, ...], ...]
    o: tuple[str, ...]
    gate_up: tuple[tuple[str, ...], ...]
    down: tuple[str, ...]

    @classmethod
    def of(cls, block: Block, names: TensorNames) -> _MatrixNames:
        out = "self_attn.o_proj" if block.attends else names.delta.out
        qkv = _attention(block.attention, names) if block.attends else [*names.delta.parts]
        network = [tuple(f"{name}.weight" for name in part) for part in names.of_network(block.feed_forward)]
        return cls(tuple((f"{name}.weight",) for name in qkv), (f"{out}.weight",), tuple(network[:-1]), network[-1])

    def of_operators(self) -> dict[str, tuple[tuple[str, ...], ...]]:
        """The same for each of OPERATORS."""
        return {"qkv": self.qkv, "o": (self.o,), "gate_up": self.gate_up, "down": (self.down,)}


def _attention(attention: Attention, names: TensorNames) -> list[str]:
    """The names of the matrices of an attention's projections."""
    letters = ["q", "k"] if attention.values_are_keys else ["q", "k", "v"]
    return [names.fused_qkv or f"self_attn.{letter}_proj" for letter in letters] + [names.gate] * attention.gate


def _of_layer(block: Block, names: TensorNames, encoding_of: Callable[[str], str]) -> Encodings:
    """The encodings of one layer. encoding_of: takes names within the layer. Raises ModelError if
    experts differ."""

    def of_part(shares: tuple[str, ...]) -> str:
        found = tuple(dict.fromkeys(map(encoding_of, dict.fromkeys(shares))))
        if len(found) > 1:
            kinds = ", ".join(kind or "plain numbers" for kind in found)
            raise ModelError(f"{shares[0]} and its like in the layer's other experts are in {kinds}; all must be alike")
        return found[0]

    stored = _MatrixNames.of(block, names)
    found = Encodings(
        tuple(map(of_part, stored.qkv)), of_part(stored.o), tuple(map(of_part, stored.gate_up)), of_part(stored.down)
    )
    return Encodings() if not any((*found.qkv, found.o, *found.gate_up, found.down)) else found
