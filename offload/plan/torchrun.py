"""What torchrun says to each of the processes that it starts."""

from __future__ import annotations

import os
from dataclasses import dataclass

from offload.errors import UsageError

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@dataclass(frozen=True)
class Launched:
    """One rank of `size`, on a machine that has `local_size` of them."""

    rank: int
    size: int
    local_rank: int
    local_size: int

    @classmethod
    def look(cls) -> Launched | None:
        """None where this process was not started by torchrun. Raises UsageError where its variables say nothing."""
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            return None
        try:
            return cls(*(int(os.environ[name]) for name in _VARIABLES))
        except (KeyError, ValueError) as error:
            raise UsageError(f"torchrun's variables are incomplete ({error}); start all ranks by torchrun") from error

    @property
    def num_hosts(self) -> int:
        """Machines, which have as many ranks each."""
        return -(-self.size // self.local_size)
