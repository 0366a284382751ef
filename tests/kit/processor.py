"""The libraries of the CPU's kernels that can run on the machine of the tests. No tests in here."""

from __future__ import annotations

import ctypes
import mmap
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields

import pytest
import torch

from offload.kernels import cpu
from offload.kernels.cpu import CpuKernels, instruction_sets, load
from offload.kernels.device import NONE, DeviceKernels

SETS = {
    # what torch is told, so that it is chosen; nothing: it is where there is no better one
    "x86_64": {"amx": "", "avx512_bf16": "", "avx512": "AVX512", "avx2": "AVX2"},
    "aarch64": {"neon": torch.backends.cpu.get_cpu_capability()},
}


def on_this_machine() -> list[str]:
    """The instruction sets whose libraries run here, the best one first."""
    names = list(SETS.get(platform.machine(), {})) if sys.platform == "linux" else []
    capability = torch.backends.cpu.get_cpu_capability()
    best = instruction_sets(sys.platform, platform.machine(), capability, cpu.features())
    return names[names.index(best[0]) :] if best else []


def built(name: str) -> CpuKernels:
    """The loaded library of `name`. Skips, with the reason, where the compiler could not make it."""
    reason = cpu.FOLDER / "unbuilt.txt"
    if not (cpu.FOLDER / f"{name}.so").exists():
        pytest.skip(f"{name}.so was not built: {reason.read_text() if reason.exists() else 'not installed from here'}")
    found = load(cpu.FOLDER, name)
    assert isinstance(found, CpuKernels), found.reason
    return found


def best() -> CpuKernels:
    """The library that this machine's processes use. Skips, with the reason, where there is none."""
    if not (names := on_this_machine()):
        pytest.skip(f"there are no kernels for {sys.platform} on {platform.machine()}")
    return built(names[0])


_NOTHING = 0  # PROT_NONE
OPERATORS = ("torch", "kernels")  # what few rows run on


def of(operators: str) -> DeviceKernels:
    """The kernels where `operators` are those, none where they are torch's. Skips where this machine has no kernels."""
    return best() if operators == "kernels" else NONE


def left_to_torch(kernels: DeviceKernels) -> set[str]:
    """What the table `kernels` has as it is without kernels."""
    return {field.name for field in fields(NONE) if getattr(kernels, field.name) == getattr(NONE, field.name)}


def swapped(patch: pytest.MonkeyPatch, kernels: DeviceKernels, **operations: Callable[..., object]) -> None:
    """Put `operations` into the table `kernels` in place of its own, as long as the patch lasts."""
    for name, operation in operations.items():
        assert name in vars(kernels)
        patch.setitem(vars(kernels), name, operation)


@contextmanager
def process_uses(operators: str) -> Iterator[None]:
    """In the body this process's engines are made with `operators`. Skips where this machine has no kernels."""
    of(operators)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(cpu.VARIABLE, "on" if operators == "kernels" else "off")
        cpu.kernels.cache_clear()
        yield
    cpu.kernels.cache_clear()


@contextmanager
def threads(number: int) -> Iterator[None]:
    """In the body torch and the kernels run on `number` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def before_a_guard(content: torch.Tensor) -> Iterator[torch.Tensor]:
    """In the body a copy of `content` behind which nothing can be read: what does ends the process."""
    page, size = mmap.PAGESIZE, content.nbytes
    room = -(-size // page) * page
    memory = mmap.mmap(-1, room + page)
    guard = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + room
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(guard), ctypes.c_size_t(page), _NOTHING) == 0
    copy = torch.frombuffer(memory, dtype=torch.uint8, offset=room - size, count=size)
    copy = copy.view(content.dtype).view(content.shape)
    yield copy.copy_(content)
