"""Triton's interpreter as the tests use it. No tests in here.

Only in a process that was started with TRITON_INTERPRET=1.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def products_by_row(patch: pytest.MonkeyPatch) -> None:
    """Of a matrix, some machines' NumPy rounds a row by its place, as no GPU's matrix unit does."""

    def dot(builder: InterpreterBuilder, a: Any, b: Any, d: Any, *_: object) -> TensorHandle:
        rows = [np.matmul(row, b.data, dtype=d.data.dtype) for row in a.data]
        return TensorHandle(np.stack(rows) + d.data, d.dtype.scalar)

    patch.setattr(InterpreterBuilder, "create_dot", dot)


@cache
def without_idle_work() -> None:
    """Leave out what takes the interpreter most of its time and changes nothing: it replaces Triton's operators at
    every call of a function, sums up what could overflow and looks at it only when debugging, and makes a table of
    types for each type that it looks up."""
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
