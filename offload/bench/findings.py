"""The results of checks, and the tolerances of computed values."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# Largest error, as a share of the largest value: several times the rounding error.
TOLERANCES = {"bf16": 2e-2, "fp16": 3e-3, "fp32": 2e-5}
REPORT = "please report it, with the file that triforce doctor --report writes"

Shown = tuple[bool, str]  # whether the check passed, and its numbers in words
Named = tuple[str, Callable[[], Shown], str]  # name, comparison, remedy


def error_of(found: Tensor, exact: Tensor) -> float:
    """The largest error as a share of the largest value; NaN counts as the largest of all."""
    error = (found.double() - exact).abs().max() / exact.abs().max()
    return float(error.nan_to_num(torch.inf))
