"""The ledger of allocated bytes: read on one thread while another writes, and unchanged by what was not made."""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from kit.models import Sizes, random_model, save, tiny_engine, tiny_plan
from kit.processor import best
from kit.quantised import SHAPES
from offload.errors import DoesNotFit
from offload.pages.tiles import TileShape, TileStore
from offload.transfer.memory import Memory, Tier

CPU = torch.device("cpu")
RETRIEVAL = Sizes(gamma=5, draft_gamma=2, lookup=True)
FEW_BITS = Sizes(gamma=5, draft_gamma=2, budget=0, weight_bits=4, kv_bits=4, page=32, capacity=600)


class Failing:
    """In place of `Memory.allocate`: call number `fails`, counted from 0, finds no memory."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.fails, self._calls, allocate = -1, count(), Memory.allocate

        def fail(*args: Any, **settings: Any) -> torch.Tensor:
            if next(self._calls) == self.fails:
                raise DoesNotFit("no memory")
            return allocate(*args, **settings)

        patch.setattr(Memory, "allocate", fail)

    def begin(self, fails: int) -> None:
        self.fails, self._calls = fails, count()


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Failing:
    return Failing(monkeypatch)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("memory")
    return (
        save(random_model("qwen2", vocab_size=264, seed=11, **SHAPES), root / "target", tokenizer=True),
        save(random_model(vocab_size=264, seed=12, num_hidden_layers=1), root / "draft", tokenizer=True),
    )


@pytest.mark.parametrize(
    ("sizes", "offload", "least"),
    [
        (RETRIEVAL, (), 6),  # arena, tiles, chosen rows, and two of the draft
        (RETRIEVAL, ("kv",), 8),  # and staging slots
        (FEW_BITS, (), 7),  # weights and keys quantised
        (replace(FEW_BITS, page=512, pages=1), ("kv", "weights"), 9),  # pages that lie packed
    ],
    ids=["retrieval", "retrieval, kv streamed", "few bits", "few bits, all streamed"],
)
def test_whichever_allocation_fails_the_ledger_is_as_before(
    folders: tuple[Path, Path], failing: Failing, sizes: Sizes, offload: tuple[str, ...], least: int
) -> None:
    """A cache that failed half way stayed in it."""
    best()  # skips where there are no kernels
    plan = tiny_plan(
        folders[0], folders[1], sizes, num_prompt_tokens=60, max_tokens=20, dtype="bf16", offload=frozenset(offload)
    )
    with tiny_engine(plan, *folders) as engine:
        memory = engine.worker.memory
        engine.worker.release()
        before = memory.allocated()
        for number in count():
            failing.begin(number)
            try:
                engine.worker.beside().release()
            except DoesNotFit:
                assert memory.allocated() == before
            else:
                break
        assert number >= least
        assert memory.allocated() == before


def test_tiles_that_were_allocated_before_an_error_are_used_when_there_is_memory_again(failing: Failing) -> None:
    """Layers had another number of tiles each."""
    memory, shape = Memory(CPU), TileShape(1, 8, 8, 2, torch.float32)
    store = TileStore(memory, shape, 3, None)
    for number in (1, 2, 5):
        failing.begin(number)
        with pytest.raises(DoesNotFit):
            store.grow(3 * shape.tokens)
    failing.begin(-1)
    store.grow(3 * shape.tokens)
    assert store.num_tiles == 3
    assert [len(homes) for homes in store._homes] == [3, 3, 3]
    assert sum(memory.allocated()["device"].values()) == store.nbytes() == 9 * shape.nbytes
    store.release()
    assert memory.allocated()["device"] == {}


def test_a_refusal_to_pin_names_the_limit_of_wsl(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory(CPU)
    assert "ulimit -l" in memory._refused(16, "pinned", "CUDA error 2")
    monkeypatch.setattr("offload.transfer.memory.in_wsl", lambda: True)
    assert "in WSL 2 CUDA often pins no more than 1 GB" in memory._refused(16, "pinned", "CUDA error 2")
    assert "WSL" not in memory._refused(16, "allocated", "ENOMEM")


def test_the_ledger_is_read_while_another_thread_writes_to_it() -> None:
    """A block that could not be pinned ahead gave "dictionary changed size during iteration" in place of its error."""
    memory, threads = Memory(CPU), list[threading.Thread]()
    block = memory.allocate((8,), torch.uint8, tier="host", purpose="first")

    class Slow(Counter[Any]):
        """Between two entries another thread has time to write."""

        def items(self) -> Iterator[Any]:  # type: ignore[override]
            for number, item in enumerate(super().items()):
                write = {"tier": "host", "purpose": f"another {number}"}
                threads.append(threading.Thread(target=memory.released, args=(block,), kwargs=write))
                threads[-1].start()
                threads[-1].join(0.05)
                yield item

    memory._ledger = Slow(memory._ledger)
    assert "after 8 B" in memory._refused(16, "pinned", "CUDA error 2")
    for thread in threads:
        thread.join()
    assert memory._ledger["host", "another 0"] == -8


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="the system has no huge pages")
@pytest.mark.parametrize("tier", ["device", "host"])
def test_blocks_of_a_cpu_ask_for_huge_pages(tier: Tier) -> None:
    block = Memory(CPU).allocate((4 * 2**20,), torch.uint8, tier=tier, purpose="huge")
    assert not block.any()
    mappings = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)[1:]
    ends = [(*(int(end, 16) for end in each.split(" ", 1)[0].split("-")), each) for each in mappings]
    (own,) = [each for first, stop, each in ends if first <= block.data_ptr() < stop]
    assert "hg" in own.split("VmFlags:")[1].split()
