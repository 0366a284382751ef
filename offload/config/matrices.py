"""The weight matrices of a layer, as products use them and as a checkpoint stores them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from offload.config.block import Block
from offload.formats.encodings import ENCODINGS

OPERATORS = ("qkv", "o", "gate_up", "down")
BESIDE = ("states_in", "states_out")  # further ones, of a layer with a recurrence beside attention
LATENTS = ("to_latent", "from_latent")  # of a layer whose experts read latents
ALIGNMENT = 64  # bytes, of each tensor within a layer


@dataclass(frozen=True)
class Matrix:
    """A weight matrix [outputs, inputs], in blocks of `encoding`, or as plain numbers if that is ""."""

    outputs: int
    inputs: int
    encoding: str = ""

    def nbytes(self, dtype_bytes: int) -> int:
        """Bytes of the matrix: plain numbers take `dtype_bytes` each, blocks are padded to whole units of ALIGNMENT."""
        if not self.encoding:
            return self.outputs * self.inputs * dtype_bytes
        return -(-self.outputs * ENCODINGS[self.encoding].row_bytes(self.inputs) // ALIGNMENT) * ALIGNMENT


def operators(block: Block) -> tuple[str, ...]:
    """The operators of a layer."""
    return OPERATORS + BESIDE * (block.beside is not None) + LATENTS * block.has_latents


def layer_parts(block: Block, hidden_size: int) -> dict[str, tuple[Matrix, ...]]:
    """The parts of each of `operators` from top to bottom, ordered as in `Encodings`."""
    mixer, inner, stored = block.mixer, block.feed_forward, block.encodings
    shapes = {
        "qkv": (mixer.parts, hidden_size, stored.qkv),
        "o": ((hidden_size,), mixer.out_size, (stored.o,)),
        "gate_up": ((inner.size,) * (1 + inner.gated), hidden_size, stored.gate_up),
        "down": ((hidden_size,), inner.size, (stored.down,)),
    }
    if block.beside is not None:
        shapes["states_in"] = block.beside.parts, hidden_size, stored.beside[:-1]
        shapes["states_out"] = (hidden_size,), block.beside.out_size, stored.beside[-1:]
    if block.experts is not None and block.has_latents:
        latent = block.experts.latent
        shapes["to_latent"] = (latent,), hidden_size, stored.latents[:1]
        shapes["from_latent"] = (hidden_size,), latent, stored.latents[1:]
    return {
        name: tuple(
            Matrix(rows, inputs, kind) for rows, kind in zip(outputs, kinds or [""] * len(outputs), strict=True)
        )
        for name, (outputs, inputs, kinds) in shapes.items()
    }


def expert_matrices(block: Block, hidden_size: int) -> dict[str, Matrix]:
    """The matrices of each of the layer's experts: its gate, if it has one, up and down; empty without experts."""
    if block.experts is None:
        return {}
    network, row = block.experts.network, block.experts.row_size(hidden_size)
    shapes = {"gate": (network.size, row), "up": (network.size, row), "down": (row, network.size)}
    names = tuple(shapes) if network.gated else ("up", "down")
    kinds = block.encodings.experts or ("",) * len(names)
    return {name: Matrix(*shapes[name], kind) for name, kind in zip(names, kinds, strict=True)}


def expert_vectors(block: Block, hidden_size: int) -> dict[str, int]:
    """The sizes of the biases of each of the layer's experts, by name: of gate and up, if it has a gate, and down."""
    if block.experts is None or not block.experts.network.bias:
        return {}
    network = block.experts.network
    return {"gate_up.bias": (1 + network.gated) * network.size, "down.bias": block.experts.row_size(hidden_size)}


def expert_parameters(block: Block, hidden_size: int) -> int:
    """Parameters of one of the layer's experts; 0 without any."""
    matrices = expert_matrices(block, hidden_size).values()
    return sum(each.outputs * each.inputs for each in matrices) + sum(expert_vectors(block, hidden_size).values())


def expert_bytes(block: Block, hidden_size: int, dtype_bytes: int) -> int:
    """Bytes of one of the layer's experts, each of its tensors in whole units of ALIGNMENT; 0 without any."""
    sizes = [each.nbytes(dtype_bytes) for each in expert_matrices(block, hidden_size).values()]
    sizes += [size * dtype_bytes for size in expert_vectors(block, hidden_size).values()]
    return sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)


def layer_matrices(block: Block, hidden_size: int) -> dict[str, tuple[Matrix, ...]]:
    """The matrices of each of `operators`: its parts, with neighbours of one encoding joined."""
    return {name: _joined(parts) for name, parts in layer_parts(block, hidden_size).items()}


def _joined(parts: Iterable[Matrix]) -> tuple[Matrix, ...]:
    found: list[Matrix] = []
    for part in parts:
        if found and found[-1].encoding == part.encoding:
            found[-1] = replace(part, outputs=found[-1].outputs + part.outputs)
        else:
            found.append(part)
    return tuple(found)
