"""The dtype of the scales of a folder's quantised matrices, read from one header."""

from __future__ import annotations

import re
from pathlib import Path

from offload.errors import ModelError
from offload.strict_json import read_json

_MAX_BYTES = 1 << 24  # of a header or an index, as `weights.checkpoint` has it
_NAME = re.compile(r"\.(scales|weight_scale)$")
_ENTRY = re.compile(rb'\.(?:scales|weight_scale)"\s*:\s*\{\s*"dtype"\s*:\s*"(F16|BF16|F32)"')


def stored_scales(folder: Path) -> str:
    """The dtype of the scales: F16, BF16 or F32; "" if the folder has no weights yet, or none with scales. Reading the
    weights checks all scales and reports faults of the files."""
    path = folder / "model.safetensors"
    index = folder / "model.safetensors.index.json"
    try:
        if not path.is_file() and index.is_file():
            weight_map = read_json(index, max_bytes=_MAX_BYTES).get("weight_map")
            shards = weight_map if isinstance(weight_map, dict) else {}
            path = folder / Path(str(next((shards[name] for name in shards if _NAME.search(name)), ""))).name
        if not path.is_file():
            return ""
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            found = _ENTRY.search(file.read(min(length, _MAX_BYTES)))
    except (OSError, ModelError, ValueError):
        return ""
    return found[1].decode() if found else ""
