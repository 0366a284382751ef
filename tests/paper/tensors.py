"""Tensors that say they are on a GPU and compute on the CPU. No tests in here.

For torch's own C++ code they are on device "meta": of a GPU it would want a device guard, which a build for CPUs has
not and which only a compiler could add. Python code, which reads `device` and `is_cuda`, sees a GPU's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cache, partial
from inspect import getsource, signature
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from paper.clocks import Actor, Block

if TYPE_CHECKING:
    from paper.gpu import PaperGpu

DEVICE = torch.device("cuda:0")
CPU, META = torch.device("cpu"), torch.device("meta")
GPU = ("cuda", "meta")  # how Python code and torch's own call it
Func = Any  # an overload of an operator

# Operators whose result's size or value the host has to know.
WAITING = {"nonzero", "_local_scalar_dense", "unique_consecutive", "unique_dim", "_unique2", "equal", "masked_select"}
MOVING = {"copy_", "_to_copy"}
WHOLE = {"rms_norm"}  # one kernel on a GPU, several operators elsewhere
WITHOUT_KERNEL = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
INDEXING = {"index", "index_put_", "_index_put_impl_"}  # by tensors of the host too, which then cross

_wrapper: Any = Tensor._make_wrapper_subclass  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Address:
    """Byte `offset` of a block. It equals that of whatever begins there and is no number, which somebody might compute
    with or read from."""

    block: int
    offset: int


class PaperTensor(Tensor):
    """raw: its values, on the CPU, in `storage`. block: its memory, shared with its views."""

    raw: Tensor
    storage: int
    block: Block
    gpu: PaperGpu
    device = property(lambda self: DEVICE)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_cpu = property(lambda self: False)  # type: ignore[assignment]
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, gpu: PaperGpu, raw: Tensor, storage: int, block: Block) -> PaperTensor:
        size, strides, offset = raw.size(), raw.stride(), raw.storage_offset()
        with torch._C._InferenceMode(False):  # what torch does to views of tensors from outside of it would fail in it
            made = _wrapper(cls, size, strides=strides, storage_offset=offset, dtype=raw.dtype, device=META)
        made.gpu, made.raw, made.storage, made.block = gpu, raw, storage, block
        return made  # type: ignore[no-any-return]

    def __init__(self, gpu: PaperGpu, raw: Tensor, storage: int, block: Block) -> None: ...

    @classmethod
    def __torch_dispatch__(cls, func: Func, types: object, args: Any = (), kwargs: Any = None) -> Any:
        call = Call(func, args, kwargs or {})
        return run(call.on_gpu[0].gpu, call)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"PaperTensor({self.raw})"

    def to(self, *args: Any, **kwargs: Any) -> Tensor:  # type: ignore[override]
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        return _to(self.gpu, self, device, dtype, non_blocking)

    def cpu(self, *args: Any, **kwargs: Any) -> Tensor:
        return _to(self.gpu, self, torch.device("cpu"), None, False)

    def cuda(self, *args: Any, **kwargs: Any) -> Tensor:
        return self

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def data_ptr(self) -> Address:  # type: ignore[override]
        return Address(self.block.number, self.raw.storage_offset() * self.raw.itemsize)

    def is_pinned(self, device: object = None) -> bool:
        return False


class Mode(TorchDispatchMode):
    """Sees what no tensor on paper takes part in: what is made on the GPU, and what the host does."""

    def __init__(self, gpu: PaperGpu) -> None:
        super().__init__()
        self._gpu = gpu

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, so torch's compiler, which takes seconds to import, need not be told of this."""
        return False

    def __torch_dispatch__(self, func: Func, types: object, args: Any = (), kwargs: Any = None) -> Any:
        return run(self._gpu, Call(func, args, kwargs or {}))


class Operator:
    """What is asked of an operator in each of its calls."""

    def __init__(self, func: Func) -> None:
        arguments = func._schema.arguments
        self.name = str(func._schema.name.partition("::")[2])
        self.places = {argument.name: place for place, argument in enumerate(arguments)}
        self.written = [each.name for each in arguments if each.alias_info is not None and each.alias_info.is_write]
        self.takes_device = "device" in self.places
        # Made of others whatever the device: in inference mode it comes before it was taken apart.
        is_composite = func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
        self.is_taken_apart = is_composite and self.name not in WHOLE
        self.has_kernel = self.name not in WITHOUT_KERNEL


_operators: dict[int, tuple[Func, Operator]] = {}  # by the overload's id: its hash takes long


def _operator(func: Func) -> Operator:
    if (found := _operators.get(id(func))) is None:
        found = _operators[id(func)] = func, Operator(func)
    return found[1]


class Call:
    """An operator's call, with its tensors by where they are and its names for them. written: ids of those that it
    writes."""

    def __init__(self, func: Func, args: Any, kwargs: Any) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self.operator = operator = _operator(func)
        self.name = operator.name
        self.on_gpu: list[PaperTensor] = []
        self.on_host: list[Tensor] = []
        for each in _tensors((*args, *kwargs.values()) if kwargs else args):
            (self.on_gpu if isinstance(each, PaperTensor) else self.on_host).append(each)
        self.written: set[int] = set()
        if operator.written:
            self.written = {id(each) for each in _tensors([self.argument(name) for name in operator.written])}
        device = self.argument("device") if operator.takes_device else None
        self.device = torch.device(device) if device is not None else None
        self.is_of_gpu = bool(self.on_gpu) or (self.device is not None and self.device.type in GPU)
        self.leaves_gpu = self.name == "_to_copy" and self.device is not None and self.device.type == "cpu"

        self._again: Callable[[], Any] | None = None

    def argument(self, name: str) -> Any:
        """As it was given, else None."""
        place = self.operator.places.get(name)
        if place is not None and place < len(self.args):
            return self.args[place]
        return self.kwargs.get(name)

    @property
    def again_on_cpu(self) -> Callable[[], Any]:
        """Its result with the raw tensors, on the CPU: to be computed, as often as one likes."""
        if self._again is None:
            self._again = self.prepared(_on_cpu, "cpu")
        return self._again

    def on_cpu(self) -> Any:
        """Its result with the raw tensors, on the CPU."""
        return self.again_on_cpu()

    def elsewhere(self, change: Callable[[Any], Any], device: str) -> Any:
        """Its result on `device`, of arguments that `change` brings there."""
        return self.prepared(change, device)()

    def prepared(self, change: Callable[[Any], Any], device: str) -> Callable[[], Any]:
        """See `elsewhere`: to be computed, as often as one likes."""
        args = [_mapped(change, value) for value in self.args]
        dropped = ("pin_memory", "non_blocking")
        kwargs = {name: _mapped(change, value) for name, value in self.kwargs.items() if name not in dropped}
        if self.device is not None and "device" in kwargs:
            kwargs["device"] = device
        if self.name == "_scaled_dot_product_flash_attention":
            return partial(_flash, *args[:3], scale=kwargs.get("scale"))
        return partial(self.func, *args, **kwargs)


def _tensors(values: Any) -> list[Tensor]:
    """Of arguments or results, which nest no deeper than lists."""
    tensors: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, (list, tuple)):
            tensors += [each for each in value if isinstance(each, Tensor)]
    return tensors


def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    return type(value)([change(each) for each in value]) if isinstance(value, (list, tuple)) else change(value)


def _on_cpu(value: Any) -> Any:
    if isinstance(value, PaperTensor):
        return value.raw
    return CPU if isinstance(value, torch.device) else value


def run(gpu: PaperGpu, call: Call) -> Any:
    if not call.is_of_gpu:
        return _on_host(gpu, call)
    if call.name == "to":
        return _to(gpu, call.args[0], call.device, call.argument("dtype"), bool(call.argument("non_blocking")))
    if call.operator.is_taken_apart:
        with Mode(gpu):
            return call.func.decompose(*call.args, **call.kwargs)
    graph = gpu.recording
    if graph is not None and call.written:
        for each in call.on_gpu:
            if id(each) in call.written:
                graph.writes(each.raw)
    out = gpu.result(call)
    made = _tensors((out,))
    storages = [_storage(each) for each in made]
    blocks = {each.storage: each.block for each in call.on_gpu}
    is_view = not call.written and bool(made) and all(storage in blocks for storage in storages)
    if not is_view and call.operator.has_kernel:
        if call.on_host:
            _check_devices(gpu, call)
        _launch(gpu, call)
        if graph is not None and not gpu.without_values:
            graph.computed(call.again_on_cpu, made)
    if call.leaves_gpu:
        return out
    known = {id(each.raw): each for each in call.on_gpu}
    if call.written:
        known |= {id(each): each for each in call.on_host}  # written by a copy from the GPU

    def wrapped(raw: Tensor, storage: int) -> Tensor:
        if (same := known.get(id(raw))) is not None:
            return same
        if (block := blocks.get(storage)) is None:
            block = gpu.allocated(raw.untyped_storage().nbytes())
            if graph is not None:
                graph.allocated(block)
            else:
                gpu.access(block, raw, gpu.stream.actor, write=True, what=call.name)
        return PaperTensor(gpu, raw, storage, block)

    if isinstance(out, Tensor):
        return wrapped(out, *storages)
    all_wrapped = iter([wrapped(*each) for each in zip(made, storages, strict=True)])
    return _mapped(lambda each: next(all_wrapped) if isinstance(each, Tensor) else each, out)


def _on_host(gpu: PaperGpu, call: Call) -> Any:
    """What the host does by itself: pinned memory that a stream may use is the only thing to check."""
    untouched = gpu.without_values and call.name == "zero_"  # the system's pages are zero, and take no memory yet
    out = call.args[0] if untouched else call.func(*call.args, **call.kwargs)
    if gpu.has_pinned and call.on_host:
        storages = {_storage(each) for each in call.on_host}
        made = _tensors((out,))
        if call.written or not made or not all(_storage(each) in storages for each in made):
            gpu.host.step()
            for each in call.on_host:
                gpu.access_host(each, gpu.host, write=id(each) in call.written, what=call.name)
    return out


def _check_devices(gpu: PaperGpu, call: Call) -> None:
    if not call.on_gpu or call.name in MOVING:
        return
    for each in call.on_host:
        if each.dim() and call.name in INDEXING and not each.is_floating_point():
            gpu.synced("copy to device", gpu.stream.actor.clock)
        elif each.dim():
            gpu.problem(f"{call.name} of tensors on the GPU and on the host, {tuple(each.shape)}")


@cache
def stored(program: Callable[..., object]) -> set[str]:
    """Names of the parameters of a Triton program, as it is in Python, that it stores to. Memory at an address that it
    reads is its `home`."""
    names = set(re.findall(r"tl\.store\(\s*(\w+)", getsource(program))) - {"home"}
    assert names
    assert names <= set(signature(program).parameters)
    return names


def launch(gpu: PaperGpu, name: str, tensors: Sequence[PaperTensor], written: Collection[int]) -> Actor:
    """A kernel or a copy goes to the current stream, which is returned. written: ids of those of `tensors` that it
    writes."""
    actor = gpu.stream.actor
    if gpu.recording is not None:
        gpu.recording.launched(name, tensors, written)
        return actor
    gpu.recorded_last = None
    actor.learn(gpu.host.clock)
    actor.step()
    gpu.launches[name] += 1
    for each in tensors:
        gpu.access(each.block, each.raw, actor, write=id(each) in written, what=name)
    return actor


def _launch(gpu: PaperGpu, call: Call) -> None:
    """The host waits for it where it has to."""
    actor = launch(gpu, call.name, call.on_gpu, call.written)
    if call.name in MOVING and (call.on_host or call.leaves_gpu):
        _cross(gpu, call)
    elif call.name in WAITING or (call.name in INDEXING and any(each.dtype == torch.bool for each in _indices(call))):
        gpu.synced(call.name, actor.clock)


def _indices(call: Call) -> list[Tensor]:
    return [each for each in call.argument("indices") or () if isinstance(each, Tensor)]


def _cross(gpu: PaperGpu, call: Call) -> None:
    """A copy between the GPU and the host. One that does not block needs pinned memory, in one piece on both sides."""
    actor, asynchronous = gpu.stream.actor, bool(call.argument("non_blocking"))
    if gpu.recording is not None:
        gpu.problem("a copy over the link in a graph, of memory of the host that may change")
    for each in call.on_host:
        gpu.access_host(each, actor, write=id(each) in call.written, what=call.name)
        if asynchronous and each.nbytes and not gpu.is_pinned(each):
            gpu.problem(f"a copy of {each.nbytes} bytes that does not block, of memory that is not pinned")
    if (
        asynchronous
        and call.name == "copy_"
        and not all(_raw(call.argument(name)).is_contiguous() for name in ("self", "src"))
    ):
        gpu.problem("a copy over the link of memory that is not in one piece")
    if asynchronous and call.leaves_gpu:
        gpu.problem("a copy to the host that does not block, into memory that is not pinned")
    if not asynchronous:
        leaves = call.leaves_gpu or any(id(each) in call.written for each in call.on_host)
        gpu.synced("copy to host" if leaves else "copy to device", actor.clock)


def _raw(tensor: Tensor) -> Tensor:
    return tensor.raw if isinstance(tensor, PaperTensor) else tensor


def _to(
    gpu: PaperGpu, tensor: Tensor, device: torch.device | None, dtype: torch.dtype | None, non_blocking: bool
) -> Tensor:
    """`Tensor.to`: itself where nothing changes."""
    device = tensor.device if device is None else DEVICE if device.type in GPU else device
    if device.type == tensor.device.type and dtype in (None, tensor.dtype):
        return tensor
    kwargs: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
    if device.type != tensor.device.type:
        kwargs |= {"device": device, "non_blocking": non_blocking}
    with _disable_current_modes():  # as in an operator that is called
        return run(gpu, Call(torch.ops.aten._to_copy.default, (tensor,), kwargs))  # type: ignore[no-any-return]


def _flash(query: Tensor, keys: Tensor, values: Tensor, *, scale: float | None) -> tuple[Any, ...]:
    """A GPU's fused attention takes 16-bit numbers only. What is not used of its results is empty."""
    if query.element_size() != 2:
        raise RuntimeError(f"fused attention of {query.dtype}")
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, keys, values, scale=scale)
    return out, lse, *(torch.empty(0) for _ in range(2)), 0, 0, *(torch.empty(0) for _ in range(3))


def _storage(raw: Tensor) -> int:
    return int(raw.untyped_storage()._cdata)
