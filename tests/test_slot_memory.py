"""The memory of slots for experts, of which prefills have a part in turns with passes: bits never depend on it.

The link is slow at random, as in test_expert_slots.py, and passes are broken off, so that copies are in flight when a
turn begins and when it ends.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from kit.asked import Asked, together
from kit.families import save_tiny
from kit.models import GREEDY, random_tokens
from kit.processor import best
from offload.engine.engine import Engine, load_tokenizer
from offload.errors import ModelError
from offload.kernels import experts_scratch
from offload.kernels.experts import Batch, Mixture, Router
from offload.model.decoder import Decoder
from offload.plan.expert_placement import prefill_bytes, staged_experts
from offload.plan.options import Options
from offload.plan.request import Request
from offload.plan.sizing import Sizing
from offload.transfer import arena as arena_module
from offload.transfer.link import CudaLink, PacedLink
from offload.transfer.memory import Memory
from offload.weights import expert_slots as slot_module
from offload.weights import prefill_experts as prefill_module
from offload.weights import slot_memory as memory_module
from offload.weights import streamed_experts as streamed_module
from offload.weights.expert_homes import HostHomes
from offload.weights.expert_layout import layout_of
from offload.weights.expert_slots import ExpertSlots
from offload.weights.experts import in_prefill
from offload.weights.prefill_experts import PrefillExperts
from offload.weights.slot_memory import SlotMemory
from offload.weights.streamed_experts import StreamedExperts
from test_expert_slots import BEST, EXPERTS, NUM_LAYERS, Homes, edited_module, few_at_once
from test_experts import HIDDEN, config_of, of
from test_planner import CPU, GPU

__all__ = ["few_at_once"]  # for all tests here, too
LAYOUT = layout_of(config_of(EXPERTS), torch.bfloat16)
MANY = 40  # rows, which want nearly all experts


@dataclass(frozen=True)
class Modules:
    """The sources of a model's slots, of which one may be edited."""

    arena: ModuleType = arena_module
    slots: ModuleType = slot_module
    streamed: ModuleType = streamed_module
    memory: ModuleType = memory_module
    prefill: ModuleType = prefill_module


@dataclass(frozen=True)
class Model:
    """Three layers' experts over a link, in `slots` slots of each and `staged` slots of none."""

    homes: Homes
    layers: list[StreamedExperts]
    memory: SlotMemory
    ledger: Memory
    num_bytes: int

    @property
    def in_prefill(self) -> list[PrefillExperts]:
        return [each.in_prefill for each in self.layers]  # type: ignore[misc]


def scratch_bytes(num_rows: int) -> int:
    """Bytes of what experts make of rows, by a CPU's kernels."""
    threads = torch.get_num_threads()
    return experts_scratch.scratch_bytes(EXPERTS, num_rows, HIDDEN, torch.bfloat16, threads=threads)


@contextmanager
def model(homes: Homes, slots: int, staged: int, modules: Modules = Modules(), *, spare: int = 0) -> Iterator[Model]:
    dice = random.Random(7)
    link = PacedLink(None, delay=lambda: dice.choice((0.0, 0.0, 0.0002, 0.001)))
    ledger, size = Memory(torch.device("cpu")), LAYOUT.num_bytes
    num_bytes = spare + max(NUM_LAYERS * slots * size, staged * size + scratch_bytes(MANY))
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(modules.memory, "Arena", modules.arena.Arena)
            patch.setattr(modules.memory, "ExpertSlots", modules.slots.ExpertSlots)
            memory = modules.memory.SlotMemory(ledger, EXPERTS, [(slots, size)] * NUM_LAYERS, staged, num_bytes)
            layers = []
            for layer, home in enumerate(homes.of_host):
                found = HostHomes(home, link)
                own = modules.streamed.StreamedExperts(found, memory.slots(slots, size), LAYOUT, layer)
                many = modules.streamed.StreamedExperts(
                    found, memory.staged, LAYOUT, layer, at_once=max(staged // 2, 1)
                )
                own.in_prefill = modules.prefill.PrefillExperts(own, many, memory)
                layers.append(own)
        yield Model(homes, layers, memory, ledger, num_bytes)
    finally:
        link.close()


def wrong_passes(own: Model, dice: random.Random, executor: str) -> int:
    """The number of passes over a layer with wrong bits. Some end after their first batch."""
    run, found = of(executor), 0
    for layer in (0, 1, 2, 2, 0):
        scene, given = own.homes.scenes[layer], own.layers[layer]
        if dice.random() < 0.4:
            next(given.batches(torch.tensor(dice.sample(range(EXPERTS.count), dice.randint(1, 8)))))
        rows = scene.rows[(first := dice.randrange(MANY)) : first + dice.choice((1, 2))].contiguous()
        found += not torch.equal(run(scene.mixture, given, rows), run(scene.mixture, scene.homes, rows))
    return found


def wrong_prefill(own: Model, dice: random.Random, executor: str, groups: int = 2) -> int:
    """The number of groups of rows with wrong bits, in a prefill layer by layer. It may be broken off."""
    run, found = of(executor), 0
    few = dice.random() < 0.3
    with own.memory.turn(3 if few else groups * MANY, MANY):
        for layer, given in enumerate(own.in_prefill):
            scene = own.homes.scenes[layer]
            for group in range(groups):
                if not few:
                    then = own.in_prefill[layer + 1] if layer + 1 < NUM_LAYERS else None
                    given.ahead(then, is_last=group == groups - 1)
                rows = scene.rows[: 3 if few else MANY - 5 * group]
                found += not torch.equal(run(scene.mixture, given, rows), run(scene.mixture, scene.homes, rows))
                if dice.random() < 0.1:
                    return found
    return found


def wrong(own: Model, executor: str, seed: int = 3) -> int:
    """The number of wrong results in passes and prefills in turns. A CPU's kernels have a prefill's own."""
    dice, of_prefill = random.Random(seed), executor if executor == "torch" else f"{executor}, prefill"
    found = 0
    for _ in range(4):
        found += wrong_passes(own, dice, executor) + wrong_prefill(own, dice, of_prefill)
    return found + wrong_passes(own, dice, executor)


@pytest.fixture(scope="module")
def homes() -> Homes:
    return Homes.made()


SIZES = [(1, 1), (2, 2), (2, 8), (3, 4), (5, 2), (5, 4), (8, 6)]


@pytest.mark.few(5)
@pytest.mark.parametrize(("slots", "staged"), SIZES)
@pytest.mark.parametrize("executor", BEST)
def test_bits_are_those_of_resident_experts_whoever_has_the_memory(
    homes: Homes, executor: str, slots: int, staged: int
) -> None:
    with model(homes, slots, staged) as own:
        assert sum(wrong(own, executor, seed) for seed in range(3)) == 0
        assert own.ledger.allocated()["device"] == {"expert slots": own.num_bytes}


def test_a_turn_takes_slots_of_the_last_layers_and_no_more_than_it_needs(homes: Homes) -> None:
    with model(homes, 8, 2) as own:
        for layer in own.layers:
            list(layer.batches(torch.arange(8)))
        held = [[*layer._slots._held] for layer in own.layers]
        assert [len(each) for each in held] == [8, 8, 8]
        with own.memory.turn(1, MANY):
            assert [[*layer._slots._held] for layer in own.layers] == held  # few rows have taken nothing yet
            own.memory.room.take("made", (LAYOUT.num_bytes + 1,), torch.uint8, torch.device("cpu"))
            assert [len(layer._slots) for layer in own.layers] == [8, 8, 6]
        with own.memory.turn(2 * MANY, MANY):
            assert len(own.memory.staged) == 2
            own.memory.room.take("made", (9 * LAYOUT.num_bytes,), torch.uint8, torch.device("cpu"))
            assert [len(layer._slots) for layer in own.layers] == [8, 5, 0]
        assert [len(layer._slots) for layer in own.layers] == [8, 8, 8]
        assert [len(layer._slots._held) for layer in own.layers] == [8, 5, 0]
        assert [*own.layers[0]._slots._held] == held[0]


def test_slots_keep_their_addresses(homes: Homes) -> None:
    """Graphs of passes know them."""
    with model(homes, 3, 4) as own:

        def addresses() -> list[int]:
            return [each.bank.content.data_ptr() for each in (*own.layers, *own.in_prefill)]

        before = addresses()
        with own.memory.turn(2 * MANY, MANY):
            assert addresses() == before
            start = own.memory._arena._block.data_ptr()
            assert own.memory.staged.content.data_ptr() == start
            made = own.memory.room.take("made", (8,), torch.bfloat16, torch.device("cpu"))
            assert made.data_ptr() == start + 4 * LAYOUT.num_bytes
            assert own.memory.room.take("made", (4,), torch.bfloat16, torch.device("cpu")).data_ptr() == made.data_ptr()
        assert addresses() == before


def numbers(batch: Batch) -> list[int]:
    return (batch.places >= 0).nonzero()[:, 0].tolist()


def schedule(own: Model, groups: int, modules: Modules = Modules()) -> list[tuple[int, str, list[int]]]:
    """What happens in a prefill, in order: (layer, "fetch" or "use", experts), with many rows in groups."""
    found = list[tuple[int, str, list[int]]]()

    def fetch(self: StreamedExperts, experts: Any) -> Any:
        if experts:
            found.append((self._layer, "fetch", [number for _, number in experts]))
        return real(self, experts)

    real: Callable[..., Any] = modules.streamed.StreamedExperts._fetch
    with pytest.MonkeyPatch.context() as patch, own.memory.turn(2 * MANY, MANY):
        patch.setattr(modules.streamed.StreamedExperts, "_fetch", fetch)
        for layer, given in enumerate(own.in_prefill[:2]):
            for group in range(groups):
                given.ahead(own.in_prefill[1] if layer == 0 else None, is_last=group == groups - 1)
                for batch in given.batches(torch.arange(8)):
                    found.append((layer, "use", numbers(batch)))
    return found


def test_one_bank_fills_while_the_other_is_used_and_layers_follow_each_other(homes: Homes) -> None:
    """A layer's experts beyond the first ones crossed the link while nothing was computed."""
    with model(homes, 1, 4, spare=10**6) as own:  # no layer lends
        for layer in own.layers[:2]:
            list(layer.batches(torch.tensor([5])))
        assert schedule(own, 1) == [
            (0, "fetch", [0, 1, 2, 3]),
            (0, "use", [5]),  # stays in its slot
            (0, "use", [0, 1]), (0, "fetch", [4, 6]),
            (0, "use", [2, 3]), (0, "fetch", [7]),
            (1, "fetch", [0]), (0, "use", [4, 6]),  # one slot is free
            (1, "fetch", [1, 2]), (0, "use", [7]),
            (1, "fetch", [3]),
            (1, "use", [5]),
            (1, "use", [0, 1]), (1, "fetch", [4, 6]),
            (1, "use", [2, 3]), (1, "fetch", [7]),
            (1, "use", [4, 6]),
            (1, "use", [7]),
        ]  # fmt: skip
        assert [[*layer._slots._held] for layer in own.layers[:2]] == [[(0, 5)], [(1, 5)]]


def test_later_rows_begin_with_what_earlier_ones_left_in_staging_slots(homes: Homes) -> None:
    with model(homes, 1, 4, spare=10**6) as own:
        list(own.layers[0].batches(torch.tensor([5])))
        found = [each for each in schedule(own, 2) if each[0] == 0]
        assert found[-7:] == [
            (0, "use", [3, 4]), (0, "fetch", [0, 1]),
            (0, "use", [6, 7]), (0, "fetch", [2]),
            (0, "use", [5]),
            (0, "use", [0, 1]),
            (0, "use", [2]),
        ]  # fmt: skip


def test_the_next_layer_fills_staging_slots_that_a_layer_does_not_need_for_later_rows(homes: Homes) -> None:
    """They were empty until its last rows."""
    with model(homes, 4, 6, spare=10**6) as own:
        for layer in own.layers[:2]:
            list(layer.batches(torch.tensor([0, 2, 4, 6])))
        assert schedule(own, 2) == [
            (0, "fetch", [1, 3, 5, 7]),
            (0, "use", [0, 2, 4, 6]),
            (1, "fetch", [1, 3]), (0, "use", [1, 3, 5]), (0, "use", [7]),
            (0, "use", [1, 3, 5, 7]),  # by later rows
            (1, "fetch", [5, 7]), (0, "use", [0, 2, 4, 6]),
            (1, "use", [0, 2, 4, 6]), (1, "use", [1, 3, 5]), (1, "use", [7]),
            (1, "use", [1, 3, 5, 7]), (1, "use", [0, 2, 4, 6]),
        ]  # fmt: skip


def test_free_slots_are_filled_and_recency_stays(homes: Homes) -> None:
    with model(homes, 3, 4) as own:
        first = own.layers[0]
        for wanted in ([7], [0]):
            list(first.batches(torch.tensor(wanted)))
        with own.memory.turn(2 * MANY, MANY):
            own.in_prefill[0].ahead()
            list(own.in_prefill[0].batches(torch.arange(8)))
        assert [number for _, number in first._slots._held] == [7, 0, 1]
        list(first.batches(torch.tensor([4])))  # takes the place of the least recently used
        assert [number for _, number in first._slots._held] == [0, 1, 4]


def test_few_rows_use_the_slots_of_their_layer_as_a_pass_does(homes: Homes) -> None:
    """They want few experts, which the text's next tokens want, too."""
    with model(homes, 3, 4) as own:
        with own.memory.turn(2, MANY):
            assert [numbers(batch) for batch in own.in_prefill[0].batches(torch.tensor([1, 6]))] == [[1, 6]]
        assert {number for _, number in own.layers[0]._slots._held} == {1, 6}
        assert len(own.memory.staged) == 0


def test_rows_that_run_at_once_take_a_quarter_of_the_staging_slots(homes: Homes) -> None:
    """No later rows find experts there, so that more of a pass's experts stay."""
    with model(homes, 8, 6) as own:
        for num_rows, count in ((MANY, 2), (MANY + 1, 6), (3, 0), (MANY - 1, 2)):
            with own.memory.turn(num_rows, MANY):
                assert len(own.memory.staged) == count
                assert len(own.layers[2]._slots) == 8 - count
                if count:
                    own.in_prefill[0].ahead()
                    list(own.in_prefill[0].batches(torch.arange(8)))
            assert not own.memory.staged._held


def test_an_interrupt_ends_the_turn(homes: Homes) -> None:
    with model(homes, 3, 4) as own:
        with suppress(KeyboardInterrupt), own.memory.turn(2 * MANY, MANY):
            own.in_prefill[0].ahead(own.in_prefill[1])
            next(own.in_prefill[0].batches(torch.arange(8)))
            raise KeyboardInterrupt
        assert [len(layer._slots) for layer in own.layers] == [3, 3, 3]
        assert not own.memory.staged._held
        assert wrong(own, BEST[-1]) == 0


@dataclass(frozen=True)
class Mutant:
    """A fault: `old` becomes `new` in the source of a field of `Modules`."""

    description: str
    module: str
    old: str
    new: str


MUTANTS = [
    Mutant("a pass reads a slot that was lent", "slots",
           "            del self._held[expert]\n        for slot in lent:",
           "            pass\n        for slot in lent:"),
    Mutant("a lent slot is filled meanwhile", "slots", "[slot for slot in self._free if slot not in lent]",
           "[slot for slot in range(len(self.content)) if slot not in self._held.values()]"),
    Mutant("nobody lends", "arena", "        self._borrow(self._used + num_bytes)\n", ""),
    Mutant("a lender is asked for fewer bytes", "arena", "lender.lend(stop - start)",
           "lender.lend(stop - start - 1024)"),
    Mutant("slots are back while a prefill's buffers are used", "memory",
           "                self.staged.take_back(staged)\n            yield",
           "                self.staged.take_back(staged)\n"
           "            [each.take_back() for _, each in self._arena._lenders]\n            yield"),
    Mutant("a prefill's buffers stay beyond its turn", "memory", "        self.room.clear()\n", ""),
    Mutant("staging slots keep their experts beyond the turn", "memory",
           "        self.staged.lend(self.staged.content.nbytes)\n\n\nclass", "\n\nclass"),
    Mutant("staging slots are not taken", "memory",
           "                self._arena.take((staged, size), torch.uint8)\n", ""),
    Mutant("a copy is in flight to what was lent", "slots", "                        event.wait()\n",
           "                        pass\n"),
    Mutant("a lent slot is nobody's for good", "slots", "        self._free += back\n", ""),
    Mutant("a staging slot is filled before it is used", "streamed", "len(self._slots) - len(waiting)",
           "len(self._slots)"),
    Mutant("the next layer takes slots in use", "streamed", "len(self._slots) - len(held) - busy",
           "len(self._slots) - len(held)"),
    Mutant("experts in the layer's slots are left out", "prefill",
           "() if self.own is None else self.own.batches_of(kept)", "()"),
    Mutant("experts that came ahead are evicted by others", "prefill", "self.own.keeping(wanted, self.staged)",
           "self.own.keeping(wanted, ())"),
    Mutant("the next layer never comes ahead", "prefill", "            if then is not None:", "            if False:"),
    Mutant("a prompt evicts experts of passes", "prefill",
           "others = {each: rows for each, rows in wanted.items() if each not in kept}", "kept, others = wanted, {}"),
]  # fmt: skip


@pytest.mark.few(6)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.description)
def test_each_fault_shows(homes: Homes, mutant: Mutant) -> None:
    """By other bits, by an error, or by another schedule."""
    edited = edited_module(getattr(Modules(), mutant.module), mutant.old, mutant.new)
    if mutant.module == "streamed":
        vars(edited).update(_AT_ONCE=2)
    modules = replace(Modules(), **{mutant.module: edited})

    def fails(slots: int, staged: int) -> bool:
        with model(homes, slots, staged, modules) as own, model(homes, slots, staged) as right:
            try:
                if any(wrong(own, BEST[-1], seed) for seed in range(3)):
                    return True
                return schedule(own, 2, modules) != (wrong(right, BEST[-1], 0) or schedule(right, 2))
            except (AssertionError, RuntimeError, ValueError, KeyError, IndexError, ModelError, StopIteration):
                return True

    assert any(fails(*sizes) for sizes in SIZES)


RACES = [
    ("a buffer is written while a copy to it is in flight", slot_module, "                        event.wait()\n",
     "                        pass\n"),
    ("a slot is filled while a buffer in it is read", slot_module,
     "self.computed(back, None)", "pass"),
]  # fmt: skip


@pytest.mark.parametrize("race", [None, *RACES], ids=lambda race: race[0] if race else "none")
def test_on_a_gpu_turns_are_ordered(
    homes: Homes, race: tuple[str, ModuleType, str, str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU on paper sees each wait that is missing, planted here."""
    pytest.importorskip("triton")
    from paper import on_paper
    from test_paper_bugs import Bug, plant

    device, own, size = torch.device("cuda:0"), homes.scenes[0], LAYOUT.num_bytes
    if race:
        description, source, *change = race
        plant(Bug(description, source.__name__, *change), monkeypatch)
    with torch.inference_mode(), on_paper() as gpu:
        ledger = Memory(device)
        home = ledger.allocate(homes.of_host[0].shape, torch.uint8, tier="host", purpose="experts")
        home.copy_(homes.of_host[0])
        memory = SlotMemory(ledger, EXPERTS, [(4, size)], num_staged=2)
        found = HostHomes(home, CudaLink(device))
        given = StreamedExperts(found, memory.slots(4, size), LAYOUT)
        many = PrefillExperts(given, StreamedExperts(found, memory.staged, LAYOUT, at_once=1), memory)
        norm = replace(own.norm, weight=own.norm.weight.to(device))
        mixture = Mixture(EXPERTS, Router(own.router.matrix.to(device)), norm)
        for turn in range(3):
            for first in range(0, 6, 3):
                made = of("torch")(mixture, given, own.rows[first : first + 3].to(device)).cpu()
                assert torch.equal(made, own.by(of("torch"), own.rows[first : first + 3]))
            given.ahead()
            next(given.batches(torch.tensor([turn, 7])))  # and no other: the pass is broken off
            with memory.turn(2 * MANY, MANY):
                buffer = memory.room.take("made", (size,), torch.uint8, device).fill_(turn)
                many.ahead()
                made = of("torch")(mixture, many, own.rows.to(device))
                _ = buffer.clone()
            assert torch.equal(made.cpu(), own.by(of("torch"), own.rows))
        problems = list(gpu.problems)
    assert all("race: " in problem for problem in problems)
    assert bool(problems) == bool(race)


def test_more_than_the_memory_has_is_allocated_and_given_back(homes: Homes) -> None:
    """A prompt longer than the planned one."""
    with model(homes, 3, 4) as own, own.memory.turn(2 * MANY, MANY):
        own.memory.room.take("made", (own.num_bytes,), torch.uint8, torch.device("cpu"))
        assert own.ledger.allocated()["device"]["expert slots"] == 2 * own.num_bytes
    assert own.ledger.allocated()["device"]["expert slots"] == own.num_bytes


def test_a_piece_that_has_no_room_is_refused() -> None:
    arena = arena_module.Arena(Memory(torch.device("cpu")), 100)
    arena.own((1, 60), ExpertSlots)
    with pytest.raises(ValueError, match="a piece of 60 bytes does not fit into the 40 that nobody owns"):
        arena.own((1, 60), ExpertSlots)


@contextmanager
def engine(folder: Path, **options: Any) -> Iterator[Engine]:
    own = Options(device="cpu", dtype="bf16", speculation=False, **options)
    request = Request.on_this_machine(folder, None, own)
    plan = request.plan(num_prompt_tokens=150, max_tokens=30)
    plan = request.together(plan, 2, most=2)
    with Engine.load(plan, folder, None, load_tokenizer(folder, None)) as made:
        yield made


def test_prompts_of_several_sequences_have_turns_between_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights cross the link, so no pass of another sequence runs within a prompt: it would find slots that were lent.
    A prompt has one turn, whatever it interrupts."""
    best()
    folder = save_tiny("qwen3_moe", tmp_path / "model", tokenizer=True, vocab_size=264, hidden_size=64)
    requests = [Asked(random_tokens(count, seed=count), GREEDY, 12) for count in (120, 30, 140, 90, 24)]
    with engine(folder) as made:
        expected, _ = together(made, requests)
    events, turn, forward = list[str](), SlotMemory.turn, Decoder.forward

    @contextmanager
    def noted(own: SlotMemory, *rows: int) -> Iterator[None]:
        with turn(own, *rows):
            events.append("begin")
            yield
            events.append("end")

    def passed(*given: Any, **more: Any) -> torch.Tensor:
        events.append("pass")
        return forward(*given, **more)

    monkeypatch.setattr(SlotMemory, "turn", noted)
    monkeypatch.setattr(Decoder, "forward", passed)
    with engine(folder, offload=frozenset({"weights"})) as made:
        placement = made.plan.placement
        assert placement.staged_experts > 0
        found, _ = together(made, requests)
        device = made.worker.memory.allocated()["device"]
        memory = next(each.memory for each in map(in_prefill, made.worker.target.weights.experts) if each)  # type: ignore[attr-defined]
    assert found == expected
    assert device["expert slots"] == placement.device_bytes["expert slots"] >= placement.prefill_bytes
    assert memory._arena._used == 0
    assert [events[at + 1] for at, event in enumerate(events) if event == "begin"] == ["end"] * len(requests)
    assert events.count("pass") > len(requests)


@pytest.mark.parametrize("hardware", ["a CPU", "a GPU"])
def test_a_prefill_has_planned_for_what_it_takes(hardware: str) -> None:
    """Of a CPU's kernels, see `test_experts`; a GPU's are counted as they are launched."""
    sizing = Sizing(
        config_of(EXPERTS), None, Options(), CPU if hardware == "a CPU" else replace(GPU, has_kernels=True), "bf16"
    )
    size, staged, rows = LAYOUT.num_bytes, staged_experts(sizing, 1024, 2**30), 1024
    assert staged == EXPERTS.count
    made = prefill_bytes(sizing, rows, staged) - staged * size
    if hardware == "a CPU":
        need = experts_scratch.scratch_bytes(EXPERTS, rows, HIDDEN, torch.bfloat16, threads=64)
    else:
        need = 2 * rows * EXPERTS.used * (EXPERTS.network.size + HIDDEN)
    assert need <= made <= 1.02 * need + 512
