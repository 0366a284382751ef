"""The diagnosis of `triforce doctor`: the machine's hardware, software and measured speed."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import psutil
import torch

from offload import machine
from offload.bench import measure
from offload.bench.measure import Copies
from offload.errors import TriforceError
from offload.kernels import cpu
from offload.kernels.choice import gpu_kernels
from offload.kernels.gpu.flash import flash
from offload.machine import Driver, Machine, Pcie
from offload.speed.hardware import Hardware, Rates, probe, rates_key
from offload.speed.rates import rates_file, save_rates
from offload.transfer.link import make_link

READ_BYTES = 1 << 30  # far more than the CPU's caches
COPY_BYTES = 256 << 20
LEAST_BYTES = 256 << 20  # free memory of a GPU that measuring needs
LOOK_SECONDS = 0.3  # for the load of other programs
SHARE = 8  # measuring takes at most 1 / SHARE of the free memory

OnStep = Callable[[str], None]


@dataclass(frozen=True)
class LinkRates:
    """Bytes per second between (pinned) host memory and one device, or several at once.

    to_device, to_host: each direction alone; both: the sum while both are busy.
    """

    to_device: float
    to_host: float
    both: float


@dataclass(frozen=True)
class Processor:
    """A CPU's bytes and operations per second, with all `num_threads`; a copy over its link uses one thread each
    way."""

    num_threads: int
    busy_share: float  # of all cores, used by other programs before measuring
    fast_bf16: bool
    read: float
    weights_read: float  # through products of one row
    link: LinkRates
    bf16_flops: float
    fp32_flops: float


@dataclass(frozen=True)
class GpuRates:
    read: float
    weights_read: float
    link: LinkRates
    flops: float  # 16-bit


@dataclass(frozen=True)
class Gpu:
    """A GPU. rates: None if measuring failed, with the reason in `problem`."""

    device: str
    name: str
    compute_capability: str
    total_bytes: int
    free_bytes: int
    pcie: Pcie | None
    peers: tuple[str, ...]  # devices whose memory it can access directly
    rates: GpuRates | None
    problem: str = ""


@dataclass(frozen=True)
class Software:
    python: str
    torch: str
    torch_cuda: str | None  # None: built without CUDA
    transformers: str
    attention: str  # the implementation in use
    flash_attn: str | None  # its version if it is installed
    kernels: str | None  # the CPU kernels' instruction set; None: torch's operators run
    kernels_problem: str = ""  # why


@dataclass(frozen=True)
class Diagnosis:
    machine: Machine
    processor: Processor
    gpus: tuple[Gpu, ...]
    together: LinkRates | None  # all GPUs at once, if there are several
    driver: Driver | None
    software: Software

    @property
    def devices(self) -> list[str]:
        """The devices that work."""
        return ["cpu", *(gpu.device for gpu in self.gpus if gpu.rates is not None)]

    @property
    def device(self) -> str:
        """The first GPU that works, else "cpu"."""
        return next((gpu.device for gpu in self.gpus if gpu.rates is not None), "cpu")

    @property
    def rates(self) -> dict[str, Rates]:
        """The rates that the planner needs, by device."""
        cpu = self.processor
        flops = cpu.bf16_flops if cpu.fast_bf16 else cpu.fp32_flops
        rates = {"cpu": Rates(cpu.link.to_device, cpu.link.to_host, cpu.weights_read, cpu.read, flops, measured=True)}
        links = None if self.together is None else self.together.to_device
        for gpu in self.gpus:
            if (own := gpu.rates) is not None:
                link = own.link
                rates[gpu.device] = Rates(
                    link.to_device, link.to_host, own.weights_read, cpu.read, own.flops, measured=True, links=links
                )
        return rates

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Record:
    """The file in which rates are stored for the planner, or the reason why they are not."""

    path: str
    problem: str = ""


def diagnose(on_step: OnStep) -> Diagnosis:
    """Inspect and measure the machine, for a few seconds. on_step: called with the name of the next step."""
    on_step("looking at the machine")
    host, driver = machine.look(), machine.driver()
    copy_bytes = min(COPY_BYTES, host.host_free_bytes // SHARE // max(torch.cuda.device_count(), 4))
    processor = _processor(min(READ_BYTES, host.host_free_bytes // SHARE), copy_bytes, on_step)
    gpus = []
    for index in range(torch.cuda.device_count()):
        on_step(f"measuring cuda:{index}")
        gpus.append(_gpu(index, copy_bytes))
    working = [gpu for gpu in gpus if gpu.rates is not None]
    if len(working) > 1:
        on_step("measuring the GPUs together")
    together = _together(working, copy_bytes)
    torch.cuda.empty_cache()  # free the memory used for measuring, also for a plan
    return Diagnosis(host, processor, tuple(gpus), together, driver, software())


def usable_hardware(diagnosis: Diagnosis) -> Hardware:
    """The hardware for a plan: a device that works, with the rates just measured."""
    return replace(probe(diagnosis.device), rates=diagnosis.rates[diagnosis.device])


def remember(diagnosis: Diagnosis) -> Record:
    """Store the rates for the planner. A file that cannot be written is reported in the record, not raised."""
    try:
        measured = {rates_key(device): rates for device, rates in diagnosis.rates.items()}
        return Record(str(save_rates(machine.machine_name(), measured)))
    except OSError as error:
        return Record(str(rates_file()), error.strerror or str(error))


def _processor(read_bytes: int, copy_bytes: int, on_step: OnStep) -> Processor:
    busy_share = psutil.cpu_percent(LOOK_SECONDS) / 100
    fast_bf16 = probe("cpu").fast_bf16
    device = torch.device("cpu")
    on_step("measuring memory")
    read, weights_read = measure.read_rates(device, torch.bfloat16 if fast_bf16 else torch.float32, read_bytes)
    on_step("measuring copies")
    with _copies(device, copy_bytes) as copies:
        link = _link_rates([copies])
    on_step("measuring products")
    return Processor(
        num_threads=torch.get_num_threads(),
        busy_share=busy_share,
        fast_bf16=fast_bf16,
        read=read,
        weights_read=weights_read,
        link=link,
        bf16_flops=measure.product_rate(device, torch.bfloat16),
        fp32_flops=measure.product_rate(device, torch.float32),
    )


@contextmanager
def _copies(device: torch.device, num_bytes: int) -> Iterator[Copies]:
    """Copies over the engine's kind of link: on a CPU an unpaced one, with a thread each way."""
    with closing(make_link(device)) as link:
        yield measure.link_copies(link, device, num_bytes)


def _link_rates(ends: Sequence[Copies]) -> LinkRates:
    """The rates of several links together, whose copies are `ends`."""
    inwards, outwards = [end.to_device for end in ends], [end.to_host for end in ends]
    return LinkRates(
        *(measure.copy_rate(copies, ends[0].num_bytes) for copies in (inwards, outwards, inwards + outwards))
    )


def _gpu(index: int, copy_bytes: int) -> Gpu:
    """The diagnosis of one GPU, also if it does not work (its memory is taken, or the driver does not match)."""
    gpu = Gpu(f"cuda:{index}", "unknown GPU", "", 0, 0, None, (), None)
    try:
        properties = torch.cuda.get_device_properties(index)
        free_bytes, _ = torch.cuda.mem_get_info(index)
        gpu = replace(
            gpu,
            name=properties.name,
            compute_capability=f"{properties.major}.{properties.minor}",
            total_bytes=properties.total_memory,
            free_bytes=free_bytes,
            peers=_peers(index),
        )
        if free_bytes < LEAST_BYTES:
            return replace(gpu, problem=f"only {free_bytes / 1e9:.2f} GB of its memory are free")
        with _copies(_device(index), min(copy_bytes, free_bytes // SHARE)) as copies:
            gpu = replace(gpu, pcie=_busy_link(copies, str(properties.uuid)))
            link = _link_rates([copies])
        rates = _gpu_rates(_device(index), link, free_bytes, half=_half(properties.major))
        return replace(gpu, rates=rates)
    except (RuntimeError, TriforceError) as error:
        return replace(gpu, problem=(str(error).splitlines() or [type(error).__name__])[0])


def _device(index: int) -> torch.device:
    return torch.device("cuda", index)


def _busy_link(copies: Copies, uuid: str) -> Pcie | None:
    """The PCIe link under load, since an idle GPU slows it down."""
    waits = [copies.to_device() for _ in range(2 * measure.COPIES_PER_RUN)]
    link = machine.pcie(uuid)
    waits[-1]()
    return link


def _gpu_rates(device: torch.device, link: LinkRates, free_bytes: int, *, half: torch.dtype) -> GpuRates:
    read, weights_read = measure.read_rates(device, half, min(READ_BYTES, free_bytes // SHARE))
    return GpuRates(read, weights_read, link, measure.product_rate(device, half))


def _half(major: int) -> torch.dtype:
    """The fast 16-bit dtype of GPUs with this compute capability."""
    return torch.bfloat16 if major >= 8 else torch.float16


def _peers(index: int) -> tuple[str, ...]:
    others = [other for other in range(torch.cuda.device_count()) if other != index]
    return tuple(f"cuda:{other}" for other in others if torch.cuda.can_device_access_peer(index, other))


def _together(gpus: list[Gpu], copy_bytes: int) -> LinkRates | None:
    """The link rates of all working GPUs at once."""
    if len(gpus) < 2:
        return None
    num_bytes = min(copy_bytes, *(gpu.free_bytes // SHARE for gpu in gpus))
    devices = [_device(int(gpu.device.removeprefix("cuda:"))) for gpu in gpus]
    try:
        with ExitStack() as stack:
            return _link_rates([stack.enter_context(_copies(device, num_bytes)) for device in devices])
    except (RuntimeError, TriforceError):  # a GPU is out of memory: only rates of single GPUs
        return None


def software() -> Software:
    """The versions of installed libraries, and the kernels in use. Errors: see cpu.kernels."""
    compiled = cpu.kernels()
    return Software(
        python=platform.python_version(),
        torch=torch.__version__,
        torch_cuda=torch.version.cuda,
        transformers=importlib.metadata.version("transformers"),
        attention=_attention(),
        flash_attn=machine.installed_version("flash_attn"),
        kernels=compiled.instruction_set if isinstance(compiled, cpu.CpuKernels) else None,
        kernels_problem=compiled.reason,
    )


def _attention() -> str:
    """The attention implementations on this machine: for few rows, and on a GPU also for many."""
    if not torch.cuda.is_available():
        return "torch products"
    device = torch.device("cuda")
    found, prefill = gpu_kernels(device), flash(device)
    if prefill.usable:
        many = f"flash-attn {prefill.version} for 16-bit prefill"
    elif found.usable:
        many = f"for 16-bit prefill ({prefill.reason})"
    else:
        many = f"torch's fused kernel for 16-bit prefill on GPUs that know bf16 ({prefill.reason})"
    few = (
        f"kernels by Triton {machine.installed_version('triton')}"
        if found.usable
        else f"torch products ({found.reason})"
    )
    return f"{few} for few rows and {many}"
