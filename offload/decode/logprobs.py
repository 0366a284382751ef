"""How likely the target finds the tokens of a text: by its own logits, before anything that sampling does to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class TokenScore:
    """A token and the logarithm of its probability; likeliest: (token, logarithm) of the most likely ones there."""

    token: int
    logprob: float
    likeliest: tuple[tuple[int, float], ...]


def scored(logits: Tensor, tokens: Sequence[int], count: int) -> list[TokenScore]:
    """logits [n, V] or more rows, of the places of n tokens; count: of the likeliest tokens, which are fewer where the
    model rules the others out."""
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
