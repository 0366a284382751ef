"""The options of a plan."""

from __future__ import annotations

from dataclasses import dataclass

from offload.errors import UsageError

MAX_RANKS = 8  # devices that run one model together
PAGE_TOKENS = 512  # tokens per page of a tile; a chunk divides it
DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
BITS = {"weight-bits": (16, 6, 4), "kv-bits": (16, 4), "link-bits": (16, 12)}


@dataclass(frozen=True, kw_only=True)
class Options:
    """The user's options; None and "auto" leave the choice to the plan. Sizes in tokens, GB and GB/s (1e9 bytes).

    gpus: number of devices (on a CPU, of processes) that run the model together; None: all. gamma, draft_gamma: fixed
    lengths; None adapts them to the text. offload: the parts that may be kept on the host. On a CPU device and host are
    one memory, so all of the named parts are offloaded, unless device_memory limits the bytes on the "device".
    host_memory: the most bytes on each host, on a CPU of all; experts that have no room there are read from their file.
    link_gbps: rate of a CPU's emulated link. cpu_experts: number of layers whose experts the CPU runs. weight_bits,
    kv_bits: of the weights and of the keys and values with which the target proposes to itself: 16 or 4, and for
    weights also 6. link_bits: of a cached number or a weight that crosses the link: 16, or 12 for lossless packing,
    which becomes a residual of 9 or 8 bits if the number's code in 4 or 6 bits is on the device. masses: the target's
    passes record their attention to each part of the text.
    """

    context: int | None = None
    budget: int | None = None
    chunk: int | None = None
    weight_bits: int | None = None
    kv_bits: int | None = None
    link_bits: int | None = None
    gamma: int | None = None
    draft_gamma: int | None = None
    sinks: int = 16
    window: int = 240
    device: str = "auto"
    gpus: int | None = 1
    dtype: str = "auto"
    offload: frozenset[str] | None = None
    device_memory: float | None = None
    host_memory: float | None = None
    link_gbps: float | None = None
    cpu_experts: int | None = None
    speculation: bool = True
    lookup: bool = True
    masses: bool = False

    def __post_init__(self) -> None:
        _within("context", self.context, 2, 2**24)
        _within("budget", self.budget, 1, 2**24)
        _within("chunk", self.chunk, 1, PAGE_TOKENS)
        _within("gamma", self.gamma, 0, 255)
        _within("draft-gamma", self.draft_gamma, 0, 64)
        _within("gpus", self.gpus, 1, MAX_RANKS)
        _within("cpu-experts", self.cpu_experts, 0, 4096)
        _within("sinks", self.sinks, 0, 4096)
        _within("window", self.window, 1, 2**20)
        if self.chunk is not None and PAGE_TOKENS % self.chunk:
            raise UsageError(f"chunk is {self.chunk}, it must be a power of two up to {PAGE_TOKENS}")
        for name, bits in (("weight-bits", self.weight_bits), ("kv-bits", self.kv_bits), ("link-bits", self.link_bits)):
            if bits not in (None, *BITS[name]):
                raise UsageError(f"{name} is {bits}, it must be {bits_of(name)}")
        if self.dtype not in ("auto", *DTYPE_BYTES):
            raise UsageError(f"dtype is {self.dtype!r}, it must be auto, bf16, fp16 or fp32")
        if self.offload is not None and not self.offload <= {"weights", "kv"}:
            unknown = ", ".join(sorted(self.offload - {"weights", "kv"}))
            raise UsageError(f"offload names {unknown}; it may name weights and kv")
        if self.link_gbps is not None and not 0.001 <= self.link_gbps <= 10_000:
            raise UsageError(f"link-gbps is {self.link_gbps}, it must be from 0.001 to 10000 GB/s")
        for name, memory in (("device-memory", self.device_memory), ("host-memory", self.host_memory)):
            if memory is not None and not 0.001 <= memory <= 100_000:
                raise UsageError(f"{name} is {memory}, it must be from 0.001 to 100000 GB")
        moves = bool(self.offload) or (self.offload is None and self.device_memory is not None)
        if self.link_gbps is not None and not moves:
            raise UsageError("link-gbps paces a link and nothing is offloaded; add --offload weights,kv")


def bits_of(name: str) -> str:
    """The allowed values of an option in words: "auto, 16, 6 or 4"."""
    *others, last = map(str, ("auto", *BITS[name]))
    return f"{', '.join(others)} or {last}"


def _within(name: str, value: int | None, least: int, most: int) -> None:
    if value is not None and not least <= value <= most:
        raise UsageError(f"{name} is {value}, it must be from {least} to {most}")
