"""The GPU on paper: its record of problems, launches and waits, and its place in torch. No tests in here."""

from __future__ import annotations

import threading
import traceback
import weakref
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from paper.clocks import Actor, Block, Clock
from paper.codes import codes_by_gpu
from paper.graphs import Graph, Pools, recording
from paper.shapes import without_values
from paper.streams import Event, Stream, current
from paper.tensors import Call, Mode

TOTAL_BYTES = 24 * 10**9
ADDRESS = Tensor.data_ptr
WHERE = ("/offload/", "/triforce_cli/", "/tests/test_")


class PaperGpu:
    """One GPU and the host beside it, whose threads count as one.

    problems: what would be wrong on a real GPU, and where. launches: kernels and copies, by operator. syncs: where the
    host waits for the GPU, by kind. num_graphs: recorded so far. without_values: tensors have sizes and no bytes, on
    the host too until somebody writes to them.
    """

    def __init__(self, *, without_values: bool = False) -> None:
        self.without_values = without_values
        self.problems: list[str] = []
        self.launches: Counter[str] = Counter()
        self.syncs: Counter[str] = Counter()
        self.host = Actor("host")
        self.recording: Graph | None = None
        self.recorded_last: Graph | None = None  # if nothing was launched since
        self.num_graphs = 0
        self.pools = Pools()
        self.bytes_now = self.bytes_peak = 0
        self._pinned: dict[int, Block] = {}  # by its first address
        self._addresses: list[int] = []  # these, rising
        self._default = Stream(self, "compute")
        self._of_thread = threading.local()
        self._lock = threading.Lock()  # pages are packed on a thread
        self._streams = 0

    @property
    def stream(self) -> Stream:
        """The current one of this thread."""
        return getattr(self._of_thread, "stream", self._default)

    @stream.setter
    def stream(self, stream: Stream) -> None:
        self._of_thread.stream = stream

    @property
    def has_pinned(self) -> bool:
        return bool(self._pinned)

    def new_stream(self, *_: object, **__: object) -> Stream:
        self._streams += 1
        return Stream(self, f"stream {self._streams}")

    def problem(self, what: str) -> None:
        frames = [frame for frame in traceback.extract_stack() if any(part in frame.filename for part in WHERE)]
        places = [f"{frame.filename.rpartition('/')[2]}:{frame.lineno}" for frame in frames[-4:][::-1]]
        self.problems.append(f"{what}, at {' < '.join(places)}")

    def synced(self, kind: str, clock: Clock) -> None:
        """The host waits until all that `clock` knows has happened."""
        if self.recording is not None:
            self.problem(f"the host waits in a graph: {kind}")
        self.syncs[kind] += not threading.current_thread().name.startswith("packing")  # nobody waits for that thread
        self.host.learn(clock)

    def synchronize(self, *_: object) -> None:
        self.synced("device", self._default.actor.clock)

    def allocated(self, num_bytes: int) -> Block:
        """New memory on the current stream. It is given back with its last tensor: to this stream, so that others must
        not use it any more."""
        self.bytes_now += num_bytes
        self.bytes_peak = max(self.bytes_peak, self.bytes_now)
        return Block("device", self.stream.actor, num_bytes, self._freed)

    def result(self, call: Call) -> Any:
        """Of an operator on the GPU."""
        return without_values(call) if self.without_values else call.on_cpu()

    def access(self, block: Block, raw: Tensor, actor: Actor, *, write: bool, what: str) -> None:
        """`raw` is in `block`, of the device."""
        first = raw.storage_offset() * raw.itemsize
        self._access(block, actor, first, first + _extent(raw), write, what)

    def access_host(self, tensor: Tensor, actor: Actor, *, write: bool, what: str) -> None:
        if tensor.numel():
            self.access_address(ADDRESS(tensor), _extent(tensor), actor, write=write, what=what)

    def access_address(self, address: int, num_bytes: int, actor: Actor, *, write: bool, what: str) -> bool:
        """So many bytes of the host. False where they are not pinned."""
        if (found := self._range(address)) is None:
            return False
        first = address - found[0]
        self._access(found[1], actor, first, first + num_bytes, write, what)
        return True

    def is_pinned(self, tensor: Tensor, *_: object) -> bool:
        return bool(tensor.numel()) and self._range(ADDRESS(tensor)) is not None

    def pin(self, address: int, num_bytes: int, flags: int) -> int:
        """cudaHostRegister."""
        self._add(address, Block("pinned", self.host, num_bytes))
        return 0

    def unpin(self, address: int) -> int:
        """cudaHostUnregister, after which the memory is the system's."""
        block = self._remove(address)
        if users := block.users(self.host):
            self.problem(f"{block.num_bytes} pinned bytes given back while {', '.join(users)} may use them")
        return 0

    def pinned_copy(self, tensor: Tensor) -> Tensor:
        """torch's own pinned memory, which it gives to nobody else while a stream may use it."""
        copied = tensor.clone()
        if copied.numel():
            self._add(copied.data_ptr(), Block("pinned", self.host, copied.nbytes))
            weakref.finalize(copied, self._remove, copied.data_ptr())
        return copied

    def reset_peak(self, *_: object) -> None:
        self.bytes_peak = self.bytes_now

    def _freed(self, block: Block) -> None:
        """The next work of its stream may use the memory for something else."""
        self.bytes_now -= block.num_bytes
        if users := block.users(block.owner, self.host):
            self.problem(f"{block.num_bytes} device bytes given back while {', '.join(users)} may use them")

    def _access(self, block: Block, actor: Actor, first: int, stop: int, write: bool, what: str) -> None:
        with self._lock:
            conflicts = list(block.access(actor, first, stop, write=write))
        for conflict in conflicts:
            kind = "write" if write else "read"
            self.problem(f"race: {kind} by {actor.name} ({what}) not ordered after {conflict}, {block.kind} memory")

    def _range(self, address: int) -> tuple[int, Block] | None:
        """The pinned block that an address of the host is in, and where that begins."""
        before = bisect_right(self._addresses, address)
        if before and address < (first := self._addresses[before - 1]) + self._pinned[first].num_bytes:
            return first, self._pinned[first]
        return None

    def _add(self, address: int, block: Block) -> None:
        self._pinned[address] = block
        insort(self._addresses, address)

    def _remove(self, address: int) -> Block:
        del self._addresses[bisect_left(self._addresses, address)]
        return self._pinned.pop(address)


def _extent(tensor: Tensor) -> int:
    """Bytes from its first element to its last."""
    if tensor.is_contiguous():
        return tensor.nbytes
    if not tensor.numel():
        return 0
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (steps + 1) * tensor.itemsize


@contextmanager
def on_paper(*, without_values: bool = False) -> Iterator[PaperGpu]:
    """Within it torch has a GPU "cuda:0", in this thread and in those that are started."""
    gpu = PaperGpu(without_values=without_values)
    with pytest.MonkeyPatch.context() as patch, Mode(gpu):
        for name, value in _cuda(gpu).items():
            patch.setattr(torch.cuda, name, value, raising=False)
        patch.setattr(torch.version, "cuda", None)  # else a build with CUDA would run its programs
        patch.setattr(torch.backends.cuda, "matmul", SimpleNamespace())  # the program sets how it sums
        patch.setattr(torch, "tensor", partial(_tensor, torch.tensor))
        patch.setattr(Tensor, "is_pinned", lambda tensor, *_: gpu.is_pinned(tensor))
        patch.setattr(Tensor, "pin_memory", lambda tensor: gpu.pinned_copy(tensor))
        patch.setattr(Tensor, "numpy", _seen(gpu, Tensor.numpy, "numpy"))
        patch.setattr(Tensor, "data_ptr", _seen(gpu, ADDRESS, "by its address"))
        patch.setattr(threading.Thread, "run", _started(gpu, threading.Thread.run))
        codes_by_gpu(patch, without_values=without_values)
        yield gpu


def _cuda(gpu: PaperGpu) -> dict[str, object]:
    """What stands in torch.cuda instead."""
    properties = SimpleNamespace(
        name="a GPU on paper", major=8, minor=9, total_memory=TOTAL_BYTES, uuid="0", multi_processor_count=128
    )
    return {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "get_device_name": lambda device=None: properties.name,
        "get_device_capability": lambda device=None: (properties.major, properties.minor),
        "get_device_properties": lambda device=None: properties,
        "mem_get_info": lambda device=None: (TOTAL_BYTES - 10**9, TOTAL_BYTES),
        "empty_cache": lambda: None,
        "memory_allocated": lambda device=None: gpu.bytes_now,
        "max_memory_allocated": lambda device=None: gpu.bytes_peak,
        "reset_peak_memory_stats": gpu.reset_peak,
        "synchronize": gpu.synchronize,
        "cudart": lambda: SimpleNamespace(cudaHostRegister=gpu.pin, cudaHostUnregister=gpu.unpin),
        "Stream": gpu.new_stream,
        "Event": partial(Event, gpu),
        "current_stream": lambda device=None: gpu.stream,
        "stream": partial(current, gpu),
        "CUDAGraph": partial(Graph, gpu),
        "graph": partial(recording, gpu),
        "is_current_stream_capturing": lambda: gpu.recording is not None,
        "graph_pool_handle": gpu.pools.new,
    }


def _tensor(made: Any, data: object, *, device: object = None, **kwargs: Any) -> Tensor:
    """torch's own would put the numbers into memory of the device itself."""
    tensor: Tensor = made(data, **kwargs)
    return tensor if device is None else tensor.to(torch.device(device))  # type: ignore[call-overload]


def _seen(gpu: PaperGpu, method: Any, what: str) -> Any:
    def seen(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        """What numpy or a library will do with the memory is not known: it reads, at least, and now."""
        gpu.host.step()
        gpu.access_host(tensor, gpu.host, write=False, what=what)
        return method(tensor, *args, **kwargs)

    return seen


def _started(gpu: PaperGpu, run: Any) -> Any:
    def run_on_paper(thread: threading.Thread) -> None:
        """Modes are a thread's own."""
        with Mode(gpu):
            run(thread)

    return run_on_paper
