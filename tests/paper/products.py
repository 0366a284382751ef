"""Products of a GPU on paper whose rows are computed one by one, so that their bits are known whatever the CPU's
library does. No tests in here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from paper.gpu import PaperGpu
from paper.tensors import Call


def products_by_row(gpu: PaperGpu, patch: pytest.MonkeyPatch, *, split: str | None = None) -> None:
    """A row's bits do not depend on its place; in products of the kind `split`, "mm" or "bmm", they do."""
    result = gpu.result

    def computed(call: Call) -> Any:
        if call.name not in ("mm", "bmm"):
            return result(call)
        rows, matrix = (each.raw for each in call.on_gpu)
        parts = rows.shape[-2] if call.name == split else 1
        return torch.cat([_row(rows, matrix, place, parts) for place in range(rows.shape[-2])], -2)

    patch.setattr(gpu, "result", computed)


def _row(rows: Tensor, matrix: Tensor, place: int, parts: int) -> Tensor:
    """One of the product. Its sum is rounded in two pieces, the first of which is `place` of `parts`; in one, if there
    is one part."""
    row, cut = rows[..., place : place + 1, :].clone(), place * matrix.shape[-2] // parts if parts > 1 else 0
    return row[..., :cut] @ matrix[..., :cut, :] + row[..., cut:] @ matrix[..., cut:, :]
