"""Facts about this machine from the operating system and the NVIDIA driver. Nothing is measured."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import platform
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path("/")
KERNELS = "TRIFORCE_KERNELS"  # environment variable: with "off" torch's operators run
# The CPU features that decide the speed of products: x86, then ARM.
FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve", "bf16")
_READS_REGISTERED = 91  # CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
# Bytes per second of one lane, one direction, after line coding (PCI-SIG), by generation.
_LANE_BYTES_PER_SECOND = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}


@dataclass(frozen=True)
class Machine:
    """A machine's CPU and memory. num_cores: logical cores that this process may use. Sizes in bytes; a container's
    limits count as the machine's."""

    system: str
    processor: str
    features: tuple[str, ...]
    num_cores: int
    host_bytes: int
    host_free_bytes: int
    memlock_bytes: int | None  # limit of locked memory of the process; None: no limit
    numa_nodes: tuple[int, ...]
    usable_numa_nodes: tuple[int, ...]  # nodes with a core that this process may use
    in_wsl: bool = False  # see the function


def look(root: Path = ROOT) -> Machine:
    nodes = dict(_numa_nodes(root))
    ours = _usable_cores()
    return Machine(
        system=platform.platform(terse=True),
        processor=_processor(root),
        features=cpu_features(root),
        num_cores=len(ours),
        host_bytes=min(_memory(root)[0], number_in(root / "sys/fs/cgroup/memory.max") or 1 << 62),
        host_free_bytes=free_host_bytes(root),
        memlock_bytes=_memlock_bytes(),
        numa_nodes=tuple(sorted(nodes)),
        usable_numa_nodes=tuple(sorted(number for number, cores in nodes.items() if cores & ours)),
        in_wsl=in_wsl(root),
    )


def in_wsl(root: Path = ROOT) -> bool:
    """Whether this Linux runs in WSL 2, Windows' virtual machine: its kernel's release names Microsoft. CUDA can pin
    little host memory there: .5 to 1 GB were measured, whatever ulimit allows (microsoft/WSL#14078,
    FlashML-org/FreeToken#233; NVIDIA's guide to CUDA on WSL names the limit without a number)."""
    return "microsoft" in _text(root / "proc/sys/kernel/osrelease").lower()


def on_windows_drive(path: Path | None) -> bool:
    """Whether a path of WSL is on a drive of Windows: below /mnt and a letter."""
    return path is not None and re.match(r"/mnt/[a-z](/|$)", str(path.resolve())) is not None


def has_native_kernels(root: Path = ROOT) -> bool:
    """Whether the CPU's kernels were built for this CPU and are not switched off."""
    built = {path.stem for path in (Path(__file__).parent / "native").glob("*.so")}
    own = {"avx2": "avx2", "asimd": "neon"}
    return os.environ.get(KERNELS) != "off" and any(own.get(name) in built for name in cpu_features(root))


def machine_name(root: Path = ROOT) -> str:
    """A name that distinguishes this machine from others that share a home folder."""
    return f"{_processor(root)}, {os.cpu_count()} cores"


def free_host_bytes(root: Path = ROOT) -> int:
    """Bytes of host memory that can be allocated now, at most the limit of a container (cgroup v2).

    The page cache counts as used in a container, but can be reclaimed.
    """
    _, free = _memory(root)
    group = root / "sys/fs/cgroup"
    limit, used = number_in(group / "memory.max"), number_in(group / "memory.current")
    if limit is None or used is None:
        return free
    cached = re.findall(r"^(?:in)?active_file (\d+)$", _text(group / "memory.stat"), re.MULTILINE)
    return min(free, max(limit - used + sum(map(int, cached)), 0))


def _memory(root: Path) -> tuple[int, int]:
    """The total and available memory in bytes. On Linux the kernel tells it, without another package."""
    said = dict(re.findall(r"^(MemTotal|MemAvailable):\s+(\d+) kB$", _text(root / "proc/meminfo"), re.MULTILINE))
    if len(said) == 2:
        return 1024 * int(said["MemTotal"]), 1024 * int(said["MemAvailable"])
    import psutil

    memory = psutil.virtual_memory()
    return memory.total, memory.available


def _usable_cores() -> set[int]:
    affinity = getattr(os, "sched_getaffinity", None)  # on Linux only
    return affinity(0) if affinity else set(range(os.cpu_count() or 1))


def _processor(root: Path) -> str:
    found = re.search(r"^model name\s*:\s*(.+)$", _text(root / "proc/cpuinfo"), re.MULTILINE)
    return found[1].strip() if found else platform.processor() or platform.machine()


def cpu_features(root: Path = ROOT) -> tuple[str, ...]:
    """The features of the CPU that are in `FEATURES`."""
    found = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", _text(root / "proc/cpuinfo"), re.MULTILINE)
    present = set(found[1].split()) if found else set()
    return tuple(feature for feature in FEATURES if feature in present)


def _numa_nodes(root: Path) -> Iterator[tuple[int, set[int]]]:
    """The NUMA nodes: (number, its cores)."""
    for folder in (root / "sys/devices/system/node").glob("node[0-9]*"):
        yield int(folder.name.removeprefix("node")), set(_core_list(_text(folder / "cpulist")))


def _core_list(text: str) -> Iterator[int]:
    """The core numbers of a list such as "0-3,8"."""
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        yield from range(int(first), int(last or first) + 1)


def _memlock_bytes() -> int | None:
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return None
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if limit == resource.RLIM_INFINITY else limit


def number_in(path: Path) -> int | None:
    """The whole number in a file; None if there is no such file or its content is not a number."""
    text = _text(path).strip()
    return int(text) if re.fullmatch(r"-?\d+", text) else None


def _text(path: Path) -> str:
    """The text of a file; "" if there is no such file, as outside Linux."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


# The versions of Triton under which the GPU's kernels passed their tests, by torch's version. scripts/versions.sh tries
# the first and the last.
TESTED = {"2.10": "3.6", "2.13": "3.7", "2.15": "3.9"}


def installed_version(package: str) -> str | None:
    """The version of an installed package, which is not imported."""
    if importlib.util.find_spec(package) is None:
        return None
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # a checkout on the path
        return "of unknown version"


def untested_versions(device: str) -> str:
    """The note where kernels on a GPU run under a pair of torch and Triton that nobody tested; "" otherwise."""
    if device == "cpu" or os.environ.get(KERNELS) == "off":
        return ""
    torch, triton = installed_version("torch"), installed_version("triton")
    if torch is None or triton is None or TESTED.get(_minor(torch)) == _minor(triton):
        return ""
    tested = ", ".join(f"{one} with {other}" for one, other in TESTED.items())
    return (
        f"torch {torch} with Triton {triton} has not been tested (torch {tested} have been); 'triforce doctor' tries "
        "each kind of kernel"
    )


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


@dataclass(frozen=True)
class Driver:
    version: str
    cuda: str  # the newest CUDA that it runs, "12.4"
    gpu_names: tuple[str, ...]


@dataclass(frozen=True)
class Pcie:
    """A GPU's PCIe link: its current speed (an idle GPU slows it down) and the GPU's maximum. slot_generation: the
    maximum of GPU and slot together; None: unknown."""

    address: str
    generation: int
    width: int
    max_generation: int
    max_width: int
    numa_node: int | None
    slot_generation: int | None = None

    @property
    def bytes_per_second(self) -> float | None:
        """The maximum in one direction at the link's current speed."""
        lane = _LANE_BYTES_PER_SECOND.get(self.generation)
        return None if lane is None else lane * self.width

    @property
    def busy_bytes_per_second(self) -> float | None:
        """The maximum in one direction at the link's speed under load."""
        fastest = max(self.generation, self.slot_generation or self.max_generation)
        return replace(self, generation=fastest).bytes_per_second


def driver() -> Driver | None:
    """The NVIDIA driver's versions, also if torch was built without CUDA. None if there is no driver."""
    with _nvml() as nvml:
        if nvml is None:
            return None
        cuda = _ask(nvml, nvml.nvmlSystemGetCudaDriverVersion_v2) or 0
        numbers = range(_ask(nvml, nvml.nvmlDeviceGetCount) or 0)
        handles = [_ask(nvml, nvml.nvmlDeviceGetHandleByIndex, number) for number in numbers]
        return Driver(
            version=str(_ask(nvml, nvml.nvmlSystemGetDriverVersion)),
            cuda=f"{cuda // 1000}.{cuda % 1000 // 10}",
            gpu_names=tuple(str(_ask(nvml, nvml.nvmlDeviceGetName, handle)) for handle in handles if handle),
        )


def pcie(uuid: str, root: Path = ROOT) -> Pcie | None:
    """The PCIe link of a GPU. uuid: as torch gives it. None if unknown, as for a virtual GPU."""
    with _nvml() as nvml:
        handle = nvml and _ask(nvml, nvml.nvmlDeviceGetHandleByUUID, f"GPU-{uuid}")
        place = handle and _ask(nvml, nvml.nvmlDeviceGetPciInfo, handle)
        if not place:
            return None

        def number(function: Callable[..., Any]) -> int:
            return _ask(nvml, function, handle) or 0

        address = f"{place.domain:04x}:{place.bus:02x}:{place.device:02x}.0"
        folder = root / "sys/bus/pci/devices" / address
        width = number(nvml.nvmlDeviceGetCurrPcieLinkWidth)
        generation = number(nvml.nvmlDeviceGetCurrPcieLinkGeneration)
        if not width or not generation:
            return None
        node = number_in(folder / "numa_node")
        # NVML's largest width is that of GPU and slot together; the kernel reports the GPU's own.
        gpu_width = max(number(nvml.nvmlDeviceGetMaxPcieLinkWidth), number_in(folder / "max_link_width") or 0, width)
        return Pcie(
            address=address,
            generation=generation,
            width=width,
            max_generation=max(number(nvml.nvmlDeviceGetGpuMaxPcieLinkGeneration), generation),
            max_width=gpu_width if gpu_width <= 32 else width,  # 255: unknown to the kernel
            numa_node=None if node is None or node < 0 else node,
            slot_generation=number(nvml.nvmlDeviceGetMaxPcieLinkGeneration) or None,
        )


def free_gpu_bytes(uuid: str) -> int | None:
    """Free bytes of a GPU's memory, read without a CUDA context, which would take memory."""
    with _nvml() as nvml:
        handle = nvml and _ask(nvml, nvml.nvmlDeviceGetHandleByUUID, f"GPU-{uuid}")
        memory = handle and _ask(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
        return int(memory.free) if memory else None


@contextmanager
def _nvml() -> Iterator[Any]:
    """The driver's library (NVML), initialised; None if the library or the driver is missing."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def _ask(nvml: Any, function: Callable[..., Any], *args: object) -> Any:
    """The answer of an NVML function; None if this GPU or driver does not support it."""
    try:
        return function(*args)
    except nvml.NVMLError:
        return None


def gpu_reads_host(number: int) -> bool:
    """Whether the kernels of GPU `number` can read pinned memory at its host address."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    value = ctypes.c_int()
    return not driver.cuDeviceGetAttribute(ctypes.byref(value), _READS_REGISTERED, number) and value.value == 1
