"""The needs of texts that go on from the prefix store, as a plan tells them before there are caches."""

from __future__ import annotations

from dataclasses import dataclass

from offload.config.model import ModelConfig
from offload.kv.block_index import BlockIndex
from offload.kv.last_hidden import PURPOSE
from offload.kv.parts import Unit, first_page_seen
from offload.kv.recent_ids import CONVOLVED, RecentIds
from offload.plan.planner import Plan


@dataclass(frozen=True)
class Needs:
    """The units of a part with which a text can go on, see `Part`. page: tokens of a page, 0: no pages. window: the
    most tokens that a row sees, 0: all. num_first: first rows, which are the unit; None: it is at the
    text's end. in_tensors: pages are files of their own tensors, see `Part.in_place`."""

    name: str
    page: int = 0
    window: int = 0
    in_tensors: bool = False
    num_first: int | None = None
    num_computed: int = 0

    @property
    def in_place(self) -> bool:
        return self.page > 0 and not self.in_tensors

    def needed(self, length: int) -> list[Unit]:
        if self.page:
            first = first_page_seen(length, self.window, self.page) if self.window else 0
            return [((number + 1) * self.page,) for number in range(first, length // self.page)]
        if self.num_first is None:
            return [(length,)]
        count = min(self.num_first, length)
        return [(count, count)] if count else []


def needs_of(plan: Plan, config: ModelConfig) -> list[Needs]:
    """The needs of each part, for texts of the model under `plan`."""
    page, composition = plan.placement.page_tokens, plan.composition
    found = [Needs("rows", page)] if config.growing else []
    found += [Needs("windows", page, window=config.window)] if config.windowed else []
    found += [Needs(BlockIndex.name, page, in_tensors=True)] if config.indexer is not None else []
    found += [Needs("states")] if config.stateful else []
    found += [Needs(CONVOLVED), Needs(RecentIds.name)] if config.with_ngrams else []
    if PURPOSE in plan.placement.device_bytes:
        found.append(Needs("hidden", num_first=composition.sinks, num_computed=composition.window))
    return found
