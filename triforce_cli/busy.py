"""How much of the CPU other programs use, and when that is worth a word."""

from __future__ import annotations

import os
from contextlib import suppress
from datetime import date

import psutil

from offload.files import user_folder, write_whole
from offload.plan.rates import FOLDER_VARIABLE

LONG_SECONDS = 20.0  # of work that others delay so that it is felt
BUSY_SHARE = 0.2  # of the CPU by others: more than this is felt


class OtherPrograms:
    """Watches from when it is made."""

    def __init__(self) -> None:
        self._began = _seconds()

    def share(self) -> float:
        """0 to 1: the share of all cores that other processes have used since."""
        used, idle, own = (now - began for now, began in zip(_seconds(), self._began, strict=True))
        return min(max(used - own, 0.0) / (used + idle), 1.0) if used + idle > 0 else 0.0


def busy_note(share: float) -> str:
    """What to say where others use this share of the CPU, "" where that is not felt."""
    if share <= BUSY_SHARE:
        return ""
    return f"other programs use {share:.0%} of the CPU: passes take longer than planned"


def note_for_long(share: float, seconds: float) -> str:
    """The same before work that takes so many seconds: "" where it is short, and where it was said today."""
    note = busy_note(share)
    return note if note and seconds >= LONG_SECONDS and _is_first_today() else ""


def _is_first_today() -> bool:
    """Whether nobody has asked today. Where nothing can be kept it is always the first time."""
    stamp, today = user_folder("cache", variable=FOLDER_VARIABLE) / "busy", date.today().isoformat()
    with suppress(OSError, ValueError):
        if stamp.read_text(encoding="utf-8") == today:
            return False
    with suppress(OSError):
        stamp.parent.mkdir(parents=True, exist_ok=True)
        write_whole(stamp, today)
    return True


def _seconds() -> tuple[float, float, float]:
    """(all cores used, all cores idle, used by this process), in seconds since they began."""
    cores, own = psutil.cpu_times(), os.times()
    idle = cores.idle + getattr(cores, "iowait", 0.0)
    twice = getattr(cores, "guest", 0.0) + getattr(cores, "guest_nice", 0.0)  # counted as user and nice, too
    return sum(cores) - twice - idle, idle, own.user + own.system
