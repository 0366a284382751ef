"""The experts of a layer that are copied to slots as they are wanted, or run by the CPU where they are."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, islice

import torch
from torch import Tensor

from offload.kernels.experts import Batch, ExpertHomes, Room
from offload.metrics import ExpertStats
from offload.speed.split import Split
from offload.transfer.memory import sent
from offload.weights.expert_homes import Homes, NearHomes
from offload.weights.expert_layout import bank_of
from offload.weights.expert_slots import Expert, ExpertSlots
from offload.weights.layout import LayerLayout

_AT_ONCE = 8  # experts that are used together as they arrive
Fetch = Callable[[Sequence[Expert]], object]


class Behind:
    """The experts that the CPU has run in a pass, of all layers: they cross the link when it is idle, to be in slots
    when their layer comes again."""

    def __init__(self) -> None:
        self._waiting = OrderedDict[int, tuple[list[Expert], Fetch]]()  # by layer, that which comes next first

    def put(self, layer: int, experts: Sequence[Expert], fetch: Fetch) -> None:
        """Have a layer's `experts` wait in place of those that still do."""
        self._waiting.pop(layer, None)
        if experts:
            self._waiting[layer] = [*experts], fetch

    def fetch(self, count: int) -> None:
        """Begin to fetch up to `count` experts."""
        while count > 0 and self._waiting:
            layer, (experts, fetch) = next(iter(self._waiting.items()))
            fetch(experts[:count])
            count -= len(experts)
            del experts[: len(experts) + min(count, 0)]
            if not experts:
                del self._waiting[layer]


@dataclass(frozen=True)
class Sharing:
    """The sharing of a layer's missed experts between the link and the CPU. split, behind: of all layers with that
    link."""

    homes: NearHomes
    split: Split
    behind: Behind


@dataclass(frozen=True)
class _Shares:
    """The shares of a layer's missed experts: those that cross the link now, those that the CPU runs, by their places
    in host memory, and how many of these and of other layers' can cross the link meanwhile."""

    crossing: Sequence[Expert]
    by_cpu: Mapping[Expert, int] = field(default_factory=dict)
    following: int = 0


class StreamedExperts:
    """A layer's experts, which are copied from their homes to slots as they are wanted, or run by the CPU where they
    are. A layer has slots of its own for passes, since layers come in turns: where a pass wants more than all slots
    hold, slots that layers shared would have lost every expert when its layer comes again."""

    whole: Batch | None = None

    def __init__(
        self,
        homes: Homes,
        slots: ExpertSlots,
        layout: LayerLayout,
        layer: int = 0,
        room: Room | None = None,
        sharing: Sharing | None = None,
        at_once: int | None = None,
    ) -> None:
        """layer: its number, other than that of each layer with the same slots. room: of all layers; by default its
        own. sharing: of missed experts with the CPU; None: it runs none. at_once: experts that are used together as
        they arrive; None: a few. alone: the same experts in the same slots, of which the CPU runs none; in_prefill:
        those in a prefill."""
        self.bank, self.stats, self.room = bank_of(layout, slots.content), ExpertStats(), room or Room()
        self._homes, self._slots, self._layer, self._sharing = homes, slots, layer, sharing
        self.on_host, self._at_once = sharing is not None, at_once
        self._in_memory = None if sharing is None else bank_of(layout, sharing.homes.content)
        slots.computed(range(len(slots)), homes.computed())  # with what was in their memory before
        self.alone = self if sharing is None else StreamedExperts(homes, slots, layout, layer, self.room)
        self.in_prefill: ExpertHomes = self.alone

    def ahead(
        self,
        then: ExpertHomes | None = None,
        *,
        is_last: bool = True,
        busy: int = 0,
        but: Container[Expert] = (),
    ) -> None:
        """See `ExpertHomes`. Experts are fetched in the order of their numbers into slots that none of the layer's has;
        those in the file are not read ahead, since the host would wait for them. but: experts that are elsewhere."""
        everyone = self._everyone
        held = self._slots.used(self._slots.held(everyone))
        others = (e for e in everyone if e not in held and e not in but and not self._homes.is_far(e[1]))
        self._fetch([*islice(others, max(len(self._slots) - len(held) - busy, 0))])

    def batches(self, chosen: Tensor) -> Iterator[Batch]:
        return self.batches_of(self.wanted(chosen))

    def batches_of(
        self,
        wanted: Mapping[Expert, int],
        meanwhile: Iterable[Batch] = (),
        on_free: Callable[[int], None] = lambda count: None,
    ) -> Iterator[Batch]:
        """Begin to fetch the experts that are in no slot, of the `wanted` ones, each with its number of rows. Returns
        their batches: the first one has those in slots, while others cross the link; then come those that the CPU runs;
        each further batch has a few of those that have arrived, the first asked for first. Where slots are too few for
        all, each has a few, whose slots the next ones take while others are used.

        meanwhile: batches from elsewhere, an iterator, which come once those in slots have left these to others.
        on_free: called before each batch from here once all are there or under way, with the number of slots that they
        still have; the others may be given away."""
        hits = self._slots.used(wanted)
        under_way = self._under_way(hits)
        there = {own: slot for own, slot in hits.items() if own not in under_way}
        missing = sorted(
            (each for each in wanted if each not in hits), key=lambda own: (self._homes.is_far(own[1]), -wanted[own])
        )
        room = len(self._slots) - len(hits)
        shares = self._shared(missing, wanted, room)
        self.stats += ExpertStats(len(hits), len(missing), 0, len(shares.by_cpu))
        coming = self._fetch(shares.crossing[:room])
        left = shares.crossing[len(coming) :]

        def first() -> Iterator[Batch]:
            if there and not left:
                yield from self._used(there)
            if self._sharing is not None:
                self._sharing.behind.fetch(shares.following)
            if shares.by_cpu:
                yield from self._by_cpu(shares.by_cpu, [wanted[each] for each in shares.by_cpu])

        return chain(first(), self._others(there if left else {}, under_way | coming, left, meanwhile, on_free))

    def _others(
        self,
        there: dict[Expert, int],
        coming: dict[Expert, int],
        left: Sequence[Expert],
        meanwhile: Iterable[Batch],
        on_free: Callable[[int], None],
    ) -> Iterator[Batch]:
        """The batches of experts that are there, or coming, and of those that are left for their slots."""
        waiting, at_once = there | coming, self._at_once or _AT_ONCE
        if not waiting:
            on_free(0)
        while waiting:  # in the order in which they leave their slots: the least recently used first
            if not waiting.keys() & there:
                yield from meanwhile
            group = dict(islice(waiting.items(), at_once))
            if not left:
                on_free(len(waiting))
            yield from self._used(group)
            waiting = {expert: slot for expert, slot in waiting.items() if expert not in group}
            coming = self._fetch(left[: len(self._slots) - len(waiting)])
            left, waiting = left[len(coming) :], waiting | coming
        yield from meanwhile

    def keeping(self, wanted: Mapping[Expert, int], but: Container[Expert]) -> dict[Expert, int]:
        """The wanted experts that are in slots, the least recently used first, and as many others as there are free
        slots, those with the most rows. but: experts that are elsewhere."""
        missing = (each for each in wanted if each not in self._slots and each not in but)
        fit = sorted(missing, key=lambda own: -wanted[own])[: self._slots.num_free]
        return {each: wanted[each] for each in (*self._slots.held(wanted), *fit)}

    @property
    def num_held(self) -> int:
        """The number of the layer's experts that are in slots."""
        return len(self._slots.held(self._everyone))

    @cached_property
    def _everyone(self) -> Mapping[Expert, None]:
        return dict.fromkeys((self._layer, number) for number in range(len(self._homes)))

    def __contains__(self, expert: object) -> bool:
        """Whether an expert is in a slot."""
        return expert in self._slots

    def wanted(self, chosen: Tensor) -> dict[Expert, int]:
        """The experts that are chosen, each with its number of rows."""
        numbers, rows = (each.tolist() for each in chosen.cpu().unique(return_counts=True))
        found = {(self._layer, number): own for number, own in zip(numbers, rows, strict=True)}
        found.pop((self._layer, len(self._homes)), None)  # no expert
        return found

    def _under_way(self, hits: Mapping[Expert, int]) -> dict[Expert, int]:
        """The experts of `hits` that may not have arrived, which count as used last. In a pass whose misses the CPU
        shares, those that followed its work have mostly arrived: batches of their own would be launches for nothing."""
        if self._sharing is not None:
            return {}
        return self._slots.used([own for own, slot in hits.items() if not self._slots.has_arrived(slot)])

    def _shared(self, missing: Sequence[Expert], wanted: Mapping[Expert, int], room: int) -> _Shares:
        """The shares of link and CPU. missing: those in host memory first, of them those with the most rows. room:
        slots that no expert of this pass has."""
        if (sharing := self._sharing) is None:
            return _Shares(missing)
        split, pace, num_bytes = sharing.split, sharing.homes.pace(), self._homes.num_bytes
        split.began()
        held = sharing.homes.in_memory([number for _, number in missing])
        far = [each for each in missing if each[1] not in held]
        near = [each for each in missing if each[1] in held]
        rows = [wanted[each] for each in near]
        count = split.crossing(rows, num_bytes, pace)
        more = split.following(rows[count:], num_bytes, pace.behind(len(far) + count))
        sharing.behind.put(self._layer, near[count:][: max(room - len(far) - count, 0)], self._follow)
        return _Shares(near[:count] + far, {each: held[each[1]] for each in near[count:]}, more)

    def _by_cpu(self, places: Mapping[Expert, int], rows: Sequence[int]) -> Iterator[Batch]:
        """The batch that the CPU runs, which is timed. places: in host memory."""
        assert self._in_memory is not None
        assert self._sharing is not None
        began = time.perf_counter()
        yield Batch(self._in_memory, self._places(places))
        self._sharing.split.ran(rows, self._homes.num_bytes, time.perf_counter() - began)
        self._sharing.split.ended()

    def _used(self, slots: dict[Expert, int]) -> Iterator[Batch]:
        """The batch of experts in slots, which later copies leave alone until the computation with it is done."""
        batch = self._arrived(slots)
        self._slots.computed(slots.values(), None)  # for good, if the pass is broken off
        yield batch
        self._slots.computed(slots.values(), self._homes.computed())

    def _arrived(self, slots: dict[Expert, int]) -> Batch:
        """The batch of experts in slots, from when they have arrived."""
        places = self._places(self._slots.arrived(slots))
        return Batch(self.bank, sent(places, self._slots.content.device))

    def _places(self, places: Mapping[Expert, int]) -> Tensor:
        of_all = torch.full((len(self._homes),), -1, dtype=torch.int32)
        of_all[[number for _, number in places]] = torch.tensor([*places.values()], dtype=torch.int32)
        return of_all

    def _follow(self, experts: Sequence[Expert]) -> None:
        """Begin to fetch experts that the CPU has run, but for those that a prefill has fetched since."""
        self._fetch([each for each in experts if each not in self._slots])

    def _fetch(self, experts: Sequence[Expert]) -> dict[Expert, int]:
        self.stats += ExpertStats(fetched_bytes=len(experts) * self._homes.num_bytes)
        return self._slots.fetch({expert: self._homes.fill(expert[1]) for expert in experts})
