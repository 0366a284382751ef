"""The weights of a draft without a cache, beside those that every model has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from offload.config.assistant import ORDER
from offload.config.model import ModelConfig
from offload.errors import ModelError
from offload.transfer.memory import Memory
from offload.weights.checkpoint import Checkpoint
from offload.weights.linear import Linear
from offload.weights.loader import Weights, load_weights

_PURPOSE = "draft embeddings"


@dataclass(frozen=True)
class AssistantWeights:
    """into: [hidden, 2 * target's hidden], out: [target's hidden, hidden]. clusters: their vectors [C, hidden] and the
    tokens of each, int64 [C, V / C]; None where all tokens have logits."""

    common: Weights
    into: Linear
    out: Linear
    clusters: tuple[Linear, Tensor] | None


def load_assistant(
    checkpoint: Checkpoint,
    config: ModelConfig,
    memory: Memory,
    *,
    dtype: torch.dtype,
    on_bytes: Callable[[int], None],
) -> AssistantWeights:
    """Load a checked checkpoint onto the device. Raises ModelError, DoesNotFit."""
    assert config.assistant is not None
    common = load_weights(checkpoint, config, memory, dtype=dtype, name="draft", on_bytes=on_bytes)
    made = list[Linear]()
    for name, each in config.assistant.matrices(config.hidden_size).items():
        block = memory.allocate((each.outputs, each.inputs), dtype, tier="device", purpose=_PURPOSE)
        checkpoint.read_into(name, block)
        on_bytes(block.nbytes)
        made.append(Linear(block, None))
    into, out, *clusters = made
    if not clusters:
        return AssistantWeights(common, into, out, None)
    order = checkpoint.integers(ORDER)
    if not torch.equal(order.sort().values, torch.arange(config.vocab_size)):
        raise ModelError(f"{checkpoint.folder}: {ORDER} is no order of all {config.vocab_size} tokens; fetch it again")
    tokens = order.view(config.assistant.clusters, -1).to(memory.device)
    return AssistantWeights(common, into, out, (clusters[0], tokens))
