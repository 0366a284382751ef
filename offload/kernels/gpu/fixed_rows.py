"""Rows in fixed point on a GPU, in Triton, as stored experts multiply them (see `fixed_programs`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from offload.formats.encodings import Encoding
from offload.formats.fixed_gpu import GROUP, sums_of
from offload.kernels.gpu.fixed_programs import fix_rows
from offload.native.launch import launch

GROUPS = 16  # of a program


@dataclass(frozen=True)
class Pairs:
    """Rows of pairs of a row with one of its experts. chosen: the experts, int32 [pairs]. places: of the experts in a
    batch, int32 [experts], or -1: rows for others are left out."""

    chosen: Tensor
    places: Tensor


@dataclass(frozen=True)
class FixedRows:
    """Rows in fixed point for matrices in one encoding. planes: int8 [2, T, inputs], of integers of 16 bits the upper
    ones and the lower ones. units: fp32 [T, inputs / 32]. sums: of the parts that least values are multiplied by, fp32
    [T, parts]; of encodings without such values any tensor."""

    planes: Tensor
    units: Tensor
    sums: Tensor

    @classmethod
    def of(cls, rows: Tensor, encoding: Encoding, pairs: Pairs | None = None) -> FixedRows:
        """rows: [T, inputs], contiguous, of 16 bits, inputs a multiple of 32. pairs: of them, where not all rows count.
        One launch."""
        (num_rows, inputs), size = rows.shape, sums_of(encoding)
        assert rows.is_contiguous()
        assert inputs % GROUP == 0
        planes = torch.empty(2, num_rows, inputs, dtype=torch.int8, device=rows.device)
        units = torch.empty(num_rows, inputs // GROUP, device=rows.device)
        sums = torch.empty(num_rows, inputs // size, device=rows.device) if size else units
        chosen, places = (units, units[:1]) if pairs is None else (pairs.chosen, pairs.places)
        launch(
            fix_rows, (num_rows, -(-inputs // (GROUP * GROUPS))),
            (rows, chosen, places, planes, units, sums, num_rows, inputs // GROUP),
            EXPERTS=len(places), CHOSEN=pairs is not None, FORM=encoding, GROUPS=GROUPS, num_warps=4,
        )  # fmt: skip
        return cls(planes, units, sums)
