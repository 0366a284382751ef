"""The acceptance rule of speculative sampling, which keeps the output exact at every level.

Speculative sampling: Leviathan et al. 2023 (arXiv 2211.17192, theorem 1 and appendix A.1), Chen et al. 2023
(arXiv 2302.01318). docs/exactness.md has the proof for two levels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from offload.decode.random_source import RandomSource


@dataclass(frozen=True)
class Verdict:
    """The tokens that one verification emits: the first `num_accepted` drafted tokens and then `next_token`.

    chances: the acceptance probability of each drafted token, up to the first rejected one.
    """

    num_accepted: int
    next_token: int  # the correction at a rejection, the bonus after full acceptance
    chances: list[float] = field(default_factory=list)


def verify(
    drafted: Sequence[int], draft_probs: Sequence[Tensor | None], target_probs: Tensor, random: RandomSource
) -> Verdict:
    """Keep a prefix of `drafted` and draw one more token, so that each emitted token follows `target_probs`.

    drafted: n tokens; draft_probs: the distribution [V] that each was drawn from, exactly, or None for a point mass;
    target_probs [n + 1, V]: the target's distribution at each place and after the last. Both warped already, in fp32 or
    better.
    Left to right a token x is kept with probability min(1, target[x] / draft[x]); at the first rejection the correction
    comes from the residual max(target - draft, 0), renormalised and never warped again; after full acceptance the bonus
    comes from the last row of `target_probs`.
    """
    n = len(drafted)
    if len(draft_probs) != n or len(target_probs) != n + 1:
        raise ValueError(f"{n} drafted tokens, {len(draft_probs)} draft_probs, {len(target_probs)} target_probs")
    ratios = _ratios(drafted, draft_probs, target_probs)
    chances = [min(ratio, 1.0) for ratio in ratios]
    for i, ratio in enumerate(ratios):
        if not random.accepts(ratio):
            rest = residual(target_probs[i], draft_probs[i], drafted[i])
            return Verdict(i, random.draw(rest), chances[: i + 1])
    return Verdict(n, random.draw(target_probs[n]), chances)


def residual(target_probs: Tensor, draft_probs: Tensor | None, token: int) -> Tensor:
    """The distribution of the correction, [V]: normalise(max(target - draft, 0)). For a point mass at `token` it is the
    target's distribution without that token, renormalised.

    Where the residual rounds to zero everywhere (target and draft are equal, so a rejection has probability zero), the
    target's own distribution.
    """
    if draft_probs is None:
        rest = target_probs.clone()
        rest[token] = 0.0
    else:
        rest = (target_probs - draft_probs).clamp_(min=0.0)
    total = rest.sum()
    return rest / total if total > 0 else target_probs


def _ratios(drafted: Sequence[int], draft_probs: Sequence[Tensor | None], target_probs: Tensor) -> list[float]:
    """The ratio target / draft at each drafted token."""
    if not drafted:
        return []
    tokens = torch.tensor(drafted, dtype=torch.long).unsqueeze(-1)
    target = target_probs[:-1].gather(-1, tokens).squeeze(-1)
    chances = [1.0 if row is None else row[token] for token, row in zip(drafted, draft_probs, strict=True)]
    draft = torch.tensor(chances, dtype=torch.float64)
    return (target.double() / draft).tolist()
