"""Numbers as people read them, where errors name them too."""

from __future__ import annotations


def significant(value: float) -> str:
    """At most three significant digits below a thousand, thousands separated above."""
    decimals = 0 if value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:,.{decimals}f}"


def size(num_bytes: float) -> str:
    """1.24 GB, 350 MB, 12.0 kB, 96 B: of 10^9, 10^6 and 10^3 bytes; 4.20 TB of 10^12."""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if num_bytes >= unit:
            return f"{significant(num_bytes / unit)} {name}"
    return f"{num_bytes:.0f} B"
