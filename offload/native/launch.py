"""Launches of a GPU's programs, which are written in Triton."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from offload.errors import TriforceError
from offload.plan.machine import KERNELS


def launch(program: Any, grid: tuple[int, ...], arguments: Sequence[object], **constants: object) -> None:
    """Run a Triton program on the current device; the first launch of its kind compiles it.

    Errors: TriforceError, with the remedy, where it cannot be compiled or started."""
    try:
        program[grid](*arguments, **constants)
    except Exception as error:
        said = str(error).strip().partition("\n")[0]
        raise TriforceError(
            f"the GPU's kernel {program.__name__} does not run here ({type(error).__name__}: {said}); "
            f"{KERNELS}=off in the environment runs torch's operators instead"
        ) from error
