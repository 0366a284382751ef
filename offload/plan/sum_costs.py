"""Predicted seconds of sums over the ranks, in which each gathers what the others have of the same rows."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SumCosts:
    """seconds: of a sum of few bytes with a single other rank; it grows with that power of the number of others.
    rate: bytes per second that come in at each rank."""

    seconds: float
    power: int
    rate: float

    def total(self, number: int, num_bytes: float, others: int) -> float:
        """Seconds of `number` sums, in which `num_bytes` come in from each of the `others`."""
        return number * self.seconds * others**self.power + others * num_bytes / self.rate if others else 0.0


SHARED = SumCosts(2e-5, 1, 4e9)  # of two and of four ranks on two cores, in memory that they share
NCCL = SumCosts(4e-5, 0, 3e9)  # published, of GPUs that reach each other through host memory alone (docs/memory.md)
NETWORK = SumCosts(1e-4, 1, 1.1e9)  # between hosts, over 10 Gbit/s: estimated
