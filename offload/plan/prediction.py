"""What a plan's steps and tokens are predicted to take."""

from __future__ import annotations

from dataclasses import dataclass

from offload.plan.acceptance import LOOKUP_TOKENS
from offload.plan.cost import Cost


@dataclass(frozen=True)
class Prediction:
    """Predicted seconds of a plan's steps, and of a token at the best draft lengths. plain_seconds_per_token: the same
    without speculation, with the placement that it then has.

    Passes are those of one row; row_seconds is added for each further row. full_block_rows: rows after which a full
    pass takes all but a row's seconds again, 0 where it waits for the link. mass_share: the share of a full pass's
    seconds that recording masses for the retrieval level adds. retrieval: of the level at which the target proposes to
    itself, over retrieved tokens or all; retrieval_token_seconds: for a token that it proposes.
    sum_seconds: of a pass, in sums over the ranks; full_link_bytes: over each device's link in a full pass;
    full_host_bytes: that the CPU attends to on the host meanwhile, for each device.
    """

    prefill_seconds: float
    first_token_seconds: float  # from the start of prefill
    full_pass_seconds: float
    full_sum_seconds: float
    full_link_bytes: int
    full_host_bytes: int
    full_row_seconds: float
    full_block_rows: int
    mass_share: float
    retrieval_pass_seconds: float
    retrieval_sum_seconds: float
    retrieval_row_seconds: float
    retrieval_token_seconds: float
    draft_pass_seconds: float
    refresh_seconds: float
    acceptance: float  # of a drafted token, at the target
    tokens_drafted: int  # for one full pass
    tokens_per_round: float
    seconds_per_token: float
    plain_seconds_per_token: float


def predict(cost: Cost, best: Cost, plain: Cost, num_prompt_tokens: int) -> Prediction:
    """The prediction for the plan of `cost`. best: the part of its levels that is predicted to be the fastest, such as
    the draft and the target alone, or lookups; plain: the same request without speculation."""
    prefill = cost.prefill(num_prompt_tokens)
    by_lookups = best.per_looked_up_token < best.per_token
    far = 8  # rows
    return Prediction(
        prefill_seconds=prefill,
        first_token_seconds=prefill + cost.full_pass(cost.sizing.rows),
        full_pass_seconds=cost.full_pass(1),
        full_sum_seconds=cost.full_sums(1),
        full_link_bytes=round(cost.full_link_bytes),
        full_host_bytes=round(cost.full_host_bytes),
        full_row_seconds=(cost.full_pass(1 + far) - cost.full_pass(1)) / far,
        full_block_rows=0 if cost.placement.offload else cost.sizing.most_rows,
        mass_share=cost.full_pass(1, masses=cost.composition.budget > 0) / cost.full_pass(1) - 1.0,
        retrieval_pass_seconds=cost.retrieval_pass(1),
        retrieval_sum_seconds=cost.sums(1) if cost.composition.inner else 0.0,
        retrieval_row_seconds=(cost.retrieval_pass(1 + far) - cost.retrieval_pass(1)) / far,
        retrieval_token_seconds=cost.retrieval_token if cost.composition.inner else 0.0,
        draft_pass_seconds=cost.draft_pass,
        refresh_seconds=cost.refresh,
        acceptance=cost.acceptance,
        tokens_drafted=1 if by_lookups else best.gamma,
        tokens_per_round=LOOKUP_TOKENS if by_lookups else best.tokens_per_round,
        seconds_per_token=min(best.per_token, best.per_looked_up_token),
        plain_seconds_per_token=plain.per_token,
    )
