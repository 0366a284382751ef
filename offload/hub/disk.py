"""Room on a disk: looked at before something large is written, and what is said where it ends all the same."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

from offload.errors import DoesNotFit, TriforceError


def free_bytes(folder: Path) -> int:
    """Free on the disk that `folder` is on, or will be on. OSError."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return shutil.disk_usage(there).free


def check_room(folder: Path, num_bytes: int, remedy: str) -> None:
    """Raises DoesNotFit where `num_bytes` more are not free."""
    free = free_bytes(folder)
    if num_bytes > free:
        raise DoesNotFit(
            f"{num_bytes / 1e9:.3g} GB are needed in {folder} and {free / 1e9:.3g} GB are free; make room, or {remedy}"
        )


def disk_error(error: OSError, folder: Path, then: str) -> TriforceError:
    """What to raise where `folder` could not be written. then: what can be done afterwards."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DoesNotFit(f"the disk of {folder} is full; make room, then {then}")
    return TriforceError(f"{error}; see to that, then {then}")
