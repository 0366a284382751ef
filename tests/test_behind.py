"""Work on a thread behind the device, and which copies it need not wait for again."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

import pytest

from offload.pages.traffic import Traffic
from offload.transfer.background import BackgroundThread, on_stack
from offload.transfer.link import Event, PacedLink


@dataclass(eq=False)
class Later:
    """An event that happens when somebody says so."""

    said: threading.Event = field(default_factory=threading.Event)
    waited: int = 0

    def wait(self) -> None: ...

    def synchronize(self) -> None:
        self.waited += 1
        assert self.said.wait(10)


def test_work_begins_after_its_events_and_changes_nothing_until_it_is_taken() -> None:
    thread, events, where = BackgroundThread[int, str]("work"), [Later(), Later()], list[str]()

    def work() -> str:
        where.append(threading.current_thread().name)
        return "made"

    assert thread.is_done
    thread.begin([3, 5], events, work)
    assert thread.items == {3, 5}
    events[0].said.set()
    assert not thread.is_done
    assert where == []
    events[1].said.set()
    items, made, happened = thread.take()
    assert (list(items), made, happened) == ([3, 5], "made", events)
    assert where[0].startswith("work")
    assert thread.items == set()
    assert thread.is_done
    thread.close()


def test_an_error_comes_to_who_takes_and_leaves_the_thread_usable() -> None:
    thread = BackgroundThread[int, int]("work")

    def fails() -> int:
        raise MemoryError("no more")

    thread.begin([1], [], fails)
    with pytest.raises(MemoryError, match="no more"):
        thread.take()
    assert thread.items == set()
    thread.begin([2], [], lambda: 7)
    assert list(thread.take()[0]) == [2]
    thread.begin([3], [], lambda: 8)
    thread.close()  # nobody takes it
    assert thread.items == set()
    thread.begin([4], [], lambda: 9)  # it starts again
    assert thread.take()[1] == 9
    thread.close()


def test_what_has_happened_is_not_waited_for_again() -> None:
    """With all that was copied before it in the same lane, and nothing after it."""
    link = PacedLink(None)
    traffic, events = Traffic(link), [Later() for _ in range(6)]
    for tile, event in zip(((0, 0), (0, 1), (0, 2)), events[:3], strict=True):
        traffic.writes(tile, event)
    for tile, event in zip(((0, 0), (0, 3)), events[3:], strict=False):
        traffic.reads(tile, event)
    for event in events:
        event.said.set()
    pending: list[Event] = traffic.pending({(0, 0), (0, 1)})
    assert pending == [events[1], events[3]]
    traffic.happened(pending)
    traffic.settle({(0, 0), (0, 1)})
    assert [event.waited for event in events] == [0] * 6
    traffic.settle({(0, 2), (0, 3)})
    assert [event.waited for event in events] == [0, 0, 1, 0, 1, 0]
    link.close()


def test_each_thread_has_the_stack_that_it_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The size is the process's: of two threads that began together one had the other's, and it stayed for good."""
    before, start, wanted = threading.stack_size(), threading.Thread.start, threading.local()
    found: list[tuple[int, int]] = []

    def noted(thread: threading.Thread) -> None:
        if size := getattr(wanted, "size", 0):
            time.sleep(0.001)  # in which another one may change it
            found.append((size, threading.stack_size()))
        start(thread)

    def begin(size: int) -> None:
        wanted.size = size
        for _ in range(20):
            on_stack(size, lambda: None)

    monkeypatch.setattr(threading.Thread, "start", noted)
    threads = [threading.Thread(target=begin, args=(size << 20,)) for size in (16, 64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 40
    assert all(size == at_start for size, at_start in found)
    assert threading.stack_size() == before
