"""The devices and memory of this machine. Reads them, and decides nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace

from offload.errors import UsageError
from offload.plan.machine import free_host_bytes, machine_name
from offload.plan.rates import RTX_4090, TWO_CORES, Rates, load_rates
from offload.plan.torchrun import Launched

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
    num_hosts: int = 1  # machines that have as many of them each, and as much memory

    @property
    def is_cpu(self) -> bool:
        return self.device == "cpu"


def probe(device: str, gpus: int | None = 1) -> Hardware:
    """The machine as seen for `device`: "auto" (a GPU where there is one), "cpu", "cuda" or "cuda:N".

    gpus: devices that are used together, the first of them being `device`; on a CPU so many processes share its cores.
    None: all GPUs from there on, or one CPU. torchrun, where it started this process, says how many. Raises UsageError.
    """
    found = _probe(device)
    launched = Launched.look()
    if launched is not None:
        if gpus not in (None, 1, launched.size):
            raise UsageError(f"gpus is {gpus} and torchrun started {launched.size} ranks; leave out --gpus")
        count, local, hosts = launched.size, launched.local_size, launched.num_hosts
    else:
        count = local = _num_devices(found) if gpus is None else gpus
        hosts = 1
    if not found.is_cpu and local > _num_devices(found):
        raise UsageError(f"gpus is {local} and torch sees {_num_devices(found)} from {found.device} on")
    rates = found.rates.shared(local) if found.is_cpu else found.rates
    return replace(found, num_devices=count, num_hosts=hosts, rates=rates)


def _num_devices(found: Hardware) -> int:
    """GPUs from that of `found` on, or one CPU."""
    import torch

    return 1 if found.is_cpu else torch.cuda.device_count() - int(found.device.partition(":")[2])


def _probe(device: str) -> Hardware:
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
