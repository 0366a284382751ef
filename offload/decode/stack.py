"""The levels of a plan, stacked: each verifies what those below propose."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from offload.decode.lookahead import Lookahead
from offload.decode.lookup import LookupProposer
from offload.decode.pace import Pace
from offload.decode.sampling import SamplingParams, SeededSource, warp
from offload.decode.speculation import Level, ModelProposer, Proposer, Speculator
from offload.plan.planner import Plan


@dataclass(frozen=True)
class Stack:
    """`top` emits tokens of the target; `lookahead` is its own."""

    top: Speculator
    lookahead: Lookahead


def stack(
    plan: Plan,
    levels: Mapping[str, Level],
    sampling: SamplingParams,
    *,
    vocab_size: int,
    device: torch.device,
    on_verified: Callable[[int], None],
) -> Stack:
    """For one request. levels: by name, the target and whichever of draft and retrieval the plan has.

    The draft proposes to both levels above it; the retrieval level is the target's last proposer.
    """
    random, pace = SeededSource(sampling.seed), Pace(plan, measured=_measures(plan, sampling))

    def law(logits: Tensor) -> Tensor:
        return warp(logits, sampling)

    def lookups() -> list[Proposer]:
        return [LookupProposer(vocab_size, device)] if plan.lookup else []

    drafts: list[Proposer] = [ModelProposer(levels["draft"], law, random)] if "draft" in levels else []
    proposers = [*lookups(), *drafts]
    if "retrieval" in levels:
        below = [*lookups(), *drafts]
        ahead = pace.retrieval(below)
        proposers.append(Speculator(levels["retrieval"], below, lookahead=ahead, warp=law, random=random))
    lookahead = pace.target(proposers)
    top = Speculator(levels["target"], proposers, lookahead=lookahead, warp=law, random=random, on_verified=on_verified)
    return Stack(top, lookahead)


def _measures(plan: Plan, sampling: SamplingParams) -> bool:
    """Whether lengths follow the clock: not where a seed is to give the same text again."""
    if plan.pace == "auto":
        return sampling.seed is None or sampling.temperature == 0.0
    return plan.pace == "measured"
