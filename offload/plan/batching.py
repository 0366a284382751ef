"""Plans for several sequences at a time: one sequence's plan with caches for more sequences, which share every pass.

Levels, budgets and the predicted seconds of passes are the same as for one sequence: the distribution of a text depends
on levels and budgets, and with a seed its tokens depend on the predicted seconds. Only the placement changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from offload.errors import DoesNotFit
from offload.plan.cost import Cost
from offload.plan.placement import largest, place, shortage
from offload.plan.planner import Plan
from offload.plan.sizing import Sizing

MOST = 8  # sequences that are tried if the user gives no number
_WORTH = 1.02  # the factor on tokens a second that one more sequence has to promise


@dataclass(frozen=True)
class _Found:
    """A plan for several sequences. rate: the predicted total tokens a second. problem: the reason why it does not fit,
    or ""."""

    plan: Plan
    rate: float
    problem: str = ""

    @property
    def num_sequences(self) -> int:
        return self.plan.request.num_sequences


def plan_together(plan: Plan, sizing: Sizing, num_sequences: int | None, *, most: int) -> Plan:
    """`plan` for `num_sequences` sequences at a time, `most` at most; None: the number, up to MOST, that is predicted
    to give the most tokens a second in all. sizing: the one that `plan` was made with.

    Raises DoesNotFit, which names the number of sequences that would fit.
    """
    one = _found(plan, sizing, 1)
    if num_sequences is None:
        return _noted(_best(one, [_found(plan, sizing, number) for number in range(2, min(MOST, most) + 1)]), one)
    number = min(num_sequences, most)
    found = one if number == 1 else _found(plan, sizing, number)
    if found.problem:
        fits = largest(lambda each: each == 1 or not _found(plan, sizing, each).problem, number - 1)
        raise DoesNotFit(f"{number} sequences at a time {found.problem}; try --batch {fits}, or lower --context")
    return _noted(found, one)


def _best(one: _Found, more: list[_Found]) -> _Found:
    best = one
    for found in more:
        if not found.problem and found.rate > _WORTH * best.rate:
            best = found
    return best


def _noted(found: _Found, one: _Found) -> Plan:
    if found.num_sequences == 1:
        return found.plan
    note = f"{found.num_sequences} prompts at a time: predicted {found.rate / one.rate:.1f} times the tokens a second"
    return replace(found.plan, notes=(*found.plan.notes, note))


def _found(plan: Plan, sizing: Sizing, number: int) -> _Found:
    sizing = replace(sizing, num_sequences=number)
    if number == 1:
        cost = Cost(sizing, plan.placement, plan.request.capacity, plan.composition)
        return _Found(plan, 1 / cost.per_token, next(_problems(cost), ""))
    cost = _placed(plan, sizing)
    placed = replace(plan, request=replace(plan.request, num_sequences=number), placement=cost.placement)
    return _Found(placed, number / cost.per_token, next(_problems(cost), ""))


def _placed(plan: Plan, sizing: Sizing) -> Cost:
    capacity, composition = plan.request.capacity, plan.composition
    return Cost(sizing, place(sizing, capacity, composition, plan.placement.cpu_experts), capacity, composition)


def _problems(cost: Cost) -> Iterator[str]:
    if (short := shortage(cost.sizing, cost.placement)) is not None:
        yield f"need {short}"
    proposes_over_it = cost.composition.inner == "self" and not cost.composition.keeps_copies
    if proposes_over_it and "kv" in cost.placement.offload:
        yield "would have their caches cross a link in passes that propose"
