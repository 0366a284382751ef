"""From a model folder to a decoder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from offload.model.decoder import Decoder
from offload.plan.config import ModelConfig
from offload.transfer.checkpoint import Checkpoint, check_model
from offload.transfer.link import Link
from offload.transfer.memory import Memory
from offload.transfer.weights import load_weights


def load_decoder(
    folder: Path,
    config: ModelConfig,
    memory: Memory,
    *,
    dtype: torch.dtype,
    name: str,
    link: Link | None,
    num_resident: int = 0,
    on_bytes: Callable[[int], None] = lambda num_bytes: None,
) -> Decoder:
    """Check the checkpoint in `folder` against `config` and read it to its places: with a link, all but the first
    `num_resident` layers to the host.

    `on_bytes` hears of each piece as it arrives. Raises ModelError.
    """
    with Checkpoint.open(folder) as checkpoint:
        check_model(checkpoint, config)
        weights = load_weights(
            checkpoint, config, memory, dtype=dtype, name=name, link=link, num_resident=num_resident, on_bytes=on_bytes
        )
    return Decoder(config, weights)
