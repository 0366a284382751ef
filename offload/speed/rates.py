"""Speeds of devices: typical of their kind, or measured by `triforce doctor` and stored in a file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from offload.errors import ModelError
from offload.fields import number
from offload.files import locked, user_folder, write_whole
from offload.strict_json import read_json

FOLDER_VARIABLE = "TRIFORCE_CACHE_DIR"


@dataclass(frozen=True)
class Rates:
    """Speeds of one device and of its link to the host: bytes (1e9 a GB) and operations per second.

    to_device, to_host: copies of pinned memory, each direction alone. device_read: weights, through products of one
    row. host_read: plain reading by all threads. flops: large products, 16-bit where the device is fast at them. links:
    the total rate from the host's memory to all devices at once; None: not measured, several get at most host_read.
    """

    to_device: float
    to_host: float
    device_read: float
    host_read: float
    flops: float
    measured: bool = False  # by `triforce doctor` on this machine; else typical of its kind
    links: float | None = None

    def shared(self, number: int) -> Rates:
        """The rates of each of `number` processes that share one CPU and its memory."""
        return replace(self, **{name: getattr(self, name) / number for name in _NUMBERS})

    @classmethod
    def slowest(cls, each: Sequence[Rates]) -> Rates:
        """The rates of each of several devices that wait for one another: the slowest of each kind."""
        least = {name: min(getattr(rates, name) for rates in each) for name in _NUMBERS}
        links = min((rates.links for rates in each if rates.links is not None), default=None)
        return cls(**least, measured=all(rates.measured for rates in each), links=links)


TWO_CORES = Rates(to_device=18e9, to_host=18e9, device_read=28e9, host_read=45e9, flops=0.9e12)
RTX_4090 = Rates(to_device=25e9, to_host=25e9, device_read=1.0e12, host_read=72e9, flops=160e12)  # DDR5-5600, twice
DISK_READ = 2.5e9  # a solid-state disk on four lanes of PCIe 3
_SERVER_READ = 165e9  # eight channels of DDR4-3200
_RATE = number(1e6, 1e18)  # plausible rates, so that quotients are finite
_DESKTOP_DEVICES = 2  # a desktop has no lanes for more

_NUMBERS = tuple(field.name for field in fields(Rates) if field.name not in ("measured", "links"))


def typical(num_devices: int) -> Rates:
    """The typical rates of GPUs in a machine with `num_devices` of them."""
    return RTX_4090 if num_devices <= _DESKTOP_DEVICES else replace(RTX_4090, host_read=_SERVER_READ)


def rates_file() -> Path:
    """hardware.json in the user's cache folder, or in the folder that TRIFORCE_CACHE_DIR names."""
    return user_folder("cache", variable=FOLDER_VARIABLE) / "hardware.json"


def load_rates(machine: str, device: str) -> Rates | None:
    """The measured rates of `device` on `machine`; None if there are none or the file is damaged."""
    record = read_records(machine).get(device)
    if not isinstance(record, dict):
        return None
    numbers = {name: float(record[name]) for name in _NUMBERS if _RATE.fits(record.get(name))}
    links = record.get("links")  # older records have none
    together = float(links) if links is not None and _RATE.fits(links) else None
    return Rates(**numbers, measured=True, links=together) if len(numbers) == len(_NUMBERS) else None


def save_rates(machine: str, measured: Mapping[str, Rates]) -> Path:
    """Add the `measured` rates, by device, to the file, and return its path. OSError."""
    added = {device: asdict(rates) for device, rates in measured.items()}
    return change_records(machine, lambda records: records | added)


def disk_of(path: Path) -> str:
    """The name of the file system that a path is on: "disk at /home"."""
    place = path.resolve()
    while not os.path.ismount(place):
        place = place.parent
    return f"disk at {place}"


def load_disk_rate(machine: str, disk: str) -> float | None:
    """The measured rate of direct reads from `disk`, bytes per second; None if there is none."""
    record = read_records(machine).get(disk)
    rate = record.get("read") if isinstance(record, dict) else None
    return float(rate) if rate is not None and _RATE.fits(rate) else None


def save_disk_rate(machine: str, disk: str, rate: float) -> Path:
    """Add the measured rate of `disk` to the file, and return its path. OSError."""
    return change_records(machine, lambda records: records | {disk: {"read": rate}})


def read_records(machine: str) -> dict[str, Any]:
    """The file's records of `machine`, by key; {} if there are none or the file is damaged."""
    records = _read(rates_file()).get(machine)
    return records if isinstance(records, dict) else {}


def change_records(machine: str, change: Callable[[dict[str, Any]], Mapping[str, Any]]) -> Path:
    """Replace the file's records of `machine`, by key, by `change` of them, and return its path. OSError.

    A home folder may be shared: records of other machines stay. Concurrent writers wait; a reader sees the old file or
    the new one, never a part.
    """
    path = rates_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path.with_suffix(".lock")):
        known = _read(path)
        records = known.get(machine)
        known[machine] = dict(change(records if isinstance(records, dict) else {}))
        write_whole(path, json.dumps(known, indent=1))
    return path


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_json(path)
    except ModelError:  # missing or damaged: treated as empty, and replaced by the next record
        return {}
