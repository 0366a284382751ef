"""The layout of an expert in a place of a bank, and banks over memory of such places."""

from __future__ import annotations

import torch
from torch import Tensor

from offload.config.matrices import expert_matrices, expert_vectors
from offload.config.model import ModelConfig
from offload.formats.encodings import ENCODINGS
from offload.formats.stored import StoredMatrix
from offload.kernels.experts import Bank, ExpertWeights, Matrix
from offload.weights.layout import LayerLayout, matrix_name

_MATRICES = ("gate", "up", "down")


def layout_of(config: ModelConfig, dtype: torch.dtype) -> LayerLayout:
    """The layout of one expert of the layer `config.block` in a flat buffer."""
    tensors: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    stored = dict[str, str]()
    for name, part in expert_matrices(config.block, config.hidden_size).items():
        view = matrix_name(name, 0, part.encoding)
        tensors[view] = (part.outputs, part.inputs), dtype
        if part.encoding:
            stored[view] = part.encoding
            tensors[view] = (part.outputs, ENCODINGS[part.encoding].row_bytes(part.inputs)), torch.uint8
    tensors |= {name: ((size,), dtype) for name, size in expert_vectors(config.block, config.hidden_size).items()}
    packed = LayerLayout.pack(tensors)
    return LayerLayout(packed.views, packed.num_bytes, stored=stored)


def bank_of(layout: LayerLayout, content: Tensor) -> Bank:
    """The places of `content`, uint8 [places, layout.num_bytes]."""
    return Bank([_bound(layout, each) for each in content], content)


def _bound(layout: LayerLayout, buffer: Tensor) -> ExpertWeights:
    tensors = layout.tensors(buffer)

    def matrix(name: str) -> Matrix | None:
        if (kind := layout.stored.get(f"{name}.stored")) is not None:
            return StoredMatrix(tensors[f"{name}.stored"], ENCODINGS[kind])
        return tensors.get(f"{name}.weight")

    gate, up, down = map(matrix, _MATRICES)
    assert up is not None
    assert down is not None
    return ExpertWeights(gate, up, down, tensors.get("gate_up.bias"), tensors.get("down.bias"))
