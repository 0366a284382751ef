"""Free space on a disk: checked before a large file is written, and named in the error if the disk is full anyway."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

from offload.errors import DoesNotFit, TriforceError
from offload.units import size


def free_bytes(folder: Path) -> int:
    """Free bytes on the disk of `folder`, which may not exist yet. OSError."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return shutil.disk_usage(existing).free


def check_room(folder: Path, num_bytes: int, remedy: str) -> None:
    """Raises DoesNotFit if fewer than `num_bytes` are free."""
    free = free_bytes(folder)
    if num_bytes > free:
        raise DoesNotFit(f"{size(num_bytes)} are needed in {folder} and {size(free)} are free; make room, or {remedy}")


def disk_error(error: OSError, folder: Path, then: str) -> TriforceError:
    """The error to raise when writing to `folder` failed with `error`. then: the step after the remedy."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DoesNotFit(f"the disk of {folder} is full; make room, then {then}")
    return TriforceError(f"{error}; correct that, then {then}")
