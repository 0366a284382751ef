"""The reader of matrices in MXFP4 as gpt-oss's folders have them: codes in one tensor, scales in another.

Of a module X: X_blocks U8 [..., rows, inputs / 32, 16], in each byte an even number in the low half and the next one in
the high half; X_scales U8 [..., rows, inputs / 32], e8m0. With leading dimensions, of experts, the matrix has the rows
of all of them. Numbers are those of transformers 5.23 (integrations/mxfp4.py, convert_moe_packed_tensors), but -0 is 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from offload.config.matrices import Matrix
from offload.errors import ModelError
from offload.formats.encodings import ENCODINGS
from offload.weights.e2m1 import rows_in_blocks
from offload.weights.entry import Entry

PARTS = ("_blocks", "_scales")  # of a module's tensors, behind its name
_FORM = ENCODINGS["MXFP4"]
_BYTES = _FORM.numbers // 2  # of a block's codes
NO_NUMBER = 255  # NaN in e8m0


@dataclass(frozen=True)
class Mxfp4File:
    """A `TensorFile` that puts a matrix into GGUF's blocks as it is read."""

    module: str
    blocks: Entry
    scales: Entry

    def get_tensor(self, name: str) -> Tensor:
        """All rows, uint8 [rows, bytes]. Memory: the result and a few MiB."""
        return self.rows(range(math.prod(self.scales.shape[:-1])))

    def rows(self, rows: range) -> Tensor:
        """Some rows, uint8 [n, bytes]; only their part of the file is read. ModelError for a scale that is NaN."""
        chosen = slice(rows.start, rows.stop, rows.step)
        blocks, scales = (
            part.file.get_tensor(part.stored_name).flatten(0, len(self.scales.shape) - 2)[chosen]
            for part in (self.blocks, self.scales)
        )
        if (scales == NO_NUMBER).any():
            raise ModelError(
                f"{self.scales.path}: {self.module}_scales has a scale of {NO_NUMBER}, which is NaN; download it again"
            )
        return rows_in_blocks(blocks.flatten(1), scales, _FORM)


def entry_of(module: str, matrix: Matrix, parts: Mapping[str, Entry], folder: Path) -> Entry:
    """The entry of a matrix with these parts, which are checked. ModelError."""
    for part in PARTS:
        if part not in parts:
            raise ModelError(
                f"{folder}: {module} is in MXFP4, by quantization_config, and there is no {module}{part}; name it in "
                "modules_to_not_convert, if it is not, or fetch it again"
            )
        if parts[part].dtype != "U8":
            raise ModelError(f"{parts[part].path}: {module}{part} is stored as {parts[part].dtype}; it must be U8")
    blocks, scales = (parts[part] for part in PARTS)
    if matrix.inputs % _FORM.numbers:
        raise ModelError(
            f"{folder}: {module} has {matrix.inputs} inputs by config.json, no multiple of the {_FORM.numbers} of a "
            "block in MXFP4; fetch weights and config.json of one version"
        )
    groups = matrix.inputs // _FORM.numbers
    rows, found = math.prod(scales.shape[:-1]), scales.shape
    if len(found) < 2 or (rows, found[-1]) != (matrix.outputs, groups) or blocks.shape != (*found, _BYTES):
        raise ModelError(
            f"{blocks.path}: {module}_blocks has shape {list(blocks.shape)} and {module}_scales {list(found)}; by "
            f"config.json there are {matrix.outputs} rows of {groups} blocks of {_BYTES} bytes, with a scale each"
        )
    file = Mxfp4File(module, blocks, scales)
    return replace(blocks, file=file, shape=(matrix.outputs, matrix.inputs), dtype=_FORM.name, rows=file.rows)
