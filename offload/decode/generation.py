"""The token loop: prefill, rounds, stop conditions. It depends on no terminal and no tokenizer."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from offload.decode.speculation import Speculator
from offload.metrics import Stats
from offload.model.passes import Work

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Run:
    """The tokens that one round emitted, cut after an end token. `finish` is set on the last run only. logits: the
    target's own, [n, V] for the tokens or more rows, where the speculator keeps them; valid until the next pass."""

    tokens: list[int]
    finish: FinishReason | None
    logits: Tensor | None = None


def in_passes(
    prompt: Sequence[int],
    speculator: Speculator,
    *,
    prefill: Callable[[Sequence[int]], None],
    num_pending: int,
    max_tokens: int,
    end_tokens: Collection[int],
    stats: Stats,
) -> Work[Run]:
    """Yield the passes of decoding, and runs until an end token was emitted ("stop") or `max_tokens` were ("length").

    prompt: at least one token. `prefill(tokens)` puts all but the last `num_pending` (1 or more) of them into the
    caches. The rest is pending in the first round, which runs without drafts so that the first token comes early. The
    last item of every text is a run, even if the text has no tokens.
    The caller may stop at any yield and truncate the speculator to the tokens that it keeps. Rounds never draft past
    `max_tokens`.
    """
    start = time.perf_counter()
    prefill(prompt[: max(len(prompt) - num_pending, 0)])
    sequence = list(prompt)
    stats.prefill_seconds = time.perf_counter() - start
    remaining = max_tokens
    if remaining == 0:
        yield Run([], "length")
    while remaining > 0:
        first = len(sequence) == len(prompt)
        step = yield from speculator.rounding(sequence, 1 if first else remaining)
        tokens = step.tokens
        now = time.perf_counter()
        if first:
            stats.first_token_seconds = now - start
        stats.decode_seconds = now - start - stats.first_token_seconds
        ended = next((i + 1 for i, token in enumerate(tokens) if token in end_tokens), None)
        tokens = tokens[:ended]
        sequence += tokens
        remaining -= len(tokens)
        stats.output_tokens += len(tokens)
        yield Run(tokens, "stop" if ended else "length" if remaining == 0 else None, step.logits)
        if ended:
            return
