"""The matrices of a layer, as they are multiplied with and as a checkpoint stores them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from offload.config.block import Block
from offload.formats.layout import encoding

OPERATORS = ("qkv", "o", "gate_up", "down")
ALIGNMENT = 64  # bytes, of each tensor among a layer's


@dataclass(frozen=True)
class Matrix:
    """[outputs, inputs], in blocks of `encoding` or, where that is "", as plain numbers."""

    outputs: int
    inputs: int
    encoding: str = ""

    def nbytes(self, dtype_bytes: int) -> int:
        """With plain numbers of `dtype_bytes`; in blocks whole units of ALIGNMENT."""
        if not self.encoding:
            return self.outputs * self.inputs * dtype_bytes
        return -(-self.outputs * encoding(self.encoding).row_bytes(self.inputs) // ALIGNMENT) * ALIGNMENT


def layer_matrices(block: Block, hidden_size: int) -> dict[str, tuple[Matrix, ...]]:
    """Of each of OPERATORS, its parts from top to bottom. Neighbours that are stored alike are one."""
    attention, inner, stored = block.attention, block.feed_forward, block.encodings
    inputs = {"qkv": hidden_size, "o": attention.q_size, "gate_up": hidden_size, "down": inner.size}
    outputs = {
        "qkv": attention.parts,
        "o": (hidden_size,),
        "gate_up": (inner.size,) * (1 + inner.gated),
        "down": (hidden_size,),
    }
    encodings = {"qkv": stored.qkv, "o": (stored.o,), "gate_up": stored.gate_up, "down": (stored.down,)}
    return {
        name: _joined(
            Matrix(rows, inputs[name], kind)
            for rows, kind in zip(outputs[name], encodings[name] or ("",) * len(outputs[name]), strict=True)
        )
        for name in OPERATORS
    }


def _joined(parts: Iterable[Matrix]) -> tuple[Matrix, ...]:
    found: list[Matrix] = []
    for part in parts:
        if found and found[-1].encoding == part.encoding:
            found[-1] = replace(part, outputs=found[-1].outputs + part.outputs)
        else:
            found.append(part)
    return tuple(found)
