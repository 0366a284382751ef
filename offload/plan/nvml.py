"""Facts from the NVIDIA driver, even if torch was built without CUDA. None without a driver."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from offload.plan.machine import ROOT, number_in

# Bytes per second of one lane, one direction, after line coding (PCI-SIG), by generation.
_LANE_BYTES_PER_SECOND = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}


@dataclass(frozen=True)
class Driver:
    version: str
    cuda: str  # the newest CUDA that it runs, "12.4"
    gpu_names: tuple[str, ...]


@dataclass(frozen=True)
class Pcie:
    """A GPU's PCIe link: its current speed (an idle GPU slows it down) and the GPU's maximum. slot_generation: the
    most that GPU and slot do together; None: unknown."""

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
        """The same at the speed that it has while bytes cross it."""
        fastest = max(self.generation, self.slot_generation or self.max_generation)
        return replace(self, generation=fastest).bytes_per_second


def driver() -> Driver | None:
    with _library() as nvml:
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
    """`uuid`: as torch gives it. None also where the GPU is virtual and says nothing."""
    with _library() as nvml:
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
        # NVML's largest width is that of GPU and slot together; the kernel knows the GPU's own.
        gpu_width = max(number(nvml.nvmlDeviceGetMaxPcieLinkWidth), number_in(folder / "max_link_width") or 0, width)
        return Pcie(
            address=address,
            generation=generation,
            width=width,
            max_generation=max(number(nvml.nvmlDeviceGetGpuMaxPcieLinkGeneration), generation),
            max_width=gpu_width if gpu_width <= 32 else width,  # 255: the kernel does not know
            numa_node=None if node is None or node < 0 else node,
            slot_generation=number(nvml.nvmlDeviceGetMaxPcieLinkGeneration) or None,
        )


def free_bytes(uuid: str) -> int | None:
    """Of a GPU's memory, without a CUDA context there, which would take some."""
    with _library() as nvml:
        handle = nvml and _ask(nvml, nvml.nvmlDeviceGetHandleByUUID, f"GPU-{uuid}")
        memory = handle and _ask(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
        return int(memory.free) if memory else None


@contextmanager
def _library() -> Iterator[Any]:
    """The library, initialised; None where there is none, or no driver beneath it."""
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
    """None where this GPU or driver does not answer the question."""
    try:
        return function(*args)
    except nvml.NVMLError:
        return None
