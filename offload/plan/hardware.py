"""The devices and memory of this machine. Reads them, and decides nothing."""

from __future__ import annotations

from dataclasses import dataclass

from offload.errors import UsageError
from offload.plan.machine import free_host_bytes, machine_name
from offload.plan.rates import RTX_4090, TWO_CORES, Rates, load_rates

__all__ = ["RTX_4090", "TWO_CORES", "Hardware", "Rates", "probe", "rates_key"]


@dataclass(frozen=True)
class Hardware:
    """device: "cpu" or "cuda:N". Bytes are free ones, now. On a CPU the device's memory is the host's."""

    device: str
    device_name: str
    device_free_bytes: int
    host_free_bytes: int
    fast_bf16: bool
    rates: Rates = TWO_CORES
    num_devices: int = 1  # alike, each with a link of its own; bytes and rates are of one

    @property
    def is_cpu(self) -> bool:
        return self.device == "cpu"


def probe(device: str) -> Hardware:
    """The machine as seen for `device`: "auto" (a GPU where there is one), "cpu", "cuda" or "cuda:N"."""
    import torch

    name = _resolve(device)
    host_free = free_host_bytes()
    rates = load_rates(machine_name(), rates_key(name))
    if name == "cpu":
        mkldnn = torch.backends.mkldnn.is_available()  # not in every build
        fast_bf16 = mkldnn and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
        return Hardware(name, _cpu_name(), host_free, host_free, fast_bf16, rates or TWO_CORES)
    properties = torch.cuda.get_device_properties(name)
    free, _ = torch.cuda.mem_get_info(name)
    return Hardware(name, properties.name, free, host_free, properties.major >= 8, rates or RTX_4090)


def rates_key(device: str) -> str:
    """The key under which the rates of "cpu" or "cuda:N" are stored.

    A card by its own number: N depends on which are visible, and two alike may sit in unlike slots.
    """
    import torch

    if device == "cpu":
        return _cpu_name()
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name} {properties.uuid}"


def _cpu_name() -> str:
    import torch

    return f"CPU, {torch.get_num_threads()} threads"


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
