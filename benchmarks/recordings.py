"""Recordings of the experts that the rows of a text choose: routing.py writes them, split.py plays them."""

from __future__ import annotations

import offload  # noqa: F401  # isort: skip  # before torch, which reads its threads' wait policy once

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from offload.config.networks import Experts, FeedForward


@dataclass(frozen=True)
class Recording:
    """The experts that a text's rows choose. chosen: integers [rows, layers, used]. experts: of a layer, whose size is
    not recorded."""

    chosen: Tensor
    experts: Experts


def save(path: Path, chosen: Mapping[str, Tensor], num_experts: int) -> None:
    """Write what the rows of each text choose, integers [rows, layers, used], by the text's name."""
    dtype = torch.uint8 if num_experts <= 256 else torch.int16
    tensors = {name: each.to(dtype).contiguous() for name, each in chosen.items()}
    save_file(tensors, path, metadata={"experts": str(num_experts)})


def load(path: Path) -> dict[str, Recording]:
    """The recording of each text."""
    with safe_open(path, "pt") as file:
        count = int(file.metadata()["experts"])
        tensors = {name: file.get_tensor(name).to(torch.int64) for name in file.keys()}  # noqa: SIM118
    return {
        name: Recording(chosen, Experts(FeedForward(32), count, chosen.shape[2])) for name, chosen in tensors.items()
    }
