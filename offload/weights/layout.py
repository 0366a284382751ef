"""A layer's weights: one flat buffer with named views. Operators are fused: q, k and v are one, gate and up too."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from offload.formats.quantised import Codes
from offload.kernels import choice
from offload.plan.config import ModelConfig

OPERATORS = ("qkv", "o", "gate_up", "down")
_ALIGNMENT = 64  # bytes, of each view in its buffer


@dataclass(frozen=True)
class Linear:
    """x [T, in] -> [T, out] with weight [out, in]."""

    weight: Tensor | Codes
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return product(x, self.weight, self.bias)


@dataclass(frozen=True)
class LayerWeights:
    """Operators and norms of one layer, all views of one buffer."""

    qkv: Linear
    o: Linear
    gate_up: Linear
    down: Linear
    input_norm: Tensor
    post_norm: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None


@dataclass(frozen=True)
class View:
    """A tensor in a flat buffer. offset: bytes."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def of(self, buffer: Tensor) -> Tensor:
        """The tensor in `buffer`, uint8 [bytes]. No copy."""
        return buffer[self.offset : self.offset + self.nbytes].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class LayerLayout:
    """The place of a layer's tensors in its flat buffer, uint8 [num_bytes], by name. Views may differ in dtype; each
    begins at a multiple of 64 bytes."""

    views: dict[str, View]
    num_bytes: int

    @classmethod
    def pack(cls, tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> LayerLayout:
        """`tensors`, name -> (shape, dtype), one after the other."""
        views, end = {}, 0
        for name, (shape, dtype) in tensors.items():
            views[name] = View(end, shape, dtype)
            end += -(-views[name].nbytes // _ALIGNMENT) * _ALIGNMENT
        return cls(views, end)

    @classmethod
    def of(cls, config: ModelConfig, dtype: torch.dtype, code_bits: int | None = None) -> LayerLayout:
        """A layer of `config` in `dtype`, its matrices in codes of `code_bits` bits where these are given."""
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        hidden, inner = config.hidden_size, config.intermediate_size
        shapes: dict[str, tuple[int, ...]] = {
            "qkv.weight": (q + 2 * kv, hidden),
            "o.weight": (hidden, q),
            "gate_up.weight": (2 * inner, hidden),
            "down.weight": (hidden, inner),
            "input_norm": (hidden,),
            "post_norm": (hidden,),
        }
        if config.qkv_bias:
            shapes["qkv.bias"] = (q + 2 * kv,)
        if config.o_bias:
            shapes["o.bias"] = (hidden,)
        if config.mlp_bias:
            shapes |= {"gate_up.bias": (2 * inner,), "down.bias": (hidden,)}
        if config.qk_norm:
            shapes |= {"q_norm": (config.head_dim,), "k_norm": (config.head_dim,)}
        tensors = {name: (shape, dtype) for name, shape in shapes.items()}
        if code_bits is not None:
            for name in OPERATORS:
                tensors |= in_codes(name, tensors.pop(f"{name}.weight")[0], code_bits)
        return cls.pack(tensors)

    @property
    def end_of_matrices(self) -> int:
        """Bytes before norms and biases: matrices come first."""
        return self.views["input_norm"].offset

    def tensors(self, buffer: Tensor) -> dict[str, Tensor]:
        """All that `buffer` holds, by name."""
        return {name: view.of(buffer) for name, view in self.views.items()}

    def bind(self, buffer: Tensor) -> LayerWeights:
        """The layer that `buffer` holds, now or after a copy into it."""
        tensors = self.tensors(buffer)
        operators = {name: Linear(matrix_of(tensors, name), tensors.get(f"{name}.bias")) for name in OPERATORS}
        norms = {name: tensors.get(name) for name in ("input_norm", "post_norm", "q_norm", "k_norm")}
        return LayerWeights(**operators, **norms)  # type: ignore[arg-type]


def in_codes(name: str, shape: tuple[int, ...], bits: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """The tensor, by name, that operator `name` has in place of a matrix [outputs, inputs]: see `Codes`."""
    return {f"{name}.blocks": (Codes.shape_of_blocks(shape, bits), torch.uint8)}


def matrix_of(tensors: Mapping[str, Tensor], name: str) -> Tensor | Codes:
    """The matrix of operator `name`, as it is or in codes."""
    return tensors[f"{name}.weight"] if f"{name}.blocks" not in tensors else Codes(tensors[f"{name}.blocks"])


def product(x: Tensor, weight: Tensor | Codes, bias: Tensor | None) -> Tensor:
    """x [T, inputs] times weight [outputs, inputs], transposed, plus bias [outputs], in the dtype of x. With codes on a
    GPU by its own kernel, which unpacks them on the way; else by torch's operators."""
    if isinstance(weight, Codes):
        return choice.gpu_kernels(x.device).multiply(x, weight, bias)
    return linear(x, weight, bias)
