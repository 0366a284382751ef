"""Stacks of experts' matrices by inputs, [experts, inputs, outputs], which gpt-oss has in plain numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from offload.weights.entry import Entry


@dataclass(frozen=True)
class TransposedFile:
    """A `TensorFile` with the rows of all experts, [experts * outputs, inputs]."""

    stack: Entry

    def get_tensor(self, name: str) -> Tensor:
        """All rows: a copy."""
        return self._stack().transpose(1, 2).flatten(0, 1)

    def rows(self, rows: range) -> Tensor:
        """Some rows: a view, if they are of one expert."""
        outputs = self.stack.shape[2]
        expert = rows.start // outputs
        if not rows or rows[-1] // outputs != expert:
            return self.get_tensor(self.stack.stored_name)[rows.start : rows.stop : rows.step]
        first = expert * outputs
        return self._stack()[expert, :, rows.start - first : rows.stop - first : rows.step].T

    def _stack(self) -> Tensor:
        return self.stack.file.get_tensor(self.stack.stored_name)


def transposed(stack: Entry) -> Entry:
    """The entry of the rows of all experts of a stack."""
    experts, inputs, outputs = stack.shape
    file = TransposedFile(stack)
    return replace(stack, file=file, shape=(experts * outputs, inputs), rows=file.rows)
