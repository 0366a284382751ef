"""Numbers and sizes as text, for screens and error messages."""

from __future__ import annotations


def significant(value: float) -> str:
    """`value` with three significant digits below a thousand; above, a whole number with separated thousands."""
    decimals = 0 if value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:,.{decimals}f}"


def size(num_bytes: float) -> str:
    """1.24 GB, 350 MB, 12.0 kB, 96 B, 4.20 TB: `num_bytes` in decimal units."""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if num_bytes >= unit:
            return f"{significant(num_bytes / unit)} {name}"
    return f"{num_bytes:.0f} B"
