"""Products in Triton's interpreter, row by row: of a matrix, some machines' NumPy rounds a row by its place, as no
card's matrix unit does. No tests in here.

Only in a process that was started with TRITON_INTERPRET=1.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def products_by_row(patch: pytest.MonkeyPatch) -> None:
    def dot(builder: InterpreterBuilder, a: Any, b: Any, d: Any, *_: object) -> TensorHandle:
        rows = [np.matmul(row, b.data, dtype=d.data.dtype) for row in a.data]
        return TensorHandle(np.stack(rows) + d.data, d.dtype.scalar)

    patch.setattr(InterpreterBuilder, "create_dot", dot)
