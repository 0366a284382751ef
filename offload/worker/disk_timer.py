"""Measurement of the rate at which experts are read from a model's file."""

from __future__ import annotations

import time
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from offload.config.gguf_header import is_gguf
from offload.machine import machine_name
from offload.plan.request import Request
from offload.speed.rates import disk_of, save_disk_rate
from offload.transfer.direct_file import DirectFile
from offload.transfer.disk import PIECE_BYTES, Disk, Reader

_WEIGHTS = ("*.safetensors", "*.gguf")
_SPOTS, _SPOT_BYTES = 48, 4 << 20  # spread over the file; about an expert


def disk_timed(request: Request, model: Path) -> Request:
    """`request` with the rate of the disk that `model` is on, if experts may have to be read from it. One that is
    missing is measured and saved; one that cannot be saved is not used, since the next start would make another plan.
    ModelError for a file that cannot be read."""
    if not request.may_read_experts or request.hardware.disk_measured:
        return request
    with suppress(OSError):
        return replace(request, hardware=request.hardware.with_disk(time_disk(model)))
    return request


def time_disk(models: Path) -> float | None:
    """Measure direct reads of the largest file of weights in a folder, or of a GGUF file, by several threads, in bytes
    per second, and save the rate. None where there is no such file. OSError, ModelError."""
    files = [models] if is_gguf(models) else [path for kind in _WEIGHTS for path in models.rglob(kind)]
    if not files:
        return None
    rate = read_rate(largest := max(files, key=lambda path: path.stat().st_size))
    save_disk_rate(machine_name(), disk_of(largest), rate)
    return rate


def read_rate(path: Path) -> float:
    """Bytes per second of direct reads of some places of a file. ModelError."""
    with closing(DirectFile(path)) as file, closing(Disk()) as disk:
        count = min(_SPOT_BYTES, file.num_bytes)
        spots = {(file.num_bytes - count) * spot // max(_SPOTS - 1, 1) for spot in range(_SPOTS)}
        began = time.perf_counter()
        for event in [disk.begin(partial(_read, file, spot, count)) for spot in sorted(spots)]:
            event.synchronize()
        return len(spots) * count / (time.perf_counter() - began)


def _read(file: DirectFile, start: int, count: int, reader: Reader) -> int:
    pieces, rest = divmod(count, PIECE_BYTES)
    for _ in reader.rows(file, start, pieces, PIECE_BYTES):
        pass
    for _ in reader.rows(file, start + pieces * PIECE_BYTES, min(rest, 1), max(rest, 1)):
        pass
    return count
