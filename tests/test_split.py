"""The split of missed experts between link and CPU: what it weighs, and what it learns from the clock."""

from __future__ import annotations

import time

import pytest
import torch

from offload.speed.split import LinkPace, Split
from offload.transfer.link import PacedLink

BYTES = 10**6


def measured(seconds: float) -> Split:
    """A split on a CPU that runs an expert for one row in so many seconds."""
    split = Split()
    split.ran([1], BYTES, seconds)
    return split


def crossing(cpu: float, rows: list[int], *, each: float = 1e-3, ahead: float = 0.0) -> int:
    return measured(cpu).crossing(rows, BYTES, LinkPace(ahead, each))


def test_all_cross_a_fast_link_and_none_a_slow_one() -> None:
    assert crossing(1.0, [1] * 5) == 5
    assert crossing(1e-5, [1] * 5) == 0
    assert crossing(1e-3, []) == 0


def test_both_end_together_where_they_are_as_fast() -> None:
    assert crossing(1e-3, [1] * 8) == 4
    assert crossing(3e-3, [1] * 8) == 6
    assert crossing(1e-3 / 3, [1] * 8) == 2


def test_who_has_more_rows_costs_the_cpu_more() -> None:
    assert crossing(1e-3, [1, 1, 1, 1]) == 2
    assert crossing(1e-3, [8, 8, 8, 8]) == 3


def test_a_link_that_is_busy_gets_fewer() -> None:
    found = [crossing(1e-3, [1] * 8, ahead=ahead) for ahead in (0.0, 2e-3, 20e-3)]
    assert found == sorted(found, reverse=True)
    assert found[-1] == 0


def test_an_expert_that_would_be_missed_again_is_worth_some_of_its_copy() -> None:
    assert crossing(1.2e-3, [1]) == 1  # by the clock alone the link
    assert crossing(0.8e-3, [1]) == 1  # by the clock alone the CPU
    assert crossing(0.6e-3, [1]) == 0


def test_a_cpu_is_measured_as_it_goes() -> None:
    split, pace = measured(1e-5), LinkPace(0.0, 1e-3)
    assert split.crossing([1] * 4, BYTES, pace) == 0
    for _ in range(60):
        split.ran([1, 1], BYTES, 20e-3)  # somebody else computes now
    assert split.crossing([1] * 4, BYTES, pace) == 4


def test_experts_follow_as_far_as_the_link_would_be_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    split = measured(1e-3)
    assert split.following([1] * 6, BYTES, LinkPace(0.0, 2e-3)) == 3
    assert split.following([1] * 6, BYTES, LinkPace(5e-3, 2e-3)) == 0
    for _ in range(80):  # 10 ms from a layer's end to the next one's choice
        split.ended()
        now += 10e-3
        split.began()
    assert split.following([], BYTES, LinkPace(0.0, 2e-3)) == 5


def test_a_links_pace_counts_what_is_under_way() -> None:
    """By its known rate, and by what was measured once enough has crossed."""
    link = PacedLink(2e9)
    device, host = torch.zeros(2**24, dtype=torch.uint8), torch.ones(2**24, dtype=torch.uint8)
    assert link.pace(2 * 10**6) == LinkPace(0.0, 1e-3)
    event = link.to_device(device, host)
    assert link.pace(10**6).ahead == pytest.approx(2**24 / 2e9)
    event.wait()
    found = link.pace(10**6)
    assert found.ahead == 0.0
    assert found.each >= 0.999 * 10**6 / 2e9  # the pace is the least that a copy takes
    link.close()
