"""What weights of bf16 have beside their codes in 4 or 6 bits: about 9 or 8 of 16 bits. Together they are the weights.

Where the codes are on the device, this alone has to cross the link. A code says in which interval its weight lies, and
the low byte of the weight, which has one bit of its exponent, tells which number of the interval it is, unless zero is
near: then 4 more bits do. The rule is in native/intervals.h, the order of the parts in native/residuals.h.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from offload.kernels.codes import GROUP, TILE, Codes
from offload.kernels.gpu import GpuKernels
from offload.kernels.native import Kernels
from offload.kernels.native.interface import Residual as Struct

HEAD_BYTES = 8  # of a group: where its 4 bits begin, and its escapes


@dataclass(frozen=True)
class Residual:
    """Of a matrix [outputs, inputs]. content: uint8 [bytes], low bytes, heads, 4 bits each, and from `escapes` on the
    escapes."""

    content: Tensor
    escapes: int


def split_off(weight: Tensor, codes: Codes, kernels: Kernels) -> Residual | None:
    """Of weight, bf16 [outputs, inputs] contiguous on the host, and its codes, on all threads. None where not every
    weight would come back, as of numbers that are not finite."""
    assert kernels.library is not None
    threads, num_groups = torch.get_num_threads(), _num_groups(codes)
    heads = torch.empty(num_groups, 2, dtype=torch.int32)
    struct = _struct(weight, codes, heads=heads.data_ptr())
    if not kernels.library.count_residual(ctypes.byref(struct), threads):
        return None
    heads, escapes, size = _places(heads)
    content = torch.empty(size, dtype=torch.uint8)
    content[weight.numel() : weight.numel() + heads.nbytes] = heads.view(torch.uint8).flatten()
    struct = _struct_over(content, escapes, weight, codes)
    kernels.library.split_residual(ctypes.byref(struct), threads)
    return Residual(content, escapes)


def restore(content: Tensor, escapes: int, codes: Codes, out: Tensor, kernels: Kernels | GpuKernels) -> None:
    """Fill out, bf16 [outputs, inputs] contiguous, from a residual's content; all are on the kernels' device."""
    assert out.is_contiguous()
    assert codes.shape == out.shape
    if isinstance(kernels, GpuKernels):
        from offload.kernels.gpu.residuals import restore as restore_on_gpu  # it imports Triton

        return restore_on_gpu(content, escapes, codes, out)
    assert kernels.library is not None
    struct = _struct_over(content, escapes, out, codes)
    kernels.library.restore_residual(ctypes.byref(struct), torch.get_num_threads())
    return None


def _num_groups(codes: Codes) -> int:
    return codes.blocks.shape[0] * codes.blocks.shape[1]


def _places(counts: Tensor) -> tuple[Tensor, int, int]:
    """counts: bytes of 4 bits and escapes of each group, int32 [groups, 2] -> (heads, where escapes begin, all bytes: a
    multiple of 16)."""
    heads = (counts.cumsum(0) - counts).int()
    fours, escapes = (int(total) for total in counts.sum(0))
    begin = (TILE * GROUP + HEAD_BYTES) * len(counts) + fours
    return heads, begin, -(-(begin + escapes) // 16) * 16


def _struct(weight: Tensor, codes: Codes, **addresses: int) -> Struct:
    assert weight.is_contiguous()
    assert codes.shape == weight.shape
    outputs, inputs = weight.shape
    places = {"weight": weight.data_ptr(), "blocks": codes.blocks.data_ptr()} | addresses
    return Struct(outputs=outputs, inputs=inputs, bits=codes.bits, **places)


def _struct_over(content: Tensor, escapes: int, weight: Tensor, codes: Codes) -> Struct:
    low, numbers = content.data_ptr(), weight.numel()
    fours = low + numbers + HEAD_BYTES * _num_groups(codes)
    return _struct(weight, codes, low=low, heads=low + numbers, fours=fours, escapes=low + escapes)
