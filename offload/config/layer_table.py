"""A table with a row for each token, of numbers for each layer: the inputs of layers beside their rows (Gemma 4's
embeddings per layer)."""

from __future__ import annotations

from dataclasses import dataclass

from offload.config.norm import Norm


@dataclass(frozen=True)
class LayerTable:
    """The table: a row has `size` numbers for each layer. The inputs of a token's layers are the sum, divided by the
    root of 2, of its row times the root of `size` and of the projection of its embedding divided by the root of the
    hidden size, normed by `norm` for each layer by itself. encoding, projection_encoding: of both matrices, see
    `Encodings`."""

    size: int
    norm: Norm
    encoding: str = ""
    projection_encoding: str = ""
