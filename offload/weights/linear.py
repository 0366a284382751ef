"""Products of rows with a weight matrix in any encoding."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from offload.formats.quantised import Codes
from offload.formats.stored import StoredMatrix
from offload.kernels import choice, cpu
from offload.kernels.device import DeviceKernels
from offload.kernels.products import divided


@dataclass(frozen=True)
class Parts:
    """A matrix of parts in different encodings, one below the other."""

    parts: tuple[Tensor | StoredMatrix, ...]

    @property
    def shape(self) -> tuple[int, int]:
        """The shape (outputs, inputs)."""
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]


Weight = Tensor | Codes | StoredMatrix | Parts


@dataclass(frozen=True)
class Linear:
    """A linear map with weight [out, in]: x [T, in] -> [T, out]."""

    weight: Weight
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return product(x, self.weight, self.bias)


def product(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    """The product x [T, inputs] @ weight [outputs, inputs]^T + bias [outputs], in the dtype of x.

    Codes on a GPU, and a stored matrix with a few rows, are multiplied by the GPU's kernel, which decodes them on the
    fly; otherwise by torch's operators, or on a CPU without fast ones by the CPU's kernels, over the decoded numbers of
    one part at a time.
    """
    if isinstance(weight, Codes):
        return choice.gpu_kernels(x.device).multiply(x, weight, bias)
    if isinstance(weight, Tensor):
        return cpu.product(x, weight, bias) if x.device.type == "cpu" else linear(x, weight, bias)
    if isinstance(weight, StoredMatrix):
        return _kernels(x.device).multiply_stored(x, weight, bias)
    out, first = x.new_empty(len(x), weight.shape[0]), 0
    for part in weight.parts:
        rows = slice(first, first + part.shape[0])
        out[:, rows] = product(x, part, None if bias is None else bias[rows])
        first = rows.stop
    return out


def by_heads(x: Tensor, weight: Weight) -> Tensor:
    """The products of x [T, H, inputs] with the matrices of heads, one below the other in `weight` -> [T, H, outputs].
    On a CPU, and where they are not plain, they are computed one by one."""
    assert not isinstance(weight, Parts)
    heads = divided(weight, x.shape[1])
    if isinstance(weight, Tensor) and x.device.type != "cpu":
        return torch.bmm(x.transpose(0, 1), weight.unflatten(0, (len(heads), -1)).transpose(1, 2)).transpose(0, 1)
    by_head = x.transpose(0, 1).contiguous()
    return torch.stack([product(rows, head, None) for rows, head in zip(by_head, heads, strict=True)], 1)


def numbers(stored: StoredMatrix, dtype: torch.dtype) -> Tensor:
    """The decoded numbers of a stored matrix, [outputs, inputs] of `dtype`, in new memory on the device of its
    blocks."""
    return _kernels(stored.rows.device).decode_stored(stored, dtype)


def _kernels(device: torch.device) -> DeviceKernels:
    return cpu.kernels() if device.type == "cpu" else choice.gpu_kernels(device)
