"""Several sequences at a time: one sequence's plan with caches for more of them, which share every pass.

Levels, budgets and what passes are predicted to take stay as they are for one sequence: a text's law depends on the
first two, and with a seed its tokens on the third. Only what lies where changes, and whether they take turns: while a
full pass of one half streams, the other drafts, so that the link waits for no draft. Each half has full passes of its
own then, so weights are used twice in a round of all, and cross the link twice where they stream: turns do not always
pay.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil

from offload.errors import DoesNotFit
from offload.plan.cost import Cost
from offload.plan.pass_times import Times
from offload.plan.placement import largest, place, shortage
from offload.plan.planner import Plan
from offload.plan.sizing import Sizing

MOST = 8  # that are tried where the user gives no number
_WORTH = 1.02  # times the tokens a second with fewer sequences: what one more has to promise


@dataclass(frozen=True)
class _Found:
    """A plan and the tokens a second that it is predicted to give in all; or why it cannot be, "" where it can."""

    plan: Plan
    rate: float
    problem: str = ""

    @property
    def num_sequences(self) -> int:
        return self.plan.request.num_sequences


def plan_together(plan: Plan, sizing: Sizing, times: Times, num_sequences: int | None, *, most: int) -> Plan:
    """`plan` for `num_sequences` sequences, but no more than `most`, at a time; None: as many, up to MOST, as are
    predicted to give the most tokens a second in all. sizing, times: those that `plan` was made with.

    Raises DoesNotFit, which says how many sequences would fit.
    """
    one = _found(plan, sizing, times, 1)
    if num_sequences is None:
        return _noted(
            _best(one, [_found(plan, sizing, times, number) for number in range(2, min(MOST, most) + 1)]), one
        )
    number = min(num_sequences, most)
    found = one if number == 1 else _found(plan, sizing, times, number)
    if found.problem:
        fits = largest(lambda each: each == 1 or not _found(plan, sizing, times, each).problem, number - 1)
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
    turns = ("half of them draft while the full pass of the others streams",) * found.plan.request.turns
    return replace(found.plan, notes=(*found.plan.notes, note, *turns))


def _found(plan: Plan, sizing: Sizing, times: Times, number: int) -> _Found:
    sizing = replace(sizing, num_sequences=number)
    if number == 1:
        cost = Cost(sizing, plan.placement, plan.request.capacity, plan.composition, times)
        return _Found(plan, 1 / cost.per_token, next(_problems(cost), ""))
    cost = _placed(plan, sizing, times)
    turns = _best_turns(plan, cost)
    pay = turns is not None and turns.per_token * _WORTH < cost.per_token
    cost, per_token = (turns.cost, turns.per_token) if turns is not None and pay else (cost, cost.per_token)
    request = replace(plan.request, num_sequences=number, turns=pay)
    placed = replace(plan, request=request, placement=cost.placement)
    return _Found(placed, number / per_token, next(_problems(cost), ""))


def _placed(plan: Plan, sizing: Sizing, times: Times) -> Cost:
    capacity, composition = plan.request.capacity, plan.composition
    return Cost(sizing, place(sizing, capacity, composition), capacity, composition, times)


def _best_turns(plan: Plan, cost: Cost) -> Turns | None:
    """With as many staged tiles as are best and fit; None where turns are not possible."""
    if not Turns(cost).possible:
        return None
    staged = (replace(cost.sizing, staging_tiles=number) for number in Turns(cost).staging)
    found = [Turns(_placed(plan, sizing, cost.times)) for sizing in staged]
    fitting = [each for each in found if each.possible and not any(_problems(each.cost))]
    return min(fitting, key=lambda each: each.per_token, default=None)


def _problems(cost: Cost) -> Iterator[str]:
    if (short := shortage(cost.sizing, cost.placement)) is not None:
        yield f"need {short}"
    proposes_over_it = cost.composition.inner == "self" and not cost.composition.keeps_copies
    if proposes_over_it and "kv" in cost.placement.offload:
        yield "would have their caches cross a link in passes that propose"


@dataclass(frozen=True)
class Turns:
    """The price of turns for `cost`, that of all sequences together."""

    cost: Cost

    @property
    def possible(self) -> bool:
        """Whether tiles stream and something else is computed meanwhile. It is not where the weights with which tokens
        are proposed stream, too: they come in the order of one pass."""
        sizing, composition = self.cost.sizing, self.cost.composition
        several = self.cost.num_sequences > 1 and sizing.num_devices == 1
        in_place = self.cost.placement.resident_layers == sizing.target.num_layers or composition.weight_bits < 16
        drafts = composition.gamma > 0 and (composition.draft if composition.inner is None else in_place)
        return several and drafts and self.cost.tiles_stream

    @property
    def per_token(self) -> float:
        """Seconds per token of each sequence, with the best number of drafted ones, or the user's."""
        most = self.cost.composition.gamma
        lengths = range(1, most + 1) if self.cost.sizing.options.gamma is None else (most,)
        return min(self._per_token(gamma) for gamma in lengths)

    @property
    def staging(self) -> Iterator[int]:
        """Numbers of staged tiles to choose from: as many as keep the link busy in a pass that proposes, and fewer."""
        streamed = self.cost.num_tiles - self.cost.placement.resident_tiles
        number = min(1 + ceil(self._proposing_pass / self.cost.tile_link_seconds), streamed)
        fewest = self.cost.sizing.staging_tiles
        while number > fewest:
            yield number
            number //= 2
        yield fewest

    def _per_token(self, gamma: int) -> float:
        """A round is a full pass of each group, in which the other drafts. Copies are fetched between two passes."""
        one, other = self._groups
        seconds = _full_pass(one, other, gamma, self._idle_share) + _full_pass(other, one, gamma, self._idle_share)
        return (seconds + one.refresh + other.refresh) / self.cost.tokens_of(gamma)

    @property
    def _groups(self) -> tuple[Cost, Cost]:
        """A half, rounded up, and the rest."""
        number = self.cost.num_sequences
        return self._of(-(-number // 2)), self._of(number // 2)

    def _of(self, number: int) -> Cost:
        return replace(self.cost, sizing=replace(self.cost.sizing, num_sequences=number))

    @property
    def _proposing_pass(self) -> float:
        """Seconds of the longest pass that proposes: on a GPU each sequence has its own, as a graph."""
        cost = self._groups[0] if self.cost.sizing.hardware.is_cpu else self._of(1)
        rows = 1 + (cost.composition.draft_gamma if cost.composition.draft else 0)
        return max(cost.retrieval_pass(rows), cost.draft_pass)

    @property
    def _idle_share(self) -> float:
        """Of a pass that proposes, the time in which the link rests: all staged tiles have come, but for the one that
        is waited for when such a pass begins."""
        busy = (self.cost.placement.staging_tiles - 1) * self.cost.tile_link_seconds
        return max(1.0 - busy / self._proposing_pass, 0.0)


def _full_pass(cost: Cost, drafting: Cost, gamma: int, idle_share: float) -> float:
    """Seconds of a full pass of one group, in which the other has drafted."""
    drafted = drafting.drafting(gamma)
    computed = cost.full_computed(gamma + 1, masses=cost.composition.mass_chunk is not None)
    return max(cost.full_link_seconds + idle_share * drafted, computed + drafted)
