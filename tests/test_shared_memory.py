"""Memory in which ranks show each other what they have computed; the ranks are threads."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from offload.errors import RankFailed
from offload.kernels.cpu import kernels
from offload.model.sums import Due
from offload.ranks import shared
from offload.ranks.shared import SLOT_BYTES, SharedMemory
from offload.ranks.sums import Sums

T = TypeVar("T")
pytestmark = pytest.mark.skipif(not kernels().usable, reason="there are no kernels for this CPU")


def nothing() -> None: ...


def seen_by(file: int, rank: int, size: int, check: Callable[[], None] = nothing) -> SharedMemory:
    library = kernels().library
    assert library is not None
    return SharedMemory(file, rank, size, library, check)


@pytest.fixture
def file() -> Iterator[int]:
    made = shared.create(4)
    yield made
    os.close(made)


def at_once(file: int, size: int, do: Callable[[SharedMemory], T]) -> list[T]:
    """What each rank makes of it, in their order."""
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(do, [seen_by(file, rank, size) for rank in range(size)]))


def part_of(rank: int, count: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(rank)).mul(100).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_parts_are_added_in_fp32_in_the_order_of_the_ranks(file: int, size: int, dtype: torch.dtype) -> None:
    """Of one number, of what is no multiple of a vector, of a slot, and of several and a bit."""
    counts = (1, 7, 64, 1001, SLOT_BYTES // dtype.itemsize, 2 * SLOT_BYTES // dtype.itemsize + 37)

    def sums(memory: SharedMemory) -> list[Tensor]:
        return [memory.total(part_of(memory.rank, count, dtype)) for count in counts]

    expected = []
    for count in counts:
        total = part_of(0, count, dtype).float()
        for rank in range(1, size):
            total += part_of(rank, count, dtype).float()
        expected.append(total.to(dtype))
    for found in at_once(file, size, sums):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_what_is_not_a_number_stays_so_on_every_rank(file: int) -> None:
    def sums(memory: SharedMemory) -> list[float]:
        parts = [[float("inf"), float("nan"), 1e38, -0.0], [float("-inf"), 1.0, 3e38, -0.0]]
        return memory.total(torch.tensor(parts[memory.rank], dtype=torch.bfloat16)).tolist()  # type: ignore[no-any-return]

    for found in at_once(file, 2, sums):
        assert str(found) == "[nan, nan, inf, -0.0]"


@pytest.mark.parametrize("num_bytes", [1, 1000, SLOT_BYTES, 2 * SLOT_BYTES + 3])
@pytest.mark.parametrize("size", [2, 4])
def test_what_is_gathered_can_be_scattered(file: int, size: int, num_bytes: int) -> None:
    def there_and_back(memory: SharedMemory) -> bool:
        own = (torch.arange(num_bytes) % 251 + memory.rank).to(torch.uint8)
        parts = memory.gather(own)
        assert len(parts) == (size if memory.rank == 0 else 0)
        parts.reverse()
        memory.scatter(parts, given := torch.zeros_like(own))
        return torch.equal(given, own - memory.rank + (size - 1 - memory.rank))

    assert at_once(file, size, there_and_back) == [True] * size


@pytest.mark.parametrize("num_shown", range(4))
def test_who_breaks_off_in_the_middle_of_a_sum_lets_the_others_have_the_rest(file: int, num_shown: int) -> None:
    """And the next sum is right on both. With no piece shown, he was interrupted before the first."""

    def interrupted(memory: SharedMemory) -> float:
        part, next_part = torch.ones(4 * SLOT_BYTES // 4), torch.full((5,), 2.0 + memory.rank)
        if memory.rank == 0:
            show, shown = memory._show, iter(range(num_shown))

            def give_up() -> None:
                if next(shown, None) is None:
                    raise KeyboardInterrupt
                show()

            memory._show = give_up  # type: ignore[method-assign]
            with pytest.raises(KeyboardInterrupt):
                memory.total(part)
            memory._show = show  # type: ignore[method-assign]
            memory.finish()
        else:
            memory.total(part)
        return float(memory.total(next_part)[-1])

    assert at_once(file, 2, interrupted) == [5.0, 5.0]


def test_who_waits_hears_what_has_become_of_the_others(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "_LOOK_NANOSECONDS", 1_000_000)
    looks = iter(range(3))

    def lost() -> None:
        if next(looks, None) is None:
            raise RankFailed("rank 1 ended")

    with pytest.raises(RankFailed, match="rank 1 ended"):
        seen_by(file, 0, 2, lost).total(torch.ones(8))


def test_who_breaks_off_after_his_last_piece_still_waits_for_the_others(
    file: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may be reading the slot that he writes next."""
    monkeypatch.setattr(shared, "_LOOK_NANOSECONDS", 1_000_000)

    def interrupted() -> None:
        raise KeyboardInterrupt

    memory = seen_by(file, 0, 2, interrupted)
    for call in (lambda: memory.total(torch.ones(8)), memory.finish):
        with pytest.raises(KeyboardInterrupt):
            call()


def test_a_signal_of_the_system_is_handled_at_once(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not when the next look is due."""
    monkeypatch.setattr(shared, "_LOOK_NANOSECONDS", 60_000_000_000)
    handled: list[float] = []

    def interrupt(number: int, frame: object) -> None:
        handled.append(time.monotonic())
        raise KeyboardInterrupt

    before, main = signal.signal(signal.SIGUSR1, interrupt), threading.main_thread().ident
    assert main is not None
    sent: list[float] = []

    def send() -> None:
        sent.append(time.monotonic())
        signal.pthread_kill(main, signal.SIGUSR1)

    timer = threading.Timer(0.02, send)
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            seen_by(file, 0, 2).total(torch.ones(8))
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)
    assert handled[0] - sent[0] < 30.0


def test_sums_over_it_need_no_group_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing listens, and a file that is not used, on a GPU or without kernels, is closed all the same."""
    cpu = torch.device("cpu")
    file = shared.create(2)
    others = seen_by(file, 1, 2)
    sums = Sums(0, 2, cpu, check=nothing, go=nothing, memory=file)
    sums.connect(lambda: pytest.fail("no store is wanted"))
    with ThreadPoolExecutor(1) as pool, sums.due([Due(1, 4)], torch.ones(1)):
        pool.submit(others.total, torch.ones(1, 4))
        assert sums.total(torch.ones(1, 4)).tolist() == [[2.0] * 4]
    assert sums.seconds > 0
    unused = shared.create(2)
    Sums(0, 2, torch.device("cuda:0"), check=nothing, go=nothing, memory=unused)
    for closed in (file, unused):
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(closed)
