"""The experts of a layer in a prefill, whose rows want nearly all of them: slots keep theirs, the others pass by."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from offload.kernels.experts import Bank, Batch, ExpertHomes, Room
from offload.weights.slot_memory import SlotMemory
from offload.weights.streamed_experts import StreamedExperts


class PrefillExperts:
    """A layer's experts in a prefill: those in its slots stay there, and others come into its free ones. The rest goes
    through staging slots that all layers share, a bank at a time: while it is used, others fill, and those of the next
    layer fill what the layer does not need any more. A prefill whose rows want few has no staging slots: its experts
    take those of the layer, as in a pass."""

    on_host = False

    def __init__(self, own: StreamedExperts | None, staged: StreamedExperts, memory: SlotMemory) -> None:
        """own: of the layer's slots; None: it has none. staged: the same experts in the slots of `memory.staged`."""
        self.own, self.staged, self.memory = own, staged, memory
        self._then: ExpertHomes | None = None
        self._is_last = True

    whole: Batch | None = None

    @property
    def bank(self) -> Bank:
        return self.staged.bank

    @property
    def room(self) -> Room | None:
        return self.memory.room

    @property
    def parts(self) -> list[StreamedExperts]:
        return [self.staged] if self.own is None else [self.own, self.staged]

    def ahead(self, then: ExpertHomes | None = None, *, is_last: bool = True, busy: int = 0) -> None:
        self._then, self._is_last = then, is_last
        if self.own is not None:
            self.own.ahead()
        self.staged.ahead(busy=busy, but=() if self.own is None else self.own)

    def batches(self, chosen: Tensor) -> Iterator[Batch]:
        """See `ExpertHomes`. Experts that an earlier group of rows has left in staging slots come first, so that others
        cross while those in the layer's slots are used."""
        then, is_last, self._then = self._then, self._is_last, None
        if self.own is not None and not self.memory.stages:
            return self.own.batches(chosen)
        wanted = self.staged.wanted(chosen)
        kept = {} if self.own is None else self.own.keeping(wanted, self.staged)
        others = {each: rows for each, rows in wanted.items() if each not in kept}
        meanwhile = () if self.own is None else self.own.batches_of(kept)

        def begin_next(count: int) -> None:
            if then is not None:
                then.ahead(busy=count if is_last else self.staged.num_held)

        return self.staged.batches_of(others, meanwhile, begin_next)
