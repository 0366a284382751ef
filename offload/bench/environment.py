"""The environment of a measurement, machine and versions, for records that are compared with later ones."""

from __future__ import annotations

import platform
from typing import Any

import torch
import transformers

from offload.machine import look


def environment() -> dict[str, Any]:
    """Hardware and versions, ready for JSON."""
    machine = look()
    return {
        "cpu": machine.processor,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "threads": torch.get_num_threads(),
        "memory_bytes": machine.host_bytes,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
