"""The levels of a plan, stacked: each verifies what those below propose."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from offload.decode.clock import Clock, MachineClock, PlanClock
from offload.decode.lookahead import Lookahead
from offload.decode.lookup import LookupProposer
from offload.decode.pace import Pace
from offload.decode.sampling import SamplingParams, SeededSource, warp
from offload.decode.speculation import Level, ModelProposer, Proposer, Speculator
from offload.plan.planner import Plan


@dataclass(frozen=True)
class Stack:
    """`top` emits tokens of the target; `lookahead` is its own, and `clock` times all levels."""

    top: Speculator
    lookahead: Lookahead
    clock: Clock


def stack(
    plan: Plan,
    levels: Mapping[str, Level],
    sampling: SamplingParams,
    *,
    vocab_size: int,
    device: torch.device,
    on_verified: Callable[[int], None],
    keeps_mass: Callable[[], bool],
    block: int | None = None,
) -> Stack:
    """For one request. levels: by name, the target and whichever of draft and retrieval the plan has. keeps_mass:
    whether the target's next pass keeps masses. block: rows of a block of its passes on this machine, if that is known;
    the plan's clock runs by what the plan knows.

    The draft proposes to both levels above it; the retrieval level is the target's last proposer.
    """
    random, measures = SeededSource(sampling.seed), _measures(plan, sampling)
    clock: Clock = MachineClock() if measures else PlanClock()
    pace = Pace(plan, block=block if measures else None)
    levels = {name: pace.priced(level, clock, keeps_mass=keeps_mass) for name, level in levels.items()}

    def law(logits: Tensor) -> Tensor:
        return warp(logits, sampling)

    def lookups() -> list[Proposer]:
        return [LookupProposer(vocab_size, device)] if plan.lookup else []

    drafts: list[Proposer] = [ModelProposer(levels["draft"], law, random)] if "draft" in levels else []
    proposers = [*lookups(), *drafts]
    if "retrieval" in levels:
        below = [*lookups(), *drafts]
        ahead = pace.retrieval(below)
        proposers.append(Speculator(levels["retrieval"], below, lookahead=ahead, warp=law, random=random, clock=clock))
    ahead, target = pace.target(proposers), levels["target"]
    top = Speculator(target, proposers, lookahead=ahead, warp=law, random=random, clock=clock, on_verified=on_verified)
    return Stack(top, ahead, clock)


def _measures(plan: Plan, sampling: SamplingParams) -> bool:
    """Whether lengths follow the clock: not where a seed is to give the same text again."""
    if plan.pace == "auto":
        return sampling.seed is None or sampling.temperature == 0.0
    return plan.pace == "measured"
