"""Products of a few rows with weights by the CPU's kernels, with the norms before and the sums after them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from offload.config.networks import Activation
from offload.formats.quantised import Codes
from offload.formats.stored import StoredMatrix, described
from offload.kernels.norms import NormWeights
from offload.native import interface as native
from offload.native.interface import DTYPES, Library, Product

Ending = Literal["write", "add", "gate", "activate"]
_ENDINGS: tuple[Ending, ...] = ("write", "add", "gate", "activate")
_ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu_tanh", "relu_squared", "clamped_silu")
Matrix = Tensor | Codes | StoredMatrix
MOST, MOST_GROUPS = 320, 16  # steps of one call, and groups of steps beside each other
_ALIGNMENT = 64  # inputs: at least a vector of every instruction set, and a pair of groups in blocks
_TILE = 16  # rows of an AMX tile; as bf16 they take half the memory of floats


@dataclass(frozen=True)
class Step:
    """A product with its norm and ending: out = ending(norm(x) @ weight^T + bias) for the first rows of x [n, inputs]
    and out [n, outputs].

    norm: None leaves x unchanged. ending: "write" stores the product; "add" adds factor times the product to out;
    "gate": out is activation(product) * (the product with `up`, or with the second half of the weight if `up` is None);
    "activate": out is activation(product). Rounded to the dtype after the norm, the product and each step of the
    ending. With a weight in codes the normed rows are quantised to 8 bits (native/codes.h).

    weight: None for no product: out [n, inputs] += factor * norm(x).
    room: scratch from `room_to_widen`; None: that of the steps. beside: the step reads nothing that the steps before it
    write, from the last one on that is not beside others, and has its own room: they run at the same time. fixed: rows
    are multiplied with stored matrices that have integers (`Encoding.has_integers`) in fixed point
    (native/stored_fixed.h), with the same bits on every machine; else only where that is quicker.
    """

    x: Tensor
    weight: Matrix | None
    bias: Tensor | None
    out: Tensor
    norm: NormWeights | None = None
    ending: Ending = "write"
    factor: float = 1.0
    activation: Activation = "silu"
    up: Matrix | None = None
    room: Tensor | None = None
    beside: bool = False
    fixed: bool = False


class Steps:
    """Consecutive steps over the same rows, in one native call. A row's bits do not depend on the number of rows."""

    def __init__(self, kernels: Library, steps: Sequence[Step], widened: Tensor) -> None:
        """steps: at most MOST in MOST_GROUPS, of one dtype, rows and matrices contiguous. widened: scratch from
        `room_to_widen`."""
        assert len(steps) <= MOST
        assert sum(not step.beside for step in steps) <= MOST_GROUPS
        self._dtype, self._library, self._kept = DTYPES[steps[0].x.dtype], kernels.library, steps
        self._widened, self._read = widened, steps[0].x  # tensors are kept alive for their addresses
        self._structures = (Product * len(steps))(*(structure_of(step, widened) for step in steps))

    def run(self, num_rows: int) -> None:
        """Run the steps over the first `num_rows` rows."""
        structures = self._structures
        self._library.run_products(self._dtype, structures, len(structures), num_rows, torch.get_num_threads())

    def read(self, x: Tensor) -> None:
        """Make the first step read x, [n, inputs] contiguous, from now on."""
        self._read, self._structures[0].x = x, x.data_ptr()


def structure_of(step: Step, widened: Sequence[Tensor] | Tensor) -> Product:
    """The description of a step for the CPU's kernels, valid as long as its tensors exist. widened: two scratch
    buffers, see `room_to_widen`."""
    inputs, outputs, norm = step.x.shape[1], step.out.shape[1], step.norm
    codes = step.weight if isinstance(step.weight, Codes) else None
    weight, up = step.weight, step.up
    if step.ending == "gate" and up is None:
        assert weight is not None
        weight, up = divided(weight, 2)
    assert weight is not None or (step.ending == "add" and norm is not None)
    own, second = widened if step.room is None else step.room
    widened_up = own if up is None or _kind(up) == _kind(weight) else second  # kinds want rows in other forms
    return Product(
        step.x.data_ptr(),
        norm and norm.weight.data_ptr(),
        norm and address(norm.bias),
        _matrix(weight),
        _matrix(up),
        address(step.bias),
        step.out.data_ptr(),
        own.data_ptr(),
        widened_up.data_ptr(),
        step.x.stride(0),
        step.out.stride(0),
        inputs,
        outputs,
        0 if codes is None else codes.bits,
        _ENDINGS.index(step.ending),
        _ACTIVATIONS.index(step.activation),
        norm is not None and norm.norm.centred,
        norm is not None and norm.norm.fp32,
        step.beside,
        step.fixed,
        0.0 if norm is None else norm.norm.eps,
        step.factor,
    )


def divided(weight: Matrix, count: int) -> list[Matrix]:
    """The equal parts of a matrix [count * outputs, inputs]; one in codes must have whole tiles in each."""
    if isinstance(weight, Codes):
        assert len(weight.blocks) % count == 0
        return [Codes(blocks) for blocks in weight.blocks.chunk(count)]
    outputs = weight.shape[0] // count
    return [weight[first : first + outputs] for first in range(0, weight.shape[0], outputs)]


def _kind(weight: Matrix | None) -> str:
    """The encoding's kind of a stored matrix."""
    return weight.encoding.kind if isinstance(weight, StoredMatrix) else ""


def _matrix(weight: Matrix | None) -> native.Matrix:
    if isinstance(weight, StoredMatrix):
        return described(weight)
    return native.Matrix(address(weight.blocks if isinstance(weight, Codes) else weight))


def room_to_widen(num_rows: int, num_inputs: int) -> Tensor:
    """Scratch memory for `Steps` of at most `num_rows` rows and `num_inputs` inputs, [2, ...]: the halves of a gate may
    want their rows in different forms."""
    return torch.empty(2, widened_floats(num_rows, num_inputs))


def widened_floats(num_rows: int, num_inputs: int) -> int:
    """Numbers of scratch for rows in the form in which they are multiplied, in fp32."""
    padded = -(-num_inputs // _ALIGNMENT) * _ALIGNMENT
    return max(num_rows, _TILE) * (padded + padded // 4)  # a quarter: sums of groups, see native/


class HeadNorms:
    """RMS norms of every head in some tensors, in place, in one native call."""

    def __init__(self, kernels: Library, parts: Sequence[tuple[Tensor, NormWeights]]) -> None:
        """parts: x [n, H * D], of one dtype, whose rows may be strided; the weight has one number per head
        dimension."""
        assert not any(norm.norm.centred for _, norm in parts)
        self._library, self._kept = kernels.library, parts  # tensors are kept alive for their addresses
        self._structures = (native.HeadNorm * len(parts))(*(_head_norm(*each) for each in parts))

    def run(self, num_rows: int) -> None:
        """Norm the first `num_rows` rows of each."""
        if self._kept:
            dtype = DTYPES[self._kept[0][0].dtype]
            self._library.norm_heads(dtype, self._structures, len(self._kept), num_rows)


def _head_norm(x: Tensor, norm: NormWeights) -> native.HeadNorm:
    dim = len(norm.weight)
    where = x.data_ptr(), norm.weight.data_ptr()
    return native.HeadNorm(*where, norm.norm.fp32, x.shape[1] // dim, dim, x.stride(0), norm.norm.eps)


def address(tensor: Tensor | None) -> int | None:
    """The address of a tensor for the CPU's kernels, null without one."""
    return None if tensor is None else tensor.data_ptr()
