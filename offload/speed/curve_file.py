"""The measured curves of a machine's CPU in the file of rates, by device, dtype and requested kernels."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from offload.fields import record
from offload.machine import KERNELS
from offload.speed.curves import Curves
from offload.speed.rates import change_records, read_records


def load_curves(machine: str, device: str, dtype: str) -> Curves | None:
    """The curves of `device`, a CPU, of `machine` for a dtype; None if there are none or the record is damaged."""
    return _curves(_records(read_records(machine), device).get(_key(dtype)))


def save_curves(machine: str, device: str, dtype: str, curves: Curves, *, anew: bool = False) -> Path:
    """Add `curves` to the file of rates and return its path. Raises OSError.

    Curves of the same kernels that are there stay, since plans may already follow from them; forms of weights that they
    do not have are added. anew: replace them, and drop those of other dtypes, since the machine may have changed.
    """

    def change(records: dict[str, Any]) -> Mapping[str, Any]:
        known = {} if anew else _records(records, device)
        joined = _joined(_curves(known.get(_key(dtype))), curves)
        return {**records, _name(device): {**known, _key(dtype): asdict(joined)}}

    return change_records(machine, change)


def _joined(known: Curves | None, measured: Curves) -> Curves:
    if known is None or known.kernels != measured.kernels:
        return measured
    return replace(known, weights=measured.weights | known.weights)


def _records(records: Mapping[str, Any], device: str) -> dict[str, Any]:
    found = records.get(_name(device))
    return found if isinstance(found, dict) else {}


def _curves(data: object) -> Curves | None:
    try:
        found = record(Curves, data, "")
    except ValueError:
        return None
    return found if found.kernels else None


def _name(device: str) -> str:
    return f"{device}, curves"


def _key(dtype: str) -> str:
    return f"{dtype} kernels={os.environ.get(KERNELS) or 'on'}"
