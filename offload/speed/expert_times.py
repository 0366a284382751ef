"""Seconds in which the CPU runs the experts of a layer: measured on the model's shapes, or estimated from rates.

Measured seconds are kept in the file of rates, as those of passes are.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from offload.config.model import ModelConfig
from offload.fields import fields_of
from offload.formats.layout import EXPERT_ALIGNMENT
from offload.speed.curves import CURVE, KERNELS_NAME, ROWS, at
from offload.speed.hardware import Hardware
from offload.speed.model_times import Measured
from offload.speed.rates import Rates, change_records
from offload.speed.routing import distinct_experts

_READ_SHARE = 0.6  # of the host's read rate, over experts (docs/log.md)
_ROW_SHARE = {False: 0.05, True: 0.3}  # of the seconds of one row, for each further row; with stored experts


@dataclass(frozen=True)
class ExpertTimes:
    """Seconds of the experts of one layer in a pass, for every row count in `ROWS`. kernels: those that ran; "" for
    estimated times."""

    seconds: tuple[float, ...]
    kernels: str = ""

    def of(self, rows: int) -> float:
        """Seconds of a pass of `rows` rows."""
        return at(self.seconds, rows)


def with_experts(config: ModelConfig) -> ModelConfig:
    """The first kind of layer that has experts: `block` has."""
    return next(kind for kind, _ in config.kinds if kind.block.experts is not None)


def cpu_runs(config: ModelConfig, hardware: Hardware) -> bool:
    """Whether the host's CPU can run a model's experts."""
    return hardware.packs and config.experts is not None and config.hidden_size % EXPERT_ALIGNMENT == 0


def estimated(config: ModelConfig, itemsize: int, rates: Rates) -> ExpertTimes:
    """Estimated seconds: reading the experts that the rows choose, and a share of one row's for each further row."""
    layer = with_experts(config)
    experts = layer.block.experts
    assert experts is not None
    each, stored = layer.expert_bytes(itemsize) / (_READ_SHARE * rates.host_read), any(layer.block.encodings.experts)
    of_rows = (each * (distinct_experts(experts, n) + experts.used * _ROW_SHARE[stored] * (n - 1)) for n in ROWS)
    return ExpertTimes(tuple(of_rows))


def load_expert_times(machine: str, device: str, key: str) -> ExpertTimes | None:
    """The measured seconds of the experts of the model `key` on `device`, a CPU, of `machine`; None if there are none
    or the record is damaged."""
    return EXPERTS.load(machine, device, key)


def save_expert_times(machine: str, device: str, key: str, times: ExpertTimes) -> Path:
    """Add `times` to the file of rates, see `Measured.added`, and return its path. OSError."""
    return change_records(machine, lambda records: EXPERTS.added(records, device, {key: times}))


def _times(record: object) -> ExpertTimes | None:
    """The seconds in a record of the file; None if it is damaged."""
    try:
        source = fields_of(record, "")
        return ExpertTimes(tuple(source.get("seconds", CURVE)), source.get("kernels", KERNELS_NAME))
    except ValueError:
        return None


EXPERTS = Measured("experts", _times)
