"""Small files that are there whole or not at all."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write `text` as UTF-8 to `path`. Who reads at the same time, or after a failure, sees the old file or the new
    one, never a part. Its mode is what the umask says. OSError."""
    temporary = path.parent / f"{path.name}{secrets.token_hex(8)}.tmp"  # also for "/", which cannot be replaced
    try:
        with temporary.open("x", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
