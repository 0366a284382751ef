"""Slots for experts on the host: with any number of them a mixture's output has the bits of the resident experts.

The link is slow at random, so that an expert which is used before it has arrived, or from a slot that has been given
away, shows.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from kit.processor import on_this_machine
from offload.config.networks import Experts, FeedForward
from offload.errors import ModelError
from offload.kernels.experts import ExpertHomes, Mixture, Router
from offload.metrics import ExpertStats
from offload.speed.routing import distinct_experts, hit_rate
from offload.speed.split import LinkPace, Split
from offload.transfer.link import CudaLink, Done, Event, PacedLink
from offload.transfer.memory import Memory
from offload.weights import expert_homes as home_module
from offload.weights import expert_slots as slot_module
from offload.weights import streamed_experts as module
from offload.weights.expert_homes import HostHomes
from offload.weights.expert_layout import bank_of, layout_of
from offload.weights.expert_slots import ExpertSlots
from offload.weights.experts import ResidentExperts
from test_experts import Run, Scene, config_of, of, scene

NUM_LAYERS = 3
EXPERTS = Experts(FeedForward(32), 8, 3)
BEST = ["torch", *on_this_machine()[:1]]
SLOTS = [1, 2, 3, 5, 8]


@dataclass(frozen=True)
class Homes:
    """Three layers of one layout: their experts on the host."""

    scenes: list[Scene]
    contents: list[Tensor]
    of_host: list[Tensor]

    @classmethod
    def made(cls, dtype: torch.dtype = torch.bfloat16, *encodings: str) -> Homes:
        scenes = [scene(EXPERTS, dtype, 40, *encodings, seed=layer) for layer in range(NUM_LAYERS)]
        layout = layout_of(config_of(EXPERTS, *encodings), dtype)
        contents = [_content(each, layout.num_bytes) for each in scenes]
        return cls(scenes, contents, [each.clone() for each in contents])


def _content(given: Scene, num_bytes: int) -> Tensor:
    """All bytes of a scene's experts, uint8 [experts, bytes]."""
    first = given.homes.bank.places[0].gate
    assert isinstance(first, Tensor)
    flat = first.view(torch.uint8).as_strided((EXPERTS.count, num_bytes), (num_bytes, 1), 0)
    return flat.clone()


class AtRandom(Split):
    """A split by dice."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._dice = random.Random(seed)

    def crossing(self, rows: Sequence[int], num_bytes: int, link: LinkPace) -> int:
        assert list(rows) == sorted(rows, reverse=True)
        return self._dice.randrange(len(rows) + 1)

    def following(self, rows: Sequence[int], num_bytes: int, link: LinkPace) -> int:
        return self._dice.randrange(4)


@contextmanager
def streamed(
    homes: Homes,
    slots: int,
    source: ModuleType = module,
    slot_source: ModuleType = slot_module,
    *,
    shared: bool = False,
    split: Split | None = None,
) -> Iterator[list[module.StreamedExperts]]:
    """The layers' experts over a link that is late by up to a millisecond. slots: of each layer, or shared by all."""
    late = random.Random(7)
    link = PacedLink(None, delay=lambda: late.choice((0.0, 0.0, 0.0002, 0.001)))
    layout = layout_of(config_of(EXPERTS), torch.bfloat16)
    behind = source.Behind()
    made = [slots_of(slots, slot_source) for _ in homes.of_host[: 1 if shared else None]]
    try:
        yield [
            source.StreamedExperts(
                own, made[0 if shared else layer], layout, layer, sharing=split and source.Sharing(own, split, behind)
            )
            for layer, own in enumerate(HostHomes(home, link) for home in homes.of_host)
        ]
    finally:
        link.close()


def slots_of(count: int, source: ModuleType = slot_module) -> ExpertSlots:
    """Zeroed slots, each with more bytes than an expert has."""
    num_bytes = layout_of(config_of(EXPERTS), torch.bfloat16).num_bytes + 64
    made: ExpertSlots = source.ExpertSlots(torch.zeros(count, num_bytes, dtype=torch.uint8))
    return made


def wrong(homes: Homes, given: Sequence[ExpertHomes], run: Run, chance: float = 0.3) -> int:
    """The number of passes over a layer whose bits are not those of resident experts. chance: that experts are fetched
    ahead of a pass."""
    rows, dice = random.Random(3), random.Random(4)
    found = 0
    for count in (1, 1, 2, 7, 1, 40, 1):
        for layer in (0, 0, 1, 2, 1):  # a prefill's blocks are at a layer one after the other
            own, first = homes.scenes[layer], rows.randrange(41 - count)
            some = own.rows[first : first + count].contiguous()
            if dice.random() < chance:
                given[layer].ahead()
            made = run(own.mixture, given[layer], some)  # first: scratch has other rows
            found += not torch.equal(made, run(own.mixture, own.homes, some))
    return found


@pytest.fixture(scope="module")
def homes() -> Homes:
    return Homes.made()


@pytest.fixture(autouse=True)
def few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a batch would have all experts that are left."""
    monkeypatch.setattr(module, "_AT_ONCE", 2)


@pytest.mark.few(6)
@pytest.mark.parametrize("slots", SLOTS)
@pytest.mark.parametrize("executor", BEST)
def test_any_number_of_slots_gives_the_bits_of_resident_experts(homes: Homes, executor: str, slots: int) -> None:
    with streamed(homes, slots) as given:
        assert wrong(homes, given, of(executor)) == 0


@pytest.mark.few(6)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("slots", SLOTS)
@pytest.mark.parametrize("executor", BEST)
def test_any_split_between_link_and_cpu_gives_the_bits_of_resident_experts(
    homes: Homes, executor: str, slots: int, seed: int
) -> None:
    with streamed(homes, slots, split=AtRandom(seed)) as given:
        assert wrong(homes, given, of(executor), 0.3 if slots < EXPERTS.count else 0.0) == 0  # or nothing is missed
        stats = sum((each.stats for each in given), start=ExpertStats())
    assert 0 < stats.by_cpu < stats.misses


@pytest.mark.few(5)
@pytest.mark.parametrize("slots", SLOTS)
@pytest.mark.parametrize("executor", BEST)
def test_layers_may_share_slots(homes: Homes, executor: str, slots: int) -> None:
    with streamed(homes, slots, shared=True) as given:
        assert wrong(homes, given, of(executor)) == 0


def test_the_least_recently_used_expert_makes_room(homes: Homes) -> None:
    with streamed(homes, 3) as given:
        first = given[0]
        for wanted in ([0], [1], [2], [0], [3], [0, 2], [1]):
            assert list(first.batches(torch.tensor(wanted)))
        stats = first.stats
    num_bytes = homes.of_host[0].shape[1]
    assert stats == ExpertStats(3, 5, 5 * num_bytes)  # hits: 0, then 0 and 2; 3 took the place of 1
    assert stats.hit_rate == 3 / 8


def test_plans_expect_no_more_hits_than_there_are_slots() -> None:
    """And more of more slots: all, where there is one for each expert."""
    for experts in (EXPERTS, Experts(FeedForward(32), 128, 8), Experts(FeedForward(32), 60, 4)):
        for rows in (1, 2, 8, 64, 512):
            rates = [hit_rate(experts, slots, rows) for slots in range(1, experts.count + 1)]
            assert rates == sorted(rates)
            assert rates[-1] == 1
            for slots, rate in enumerate(rates, 1):
                assert 0 <= rate * distinct_experts(experts, rows) <= slots


def test_experts_that_are_there_are_used_while_others_arrive(homes: Homes) -> None:
    with streamed(homes, 8) as given:
        list(given[1].batches(torch.tensor([2, 5])))
        batches = [(each.places >= 0).nonzero()[:, 0].tolist() for each in given[1].batches(torch.tensor([5, 1, 2, 7]))]
    assert batches == [[2, 5], [1, 7]]


def test_the_next_experts_take_slots_of_used_ones_while_others_are_used(homes: Homes) -> None:
    """All of a batch had to be used before the next one began to arrive."""
    with streamed(homes, 16) as given, pytest.MonkeyPatch.context() as patched:
        own, fetched, seen = given[0], list[int](), list[tuple[list[int], list[int]]]()
        fetch = own._fetch
        patched.setattr(own, "_fetch", lambda some: (fetched.extend(number for _, number in some), fetch(some))[1])
        own._slots = slots_of(4)
        own.bank = bank_of(layout_of(config_of(EXPERTS), torch.bfloat16), own._slots.content)
        for batch in own.batches(torch.arange(7)):
            seen.append(((batch.places >= 0).nonzero()[:, 0].tolist(), [*fetched]))
    assert seen == [
        ([0, 1], [0, 1, 2, 3]), ([2, 3], [0, 1, 2, 3, 4, 5]), ([4, 5], [*range(7)]), ([6], [*range(7)]),
    ]  # fmt: skip


def test_after_an_interrupt_a_copy_in_flight_is_waited_for(homes: Homes) -> None:
    link = PacedLink(None, delay=lambda: 0.05)
    layout = layout_of(config_of(EXPERTS), torch.bfloat16)
    slots, of_host = slots_of(4), HostHomes(homes.of_host[0], link)
    own = module.StreamedExperts(of_host, slots, layout)
    slots.fetch({(0, 6): of_host.fill(6)})  # begun, and not waited for
    own.ahead()
    for number in (6, 0):
        (batch,) = own.batches(torch.tensor([number]))
        assert torch.equal(slots.content[int(batch.places[number]), : layout.num_bytes], homes.of_host[0][number])
    link.close()


def test_experts_that_came_ahead_are_used_in_turns_and_the_others_fetched(homes: Homes) -> None:
    with streamed(homes, 5) as given:
        own, num_bytes = given[0], homes.of_host[0].shape[1]
        list(own.batches(torch.tensor([6])))
        own.ahead()
        assert own.stats.fetched_bytes == 5 * num_bytes  # and 6 stays
        own.ahead()
        batches = [(each.places >= 0).nonzero()[:, 0].tolist() for each in own.batches(torch.tensor([0, 1, 2, 3, 6]))]
        assert batches == [[6], [0, 1], [2, 3]]
        batches = [(each.places >= 0).nonzero()[:, 0].tolist() for each in own.batches(torch.arange(8))]
        assert sorted(number for batch in batches for number in batch) == [*range(8)]
        assert own.stats.fetched_bytes == 8 * num_bytes


def test_experts_that_followed_the_cpus_work_are_in_a_batch_with_those_that_are_there(homes: Homes) -> None:
    """A pass of few rows would have one more batch, with launches of its own, for copies that have long ended."""

    class ByCpu(Split):
        def crossing(self, rows: Sequence[int], num_bytes: int, link: LinkPace) -> int:
            return 0

        def following(self, rows: Sequence[int], num_bytes: int, link: LinkPace) -> int:
            return 2

    with streamed(homes, 8, split=ByCpu()) as given:
        own = given[0]
        for wanted, numbers in (([0, 1], [[0, 1]]), ([0, 1, 2], [[0, 1], [2]]), ([0, 1, 2], [[0, 1, 2]])):
            batches = [(each.places >= 0).nonzero()[:, 0].tolist() for each in own.batches(torch.tensor(wanted))]
            assert batches == numbers


def test_an_expert_that_came_with_a_prefill_does_not_follow_the_cpus_work_too(homes: Homes) -> None:
    """It was then in two slots, of which one was nobody's from there on."""

    class ByCpu(Split):
        most = 0

        def crossing(self, rows: Sequence[int], num_bytes: int, link: LinkPace) -> int:
            return 0

        def following(self, rows: Sequence[int], num_bytes: int, link: LinkPace) -> int:
            return self.most

    split = ByCpu()
    with streamed(homes, 4, split=split) as given:
        for own in given[:2]:
            list(own.batches(torch.tensor([0, 1, 2])))  # they follow, but the link is busy
        given[0].in_prefill.ahead()
        list(given[0].in_prefill.batches(torch.tensor([0, 1, 2])))
        split.most = 8
        list(given[1].batches(torch.tensor([3])))
        for own in given[:2]:
            assert sorted([*own._slots._held.values(), *own._slots._free]) == [*range(4)]


class Recorded(PacedLink):
    """A link that says which copies wait for which of the events that were recorded on it."""

    def __init__(self) -> None:
        super().__init__(None)
        self.recorded, self.waited = list[Event](), list[int]()

    def record(self) -> Event:
        self.recorded.append(Done())
        return self.recorded[-1]

    def to_device(self, dst: Tensor, src: Tensor, after: Sequence[Event] = ()) -> Event:
        (event,) = after
        self.waited.append(next(number for number, each in enumerate(self.recorded) if each is event))
        return super().to_device(dst, src, after)


def test_a_copy_waits_for_the_computation_that_read_its_slot_and_no_later_one(homes: Homes) -> None:
    """Those fetched ahead would begin behind all that a host has issued before a GPU is done with it."""
    with closing(Recorded()) as link:
        layout, slots = layout_of(config_of(EXPERTS), torch.bfloat16), slots_of(4)
        first, second = (
            module.StreamedExperts(HostHomes(home, link), slots, layout, layer)
            for layer, home in enumerate(homes.of_host[:2])
        )
        assert len(link.recorded) == 2  # when they were made
        for _ in first.batches(torch.tensor([4, 5])):
            link.record()  # other computation
        after_use = len(link.recorded) - 1
        for _ in range(3):
            link.record()
        second.ahead()
        assert link.waited == [1, 1, 1, 1, after_use, after_use]
        next(first.batches(torch.tensor([6])))  # is broken off
        link.record()
        second.ahead()
        assert link.waited[6:] == [1, len(link.recorded) - 1]


RACES = [
    ("an expert is used before it has arrived", slot_module, "lambda event: event.wait()", "lambda _: None"),
    (
        "an expert arrives in a slot that is still computed with",
        home_module,
        "home, (end or self._link.record(),)",
        "home, ()",
    ),
    (
        "the end of an earlier computation with a slot is taken for the last one's",
        module,
        "yield batch\n        self._slots.computed(slots.values(), self._homes.computed())",
        "self._slots.computed(slots.values(), self._homes.computed())\n        yield batch",
    ),
    (
        "a pass that was broken off computes with a slot no more",
        module,
        "self._slots.computed(slots.values(), None)",
        "...",
    ),
]


@pytest.mark.parametrize("race", [None, *RACES], ids=lambda race: race[0] if race else "none")
def test_on_a_gpu_copies_and_computation_are_ordered(
    homes: Homes, race: tuple[str, ModuleType, str, str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU on paper sees each wait that is missing, planted here."""
    pytest.importorskip("triton")
    from paper import on_paper
    from test_paper_bugs import Bug, plant

    device, own, layout = torch.device("cuda:0"), homes.scenes[0], layout_of(config_of(EXPERTS), torch.bfloat16)
    if race:
        description, source, *change = race
        plant(Bug(description, source.__name__, *change), monkeypatch)
    with torch.inference_mode(), on_paper() as gpu:
        memory = Memory(device)
        home = memory.allocate(homes.of_host[0].shape, torch.uint8, tier="host", purpose="experts")
        home.copy_(homes.of_host[0])
        content = memory.allocate((2, layout.num_bytes), torch.uint8, tier="device", purpose="slots")
        given = module.StreamedExperts(HostHomes(home, CudaLink(device)), ExpertSlots(content), layout)
        norm = replace(own.norm, weight=own.norm.weight.to(device))
        mixture = Mixture(EXPERTS, Router(own.router.matrix.to(device)), norm)
        for first in range(0, 12, 3):
            given.ahead()
            made = of("torch")(mixture, given, own.rows[first : first + 3].to(device)).cpu()
            assert torch.equal(made, own.by(of("torch"), own.rows[first : first + 3]))
        batch = next(given.batches(torch.tensor([0, 1])))  # and no other: the pass is broken off
        held = [each for each in batch.places.tolist() if each >= 0]
        _ = [content[each].clone() for each in held]
        list(given.batches(torch.tensor([2, 3])))
        problems = list(gpu.problems)
    assert all("race: " in problem for problem in problems)
    assert bool(problems) == bool(race)


def test_padding_brings_no_expert(homes: Homes) -> None:
    """Its number is that of all experts."""
    with streamed(homes, 8) as given:
        (batch,) = given[0].batches(torch.tensor([[8, 2], [5, 8]]))
        assert (batch.places >= 0).nonzero()[:, 0].tolist() == [2, 5]
        assert list(given[0].batches(torch.tensor([8, 8]))) == []
        assert given[0].stats.misses == 2


def test_a_failed_copy_loses_no_slot(homes: Homes) -> None:
    class Failing(PacedLink):
        broken = False

        def to_device(self, *args: object, **options: object) -> object:  # type: ignore[override]
            if self.broken:
                raise RuntimeError("the link is broken")
            return super().to_device(*args, **options)  # type: ignore[arg-type]

    link, layout = Failing(None), layout_of(config_of(EXPERTS), torch.bfloat16)
    given: list[ExpertHomes] = [
        module.StreamedExperts(HostHomes(home, link), slots_of(2), layout) for home in homes.of_host
    ]
    link.broken = True
    for _ in range(3):
        with pytest.raises(RuntimeError, match="the link is broken"):
            list(given[0].batches(torch.tensor([1, 2])))
    link.broken = False
    assert wrong(homes, given, of("torch")) == 0
    link.close()


def order_of_use(homes: Homes, *sources: ModuleType) -> list[list[int]]:
    """The experts of each batch where one is there and three come ahead."""
    with streamed(homes, 4, *sources) as given:
        list(given[0].batches(torch.tensor([2])))
        given[0].ahead()
        return [(each.places >= 0).nonzero()[:, 0].tolist() for each in given[0].batches(torch.arange(4))]


def edited_module(original: ModuleType, old: str, new: str) -> ModuleType:
    """The module with `new` in place of `old`, which it has once."""
    source = Path(str(original.__file__)).read_text()
    assert source.count(old) == 1
    made = ModuleType("edited_experts")
    sys.modules["edited_experts"] = made
    exec(compile(source.replace(old, new), "<edited>", "exec"), made.__dict__)
    return made


@dataclass(frozen=True)
class Mutant:
    """A fault: `old` becomes `new` in the source of weights/streamed_experts.py, or of slots."""

    description: str
    old: str
    new: str
    of_slots: bool = True


MUTANTS = [
    Mutant("a miss is used before it has arrived", "lambda event: event.wait()", "lambda _: None"),
    Mutant("another expert's slot", "found[expert] = self._free.pop()", "found[expert] = self._free.pop() - 1"),
    Mutant("a slot that was given away is still its first expert's", "                del self._held[expert]\n", ""),
    Mutant("experts of another number", "fill(expert[1]) for", "fill(expert[1] - 1) for", False),
    Mutant("another layer's expert of that number", "{(self._layer, number)", "{(0, number)", False),
    Mutant("the last used expert makes room", "next(iter(self._held.items()))", "next(reversed(self._held.items()))"),
    Mutant("an expert that is there is fetched again into a second slot", "each in wanted if each not in hits",
           "each in wanted", False),
    Mutant("experts that are there may be given away", "self._fetch(shares.crossing[:room])",
           "self._fetch(shares.crossing[: len(self._slots)])", False),
    Mutant("only the first experts arrive", "left = shares.crossing[len(coming) :]", "left = []", False),
    Mutant("experts that are not used yet make room", "len(self._slots) - len(waiting)", "len(self._slots)", False),
    Mutant("an expert that is used counts as unused", "            self._held.move_to_end(expert)\n",
           "            pass\n"),
    Mutant("a miss is run by both", "near[:count] + far", "near + far", False),
    Mutant("a miss is run by neither", "for each in near[count:]}", "for each in near[count + 1 :]}", False),
    Mutant("an expert follows into a slot in use", "[: max(room - len(far) - count, 0)]", "[: len(self._slots)]",
           False),
    Mutant("experts that are there make room for those fetched ahead", "len(self._slots) - len(held)",
           "len(self._slots)", False),
    Mutant("an expert under way is used before its turn to make room",
           "return self._slots.used([own for own, slot in hits.items() if not self._slots.has_arrived(slot)])",
           "return {own: slot for own, slot in hits.items() if not self._slots.has_arrived(slot)}", False),
    Mutant("an expert under way counts as there", "there = {own: slot for own, slot in hits.items() if own not in"
           " under_way}", "there, under_way = hits, {}", False),
    Mutant("the CPU runs another expert", "{each: held[each[1]] for", "{each: held[each[1]] - 1 for", False),
]  # fmt: skip


@pytest.mark.few(3)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.description)
def test_each_fault_shows(homes: Homes, mutant: Mutant) -> None:
    """By other bits, by an error, by other counts than those of the least recently used, or another order of use."""
    edited = edited_module(slot_module if mutant.of_slots else module, mutant.old, mutant.new)
    vars(edited).update(_AT_ONCE=2)

    sources = (module, edited) if mutant.of_slots else (edited, slot_module)

    def fails(slots: int, shared: bool = False, splits: bool = False) -> bool:
        own, theirs = (AtRandom(slots) if splits else None for _ in range(2))
        with (
            streamed(homes, slots, *sources, shared=shared, split=own) as given,
            streamed(homes, slots, shared=shared, split=theirs) as right,
        ):
            try:
                if wrong(homes, given, of(BEST[-1])):
                    return True
            except (AssertionError, RuntimeError, ValueError, KeyError, IndexError, ModelError):
                return True
            assert wrong(homes, right, of(BEST[-1])) == 0
            counted = [each.stats for each in given] != [each.stats for each in right]
        return counted or order_of_use(homes, *sources) != order_of_use(homes)

    assert any(fails(slots, splits=splits) for splits in (True, False) for slots in SLOTS) or fails(5, shared=True)


def test_a_resident_experts_place_is_its_number() -> None:
    layout = layout_of(config_of(EXPERTS), torch.bfloat16)
    resident = ResidentExperts(bank_of(layout, torch.zeros(8, layout.num_bytes, dtype=torch.uint8)))
    (batch,) = resident.batches(torch.tensor([[3, 1]]))
    assert batch.places.tolist() == [*range(8)]
