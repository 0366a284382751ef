"""Triton's programs on paper, run by its interpreter on the tensors' values. No tests in here.

Only in a process that was started with TRITON_INTERPRET=1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from torch.utils._python_dispatch import _disable_current_modes

from offload.formats import packed_gpu, quantised_kv_gpu, residuals_gpu, stored_gpu
from offload.kernels import choice
from offload.kernels.gpu import attention, copies, prefill, quantised_products, splits, stored_products
from offload.kernels.gpu.kernels import GPU_KERNELS
from paper.gpu import PaperGpu
from paper.tensors import PaperTensor, launch, stored


def programs_by_interpreter(gpu: PaperGpu, patch: pytest.MonkeyPatch) -> None:
    """The GPU has kernels from now on, and they run. Graphs cannot have them."""

    def run(program: Any, grid: tuple[int, ...], arguments: Sequence[object], **constants: object) -> None:
        assert gpu.recording is None
        given = dict(zip(program.arg_names, arguments, strict=False))
        tensors = {name: each for name, each in given.items() if isinstance(each, PaperTensor)}
        written = {id(tensors[name]) for name in stored(program.fn) & tensors.keys()}
        launch(gpu, program.__name__, [*tensors.values()], written)
        with _disable_current_modes():  # it is not the host that reads
            raw = [each.raw if isinstance(each, PaperTensor) else each for each in arguments]
            widened = {"WIDEN": True} if "WIDEN" in constants else {}
            program[grid](*raw, **constants | widened)

    patch.setattr(choice, "gpu_kernels", lambda device: GPU_KERNELS)
    for module in (
        *(packed_gpu, quantised_kv_gpu, residuals_gpu, stored_gpu),
        *(attention, copies, prefill, quantised_products, splits, stored_products),
    ):
        patch.setattr(module, "launch", run)
