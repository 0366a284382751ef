"""The devices and memory of this machine, as they are probed. Nothing is decided here."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from offload.errors import UsageError
from offload.machine import (
    KERNELS,
    cpu_features,
    free_gpu_bytes,
    free_host_bytes,
    gpu_reads_host,
    has_native_kernels,
    in_wsl,
    installed_version,
    machine_name,
    pcie,
)
from offload.speed.rates import DISK_READ, RTX_4090, TWO_CORES, Rates, load_rates, typical

__all__ = ["RTX_4090", "TWO_CORES", "Hardware", "Rates", "probe", "rates_key"]

_COPY_SHARE = 25 / 31.5  # of a PCIe link's nominal rate, reached by copies
_CONTEXT_BYTES = 512 * 2**20  # of GPU memory, taken by CUDA for each process
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")  # torchrun's variables


@dataclass(frozen=True)
class Hardware:
    """The devices and memory that a plan may use. device: "cpu" or "cuda:N". Bytes are the currently free ones. On a
    CPU the device's memory is the host's. has_kernels: whether a GPU's kernels can be compiled here; the CPU's are not
    meant. reads_host: whether they read pinned memory themselves. packs: whether the CPU's kernels were built. in_wsl:
    see machine.py; a GPU's plan can pin little there.
    disk_read: bytes per second of direct reads of the model's file; disk_measured: else typical."""

    device: str
    device_name: str
    device_free_bytes: int
    host_free_bytes: int
    fast_bf16: bool
    rates: Rates = TWO_CORES
    num_devices: int = 1  # each with a link of its own; bytes and rates are the least of all devices
    num_hosts: int = 1  # machines, with the same number of devices and the same memory each
    has_kernels: bool = True
    reads_host: bool = True
    packs: bool = True
    in_wsl: bool = False
    disk_read: float = DISK_READ
    disk_measured: bool = False

    @property
    def is_cpu(self) -> bool:
        return self.device == "cpu"

    @property
    def ranks_per_host(self) -> int:
        """Devices that share one host's memory."""
        return -(-self.num_devices // self.num_hosts)

    @property
    def link_rate(self) -> float:
        """Bytes per second to each device while all are busy: GPUs of one host share the rate of its memory. The
        `rates` of a CPU's ranks are shared ones already."""
        each, number = self.rates.to_device, self.ranks_per_host
        together = self.rates.links
        if together is None and number > 1:
            together = self.rates.host_read
        return each if together is None or self.is_cpu else min(each, together / number)

    def with_disk(self, rate: float | None) -> Hardware:
        """This hardware with the measured rate of the disk, if there is one."""
        return self if rate is None else replace(self, disk_read=rate, disk_measured=True)


@dataclass(frozen=True)
class Launched:
    """The environment that torchrun gives a process: one rank of `size`, on a machine with `local_size` ranks."""

    rank: int
    size: int
    local_rank: int
    local_size: int

    @classmethod
    def look(cls) -> Launched | None:
        """The environment of this process; None if torchrun did not start it. Raises UsageError if the variables are
        invalid."""
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            return None
        try:
            return cls(*(int(os.environ[name]) for name in _TORCHRUN))
        except (KeyError, ValueError) as error:
            raise UsageError(f"torchrun's variables are incomplete ({error}); start all ranks by torchrun") from error

    @property
    def num_hosts(self) -> int:
        """The number of machines, which have the same number of ranks each."""
        return -(-self.size // self.local_size)


def probe(device: str, gpus: int | None = 1) -> Hardware:
    """The hardware for `device`: "auto" (a GPU if there is one), "cpu", "cuda" or "cuda:N".

    gpus: the number of devices used together, from `device` on; on a CPU, the number of processes that share its cores.
    None: all GPUs from `device` on, or one CPU. Under torchrun the number is torchrun's. Raises UsageError.
    """
    name, launched = _resolve(device), Launched.look()
    if launched is not None:
        if gpus not in (None, 1, launched.size):
            raise UsageError(f"gpus is {gpus} and torchrun started {launched.size} ranks; leave out --gpus")
        count, local, hosts = launched.size, launched.local_size, launched.num_hosts
    else:
        count = local = _num_devices(name) if gpus is None else gpus
        hosts = 1
    if name == "cpu":
        found = _cpu()
        return replace(found, num_devices=count, num_hosts=hosts, rates=found.rates.shared(local))
    if local > _num_devices(name):
        raise UsageError(f"gpus is {local} and torch sees {_num_devices(name)} from {name} on")
    return replace(_gpus(_index(name), local), num_devices=count, num_hosts=hosts)


def _num_devices(name: str) -> int:
    """The number of GPUs from `name` on, or one CPU."""
    import torch

    return 1 if name == "cpu" else torch.cuda.device_count() - _index(name)


def _index(name: str) -> int:
    return int(name.partition(":")[2])


def _cpu() -> Hardware:
    import torch

    mkldnn = torch.backends.mkldnn.is_available()  # not in every build
    fast_bf16 = mkldnn and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    fast_bf16 |= "avx2" in cpu_features() and has_native_kernels()  # which multiply 16 bits where torch is slow
    free, rates = free_host_bytes(), load_rates(machine_name(), rates_key("cpu"))
    return Hardware("cpu", _cpu_name(), free, free, fast_bf16, rates or TWO_CORES, packs=has_native_kernels())


def _gpus(first: int, number: int) -> Hardware:
    """The hardware of several GPUs that wait for one another: the least of each number."""
    import torch

    names = [f"cuda:{first + position}" for position in range(number)]
    properties = [torch.cuda.get_device_properties(name) for name in names]
    free, _ = torch.cuda.mem_get_info(names[0])
    others = [free_gpu_bytes(str(gpu.uuid)) for gpu in properties[1:]]
    return Hardware(
        names[0],
        properties[0].name,
        min([free, *(max(other - _CONTEXT_BYTES, 0) for other in others if other is not None)]),
        free_host_bytes(),
        all(gpu.major >= 8 for gpu in properties),
        Rates.slowest([_gpu_rates(name, number) for name in names]),
        packs=has_native_kernels(),
        has_kernels=_has_kernels(all(gpu.major >= 8 for gpu in properties)),
        reads_host=all(gpu_reads_host(first + position) for position in range(number)),
        in_wsl=in_wsl(),
    )


def _has_kernels(new_enough: bool) -> bool:
    """Whether kernels can be compiled for this GPU, see `Hardware`. new_enough: compute capability 8.0 or later."""
    import torch

    wanted = os.environ.get(KERNELS) != "off"
    return new_enough and wanted and torch.version.cuda is not None and installed_version("triton") is not None


def _gpu_rates(name: str, number: int) -> Rates:
    """The rates of one of `number` GPUs: measured, or typical ones with the link rate of its slot."""
    import torch

    if (measured := load_rates(machine_name(), rates_key(name))) is not None:
        return measured
    link = pcie(str(torch.cuda.get_device_properties(name).uuid))
    rates, rate = typical(number), link and link.busy_bytes_per_second
    return replace(rates, to_device=_COPY_SHARE * rate, to_host=_COPY_SHARE * rate) if rate else rates


def rates_key(device: str) -> str:
    """The key under which the rates of "cpu" or "cuda:N" are stored.

    A GPU's key is its own id: N depends on the visible GPUs, and two GPUs of one kind may sit in different slots.
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
    if kind != "cuda" or (number and not (number.isdecimal() and len(number) <= 9)):
        raise UsageError(f"device is {device!r}, it must be auto, cpu, cuda or cuda:N")
    if int(number or 0) >= count:
        raise UsageError(f"device {device} is asked for and torch sees {count} CUDA devices; try --device cpu")
    return f"cuda:{int(number or 0)}"
