"""What this machine has. Looks, and decides nothing."""

from __future__ import annotations

from dataclasses import dataclass

import psutil

from offload.errors import UsageError


@dataclass(frozen=True)
class Rates:
    """How fast one device and its way to the host are: bytes (1e9 a GB) and operations per second.

    to_device, to_host: copies of pinned memory, each direction alone. flops: large 16-bit matrix products.
    """

    to_device: float
    to_host: float
    device_read: float
    host_read: float
    flops: float
    measured: bool = False  # by `triforce doctor` on this machine; else typical of its kind


TWO_CORES = Rates(to_device=8e9, to_host=8e9, device_read=18e9, host_read=18e9, flops=0.18e12)
RTX_4090 = Rates(to_device=25e9, to_host=25e9, device_read=1.0e12, host_read=60e9, flops=160e12)


@dataclass(frozen=True)
class Hardware:
    """device: "cpu" or "cuda:N". Bytes are free ones, now. On a CPU the device's memory is the host's."""

    device: str
    device_name: str
    device_free_bytes: int
    host_free_bytes: int
    fast_bf16: bool
    rates: Rates = TWO_CORES

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
