"""Measured seconds of models in the file of rates, by device and by a model's key."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from offload.speed.rates import read_records


class Times(Protocol):
    """A dataclass of seconds, and the name of the kernels that took them."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def kernels(self) -> str: ...


T = TypeVar("T", bound=Times)


@dataclass(frozen=True)
class Measured(Generic[T]):
    """Records of one kind of times, all models' of a device in one. name: of the kind. times_of: the times in a
    model's record; None if there are none or it is damaged."""

    name: str
    times_of: Callable[[object], T | None]

    def record(self, device: str) -> str:
        """The name of the record of `device`."""
        return f"{device}, {self.name}"

    def load(self, machine: str, device: str, key: str) -> T | None:
        """The times of the model `key` on `device` of `machine`; None if there are none or the record is damaged."""
        return self.times_of(self._models(read_records(machine), device).get(key))

    def added(self, records: Mapping[str, Any], device: str, measured: Mapping[str, T]) -> dict[str, Any]:
        """A machine's `records` with the times `measured`, by model. Times of the same kernels that are there stay,
        since plans may already follow from them."""
        models = self._models(records, device)
        missing = {key: asdict(times) for key, times in measured.items() if not self._is_of(models.get(key), times)}
        return {**records, self.record(device): models | missing}

    def _models(self, records: Mapping[str, Any], device: str) -> dict[str, Any]:
        models = records.get(self.record(device))
        return models if isinstance(models, dict) else {}

    def _is_of(self, record: object, times: T) -> bool:
        """Whether a record has times of the same kernels."""
        known = self.times_of(record)
        return known is not None and known.kernels == times.kernels
