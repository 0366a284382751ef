"""Building of a plan's speculator: the proposers of each level, and the charges of each step."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import torch

from offload.decode.distribution import Distribution
from offload.decode.gpu_draws import Beforehand
from offload.decode.grammar_proposer import AllowedLookupProposer, GrammarProposer
from offload.decode.lengths import LOOKUP_CHANCES, Adaptive, Estimate, Fixed, PassSeconds
from offload.decode.lookup import LookupProposer
from offload.decode.proposal import Proposer
from offload.decode.random_source import SeededSource
from offload.decode.sampling import SamplingParams
from offload.decode.speculation import Charge, Lengths, ModelProposer, Speculator
from offload.model.passes import Level
from offload.plan.composition import LevelName
from offload.plan.planner import Plan

TRUST = 32.0  # observations that the planned acceptance of retrieved tokens is worth: measured on three models
HOPE = 0.1  # added to a draft's guessed acceptance at first: a draft that is never tried is never measured

Prepare = Callable[[int, bool], bool]  # (accepted rows, whether the own level is wanted) -> whether it is ready


def build_speculator(
    plan: Plan,
    levels: Mapping[str, Level],
    sampling: SamplingParams,
    distribution: Distribution,
    *,
    device: torch.device,
    prepare_copies: Prepare,
    block: int | None = None,
    keeps_logits: bool = False,
) -> Speculator:
    """The speculator of one request, which emits tokens of the target.

    levels: by name, the target and the plan's other levels. The draft proposes to both levels above it; the target's
    own level, "self" or "retrieval", is its last proposer. block: rows of a block of the target's passes on this
    machine, if known. distribution: of the request, the same at all levels.
    keeps_logits: whether the target's rounds have logits.
    With a seed and a temperature above 0 every step is charged the plan's seconds instead of measured ones: lengths,
    and so the text, are then the same on a machine of any speed.
    """
    source, costs = SeededSource(sampling.seed), _Costs(plan, sampling, block)
    adjust, warp = distribution.adjust, distribution.warp
    random = source if device.type == "cpu" or adjust is not None else Beforehand(source, device)
    grammar = None if adjust is None else adjust.grammar

    def guesses() -> list[Proposer]:
        """Proposers that need no pass."""
        found: list[Proposer] = []
        if grammar is not None and plan.composition.gamma:
            found.append(GrammarProposer(grammar))
        if plan.composition.lookup:
            found.append(LookupProposer() if grammar is None else AllowedLookupProposer(grammar))
        return found

    def speculator(name: LevelName, proposers: Sequence[Proposer], most: int, *, prepare: Prepare | None) -> Speculator:
        return Speculator(
            levels[name],
            proposers,
            lengths=costs.lengths(name, most, proposers),
            warp=warp,
            adjust=adjust,
            random=random,
            charge=costs.passes(name),
            prepare=None if prepare is None else costs.prepare(prepare),
            keeps_logits=keeps_logits and name == "target",
        )

    drafts: list[Proposer] = []
    if "draft" in levels:
        drafts = [ModelProposer(levels["draft"], warp, random, charge=costs.passes("draft"), adjust=adjust)]
    proposers = [*guesses(), *drafts]
    if inner := plan.composition.inner:
        below = [*guesses(), *drafts]
        prepare = prepare_copies if plan.composition.keeps_copies else None
        proposers.append(speculator(inner, below, plan.composition.draft_gamma, prepare=prepare))
    return speculator("target", proposers, plan.composition.gamma, prepare=None)


class _Costs:
    """The seconds of a plan's passes: the charges of each step, and the initial estimates of each level."""

    def __init__(self, plan: Plan, sampling: SamplingParams, block: int | None) -> None:
        self._plan, self._predicted = plan, plan.predicted
        self._planned = sampling.seed is not None and sampling.temperature > 0.0
        planned_block = plan.predicted.full_block_rows
        self._block = block if block and planned_block and not self._planned else planned_block

    def passes(self, name: LevelName) -> Charge:
        """The charge of a level's pass: the measured seconds, unless it was the first of its kind."""
        seconds = self._pass_seconds(name)
        return lambda num_rows, took, is_first: seconds.at(num_rows) if self._planned or is_first else took

    def prepare(self, prepare: Prepare) -> Callable[[int, bool], float | None]:
        """`prepare` with its charge, which includes recording softmax masses in the full pass before it."""
        predicted = self._predicted
        masses = predicted.mass_share * predicted.full_pass_seconds

        def charged(num_rows: int, wanted: bool) -> float | None:
            start = time.perf_counter()
            if not prepare(num_rows, wanted):
                return None
            return masses + (predicted.refresh_seconds if self._planned else time.perf_counter() - start)

        return charged

    def lengths(self, name: LevelName, most: int, proposers: Sequence[Proposer]) -> Lengths:
        if name not in self._plan.composition.adaptive:
            return Fixed(most)
        return Adaptive(most, self._pass_seconds(name), [self._estimate(proposer.name) for proposer in proposers])

    def _pass_seconds(self, name: LevelName) -> PassSeconds:
        return pass_seconds(self._plan, name, block=self._block)

    def _estimate(self, name: str) -> Estimate:
        """The estimate of a proposer before it was tried."""
        predicted = self._predicted
        if name in (LookupProposer.name, GrammarProposer.name):
            return Estimate(LOOKUP_CHANCES[0], 0.0, chances=LOOKUP_CHANCES)
        if name == "draft":
            return Estimate(predicted.draft_acceptance + HOPE, predicted.draft_pass_seconds)
        prepare_seconds = predicted.refresh_seconds + predicted.mass_share * predicted.full_pass_seconds
        return Estimate(
            predicted.acceptance, predicted.retrieval_token_seconds, weight=TRUST, prepare_seconds=prepare_seconds
        )


def pass_seconds(plan: Plan, name: str, *, block: int = 0) -> PassSeconds:
    """The planned seconds of a level's passes. block: see `PassSeconds`, for the target."""
    predicted = plan.predicted
    if name == "draft":
        return PassSeconds(predicted.draft_pass_seconds, 0.0)
    if name in ("self", "retrieval"):
        one, row = predicted.retrieval_pass_seconds, predicted.retrieval_row_seconds
        return PassSeconds(one - row, row)
    one, row = predicted.full_pass_seconds, predicted.full_row_seconds
    return PassSeconds(one - row, row, block=block)
