"""Places in host memory between an expert's file and the slots on a device: whatever is late, shuffled, broken off or
fails, a mixture's output has the bits of resident experts, or there is an error.

A read here is carried out when somebody waits for it, or for a later one, in any order; until then its place has
neither the old expert nor the new one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from time import sleep
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from kit.models import LateLink
from offload.errors import ModelError
from offload.kernels.experts import ExpertHomes
from offload.speed.split import Split
from offload.transfer.disk import Disk, Reader
from offload.transfer.link import CudaLink, Event, Link, PacedLink
from offload.transfer.memory import Memory
from offload.weights import expert_homes as home_module
from offload.weights import expert_slots as slot_module
from offload.weights.expert_layout import layout_of
from offload.weights.experts import HostExperts
from offload.weights.streamed_experts import Behind, Sharing, StreamedExperts
from test_expert_slots import BEST, EXPERTS, AtRandom, Homes, edited_module, few_at_once

__all__ = ["few_at_once"]  # for all tests here, too
from test_experts import Run, config_of, of

GARBAGE = 0x7B
Begin = Callable[[Callable[[], int]], Event]


@dataclass
class LateReads:
    """The reads that were begun. fails: whether one is to fail, asked once for each."""

    order: random.Random = field(default_factory=lambda: random.Random(5))
    fails: Callable[[], bool] = lambda: False
    pending: list[_Late] = field(default_factory=list)
    num_begun: int = 0

    def begin(self, read: Callable[[], int]) -> Event:
        self.num_begun += 1
        self.pending.append(_Late(self, read))
        return self.pending[-1]

    def until(self, wanted: _Late) -> None:
        while wanted in self.pending:
            self.pending.pop(self.order.randrange(len(self.pending))).carry_out()


class _Late:
    def __init__(self, reads: LateReads, read: Callable[[], int]) -> None:
        self._reads, self._read, self._error = reads, read, ModelError("the disk is broken") if reads.fails() else None

    def carry_out(self) -> None:
        if self._error is None:
            with torch.inference_mode():
                self._read()

    def wait(self) -> None:
        self._reads.until(self)
        if self._error is not None:
            raise self._error

    synchronize = wait


@dataclass(frozen=True)
class Stand:
    """A layer's experts in a file that is none. begin: begins a read."""

    content: Tensor
    begin_read: Begin

    @property
    def num_bytes(self) -> int:
        return self.content.shape[1]

    def __len__(self) -> int:
        return len(self.content)

    def begin(self, number: int, place: Tensor) -> Event:
        place.fill_(GARBAGE)

        def read() -> int:
            place.copy_(self.content[number])
            return len(place)

        return self.begin_read(read)


@dataclass(frozen=True)
class Modules:
    homes: ModuleType = home_module
    slots: ModuleType = slot_module


def tiered(
    homes: Homes,
    link: Link,
    begin: Begin,
    slots: int,
    places: int,
    modules: Modules = Modules(),
    *,
    by_cpu: bool = False,
    split: Split | None = None,
) -> list[ExpertHomes]:
    """The layers' experts in places before a file. by_cpu: the host runs them in their places; in a prefill they cross
    the link to slots that layers share. split: the host runs some of those in places. slots: 0 for none."""
    layout, made = layout_of(config_of(EXPERTS), torch.bfloat16), list[ExpertHomes]()

    def empty(count: int) -> slot_module.ExpertSlots:
        found: slot_module.ExpertSlots = modules.slots.ExpertSlots(
            torch.zeros(count, layout.num_bytes, dtype=torch.uint8)
        )
        return found

    shared, behind = empty(max(slots, 1)), Behind()
    for layer, content in enumerate(homes.contents):
        file, kept = modules.homes.FileHomes(Stand(content, begin)), empty(places)
        here = StreamedExperts(file, kept, layout, layer)
        cached = modules.homes.CachedHomes(file, kept, layer, link)
        if not slots:
            made.append(here)
        elif by_cpu:
            made.append(HostExperts(here, StreamedExperts(cached, shared, layout, layer)))
        else:
            sharing = None if split is None else Sharing(cached, split, behind)
            made.append(StreamedExperts(cached, empty(slots), layout, layer, sharing=sharing))
    return made


def also_broken_off(homes: Homes, given: Sequence[ExpertHomes], run: Run) -> int:
    """The number of passes over a layer with wrong bits. In between some end after their first batch, and layers that
    the CPU runs have prefills."""
    order, found = random.Random(9), 0
    for count in (1, 1, 2, 7, 1, 40, 1, 3, 1, 1, 5, 1, 2, 1):
        for layer in (0, 0, 1, 2, 1):
            own, homes_of = homes.scenes[layer], given[layer]
            if isinstance(homes_of, HostExperts) and order.random() < 0.5:
                homes_of = homes_of.in_prefill
            if order.random() < 0.5:
                homes_of.ahead()
            next(homes_of.batches(torch.tensor(order.sample(range(EXPERTS.count), order.randint(1, 8)))))
            some = own.rows[(first := order.randrange(41 - count)) : first + count].contiguous()
            found += not torch.equal(run(own.mixture, homes_of, some), run(own.mixture, own.homes, some))
    return found


@pytest.fixture(scope="module")
def homes() -> Homes:
    return Homes.made()


SIZES = [(0, 1), (0, 3), (1, 1), (2, 1), (2, 5), (5, 2), (8, 3), (3, 7)]


@pytest.mark.few(6)
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("by_cpu", [False, True])
@pytest.mark.parametrize(("slots", "places"), SIZES)
@pytest.mark.parametrize("executor", BEST)
def test_any_number_of_places_gives_the_bits_of_resident_experts(
    homes: Homes, executor: str, slots: int, places: int, by_cpu: bool, late: bool
) -> None:
    reads, link = LateReads(), LateLink(late_in=late, late_out=False)
    given = tiered(homes, link, reads.begin, slots, places, by_cpu=by_cpu)
    assert also_broken_off(homes, given, of(executor)) == 0
    assert reads.num_begun > 0


@pytest.mark.few(4)
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(("slots", "places"), [(2, 5), (4, 6), (3, 7), (1, 8)])
def test_the_cpu_runs_some_of_those_that_are_in_places(homes: Homes, slots: int, places: int, late: bool) -> None:
    reads, link = LateReads(), LateLink(late_in=late, late_out=False)
    given = tiered(homes, link, reads.begin, slots, places, split=AtRandom(slots))
    assert also_broken_off(homes, given, of(BEST[-1])) == 0
    assert sum(each.stats.by_cpu for each in given if isinstance(each, StreamedExperts)) > 0


@pytest.mark.few(3)
@pytest.mark.parametrize(("slots", "places"), SIZES)
def test_threads_of_a_disk_may_be_late_in_any_order(homes: Homes, slots: int, places: int) -> None:
    late = random.Random(7)
    link = PacedLink(None, delay=lambda: late.choice((0.0, 0.0002, 0.001)))
    waits = random.Random(3)

    def begin(read: Callable[[], int]) -> Event:
        def slowly(reader: Reader) -> int:
            sleep(waits.choice((0.0, 0.0, 0.002)))
            return read()

        return disk.begin(slowly)

    with closing(Disk()) as disk, closing(link):
        assert also_broken_off(homes, tiered(homes, link, begin, slots, places), of(BEST[-1])) == 0
        assert disk.stats.reads > 0


def failing(rate: float) -> LateReads:
    chance = random.Random(11)
    return LateReads(fails=lambda: chance.random() < rate)


def survived(homes: Homes, given: Sequence[ExpertHomes], run: Run) -> int:
    """The number of passes over a layer with wrong bits; one whose reads fail is tried again."""
    rows, found = random.Random(3), 0
    for count in (1, 2, 7, 1, 40, 1, 3, 1, 1, 5):
        for layer in (0, 0, 1, 2, 1):
            own, first, homes_of = homes.scenes[layer], rows.randrange(41 - count), given[layer]
            if isinstance(homes_of, HostExperts) and rows.random() < 0.5:
                homes_of = homes_of.in_prefill
            some, made = own.rows[first : first + count].contiguous(), None
            while made is None:
                try:
                    made = run(own.mixture, homes_of, some)
                except ModelError:
                    continue
            found += not torch.equal(made, run(own.mixture, own.homes, some))
    return found


@pytest.mark.few(4)
@pytest.mark.parametrize("by_cpu", [False, True])
@pytest.mark.parametrize(("slots", "places"), SIZES)
def test_an_expert_whose_read_failed_is_never_computed_with(
    homes: Homes, slots: int, places: int, by_cpu: bool
) -> None:
    reads = failing(0.05)
    given = tiered(homes, LateLink(late_in=True, late_out=False), reads.begin, slots, places, by_cpu=by_cpu)
    assert survived(homes, given, of(BEST[-1])) == 0


def test_experts_in_host_memory_are_used_before_those_that_are_read(homes: Homes) -> None:
    own = tiered(homes, LateLink(late_in=True, late_out=False), LateReads().begin, 3, 5)[0]
    assert isinstance(own, StreamedExperts)
    for wanted in ([5], [0, 6, 7]):
        list(own.batches(torch.tensor(wanted)))
    found = [(each.places >= 0).nonzero()[:, 0].tolist() for each in own.batches(torch.tensor([1, 2, 5]))]
    assert found == [[1, 5], [2]]


def test_experts_in_the_file_do_not_come_ahead(homes: Homes) -> None:
    """The host would wait for their reads, one after the other, before it launches a layer's attention."""
    reads, link = LateReads(), LateLink(late_in=True, late_out=False)
    own = tiered(homes, link, reads.begin, 4, 5)[0]
    own.ahead()
    assert (reads.num_begun, link.num_coming) == (0, 0)
    assert isinstance(own, StreamedExperts)
    for wanted in ([1, 2, 3, 4, 5], [4, 5, 6, 7]):
        list(own.batches(torch.tensor(wanted)))
    own._slots, begun = empty_like(own._slots), reads.num_begun  # 3 to 7 are in places
    own.ahead()
    assert (reads.num_begun, link.num_coming) == (begun, 4)


def empty_like(slots: slot_module.ExpertSlots) -> slot_module.ExpertSlots:
    return slot_module.ExpertSlots(torch.zeros_like(slots.content))


@pytest.mark.parametrize("planted", [False, True])
def test_a_copy_whose_read_failed_is_not_made_up_for(
    homes: Homes, planted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its slot is another expert's by then. planted: the fault, which is to show."""
    outcomes = iter([True, False, False, False])
    reads, link = LateReads(fails=lambda: next(outcomes)), LateLink(late_in=True, late_out=False)
    given = tiered(homes, link, reads.begin, 1, 1, by_cpu=True)
    first, second = (each for each in given[:2] if isinstance(each, HostExperts))
    here, place = first.own, torch.tensor
    if planted:
        assert isinstance(here, StreamedExperts)
        monkeypatch.setattr(here._slots, "_leaving", Kept())
    with pytest.raises(ModelError):
        list(first.in_prefill.batches(place([0])))  # its slot is free again
    list(first.batches(place([0])))  # read into the same place
    list(second.in_prefill.batches(place([2])))  # takes the slot
    list(first.batches(place([1])))  # takes the place
    (batch,) = second.in_prefill.batches(place([2]))
    content = batch.bank.content[int(batch.places[2])]
    assert torch.equal(content, homes.contents[1][2]) != planted


class Kept(dict[int, Event]):
    """The copies from slots, of which the first `pop`, of one whose read failed, takes none away."""

    spared = False

    def pop(self, *given: Any) -> Any:
        if not self.spared and given[0] in self:
            self.spared = True
            return None
        return super().pop(*given)


@dataclass(frozen=True)
class Mutant:
    """A fault: `old` becomes `new` in the source of a module."""

    description: str
    old: str
    new: str
    of_homes: bool = True


MUTANTS = [
    Mutant("a place is copied from before it is filled", "            self._filled()\n", "            pass\n"),
    Mutant("a place is given away while it is copied from", "        self._places.leaves(place, arrival)\n", ""),
    Mutant("another expert is read", "self._homes.fill(expert[1])", "self._homes.fill(expert[1] - 1)"),
    Mutant("another layer's place", "partial(self._begin, (self._layer, number))", "partial(self._begin, (0, 0))"),
    Mutant("nobody waits for what leaves a slot", "event.synchronize()\n                self._wait",
           "pass\n                self._wait", False),
    Mutant("a slot is filled again while it is filled", "self._wait(expert, slot, lambda event: event.synchronize())",
           "self._arriving.pop(slot, None)", False),
    Mutant("an expert that was lost beside another one is taken for one that is there",
           "if self._held.get(expert) != slot:", "if False:", False),
    Mutant("an expert that failed is still there", "slot = self._held.pop(expert)", "slot = self._held[expert]", False),
]  # fmt: skip


def edited(mutant: Mutant) -> Modules:
    made = edited_module(home_module if mutant.of_homes else slot_module, mutant.old, mutant.new)
    return Modules(homes=made) if mutant.of_homes else Modules(slots=made)


def outcomes(homes: Homes, modules: Modules) -> Iterator[bool]:
    """Whether all bits are right, by place."""
    for by_cpu in (False, True):
        for slots, places in SIZES:
            for reads, check in ((LateReads(), also_broken_off), (failing(0.1), survived), (failing(0.4), survived)):
                link = LateLink(late_in=True, late_out=False)
                given = tiered(homes, link, reads.begin, slots, places, modules, by_cpu=by_cpu)
                try:
                    yield check(homes, given, of(BEST[-1])) == 0
                except (RuntimeError, KeyError, IndexError, AttributeError, TypeError, ModelError):
                    yield False


@pytest.mark.few(4)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.description)
def test_each_fault_shows(homes: Homes, mutant: Mutant) -> None:
    assert not all(outcomes(homes, edited(mutant)))


RACES = [
    ("a place is filled while it crosses the link", home_module, "self._places.leaves(place, arrival)", "..."),
    (
        "an expert arrives in a slot that is still computed with",
        home_module,
        "content, (end or self._link.record(),))",
        "content, ())",
    ),
]


@pytest.mark.parametrize("race", [None, *RACES], ids=lambda race: race[0] if race else "none")
def test_on_a_gpu_reads_copies_and_computation_are_ordered(
    homes: Homes, race: tuple[str, ModuleType, str, str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU on paper sees each wait that is missing, planted here."""
    pytest.importorskip("triton")
    from paper import on_paper
    from test_paper_bugs import Bug, plant

    device, layout = torch.device("cuda:0"), layout_of(config_of(EXPERTS), torch.bfloat16)
    if race:
        description, source, *change = race
        plant(Bug(description, source.__name__, *change), monkeypatch)
    monkeypatch.setattr(
        "offload.weights.streamed_experts.sent", lambda places, device: places
    )  # the host does not wait
    with torch.inference_mode(), on_paper() as gpu:
        memory, reads = Memory(device), LateReads()
        place, slot = (
            memory.allocate((count, layout.num_bytes), torch.uint8, tier=tier, purpose="experts")
            for count, tier in ((3, "host"), (3, "device"))
        )
        file = home_module.FileHomes(Stand(homes.contents[0], reads.begin))  # type: ignore[arg-type]
        cached = home_module.CachedHomes(file, slot_module.ExpertSlots(place), 0, CudaLink(device))
        given = StreamedExperts(cached, slot_module.ExpertSlots(slot), layout)
        for wanted in ([0, 1, 2], [3, 4, 5], [0, 6, 7]):
            for batch in given.batches(torch.tensor(wanted)):
                held = [each for each in batch.places.tolist() if each >= 0]
                _ = [slot[each].clone() for each in held]  # as a kernel reads them
        problems = list(gpu.problems)
    assert all("race: " in problem for problem in problems)
    assert bool(problems) == bool(race)
