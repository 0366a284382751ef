"""Sums over ranks: the path of GPUs, with tensors that say they are on one and hold no bytes, and the rules of taking
part. What the sums are is tested with real ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from offload.errors import RankFailed, UsageError
from offload.model.sums import Due
from offload.ranks.sums import Sums

GPU = torch.device("cuda:0")


class Instant:
    """An event of a GPU: a second has passed from each to the next."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Instant) -> float:
        return 1000.0


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The arguments of the group that is met; it is one of torch's own that sends nothing."""
    asked: dict[str, Any] = {}
    init = dist.init_process_group

    def fake(backend: str, *, store: object, rank: int, world_size: int, **settings: Any) -> None:
        asked.update(settings, backend=backend)
        init("fake", store=FakeStore(), rank=rank, world_size=world_size)

    monkeypatch.setattr(dist, "init_process_group", fake)
    monkeypatch.setattr(torch.cuda, "Event", Instant)
    yield asked
    dist.destroy_process_group()


def nothing() -> None: ...


def on_gpu(size: int, check: Callable[[], None] = nothing) -> Sums:
    sums = Sums(0, size, GPU, check=check, go=nothing)
    sums.connect(FakeStore)
    return sums


@pytest.mark.parametrize("size", [2, 4])
def test_on_a_gpu_a_sum_is_gathered_there_and_nothing_waits(
    group: dict[str, Any], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors without bytes raise where the host would have to wait for one."""
    gathered: list[set[torch.device]] = []
    gather = dist.all_gather

    def noted(parts: list[Tensor], part: Tensor, **settings: object) -> object:
        gathered.append({part.device, *(each.device for each in parts)})
        return gather(parts, part, **settings)

    monkeypatch.setattr(dist, "all_gather", noted)
    with FakeTensorMode():
        sums = on_gpu(size)
        part = torch.empty(16, 5120, dtype=torch.bfloat16, device=GPU)
        with sums.due([Due(16, 5120)] * 80, part):
            totals = [sums.total(part) for _ in range(80)]
        assert {(total.device, total.dtype, tuple(total.shape)) for total in totals} == {
            (GPU, torch.bfloat16, (16, 5120))
        }
    assert gathered == [{GPU}] * 80
    assert sums.seconds == 80.0
    assert (group["backend"], group["device_id"]) == ("cpu:gloo,cuda:nccl", GPU)


def test_a_process_is_in_one_group_at_a_time(group: dict[str, Any]) -> None:
    on_gpu(2)
    with pytest.raises(UsageError, match="close that engine"):
        on_gpu(2)


class AtOnce:
    """A thread that has ended when it has started, or does not for as long as anybody should look."""

    def __init__(self, target: Callable[[], None], daemon: bool, *, ends: bool = True) -> None:
        assert daemon
        self.target, self.ends, self.looks = target, ends, iter(range(99))

    def start(self) -> None:
        if self.ends:
            self.target()

    def is_alive(self) -> bool:
        return not self.ends and next(self.looks, None) is not None

    def join(self, timeout: float) -> None: ...


@pytest.mark.parametrize("ends", [True, False])
def test_who_dies_on_the_way_to_the_others_is_named(monkeypatch: pytest.MonkeyPatch, ends: bool) -> None:
    """Whether torch says that a connection was lost or waits for ever."""
    looks = iter(range(9))

    def refused(*_: object, **__: object) -> None:
        raise RuntimeError("Connection reset")

    def lost() -> None:
        if next(looks) > 1:
            raise RankFailed("rank 1 ended")

    monkeypatch.setattr(dist, "init_process_group", refused)
    monkeypatch.setattr("offload.ranks.sums.threading", SimpleNamespace(Thread=partial(AtOnce, ends=ends)))
    with pytest.raises(RankFailed, match="rank 1 ended"):
        Sums(0, 2, torch.device("cpu"), check=lost, go=nothing).connect(FakeStore)


def test_a_group_is_left_once(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[int] = []
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: left.append(1))
    sums = Sums(0, 2, torch.device("cpu"), check=nothing, go=nothing)
    sums.close()
    sums.connect(FakeStore)
    sums.close()
    sums.close()
    assert left == [1]


def test_on_a_failure_a_gpus_group_is_aborted(group: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's kernels wait for a dead rank for ever."""
    aborted: list[int] = []
    sums = on_gpu(2)
    monkeypatch.setattr(type(dist.group.WORLD), "abort", lambda self: aborted.append(1))
    sums.abort()
    assert aborted == [1]


class Others:
    """Ranks that gather what this one gives: its own part, so that a sum is a multiple of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gathered: list[Tensor] = []
        monkeypatch.setattr(dist, "all_gather", self.gather)

    def gather(self, parts: list[Tensor], part: Tensor, **settings: object) -> Others:
        self.gathered.append(part)
        for each in parts:
            each.copy_(part)
        return self

    def is_completed(self) -> bool:
        return True

    def wait(self, timeout: object = None) -> None: ...


class Late(Others):
    """A sum that is not there when the wait for it ends, and is a moment later. failed: it never will be."""

    failed = completed = False

    def is_completed(self) -> bool:
        return self.completed

    def wait(self, timeout: object = None) -> None:
        waited, self.completed = self.completed, True
        if not waited or self.failed:
            raise RuntimeError("Connection closed by peer" if self.failed else "Operation timed out!")


def on_processor(check: Callable[[], None] = nothing, go: Callable[[], None] = nothing) -> Sums:
    return Sums(0, 3, torch.device("cpu"), check=check, go=go)


DUE = [Due(2, 4), Due(2, 4), Due(1, 4, torch.float32)]
PART = torch.ones(2, 4, dtype=torch.bfloat16)


def test_whoever_breaks_off_takes_part_in_the_sums_that_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    others, sums = Others(monkeypatch), on_processor()

    def broken_off() -> None:
        with sums.due(DUE, PART):
            assert torch.equal(sums.total(PART), 3 * PART)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        broken_off()
    assert [(tuple(part.shape), part.any().item()) for part in others.gathered] == [
        ((2, 4), True), ((2, 4), False), ((1, 4), False),
    ]  # fmt: skip
    assert [part.dtype for part in others.gathered] == [PART.dtype, PART.dtype, torch.float32]
    with sums.due(DUE[:1], PART):  # and is in step
        sums.total(PART)


def test_a_sum_that_comes_as_the_wait_for_it_ends_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after Ctrl-Z: all ranks were stopped for longer than one waits."""
    looked: list[int] = []
    Late(monkeypatch)
    sums = on_processor(check=lambda: looked.append(1))
    with sums.due(DUE[:1], PART):
        assert torch.equal(sums.total(PART), 3 * PART)
    assert looked == [1]


def test_a_sum_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offload.ranks.sums._WHY_SECONDS", 0.0)
    Late(monkeypatch).failed = True
    sums = on_processor()
    with pytest.raises(RuntimeError, match="closed by peer"), sums.due(DUE[:1], PART):
        sums.total(PART)


def test_nothing_is_owed_for_what_the_others_were_not_told_to_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost() -> None:
        raise RankFailed("gone")

    others, sums = Others(monkeypatch), on_processor(go=lost)
    with pytest.raises(RankFailed), sums.due(DUE, PART):
        pass
    assert others.gathered == []


def test_who_could_not_take_part_is_out_of_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after two interrupts, of which the second ended the wait for the others."""
    others, sums = Others(monkeypatch), on_processor()

    def interrupted(*_: object, **__: object) -> Others:
        raise KeyboardInterrupt

    def broken_off() -> None:
        with sums.due(DUE, PART):
            monkeypatch.setattr(dist, "all_gather", interrupted)
            raise ValueError

    with pytest.raises(KeyboardInterrupt):
        broken_off()
    monkeypatch.setattr(dist, "all_gather", others.gather)
    with pytest.raises(RankFailed, match="start again"), sums.due(DUE, PART):
        pass


def test_sums_that_are_not_due_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    Others(monkeypatch)
    sums = on_processor()
    with pytest.raises(RuntimeError, match=r"\(3, 4\) where \(2, 4\) is due"), sums.due(DUE, PART):
        sums.total(torch.ones(3, 4))
    with pytest.raises(RuntimeError, match="3 sums"), on_processor().due(DUE, PART):
        pass


def test_parts_are_added_in_fp32_in_the_order_of_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    values = [256.0, 1.0, 1.0, -256.0]

    class Three(Others):
        def gather(self, parts: list[Tensor], part: Tensor, **settings: object) -> Others:
            for each, value in zip(parts, values, strict=False):
                each.fill_(value)
            return self

    Three(monkeypatch)
    sums = on_processor()
    with sums.due([Due(1, 1)], PART):
        # In bf16 256 + 1 is 256, however often 1 is added.
        assert sums.total(torch.zeros(1, 1, dtype=torch.bfloat16)).item() == 258.0
