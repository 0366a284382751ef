"""The share of the CPU that other programs use, and the note on it where it slows this program down."""

from __future__ import annotations

import os
from contextlib import suppress
from datetime import date

import psutil

from offload.files import user_folder, write_whole
from offload.speed.rates import FOLDER_VARIABLE

LONG_SECONDS = 20.0  # shorter work gets no note
BUSY_SHARE = 0.2  # of the CPU used by others: a larger share gets a note


class OtherPrograms:
    """A meter of the other processes' CPU use since the object was made."""

    def __init__(self) -> None:
        self._began = _seconds()

    def share(self) -> float:
        """The share of all cores, 0 to 1, that other processes have used since the object was made."""
        used, idle, own = (now - began for now, began in zip(_seconds(), self._began, strict=True))
        return min(max(used - own, 0.0) / (used + idle), 1.0) if used + idle > 0 else 0.0


def busy_note(share: float) -> str:
    """The note for this share of the CPU; "" up to BUSY_SHARE."""
    if share <= BUSY_SHARE:
        return ""
    return f"other programs use {share:.0%} of the CPU: passes take longer than planned"


def note_for_long(share: float, seconds: float) -> str:
    """The note before work that takes `seconds`: "" if it is shorter than LONG_SECONDS or a note was given today."""
    note = busy_note(share)
    return note if note and seconds >= LONG_SECONDS and _is_first_today() else ""


def _is_first_today() -> bool:
    """True for the first call of the day, and for every call if the cache folder cannot be written."""
    stamp, today = user_folder("cache", variable=FOLDER_VARIABLE) / "busy", date.today().isoformat()
    with suppress(OSError, ValueError):
        if stamp.read_text(encoding="utf-8") == today:
            return False
    with suppress(OSError):
        stamp.parent.mkdir(parents=True, exist_ok=True)
        write_whole(stamp, today)
    return True


def _seconds() -> tuple[float, float, float]:
    """(all cores used, all cores idle, used by this process), in seconds since boot and since the process began."""
    cores, own = psutil.cpu_times(), os.times()
    idle = cores.idle + getattr(cores, "iowait", 0.0)
    twice = getattr(cores, "guest", 0.0) + getattr(cores, "guest_nice", 0.0)  # counted as user and nice, too
    return sum(cores) - twice - idle, idle, own.user + own.system
