"""The normalisation of rows, as a config describes it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Norm:
    """A normalisation of rows. centred: LayerNorm, which subtracts the mean, else RMS norm. plus_one: it multiplies by
    1 + its weight. bias: it adds a bias. fp32: its vectors are fp32 in any dtype of the model, so that the added 1
    loses no bit of them. weightless: its weight is 1 and not in the checkpoint; never so for a model's last norm."""

    eps: float = 1e-6
    centred: bool = False
    plus_one: bool = False
    bias: bool = False
    fp32: bool = False
    weightless: bool = False

    def itemsize(self, dtype_bytes: int) -> int:
        """Bytes per element of the norm's vectors in a model of `dtype_bytes` per element."""
        return 4 if self.fp32 else dtype_bytes
