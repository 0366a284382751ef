"""Measured speed of reading, copying and products on this machine: the best of a few runs, since other load only slows
them.

Works on any device, and is independent of models.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from offload.interrupts import poll
from offload.transfer.link import Link
from offload.transfer.memory import Memory
from offload.weights.linear import product

MIN_RUNS = 3
READ_SECONDS = COPY_SECONDS = 0.5  # long enough for an undisturbed moment
PRODUCT_SECONDS = 0.1  # per size
COPIES_PER_RUN = 4  # back to back, so that the cost of starting them does not count
ENOUGH_SECONDS = 0.05  # of one product, for an accurate time
MAX_PRODUCT_SIZE = 8192
MATRIX_WIDTH = 4096
PURPOSE = "measuring"

Copy = Callable[[], Callable[[], object]]  # starts a copy, returns a function that waits for it


@dataclass(frozen=True)
class Copies:
    """Copies between a device and the host in both directions, `num_bytes` each."""

    to_device: Copy
    to_host: Copy
    num_bytes: int


def read_rates(device: torch.device, dtype: torch.dtype, num_bytes: int) -> tuple[float, float]:
    """The read rates (plain, weights) in bytes per second: a sum over `num_bytes` of memory; a product of one row with
    that many bytes."""
    block = torch.ones(num_bytes // 4, device=device)
    plain = block.nbytes / _best_seconds(block.sum, device, seconds=READ_SECONDS)
    weights = block.view(dtype)
    width = min(MATRIX_WIDTH, weights.numel())
    weights = weights[: weights.numel() // width * width].view(-1, width)
    row = torch.ones(1, width, dtype=dtype, device=device)
    run = partial(product, row, weights, None)
    return plain, weights.nbytes / _best_seconds(run, device, seconds=READ_SECONDS)


def product_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second (a multiply-add is two) of square products, the best size up to one that takes long."""
    best, size = 0.0, 256
    while size <= MAX_PRODUCT_SIZE:
        matrix = torch.randn(size, size, device=device).to(dtype)
        seconds = _best_seconds(partial(product, matrix, matrix, None), device, seconds=PRODUCT_SECONDS)
        best, size = max(best, 2 * size**3 / seconds), 2 * size
        if seconds > ENOUGH_SECONDS:
            break
    return best


def copy_rate(copies: Sequence[Copy], num_bytes: int) -> float:
    """Bytes per second of all `copies`, of `num_bytes` each, in flight together."""

    def run() -> None:
        for wait in [copy() for _ in range(COPIES_PER_RUN) for copy in copies]:
            wait()

    return COPIES_PER_RUN * len(copies) * num_bytes / _best_seconds(run, seconds=COPY_SECONDS)


def link_copies(link: Link, device: torch.device, num_bytes: int) -> Copies:
    """Copies over a link as the engine uses it, with independent directions."""
    send, receive = (_blocks(device, num_bytes) for _ in range(2))
    synchronize(device)
    return Copies(
        to_device=lambda: link.to_device(send[0], send[1]).synchronize,
        to_host=lambda: link.to_host(receive[1], receive[0]).synchronize,
        num_bytes=num_bytes,
    )


def synchronize(device: torch.device) -> None:
    """Wait until `device` has finished all its work; a CPU has when a call returns."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _blocks(device: torch.device, num_bytes: int) -> tuple[Tensor, Tensor]:
    """Two buffers (on the device, on the host); the host's is pinned for a GPU. They are written once, so that all
    memory pages exist."""
    memory = Memory(device)
    return (
        memory.allocate((num_bytes,), torch.uint8, tier="device", purpose=PURPOSE).fill_(1),
        memory.allocate((num_bytes,), torch.uint8, tier="host", purpose=PURPOSE).fill_(1),
    )


def _best_seconds(run: Callable[[], object], device: torch.device | None = None, *, seconds: float) -> float:
    """The shortest of at least three runs that take `seconds` together; a run ends when `device` has finished it."""
    best, spent, count = math.inf, 0.0, 0
    while count < MIN_RUNS or spent < seconds:
        poll()
        start = time.perf_counter()
        run()
        if device is not None:
            synchronize(device)
        taken = time.perf_counter() - start
        best, spent, count = min(best, taken), spent + taken, count + 1
    return best
