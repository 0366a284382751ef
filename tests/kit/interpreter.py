"""Triton's interpreter as the tests use it. No tests in here.

Only in a process that was started with TRITON_INTERPRET=1.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from math import prod
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from kit.fixed import fma


def products_by_row(patch: pytest.MonkeyPatch) -> None:
    """Of a matrix, some machines' NumPy rounds a row by its place, as no GPU's matrix unit does."""

    def dot(builder: InterpreterBuilder, a: Any, b: Any, d: Any, *_: object) -> TensorHandle:
        if a.data.dtype == np.int8:  # exact, of any order
            return TensorHandle(np.matmul(a.data, b.data, dtype=np.float32).astype(np.int32) + d.data, d.dtype.scalar)
        rows = [np.matmul(row, b.data, dtype=d.data.dtype) for row in a.data]
        return TensorHandle(np.stack(rows) + d.data, d.dtype.scalar)

    patch.setattr(InterpreterBuilder, "create_dot", dot)


@cache
def without_idle_work() -> None:
    """Leave out what takes the interpreter most of its time and changes nothing: it replaces Triton's operators at
    every call of a function, sums up what could overflow and looks at it only when debugging, makes a table of types
    for each type that it looks up, and a type and a shape for each tensor."""
    patch_lang, patched = interpreter._patch_lang, set[str]()

    def patch_once(fn: Any) -> SimpleNamespace:
        module = fn.__globals__["__name__"]
        if module not in patched:
            patched.add(module)
            patch_lang(fn)
        return SimpleNamespace(restore=lambda: None)  # nothing else in this process needs Triton's own

    dtype_of, dtypes = interpreter._get_np_dtype, dict[str, np.dtype[Any]]()

    def known_dtype_of(of: Any) -> np.dtype[Any]:
        if of.scalar.name not in dtypes:
            dtypes[of.scalar.name] = dtype_of(of)
        return dtypes[of.scalar.name]

    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    interpreter._patch_lang = patch_once
    interpreter._get_np_dtype = known_dtype_of
    _share_types()


def _share_types() -> None:
    """One block type for each element type and shape, and one shape for all tensors that have it, which need not be
    broadcast to each other."""
    init_type, types = core.block_type.__init__, dict[tuple[type, str, tuple[int, ...]], core.block_type]()
    shapes = dict[tuple[int, ...], core.tuple]()

    def known_type(cls: type, element: core.dtype, shape: Iterable[Any]) -> core.block_type:
        sizes = tuple([size if type(size) is int else core._unwrap_if_constexpr(size) for size in shape])
        key = (type(element), element.name, sizes)  # the name of a pointer's says what it is to
        if key not in types:
            types[key] = object.__new__(cls)
        return types[key]

    def init_type_once(block: core.block_type, element: core.dtype, shape: Iterable[Any]) -> None:
        if "numel" not in block.__dict__:
            init_type(block, element, shape)

    def init_tensor(tensor: core.tensor, handle: TensorHandle, of: core.dtype) -> None:
        known = of.__dict__
        if "tensors_shape" not in known:
            sizes = of.shape if of.is_block() else ()
            sizes = tuple(sizes)
            if sizes not in shapes:
                shapes[sizes] = core.tuple([core.constexpr(size) for size in sizes])
            known["tensors_shape"] = shapes[sizes]
            known["tensors_numel"] = core.constexpr(prod(sizes))
        tensor.handle, tensor.type, tensor.dtype = handle, of, of.scalar
        tensor.shape, tensor.numel = known["tensors_shape"], known["tensors_numel"]

    unwrap, broadcast = core._unwrap_if_constexpr, TritonSemantic.broadcast_impl_value

    def unwrap_at_once(value: Any) -> Any:
        of = type(value)
        if of is core.constexpr:
            return value.value
        return value if of is int or of is core.tensor else unwrap(value)

    def broadcast_others(semantic: TritonSemantic, left: core.tensor, right: core.tensor) -> tuple[Any, Any]:
        if left.shape is right.shape or (not left.type.is_block() and not right.type.is_block()):
            return left, right
        return broadcast(semantic, left, right)

    core.block_type.__new__ = staticmethod(known_type)
    core.block_type.__init__ = init_type_once
    core.tensor.__init__ = init_tensor
    core._unwrap_if_constexpr = unwrap_at_once
    TritonSemantic.broadcast_impl_value = broadcast_others


def rounds_to_bf16(patch: pytest.MonkeyPatch) -> None:
    """As a GPU does: to the nearest, of two the even one. The interpreter cuts off."""
    convert = interpreter._convert_float

    def rounded(data: Any, source: Any, target: Any, *more: object) -> Any:
        if source.name == "fp32" and target.name == "bf16":
            found = torch.from_numpy(np.array(data, np.float32)).bfloat16()
            return found.view(torch.int16).numpy().view(np.uint16)
        if source.name == "bf16" and target.name == "fp32":
            return (np.asarray(data).astype(np.uint32) << 16).view(np.float32)
        return convert(data, source, target, *more)

    patch.setattr(interpreter, "_convert_float", rounded)


def rounds_products_once(patch: pytest.MonkeyPatch) -> None:
    """A fused multiply-add of fp32 has one rounding, on a GPU. The interpreter rounds the product, too."""

    def fused(builder: InterpreterBuilder, x: Any, y: Any, z: Any) -> TensorHandle:
        assert z.data.dtype == np.float32
        return TensorHandle(fma(*(torch.from_numpy(np.array(each.data)) for each in (x, y, z))).numpy(), z.dtype.scalar)

    patch.setattr(InterpreterBuilder, "create_fma", fused)


def runs_assembly(patch: pytest.MonkeyPatch) -> None:
    """The instructions that programs have as assembly, by the PTX manual: moves of a register of four bytes, and
    permutations of bytes."""

    def run(builder: InterpreterBuilder, text: str, _: str, given: Any, kinds: Any, *more: object) -> Any:
        data = [np.ascontiguousarray(each.data) for each in given]
        name, (kind,) = text.split()[0], kinds if isinstance(kinds, list | tuple) else (kinds,)
        return _Results([TensorHandle(_ASSEMBLY[name](*data), kind.scalar)])

    patch.setattr(InterpreterBuilder, "create_inline_asm", run)


class _Results(list[TensorHandle]):
    """The results of an operation as a builder returns them."""

    def get_result(self, number: int) -> TensorHandle:
        return self[number]


def _moved(words: Any) -> Any:
    """The bytes of the first word of each four neighbours."""
    return words[..., ::4].astype(np.int32).view(np.int8)


def _permuted(low: Any, high: Any, places: Any) -> Any:
    """prmt: bytes of two words by four fields of four bits, of which the highest bit is 0."""
    low, high, places = np.broadcast_arrays(low, high, places)
    both = (low.astype(np.int64) & 0xFFFFFFFF) | high.astype(np.int64) << 32
    made = np.zeros_like(both)
    for number in range(4):
        field = places >> 4 * number & 15
        assert (field < 8).all()
        made |= (both >> 8 * field.astype(np.int64) & 255) << 8 * number
    return made.astype(np.uint32).view(np.int32)


_ASSEMBLY = {"mov.b32": _moved, "prmt.b32": _permuted}
