"""The compute device: the current device of a thread, and the precision of sums."""

from __future__ import annotations

import torch


def use_device(device: torch.device) -> None:
    """Make a GPU this thread's current device: Triton and some libraries launch there, regardless of the tensors'
    device. A thread starts with cuda:0. No effect on a CPU."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def sum_in_fp32(device: torch.device) -> None:
    """Have cuBLAS keep the partial sums of 16-bit products in fp32, in this process. No effect on a CPU."""
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
