"""Allocation of all long-lived memory: the only module that allocates host and device blocks and that pins memory.

Host blocks, and device blocks on a CPU, are anonymous mappings of exactly the requested bytes (torch's pinned allocator
rounds up to a power of two: 20 GiB would take 32). They use huge pages if the system allows them, so that a CPU seldom
waits for addresses, and the NUMA node nearest to the GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import platform
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from offload.errors import DoesNotFit
from offload.machine import gpu_reads_host, in_wsl, number_in
from offload.transfer.device import use_device
from offload.transfer.prepinned import Prepinned
from offload.units import size

Tier = Literal["host", "device"]

# cudaHostRegisterPortable pins for every device, not only the current one; Mapped lets kernels read the block.
_PORTABLE, _MAPPED = 1, 2
_MPOL_PREFERRED = 1
# Python's default for anonymous pages is MAP_SHARED; shared pages are never huge.
_PRIVATE: dict[str, Any] = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
_KEPT = {-3: 32 * 2**20, -1: 128 * 2**20}  # M_MMAP_THRESHOLD at its maximum, and M_TRIM_THRESHOLD
_MBIND = {"x86_64": 237, "aarch64": 235}  # system call numbers


def sent(values: Tensor, device: torch.device) -> Tensor:
    """Copy a small host tensor to `device` without blocking."""
    return values if device.type == "cpu" else values.pin_memory().to(device, non_blocking=True)


def sent_to(out: Tensor, values: Tensor) -> Tensor:
    """Copy a small host tensor to `out` on a GPU without blocking."""
    return out.copy_(values.pin_memory(), non_blocking=True)


def kernels_read_host(device: torch.device) -> bool:
    """Whether a GPU's kernels can read pinned memory at its host address."""
    return gpu_reads_host(torch.cuda.current_device() if device.index is None else device.index)


def keep_freed_memory() -> bool:
    """Make glibc keep freed blocks of up to 32 MiB, 128 MiB in all, for reuse. Otherwise a prefill's temporaries come
    from the system each time, page by page, which makes it 1.6 times slower. False if there is no glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if platform.system() == "Linux" else None
    return mallopt is not None and all(tuple(mallopt(option, value) for option, value in _KEPT.items()))


class Memory:
    """The allocator of zeroed blocks on the compute device or the host, with a ledger of bytes by tier and purpose.

    On a machine without a GPU both tiers are the same memory; the ledger still distinguishes them. Host blocks are
    pinned if the device is a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._node = _numa_node(device)
        self._ledger: Counter[tuple[Tier, str]] = Counter()
        self._lock = threading.Lock()  # of the ledger: the pinning thread reads it for its errors
        self._ahead: Prepinned | None = None
        if device.type == "cpu":
            keep_freed_memory()

    @torch.inference_mode(False)  # a block allocated in a forward may be written outside of one
    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, *, tier: Tier, purpose: str) -> Tensor:
        """Allocate a zeroed tensor: unwritten rows must be finite, since attention multiplies them by zero.

        Raises DoesNotFit, with the numbers, if the system refuses the block or its pinning.
        """
        num_bytes = math.prod(shape) * dtype.itemsize
        if tier == "device" and self.device.type != "cpu":
            block = self._device_block(shape, dtype)
        else:
            made = self._host_block if tier == "host" else self._new_host_block
            block = (made(num_bytes) if num_bytes else torch.zeros(0, dtype=torch.uint8)).view(dtype).view(shape)
        self._count(tier, purpose, block.nbytes)
        return block

    @contextlib.contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """A context whose allocations no longer count if its body raises: their owner was not made, and drops them."""
        with self._lock:
            before = self._ledger.copy()
        try:
            yield
        except BaseException:
            with self._lock:
                self._ledger = before
            raise

    def pin_ahead(self, sizes: Sequence[int]) -> None:
        """Begin to make and pin host blocks of `sizes` bytes, on a thread and in this order. `allocate` takes blocks
        from them, and raises the thread's error. No effect on a CPU, where nothing is pinned."""
        if self.device.type == "cuda" and sizes:
            self._ahead = Prepinned(sizes, self._on_a_thread)

    def wait_pinned(self, on_bytes: Callable[[int, int], None]) -> None:
        """Wait until all blocks of `pin_ahead` are made. `on_bytes(done, total)` is called meanwhile."""
        if self._ahead is not None:
            self._ahead.wait(on_bytes)

    def close(self) -> None:
        """Stop making blocks ahead, and free the ones that were not taken. Idempotent."""
        if self._ahead is not None:
            self._ahead.close()

    def released(self, block: Tensor, *, tier: Tier, purpose: str) -> None:
        """Note in the ledger that the owner of `block` drops it."""
        self._count(tier, purpose, -block.nbytes)

    def allocated(self) -> dict[Tier, dict[str, int]]:
        """Bytes in use now, by tier and purpose."""
        tiers: dict[Tier, dict[str, int]] = {"host": {}, "device": {}}
        with self._lock:
            for (tier, purpose), num_bytes in self._ledger.items():
                if num_bytes:
                    tiers[tier][purpose] = num_bytes
        return tiers

    def _count(self, tier: Tier, purpose: str, num_bytes: int) -> None:
        with self._lock:
            self._ledger[tier, purpose] += num_bytes

    def _held(self, tier: Tier) -> int:
        return sum(self.allocated()[tier].values())

    def _device_block(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        try:
            return torch.zeros(shape, dtype=dtype, device=self.device)
        except torch.OutOfMemoryError as error:
            raise DoesNotFit(
                f"{size(math.prod(shape) * dtype.itemsize)} of device memory could not be had after "
                f"{size(self._held('device'))}; another program may use the device: lower --device-memory or --context"
            ) from error

    def _host_block(self, num_bytes: int) -> Tensor:
        """A host block: one that was made ahead, or a new one, see `_new_host_block`."""
        block = None if self._ahead is None else self._ahead.take(num_bytes)
        return self._new_host_block(num_bytes) if block is None else block

    def _on_a_thread(self, num_bytes: int) -> Tensor:
        use_device(self.device)
        return self._new_host_block(num_bytes)

    def _new_host_block(self, num_bytes: int) -> Tensor:
        """A new host block, uint8 [num_bytes]; for a GPU its pages are touched (on torch's threads) and pinned."""
        try:
            mapping = _Mapping(-1, num_bytes, **_PRIVATE)
        except OSError as error:
            raise DoesNotFit(self._refused(num_bytes, "reserved", str(error))) from error
        block = torch.frombuffer(mapping, dtype=torch.uint8)
        _advise(mapping, block, self._node)
        if self.device.type == "cuda":
            block.zero_()
            self._pin(mapping, block)
        return block

    def _pin(self, mapping: _Mapping, block: Tensor) -> None:
        runtime = torch.cuda.cudart()
        code = int(runtime.cudaHostRegister(block.data_ptr(), block.nbytes, _PORTABLE | _MAPPED))
        if code:
            with contextlib.suppress(RuntimeError):  # clears the error, which CUDA would raise again at the next call
                torch.zeros(1, device=self.device)
            raise DoesNotFit(self._refused(block.nbytes, "pinned", f"CUDA error {code}"))
        mapping.unpin = partial(runtime.cudaHostUnregister, block.data_ptr())
        if hasattr(mmap, "MADV_DONTFORK"):  # copy-on-write after a fork would move the pinned pages to the child
            mapping.madvise(mmap.MADV_DONTFORK)

    def _refused(self, num_bytes: int, what: str, reason: str) -> str:
        held = self._held("host") + (0 if self._ahead is None else self._ahead.held)
        refused = f"{size(num_bytes)} of host memory could not be {what} ({reason}) after {size(held)}; "
        if what == "pinned" and in_wsl():
            return refused + (
                "in WSL 2 CUDA often pins no more than 1 GB, whatever the limits: plan for the GPU alone (a smaller "
                "model, --context or --kv-bits 4), or use Linux itself"
            )
        return refused + (
            "the system limits what one process may pin (ulimit -l, a container's memory limit): raise that limit, or "
            "lower --context"
        )


class _Mapping(mmap.mmap):
    """An anonymous mapping that is unpinned before it is freed, when the last tensor over it is gone."""

    unpin: Callable[[], object] | None = None

    def __del__(self) -> None:
        if self.unpin is not None:
            self.unpin()


def _advise(mapping: mmap.mmap, block: Tensor, node: int | None) -> None:
    """Ask for huge pages, and for pages near the GPU, if the system has them. If it refuses, only speed changes."""
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            mapping.madvise(mmap.MADV_HUGEPAGE)
    number = _MBIND.get(_machine())
    if node is None or number is None:
        return
    mask = ctypes.c_ulong(1 << node)
    ctypes.CDLL(None).syscall(
        number, ctypes.c_void_p(block.data_ptr()), ctypes.c_ulong(block.nbytes), _MPOL_PREFERRED, ctypes.byref(mask),
        ctypes.c_ulong(8 * ctypes.sizeof(mask)), 0,
    )  # fmt: skip


def _machine() -> str:
    return platform.machine() if platform.system() == "Linux" else ""


def _numa_node(device: torch.device) -> int | None:
    """The NUMA node nearest to the GPU; None if there is only one node, or if it is unknown."""
    if device.type != "cuda" or len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) < 2:
        return None
    properties: Any = torch.cuda.get_device_properties(device)
    if not hasattr(properties, "pci_bus_id"):  # known to torch from 2.7 on
        return None
    address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    node = number_in(Path("/sys/bus/pci/devices") / address / "numa_node")
    return node if node is not None and 0 <= node < 64 else None
