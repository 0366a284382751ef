"""Seconds by the rows of a pass, as they are measured and kept: a curve has one value for every row count in `ROWS`."""

from __future__ import annotations

from bisect import bisect_left

from offload.fields import Kind, list_of, number

ROWS = (1, 2, 4, 8, 16, 32, 64)
SECONDS = number(1e-15, 1e6)  # plausible seconds, so that a quotient is finite
CURVE = list_of(SECONDS, length=len(ROWS))
KERNELS_NAME = Kind("a name", lambda value: isinstance(value, str) and value != "")


def at(curve: tuple[float, ...], rows: int) -> float:
    """The value of a curve at `rows`: linear between the points of `ROWS`, proportional beyond the last one."""
    if rows >= ROWS[-1]:
        return curve[-1] * rows / ROWS[-1]
    after = max(bisect_left(ROWS, rows), 1)
    below, above = ROWS[after - 1 : after + 1]
    low, high = curve[after - 1 : after + 1]
    return low + (high - low) * (rows - below) / (above - below)
