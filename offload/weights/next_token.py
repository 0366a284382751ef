"""The weights of a next-token head (MTP), which are in its model's checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from offload.config.model import ModelConfig
from offload.config.next_token import join_of
from offload.kernels.experts import ExpertHomes
from offload.kernels.norms import NormWeights, dtype_of
from offload.transfer.disk import Disk
from offload.transfer.link import Link
from offload.transfer.memory import Memory
from offload.weights.checkpoint import Checkpoint, check_head
from offload.weights.experts import load_experts
from offload.weights.layout import LayerLayout, LayerWeights
from offload.weights.linear import Linear
from offload.weights.loader import load_layer
from offload.weights.streams import StreamWeights

PURPOSE = "draft layers"


@dataclass(frozen=True)
class NextTokenWeights:
    """The weights of a next-token head. experts: of its layer, see `Weights`. join: [hidden, 2 * hidden], of an
    embedding and a hidden row, or each stream of one, which have norms of their own before it. norm: of the output, or
    the mean of its streams."""

    layer: LayerWeights
    nbytes: int
    experts: tuple[ExpertHomes | None, ...]
    join: Linear
    embedding_norm: NormWeights
    hidden_norm: NormWeights
    norm: NormWeights | StreamWeights


def load_next_token(
    checkpoint: Checkpoint,
    config: ModelConfig,
    memory: Memory,
    *,
    dtype: torch.dtype,
    link: Link | None,
    expert_slots: int,
    expert_places: int = 0,
    disk: Disk | None = None,
    on_bytes: Callable[[int], None],
) -> NextTokenWeights:
    """Load the head from its model's checkpoint onto the device, but for its experts if `expert_slots` is not 0, see
    `load_weights`. config: of the head alone. Raises ModelError where tensors are missing or have other shapes,
    DoesNotFit."""
    check_head(checkpoint, config)
    names = config.names.next_token

    def block(shape: tuple[int, ...], kind: torch.dtype = dtype) -> Tensor:
        return memory.allocate(shape, kind, tier="device", purpose=PURPOSE)

    def read(name: str, into: Tensor) -> Tensor:
        checkpoint.read_into(f"{name}.weight", into)
        on_bytes(into.nbytes)
        return into

    def norm(name: str, size: int) -> NormWeights:
        weight = read(name, block((size,), dtype_of(config.norm, dtype)))
        return NormWeights(config.norm, weight.add_(1) if config.norm.plus_one else weight)

    def joined() -> Linear:
        matrix = block((join.outputs, join.inputs))
        for name, columns in zip(names.joins, matrix.chunk(len(names.joins), 1), strict=True):
            read(name, columns)
        return Linear(matrix, None)

    def last() -> NormWeights | StreamWeights:
        own = norm(*config.last_norm)
        if config.streams is None:
            return own
        of_mean = ((name.removesuffix(".weight"), each) for name, each in config.of_last_mean.items())
        down, up = (Linear(read(name, block((each.outputs, each.inputs))), None) for name, each in of_mean)
        return StreamWeights(config.streams, own, down, up)

    layout, join = LayerLayout.of(config, dtype), join_of(config)
    buffer = memory.allocate((layout.num_bytes,), torch.uint8, tier="device", purpose=PURPOSE)
    load_layer(checkpoint, config, layout, 0, buffer)
    on_bytes(buffer.nbytes)
    experts = load_experts(
        checkpoint,
        config,
        memory,
        dtype=dtype,
        name="draft",
        link=link,
        slots=expert_slots,
        places=expert_places,
        disk=disk,
        on_bytes=on_bytes,
    )
    return NextTokenWeights(
        layout.bind(buffer),
        layout.num_bytes,
        experts,
        joined(),
        norm(names.embedding_norm, config.hidden_size),
        norm(names.hidden_norm, config.row_size),
        last(),
    )
