"""Log probabilities of a text's tokens under the target's own logits, before any sampling parameter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class TokenScore:
    """A token and its log probability. likeliest: (token, log probability) of the most likely tokens at its place."""

    token: int
    logprob: float
    likeliest: tuple[tuple[int, float], ...]


def scored(logits: Tensor, tokens: Sequence[int], count: int) -> list[TokenScore]:
    """The scores of n tokens by logits [n, V], or more rows, of their places. count: number of likeliest tokens; fewer
    are returned where the model excludes the others."""
    if not tokens:
        return []
    logs = logits[: len(tokens)].float().log_softmax(-1)
    best = logs.topk(min(count, logs.shape[-1]), -1)
    rows = zip(tokens, logs.unbind(), best.values.tolist(), best.indices.tolist(), strict=True)
    return [
        TokenScore(
            token,
            float(row[token]),
            tuple((other, value) for other, value in zip(others, values, strict=True) if value > float("-inf")),
        )
        for token, row, values, others in rows
    ]
