"""Triton's programs on paper, run by its interpreter on the tensors' values. No tests in here.

Only in a process that was started with TRITON_INTERPRET=1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest
from torch.utils._python_dispatch import _disable_current_modes

from offload.formats import packed_gpu, quantised_kv_gpu, residuals_gpu, stored_gpu
from offload.kernels import choice
from offload.kernels.gpu import (
    activation,
    attention,
    block_slots,
    choosing,
    convolution,
    copies,
    delta,
    experts,
    fixed_rows,
    halves,
    prefill,
    quantised_products,
    rotation,
    splits,
    stored_products,
    streams,
)
from offload.kernels.gpu.kernels import GPU_KERNELS
from offload.native import launch as native_launch
from paper.gpu import PaperGpu
from paper.tensors import PaperTensor, launch, stored


def programs_by_interpreter(gpu: PaperGpu, patch: pytest.MonkeyPatch) -> None:
    """The GPU has kernels from now on, and they run, in graphs too."""

    def run(program: Any, grid: tuple[int, ...], arguments: Sequence[object], **constants: object) -> None:
        given = dict(zip(program.arg_names, arguments, strict=False))
        tensors = {name: each for name, each in given.items() if isinstance(each, PaperTensor)}
        written = {id(tensors[name]) for name in stored(program.fn) & tensors.keys()}
        launch(gpu, program.__name__, _read(tensors), written)
        raw = [each.raw if isinstance(each, PaperTensor) else each for each in arguments]
        widened = {"WIDEN": True} if "WIDEN" in constants else {}

        def compute() -> None:
            with _disable_current_modes():  # it is not the host that reads
                program[grid](*raw, **constants | widened)

        if (graph := gpu.recording) is not None:
            for each in tensors.values():
                if id(each) in written:
                    graph.writes(each.raw)
            graph.computed(compute, ())
        compute()

    patch.setattr(choice, "gpu_kernels", lambda device: GPU_KERNELS)
    for module in (
        native_launch,
        *(packed_gpu, quantised_kv_gpu, residuals_gpu, stored_gpu),
        *(activation, attention, block_slots, choosing, convolution, copies, delta, experts, fixed_rows, halves),
        *(prefill, quantised_products, rotation, splits, stored_products, streams),
    ):
        patch.setattr(module, "launch", run)


def _read(tensors: dict[str, PaperTensor]) -> list[PaperTensor]:
    """What a program reads or writes. Of a bank of experts: the places of the batch alone, and no book of codes that is
    a part of it, as forms without a book have."""
    if "content" not in tensors or "places" not in tensors:
        return [*tensors.values()]
    bank = tensors["content"].raw.untyped_storage().data_ptr()
    others = [each for each in tensors.values() if each.raw.untyped_storage().data_ptr() != bank]
    there = tensors["places"].raw.tolist()
    return others + [cast(PaperTensor, tensors["content"][place]) for place in there if place >= 0]
