"""The parts of a worker that outlive its plan: models, memory, link."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from offload.errors import ModelError
from offload.model.decoder import Decoder
from offload.model.loading import load_decoders
from offload.model.sums import Sums
from offload.plan.planner import Plan
from offload.plan.shards import ALONE, Shard
from offload.transfer.device import sum_in_fp32, use_device
from offload.transfer.link import Link, make_link
from offload.transfer.memory import Memory


@dataclass(frozen=True)
class Parts:
    """What outlives a plan: models, the memory they are in, and the link that some of them cross. decoders: by name,
    "target" and, where there is one, "draft"."""

    decoders: Mapping[str, Decoder]
    memory: Memory
    link: Link | None

    @classmethod
    def load(
        cls,
        plan: Plan,
        folders: Mapping[str, Path],
        on_bytes: Callable[[int, int], None],
        *,
        shard: Shard = ALONE,
        sums: Sums | None = None,
    ) -> Parts:
        """Read the models in `folders`, of "target" a shard, to where the plan wants them. Raises ModelError,
        DoesNotFit."""
        memory = Memory(torch.device(plan.request.device))
        use_device(memory.device)
        sum_in_fp32(memory.device)
        link = make_link(memory.device, plan.placement.link_bytes_per_second) if plan.placement.offload else None
        try:
            return cls(load_decoders(folders, plan, memory, link, on_bytes, shard=shard, sums=sums), memory, link)
        except BaseException:
            if link is not None:
                link.close()
            raise

    @property
    def target(self) -> Decoder:
        return self.decoders["target"]

    def num_scored(self, num_tokens: int) -> int:
        """Entries of the target's logits that are tokens, of a vocabulary of `num_tokens`: models may pad theirs.
        Raises ModelError where a draft scores fewer."""
        width = min(num_tokens, self.target.config.vocab_size)
        if "draft" in self.decoders and (fewer := self.decoders["draft"].config.vocab_size) < width:
            raise ModelError(f"the draft scores {fewer} tokens, the target {width}; --draft none")
        return width

    def close(self) -> None:
        """End the link's threads."""
        if self.link is not None:
            self.link.close()
