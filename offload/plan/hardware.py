"""What this machine has. Looks, and decides nothing."""

from __future__ import annotations

from dataclasses import dataclass

import psutil

from offload.errors import UsageError


@dataclass(frozen=True)
class Hardware:
    """device: "cpu" or "cuda:N". Bytes are free ones, now. On a CPU the device's memory is the host's."""

    device: str
    device_name: str
    device_free_bytes: int
    host_free_bytes: int
    fast_bf16: bool

    @property
    def is_cpu(self) -> bool:
        return self.device == "cpu"


def probe(device: str) -> Hardware:
    """The machine as seen for `device`: "auto" (a GPU where there is one), "cpu", "cuda" or "cuda:N"."""
    import torch

    name = _resolve(device)
    host_free = psutil.virtual_memory().available
    if name == "cpu":
        fast_bf16 = bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
        return Hardware(name, f"CPU, {torch.get_num_threads()} threads", host_free, host_free, fast_bf16)
    properties = torch.cuda.get_device_properties(name)
    free, _ = torch.cuda.mem_get_info(name)
    return Hardware(name, properties.name, free, host_free, properties.major >= 8)


def _resolve(device: str) -> str:
    import torch

    count = torch.cuda.device_count()
    if device == "auto":
        return "cuda:0" if count else "cpu"
    if device == "cpu":
        return device
    kind, _, number = device.partition(":")
    if kind != "cuda" or (number and not number.isdigit()):
        raise UsageError(f"device is {device!r}, it must be auto, cpu, cuda or cuda:N")
    if int(number or 0) >= count:
        raise UsageError(f"device {device} is asked for and torch sees {count} CUDA devices; try --device cpu")
    return f"cuda:{int(number or 0)}"
