"""Launches of a GPU's programs, which are written in Triton."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from offload.errors import TriforceError
from offload.machine import KERNELS

_counters: list[Counter[str]] = []


@contextmanager
def counting() -> Iterator[Counter[str]]:
    """Count the launches within, by the program's name."""
    counter = Counter[str]()
    _counters.append(counter)
    try:
        yield counter
    finally:
        _counters.pop()


def launch(program: Any, grid: tuple[int, ...], arguments: Sequence[object], **constants: object) -> Any:
    """Run a Triton program on the current device; the first launch of its kind compiles it. Returns what was compiled,
    None in Triton's interpreter.

    Errors: TriforceError, with the remedy, where it cannot be compiled or started."""
    for counter in _counters:
        counter[program.__name__] += 1
    try:
        return program[grid](*arguments, **constants)
    except Exception as error:
        said = str(error).strip().partition("\n")[0]
        raise TriforceError(
            f"the GPU's kernel {program.__name__} does not run here ({type(error).__name__}: {said}); "
            f"{KERNELS}=off in the environment runs torch's operators instead"
        ) from error
