"""The CPU's kernels: the library that suits this machine, or the reason for none.

native/kernels.cpp and its headers are compiled when the package is installed (setup.py), once for each instruction set.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from math import gcd
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import linear

from offload import native
from offload.config.mixers import DeltaRule, DilatedConvolution, Mamba2, ShortConvolution
from offload.config.model import ModelConfig
from offload.errors import UsageError
from offload.formats import packed, quantised, quantised_kv, residuals
from offload.formats.encodings import KINDS
from offload.formats.layout import EXPERT_ALIGNMENT
from offload.formats.stored import StoredMatrix, decode
from offload.kernels import choosing_cpu, convolution_cpu, delta_cpu, experts_cpu
from offload.kernels.device import NONE, DeviceKernels
from offload.kernels.products import Step, Steps, room_to_widen
from offload.kernels.runs import RunAttention
from offload.kernels.spans import JOINED_SPAN, SPAN, SpanAttention
from offload.machine import KERNELS, cpu_features
from offload.native.interface import Library, declare

VARIABLE = KERNELS
CAPABILITY = "ATEN_CPU_CAPABILITY"  # torch's: avx2, say, keeps it and us from newer instructions
VERSION = 45  # of the kernels: sessions and measured times are of one
ABI = 1000 * VERSION + len(KINDS)  # what kernels.cpp says too
OFF = f"{VARIABLE} is off"
FOLDER = Path(native.__file__).parent
_NEWER = {"amx": "amx_bf16", "avx512_bf16": "avx512_bf16"}  # instruction sets beyond AVX-512, by a CPU's feature
WAIT_POLICY = "OMP_WAIT_POLICY"
WAITING = {"passive": 1, "active": 2}  # threads.h; otherwise as the machine is busy
_AGAIN = "run pip install again"


FEW_ROWS = 64  # up to so many the kernels are used where torch's operators would do, too
_WITHOUT_16_BITS = "avx2"  # the instruction set for which torch has no fast products of 16 bits
_WIDEST_HEAD = 1024
_spare: dict[torch.dtype, Tensor] = {}  # by `_multiply_stored`, which takes it out while it uses it


@dataclass(frozen=True, kw_only=True)
class CpuKernels(DeviceKernels):
    """The table of a loaded library, with the library and its instruction set."""

    library: ctypes.CDLL
    instruction_set: str


def _table(library: ctypes.CDLL, instruction_set: str) -> CpuKernels:
    own = CpuKernels(name=f"{instruction_set} {VERSION}", library=library, instruction_set=instruction_set)
    return replace(
        own,
        attention=partial(_attention, own),
        choose=partial(choosing_cpu.choose, kernels=own),
        multiply_stored=partial(_multiply_stored, own),
        decode_stored=partial(_decode_stored, own),
        recurrences={
            **dict.fromkeys((DeltaRule, Mamba2), partial(delta_cpu.run_states, kernels=own)),
            **dict.fromkeys((ShortConvolution, DilatedConvolution), partial(convolution_cpu.convolution, kernels=own)),
        },
        experts=partial(experts_cpu.run_experts, kernels=own),
        prefill_experts=partial(experts_cpu.run_many, kernels=own),
        quantise=partial(quantised.encode, kernels=own),
        quantise_kv=partial(quantised_kv.encode, kernels=own),
        unpack_numbers=partial(packed.unpack_numbers, kernels=own),
        unpack_tile=partial(packed.unpack_tile, kernels=own),
        restore=partial(residuals.restore, kernels=own),
        restore_tile=partial(residuals.restore_tile, kernels=own),
    )


def _attention(own: Library, *, dtype: torch.dtype, page: int | None = None, chunk: int | None = None) -> RunAttention:
    span, joined_span = (each if page is None else gcd(each, page) for each in (SPAN, JOINED_SPAN))
    return SpanAttention(own, dtype=dtype, span=span, joined_span=joined_span, chunk=chunk)


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The product x [T, inputs] @ weight [outputs, inputs]^T + bias [outputs]: torch's, or in 16 bits on AVX2, where
    torch takes seven times as long, the kernels' (docs/log.md)."""
    own, num_inputs = kernels(), weight.shape[1]
    if x.dtype.itemsize != 2 or num_inputs % 2 or not isinstance(own, CpuKernels):
        return linear(x, weight, bias)
    if own.instruction_set != _WITHOUT_16_BITS:
        return linear(x, weight, bias)
    x, weight, out = x.contiguous(), weight.contiguous(), x.new_empty(len(x), len(weight))
    widened = room_to_widen(min(len(x), FEW_ROWS), num_inputs)
    for rows, made in zip(x.split(FEW_ROWS), out.split(FEW_ROWS), strict=True):
        Steps(own, [Step(rows, weight, bias, made)], widened).run(len(rows))
    return out


def _multiply_stored(own: Library, x: Tensor, stored: StoredMatrix, bias: Tensor | None) -> Tensor:
    """The memory that numbers are decoded to is kept for the next matrix: new memory would take longer to get than they
    take to decode."""
    (outputs, inputs), buffer = stored.shape, _spare.pop(x.dtype, None)
    if buffer is None or len(buffer) < outputs * inputs:
        buffer = torch.empty(outputs * inputs, dtype=x.dtype)
    decoded = buffer[: outputs * inputs].view(outputs, inputs)
    decode(stored, decoded, own)
    found = product(x, decoded, bias)
    _spare[x.dtype] = buffer
    return found


def _decode_stored(own: Library, stored: StoredMatrix, dtype: torch.dtype) -> Tensor:
    out = torch.empty(stored.shape, dtype=dtype)
    decode(stored, out, own)
    return out


@cache
def kernels() -> DeviceKernels:
    """This process's kernels. Errors: UsageError if TRIFORCE_KERNELS is neither on nor off."""
    if not wanted(VARIABLE):
        return DeviceKernels(reason=OFF)
    found = DeviceKernels(reason="there are no kernels for this CPU; they need Linux and AVX2 or 64-bit ARM")
    for name in instruction_sets(sys.platform, platform.machine(), torch.backends.cpu.get_cpu_capability(), features()):
        found = load(FOLDER, name)
        if found.usable:
            break
    return found


def fitting(device: torch.device, head_dim: int, products: Sequence[tuple[int, int, bool]]) -> DeviceKernels:
    """This process's kernels, or none where a model cannot run on them. products: (outputs, inputs, has a bias) of its
    operators; 16-bit numbers are read in pairs."""
    if device.type != "cpu":
        return NONE
    if head_dim > _WIDEST_HEAD or head_dim % 2:
        return DeviceKernels(reason=f"the kernels know heads of 2, 4, ... {_WIDEST_HEAD} numbers, not of {head_dim}")
    if odd := [inputs for _, inputs, _ in products if inputs % 2]:
        return DeviceKernels(reason=f"the kernels know weights of an even number of inputs, not of {odd[0]}")
    return kernels()


def of_model(device: torch.device, config: ModelConfig) -> DeviceKernels:
    """This process's kernels, or none where some layer of the model cannot run on them. Layers may have heads of
    several sizes."""
    found = [fitting(device, head_dim, config.all_products) for head_dim in config.head_dims]
    row = 0 if config.experts is None else config.experts.row_size(config.hidden_size)
    if odd := [size for size in (config.hidden_size, row) if row and size % EXPERT_ALIGNMENT]:
        reason = f"the kernels know experts over rows of 16, 32, ... numbers, not of {odd[0]}"
        return DeviceKernels(reason=reason)
    return next((each for each in found if not each.usable), found[0])


def instruction_sets(system: str, machine: str, capability: str, features: Collection[str]) -> tuple[str, ...]:
    """The instruction sets of this machine for which there are kernels, the best one first. capability: the instruction
    set that torch's own kernels use."""
    if system != "linux":
        return ()
    if machine == "x86_64":
        newer = [name for name, feature in _NEWER.items() if feature in features]
        return {"AVX512": (*newer, "avx512"), "AVX2": ("avx2",)}.get(capability, ())
    return ("neon",) if machine == "aarch64" else ()


def load(folder: Path, name: str) -> DeviceKernels:
    """The library of the instruction set `name` in `folder`. Its threads wait as OMP_WAIT_POLICY asks for."""
    path = folder / f"{name}.so"
    if not path.exists():
        return DeviceKernels(reason=_why_unbuilt(folder))
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        return DeviceKernels(reason=f"the kernels cannot be loaded: {error}")
    if (found := library.abi()) != ABI:
        return DeviceKernels(
            reason=f"the kernels were built from other sources (interface {found}, not {ABI}); {_AGAIN}"
        )
    if not library.permitted():
        return DeviceKernels(reason=f"the system does not let this process use {name}")
    declare(library)
    library.wait_by(WAITING.get(os.environ.get(WAIT_POLICY, "").lower(), 0))
    return _table(library, name)


def features() -> Collection[str]:
    """The CPU's features, by which instruction sets beyond AVX-512 are chosen; none where ATEN_CPU_CAPABILITY is
    set."""
    return () if CAPABILITY in os.environ else cpu_features()


def wanted(variable: str) -> bool:
    """False where the environment says off. Raises UsageError for anything but on and off."""
    value = os.environ.get(variable, "")
    if value not in ("", "on", "off"):
        raise UsageError(f"{variable} is {value!r}; on and off are known")
    return value != "off"


def _why_unbuilt(folder: Path) -> str:
    try:
        reason = (folder / "unbuilt.txt").read_text(encoding="utf-8").strip()
    except OSError:
        return f"the kernels were not built; {_AGAIN}"
    return f"the kernels were not built ({reason}); {_AGAIN}"
