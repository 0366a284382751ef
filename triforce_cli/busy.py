"""How much of the CPU other programs use."""

from __future__ import annotations

import os

import psutil

BUSY_SHARE = 0.2  # of the CPU by others: more than this is felt


class OtherPrograms:
    """Watches from when it is made."""

    def __init__(self) -> None:
        self._began = _seconds()

    def share(self) -> float:
        """0 to 1: the share of all cores that other processes have used since."""
        used, idle, own = (now - began for now, began in zip(_seconds(), self._began, strict=True))
        return min(max(used - own, 0.0) / (used + idle), 1.0) if used + idle > 0 else 0.0


def _seconds() -> tuple[float, float, float]:
    """(all cores used, all cores idle, used by this process), in seconds since they began."""
    cores, own = psutil.cpu_times(), os.times()
    idle = cores.idle + getattr(cores, "iowait", 0.0)
    twice = getattr(cores, "guest", 0.0) + getattr(cores, "guest_nice", 0.0)  # counted as user and nice, too
    return sum(cores) - twice - idle, idle, own.user + own.system
