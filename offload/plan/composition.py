"""Candidate compositions for a request: the levels that could speculate, among which the planner chooses."""

from __future__ import annotations

from collections.abc import Iterator

from offload.plan.sizing import PLAIN, Composition, Sizing

LONGEST = (63, 31, 15)  # tokens drafted for one full pass, at most: the longer, the more memory masses need
DRAFT_LONGEST = 15  # the same for one pass of the retrieval level
LEAST_BUDGET = 512
_SHARES = (32, 16, 8, 4, 2)  # budgets are these parts of the capacity
_CHUNKS = (16, 32)


def compositions(sizing: Sizing, capacity: int) -> Iterator[Composition]:
    """Compositions that the user's options allow; plain decoding is one if neither a length nor a budget is given."""
    options = sizing.options
    if not options.speculation or options.gamma == 0:
        yield PLAIN
        return
    drafts = [False]
    if sizing.draft is not None and options.draft_gamma != 0:
        drafts = [True] if options.draft_gamma else [True, False]
    draft_gamma = DRAFT_LONGEST if options.draft_gamma is None else options.draft_gamma
    for gamma in LONGEST if options.gamma is None else (options.gamma,):
        for draft in drafts:
            below = draft_gamma if draft or options.lookup else 0
            for budget in _budgets(sizing, capacity):
                for chunk in _CHUNKS if options.chunk is None else (options.chunk,):
                    whole = max(budget // chunk, 1) * chunk
                    yield Composition(gamma, below, whole, chunk, draft, options.lookup)
            if draft and options.budget is None:
                yield Composition(gamma, 0, draft=True, lookup=options.lookup)
        if options.lookup and options.gamma is None and options.budget is None:
            yield Composition(gamma, lookup=True)
    if options.gamma is None and options.budget is None:
        yield PLAIN


def _budgets(sizing: Sizing, capacity: int) -> list[int]:
    """Tokens, ascending."""
    if sizing.options.budget is not None:
        return [min(sizing.options.budget, capacity)]
    wanted = {max(capacity // share, LEAST_BUDGET) for share in _SHARES}
    return sorted({min(budget, capacity) for budget in wanted})
