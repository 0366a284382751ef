"""How many sequences run at a time: as many as pay and fit, or what was asked for, and why that cannot be.

What each number is predicted to give is made up here; real plans: test_planner.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from offload.errors import DoesNotFit
from offload.plan import batching
from offload.plan.batching import MOST, _Found, _problems, plan_together

Asking = Callable[[int | None, int], int]


@dataclass(frozen=True)
class Asked:
    num_sequences: int = 1


@dataclass(frozen=True)
class Planned:
    request: Any
    notes: tuple[str, ...] = ()
    placement: str = ""


@pytest.fixture
def asking(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Asking]:
    """Of tokens a second and problems by number of sequences: (asked for, most) -> the number that is planned."""

    def made(rates: Mapping[int, float], problems: Mapping[int, str] | None = None) -> Asking:
        def found(plan: object, sizing: object, number: int) -> _Found:
            planned = Planned(Asked(number))
            return _Found(planned, rates[number], (problems or {}).get(number, ""))  # type: ignore[arg-type]

        monkeypatch.setattr(batching, "_found", found)
        return lambda asked, most: plan_together(None, None, asked, most=most).request.num_sequences  # type: ignore[arg-type]

    return made


def test_one_sequence_more_has_to_promise_more_than_it_could_err(asking: Callable[..., Asking]) -> None:
    plan = asking({1: 1.0, 2: 1.01, 3: 1.5, 4: 1.52})
    assert [plan(None, most) for most in (1, 2, 3, 4)] == [1, 1, 3, 3]


def test_no_more_are_tried_than_are_worth_trying_or_asked(asking: Callable[..., Asking]) -> None:
    plan = asking({number: float(number) for number in range(1, 2 * MOST)})
    assert [plan(None, most) for most in (1, 5, MOST, MOST + 1)] == [1, 5, MOST, MOST]
    assert [plan(7, most) for most in (1, 5, 9)] == [1, 5, 7]


def test_what_does_not_fit_is_passed_over_or_refused_with_the_number_that_does(asking: Callable[..., Asking]) -> None:
    rates = {number: float(number) for number in range(1, 9)}
    plan = asking(rates, dict.fromkeys(range(4, 9), "need 12 GB of memory, 8 GB are free"))
    assert plan(None, 8) == 3
    assert plan(3, 8) == 3
    with pytest.raises(DoesNotFit, match="5 sequences at a time need 12 GB of memory, 8 GB are free; try --batch 3,"):
        plan(5, 8)
    alone = asking(rates, dict.fromkeys(range(2, 9), "need more"))
    assert alone(None, 8) == 1
    with pytest.raises(DoesNotFit, match="try --batch 1,"):
        alone(2, 8)


@pytest.mark.parametrize("inner", ["self", "retrieval", None])
@pytest.mark.parametrize("keeps_copies", [True, False])
@pytest.mark.parametrize("offload", [("kv",), ("weights",), ()])
def test_no_cache_crosses_a_link_in_passes_that_propose(
    monkeypatch: pytest.MonkeyPatch, inner: str | None, keeps_copies: bool, offload: tuple[str, ...]
) -> None:
    monkeypatch.setattr(batching, "shortage", lambda sizing, placement: None)
    placement = SimpleNamespace(offload=offload)
    sizing = SimpleNamespace(hardware=SimpleNamespace(is_cpu=True), num_sequences=2)
    cost = SimpleNamespace(
        sizing=sizing, placement=placement, composition=SimpleNamespace(inner=inner, keeps_copies=keeps_copies)
    )
    wrong = inner == "self" and not keeps_copies and offload == ("kv",)
    assert any(_problems(cost)) == wrong  # type: ignore[arg-type]
