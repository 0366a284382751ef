"""The inputs of layers beside their rows: of each token a row of a table, and a projection of its embedding."""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt

from torch import Tensor

from offload.config.model import ModelConfig
from offload.weights.layer_inputs import LayerInputWeights
from offload.weights.linear import Linear


class LayerInputs:
    """Inputs [T, size] of each layer, see `LayerTable`: for few rows of all layers at once, in a prefill of one layer
    and one block, so that none are kept. Each step rounds to the dtype."""

    def __init__(self, config: ModelConfig, weights: LayerInputWeights) -> None:
        own = weights.described
        self.weights, self._size = weights, own.size
        self._of_row, self._of_projection, self._of_sum = sqrt(own.size), 1 / sqrt(config.hidden_size), 1 / sqrt(2)

    def of_all(self, rows: Tensor, embedded: Tensor, multiply: Callable[[Tensor, Linear], Tensor]) -> Tensor:
        """rows: of the table, [T, L * size]. embedded: the tokens' embeddings [T, hidden] -> [L, T, size]. multiply:
        the product of rows with a matrix."""
        projected = multiply(embedded, self.weights.projection)
        joined = self._joined(*(each.unflatten(1, (-1, self._size)) for each in (rows, projected)))
        return joined.transpose(0, 1).contiguous()

    def of_layer(self, layer: int, tokens: Tensor, embedded: Tensor) -> Tensor:
        """tokens: int64 [T]. embedded: their embeddings [T, hidden] -> [T, size] of one layer."""
        projected = self.weights.projection_of(layer)(embedded)
        return self._joined(self.weights.rows(tokens, layer), projected)

    def _joined(self, rows: Tensor, projected: Tensor) -> Tensor:
        """[..., size] both -> [..., size]."""
        normed = self.weights.norm(projected * self._of_projection)
        return (normed + rows * self._of_row) * self._of_sum
