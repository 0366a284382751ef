"""Host memory is pinned on a thread while a checkpoint is read: errors, interrupts and progress."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from kit.models import save_pair
from offload.engine.engine import Engine, load_tokenizer
from offload.errors import DoesNotFit
from offload.plan.sizing import FETCH_BYTES
from offload.progress import OnProgress, Progress, ignore
from offload.transfer.prepinned import Prepinned
from paper import PaperGpu, on_paper
from paper.engines import CASES, Case, Pair


def block(num_bytes: int) -> Tensor:
    return torch.zeros(num_bytes, dtype=torch.uint8)


class Maker:
    """Makes blocks when it is let."""

    def __init__(self, *, fails_at: int | None = None) -> None:
        self.made: list[int] = []
        self.threads: set[int] = set()
        self.let = threading.Semaphore(0)
        self._fails_at = fails_at

    def __call__(self, num_bytes: int) -> Tensor:
        self.let.acquire()
        self.threads.add(threading.get_ident())
        if len(self.made) == self._fails_at:
            raise DoesNotFit("no more")
        self.made.append(num_bytes)
        return block(num_bytes)


def test_blocks_are_made_in_order_on_another_thread_before_they_are_asked_for() -> None:
    maker = Maker()
    ahead = Prepinned([3, 3, 5], maker)
    maker.let.release(3)
    ahead.wait(lambda done, total: None)
    assert maker.made == [3, 3, 5]
    assert maker.threads.isdisjoint({threading.get_ident()})
    assert ahead.held == 11
    taken = [ahead.take(size) for size in (5, 3, 3)]
    assert [len(each) for each in taken if each is not None] == [5, 3, 3]
    assert len({each.data_ptr() for each in taken if each is not None}) == 3
    assert ahead.take(3) is ahead.take(4) is None  # no more, and none of that size
    assert ahead.held == 0


def test_who_asks_too_early_waits() -> None:
    maker = Maker()
    ahead = Prepinned([3, 5], maker)
    threading.Timer(0.05, maker.let.release, (2,)).start()
    taken = ahead.take(5)
    assert taken is not None
    assert len(taken) == 5
    ahead.close()


def test_an_error_is_raised_where_the_memory_is_wanted() -> None:
    maker = Maker(fails_at=1)
    ahead = Prepinned([3, 5], maker)
    maker.let.release(2)
    ahead.wait(lambda done, total: None)
    assert ahead.take(3) is not None
    with pytest.raises(DoesNotFit, match="no more"):
        ahead.take(5)
    ahead.close()


def test_progress_is_reported_while_somebody_waits_and_not_when_all_is_there() -> None:
    maker, reports = Maker(), list[tuple[int, int]]()
    ahead = Prepinned([3, 5], maker)

    def noted(done: int, total: int) -> None:
        reports.append((done, total))
        maker.let.release()

    ahead.wait(noted)
    assert reports[0] == (0, 8)
    assert reports[-1] == (8, 8)
    assert reports.count((8, 8)) == 1
    reports.clear()
    ahead.wait(noted)
    assert reports == []


def test_closing_ends_the_thread_after_its_block_and_drops_what_nobody_took() -> None:
    maker = Maker()
    ahead = Prepinned([3, 5, 7], maker)
    maker.let.release()
    while not ahead.held:
        pass
    threading.Timer(0.05, maker.let.release).start()
    ahead.close()
    ahead.close()
    assert maker.made == [3, 5]
    assert ahead.held == 0


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return save_pair(tmp_path_factory.mktemp("models"), context=256)


class Pins:
    """The GPU's cudaHostRegister, which goes on after its first block when it is let, and may fail."""

    def __init__(self, gpu: PaperGpu) -> None:
        self.gpu, self.let, self.fails = gpu, threading.Event(), False

    def __call__(self, address: int, num_bytes: int, flags: int) -> int:
        if self.gpu.has_pinned:
            assert self.let.wait(20)
        return 2 if self.fails and self.gpu.has_pinned else self.gpu.pin(address, num_bytes, flags)


@pytest.fixture
def pins(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pins]:
    with on_paper() as gpu:
        pins, runtime = Pins(gpu), torch.cuda.cudart()
        runtime.cudaHostRegister = pins  # type: ignore[method-assign]
        monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
        yield pins
        gc.collect()
        assert gpu.problems == []
        assert not gpu.has_pinned
        assert not [thread for thread in threading.enumerate() if thread.name == "pin"]


def load(case: Case, pair: Pair, on_progress: OnProgress) -> Engine:
    target, draft = pair
    draft_too = draft if case.sizes.draft_gamma else None
    return Engine.load(case.plan(pair), target, draft_too, load_tokenizer(target, draft_too), on_progress=on_progress)


def test_tiles_are_pinned_while_weights_are_read_and_the_rest_with_progress(pair: Pair, pins: Pins) -> None:
    reports: list[Progress] = []

    def noted(progress: Progress) -> None:
        reports.append(progress)
        if progress.stage == "pin":
            pins.let.set()

    with load(CASES["plain, kv streamed"], pair, noted) as engine:
        host = engine.worker.memory.allocated()["host"]
        assert engine.worker.memory._ahead is not None
        assert engine.worker.memory._ahead.held == 0
    del engine
    stages = [report.stage for report in reports]
    assert stages == sorted(stages)  # "load", then "pin"
    pinned = [report for report in reports if report.stage == "pin"]
    assert [report.done for report in (pinned[0], pinned[-1])] == [pinned[0].done, pinned[-1].total]
    assert pinned[0].done < pinned[-1].total == host["kv cache"] + host["hidden rows"]


@pytest.mark.parametrize("case", ["plain, kv streamed", "draft, both streamed"])
def test_all_that_is_on_the_host_is_pinned_ahead(case: str, pair: Pair, pins: Pins) -> None:
    pins.let.set()
    with load(CASES[case], pair, ignore) as engine:
        host, ahead = engine.worker.memory.allocated()["host"], engine.worker.memory._ahead
        assert ahead is not None
        assert host.pop("gathered chunks", 0) <= FETCH_BYTES  # so little is pinned when its cache is made
        assert sum(host.values()) == sum(ahead._sizes)
        assert ahead.held == 0
    del engine, ahead


@pytest.mark.parametrize("stage", ["load", "pin"])
def test_an_interrupt_while_memory_is_pinned_leaves_nothing_pinned(stage: str, pair: Pair, pins: Pins) -> None:
    def interrupted(progress: Progress) -> None:
        if progress.stage == stage:
            threading.Timer(0.1, pins.let.set).start()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load(CASES["plain, kv streamed"], pair, interrupted)


def test_memory_that_cannot_be_pinned_is_told_with_the_context_that_fits(pair: Pair, pins: Pins) -> None:
    pins.fails = True
    pins.let.set()
    with pytest.raises(DoesNotFit, match=r"could not be pinned \(CUDA error 2\).* lower --context to [0-9]+$"):
        load(CASES["plain, kv streamed"], pair, ignore)
