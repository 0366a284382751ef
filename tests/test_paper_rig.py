"""The GPU on paper reports each kind of mistake, and none where there is none."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from offload.transfer.link import CudaLink
from offload.transfer.memory import Memory
from paper import PaperGpu, on_paper

DEVICE = torch.device("cuda:0")


@pytest.fixture
def gpu() -> Iterator[PaperGpu]:
    with on_paper() as gpu:
        yield gpu


def pinned(size: int = 64) -> Tensor:
    return Memory(DEVICE).allocate((size,), torch.float32, tier="host", purpose="test")


def there(size: int = 64) -> Tensor:
    return torch.zeros(size, device=DEVICE)


def test_torch_is_as_it_was_afterwards() -> None:
    before = (torch.cuda.Stream, torch.tensor, Tensor.numpy, threading.Thread.run, torch.cuda.is_available())
    with on_paper():
        assert torch.cuda.is_available()
    assert (torch.cuda.Stream, torch.tensor, Tensor.numpy, threading.Thread.run, torch.cuda.is_available()) == before
    assert torch.zeros(2).device.type == "cpu"


@pytest.mark.parametrize("inference", [False, True])
def test_tensors_compute_and_say_that_they_are_on_the_gpu(inference: bool, gpu: PaperGpu) -> None:
    rows = torch.randn(4, 6)
    with torch.inference_mode(inference):
        on_gpu = rows.to(DEVICE)
        assert on_gpu.device == DEVICE
        assert on_gpu.is_cuda
        made = [torch.empty_like(rows, device=DEVICE), torch.arange(3, device=on_gpu.device), on_gpu.new_zeros(2)]
        views = [on_gpu[1:], on_gpu.view(-1), on_gpu.t(), on_gpu.split(2)[1], on_gpu[0]]
        results = [torch.nn.functional.rms_norm(on_gpu, (6,)), on_gpu @ on_gpu.t(), on_gpu.softmax(-1)]
        assert {each.device for each in [*made, *views, *results]} == {DEVICE}
        on_gpu[1, 2:] = 7.0
        on_gpu[2:] += on_gpu[:2]
        rows[1, 2:] = 7.0
        rows[2:] += rows[:2]
        assert on_gpu.cpu().equal(rows)
        assert on_gpu.tolist() == rows.tolist()
        assert float(on_gpu.sum()) == float(rows.sum())
        assert on_gpu.to(DEVICE) is on_gpu
        assert on_gpu.float() is on_gpu
        assert on_gpu.to(torch.float64).cpu().equal(rows.double())
    assert gpu.problems == []


def test_a_schedule_with_its_events_is_right(gpu: PaperGpu) -> None:
    link, home, back, slot = CudaLink(DEVICE), pinned(), pinned(), there()
    for value in range(4):
        home.fill_(value)
        arrived = link.to_device(slot, home, (link.record(),))
        arrived.wait()
        slot += 1
        link.to_host(back, slot, (link.record(),)).synchronize()
        assert back.eq(value + 1).all()
    assert gpu.problems == []
    assert gpu.syncs["event"] == 4


def test_parts_of_a_block_need_no_order(gpu: PaperGpu) -> None:
    link, home, slot = CudaLink(DEVICE), pinned(), there()
    event = link.to_device(slot[:32], home[:32], (link.record(),))
    slot[32:].sum()
    home[32:].fill_(1)
    assert gpu.problems == []
    slot[31:].sum()
    home[31:].fill_(1)
    assert len(gpu.problems) == 2
    event.synchronize()


def reads_before_the_copy_came(link: CudaLink) -> None:
    home, slot = pinned(), there()
    event = link.to_device(slot, home, (link.record(),))
    slot.sum()
    event.synchronize()


def overwrites_what_is_computed_with(link: CudaLink) -> None:
    home, slot = pinned(), there()
    slot.sum()
    link.to_device(slot, home).synchronize()


def the_host_reads_before_the_copy_came(link: CudaLink) -> None:
    home, slot = pinned(), there()
    event = link.to_host(home, slot, (link.record(),))
    home.sum()
    event.synchronize()


def numpy_reads_before_the_copy_came(link: CudaLink) -> None:
    home, slot = pinned(), there()
    event = link.to_host(home, slot, (link.record(),))
    home.numpy()
    event.synchronize()


def the_host_writes_before_the_copy_left(link: CudaLink) -> None:
    home, slot = pinned(), there()
    event = link.to_device(slot, home, (link.record(),))
    home.fill_(1)
    event.synchronize()


def a_thread_of_the_host_writes_before_the_copy_left(link: CudaLink) -> None:
    home, slot = pinned(), there()
    event = link.to_device(slot, home, (link.record(),))
    thread = threading.Thread(target=lambda: home.fill_(1))
    thread.start()
    thread.join()
    event.synchronize()


def gives_device_memory_back_too_early(link: CudaLink) -> None:
    home, slot = pinned(), there()
    event = link.to_device(slot, home, (link.record(),))
    del slot
    event.synchronize()


def gives_pinned_memory_back_too_early(link: CudaLink) -> None:
    home, slot = pinned(), there()
    event = link.to_device(slot, home, (link.record(),))
    del home
    event.synchronize()


def copies_what_is_not_pinned(link: CudaLink) -> None:
    slot = there()
    link.to_device(slot, torch.zeros(64), (link.record(),)).synchronize()


def copies_what_is_not_in_one_piece(link: CudaLink) -> None:
    slot, home = there().view(8, 8), pinned().view(8, 8)
    link.to_device(slot[:, ::2], home[:, ::2], (link.record(),)).synchronize()


def adds_what_is_on_the_host(link: CudaLink) -> None:
    there() + torch.ones(64)


def waits_for_an_event_of_nothing(link: CudaLink) -> None:
    torch.cuda.current_stream().wait_event(torch.cuda.Event())


def times_events_without_timing(link: CudaLink) -> None:
    first, second = torch.cuda.Event(), torch.cuda.Event()
    first.record()
    second.record()
    first.elapsed_time(second)


MISTAKES: dict[Callable[[CudaLink], None], str] = {
    reads_before_the_copy_came: "race: read by compute (sum) not ordered after write by stream 1, device memory",
    overwrites_what_is_computed_with: "race: write by stream 1 (copy_) not ordered after read by compute",
    the_host_reads_before_the_copy_came: "race: read by host (sum) not ordered after write by stream 2, pinned memory",
    numpy_reads_before_the_copy_came: "race: read by host (numpy) not ordered after write by stream 2",
    the_host_writes_before_the_copy_left: "race: write by host (fill_) not ordered after read by stream 1",
    a_thread_of_the_host_writes_before_the_copy_left: "race: write by host (fill_) not ordered after read by stream 1",
    gives_device_memory_back_too_early: "256 device bytes given back while stream 1 may use them",
    gives_pinned_memory_back_too_early: "256 pinned bytes given back while stream 1 may use them",
    copies_what_is_not_pinned: "a copy of 256 bytes that does not block, of memory that is not pinned",
    copies_what_is_not_in_one_piece: "a copy over the link of memory that is not in one piece",
    adds_what_is_on_the_host: "add of tensors on the GPU and on the host, (64,)",
    waits_for_an_event_of_nothing: "an event is waited for and was never recorded",
    times_events_without_timing: "time is asked of an event that was made without timing",
}


@pytest.mark.parametrize(("mistake", "words"), MISTAKES.items(), ids=[mistake.__name__ for mistake in MISTAKES])
def test_a_mistake_is_reported_with_its_place(mistake: Callable[[CudaLink], None], words: str, gpu: PaperGpu) -> None:
    mistake(CudaLink(DEVICE))
    found = [problem for problem in gpu.problems if words in problem]
    assert found, gpu.problems
    assert "test_paper_rig.py:" in found[0]


@pytest.mark.parametrize(
    ("ask", "kind"),
    [
        (lambda rows: rows.tolist(), "copy to host"),
        (lambda rows: rows.cpu(), "copy to host"),
        (lambda rows: int(rows.sum()), "_local_scalar_dense"),
        (lambda rows: rows.nonzero(), "nonzero"),
        (lambda rows: rows[rows > 0], "index"),
        (lambda rows: rows.unique_consecutive(), "unique_consecutive"),
        (lambda rows: torch.tensor([1, 2], device=DEVICE), "copy to device"),
        (lambda rows: torch.cuda.current_stream().synchronize(), "stream"),
        (lambda rows: torch.cuda.synchronize(), "device"),
    ],
)
def test_a_wait_of_the_host_is_counted(ask: Callable[[Tensor], object], kind: str, gpu: PaperGpu) -> None:
    rows = there()
    assert gpu.syncs.total() == 0
    ask(rows)
    assert gpu.syncs == {kind: 1}


def test_kernels_are_counted_and_views_are_not(gpu: PaperGpu) -> None:
    rows = there().view(8, 8)[2:].t()
    assert gpu.launches == {"zeros": 1}
    torch.nn.functional.linear(rows, rows) + 1
    assert gpu.launches == {"zeros": 1, "mm": 1, "add": 1}


def test_memory_is_counted_while_a_view_of_it_lives(gpu: PaperGpu) -> None:
    rows = there(1000)
    view = rows[:10]
    del rows
    assert torch.cuda.memory_allocated() == 4000
    del view
    assert torch.cuda.memory_allocated() == 0
    assert torch.cuda.max_memory_allocated() == 4000


def test_addresses_tell_places_apart_and_are_no_numbers(gpu: PaperGpu) -> None:
    rows, other = there(), there()
    assert rows[16:].data_ptr() == rows.view(8, 8)[2].data_ptr() == rows.view(torch.uint8)[64:].data_ptr()
    assert rows.data_ptr() not in (rows[1:].data_ptr(), other.data_ptr())
    gone = other.data_ptr()
    del other
    assert there().data_ptr() != gone
    with pytest.raises(TypeError):
        ctypes.c_void_p(rows.data_ptr())  # type: ignore[arg-type]
