"""The exactness check: the engine's output against the target alone, by replaying every token and recomputing some.

Speculation must not change the output: the logits of each token must be bit for bit the logits that plain decoding
computes at its position. A prefill of the same tokens sums in another order, so its logits agree within rounding only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from offload.decode.sampling import SamplingParams
from offload.decode.warp import Warp
from offload.engine.request import GenerationRequest
from offload.model.passes import Pass, forward
from offload.progress import OnProgress, Progress, ignore

if TYPE_CHECKING:
    from offload.config.model import ModelConfig
    from offload.engine.engine import Engine
    from offload.plan.planner import PlannedRequest

# Largest difference of a logit from a fresh prefill's, in standard deviations of the row's logits (docs/exactness.md).
TOLERANCES = {"fp32": 1e-4, "fp16": 0.05, "bf16": 0.25}
ROUNDED = 2  # times as much where a prefill rounds stored numbers to 16 bits, which passes do not


@dataclass(frozen=True)
class Replayed:
    """A generated token (`index` from 0) and the row that plain decoding draws it from.

    difference: the largest difference of a logit from the row that the engine drew from, 0.0 with same_bits. margin: of
    the largest logit over the next one. possible: `token` has a probability above 0; at temperature 0, it is `best`.
    """

    index: int
    token: int
    best: int
    possible: bool
    same_bits: bool
    difference: float
    margin: float

    @property
    def is_exact(self) -> bool:
        return self.possible and self.same_bits


@dataclass(frozen=True)
class Recomputed:
    """A generated token and its row of logits from a fresh prefill. difference, margin: in standard deviations of the
    row's logits."""

    index: int
    token: int
    best: int
    difference: float
    margin: float


@dataclass(frozen=True)
class ExactnessReport:
    """The comparisons of one text. tolerance: for recomputed logits, in standard deviations of a row's logits."""

    prompt_tokens: int
    tokens: list[int]
    replayed: list[Replayed]
    recomputed: list[Recomputed]
    tolerance: float

    @property
    def inexact(self) -> list[Replayed]:
        return [position for position in self.replayed if not position.is_exact]

    @property
    def intolerable(self) -> list[Recomputed]:
        return [position for position in self.recomputed if not position.difference <= self.tolerance]

    @property
    def holds(self) -> bool:
        return not self.inexact and not self.intolerable


def check_exactness(
    engine: Engine,
    prompt: Sequence[int],
    sampling: SamplingParams,
    *,
    max_tokens: int,
    num_recomputed: int,
    tolerance: float | None = None,
    on_progress: OnProgress = ignore,
) -> ExactnessReport:
    """Generate, then replay every token and recompute `num_recomputed` of them, spread evenly and including the last.

    Memory: 4 bytes for each new token and entry of the vocabulary. Recomputing takes another prefill. The engine's
    caches are of no use afterwards. tolerance: None for that of the plan's dtype.
    """
    recorder = Recorder()
    tokens = _written(engine, GenerationRequest(prompt, sampling, max_tokens=max_tokens), recorder, on_progress)
    drawn_from = recorder.rows(len(prompt) - 1, len(prompt) + len(tokens) - 1)
    distribution, replayed = engine.distribution(sampling, len(prompt), engine.end_tokens), []
    for index, row in enumerate(_replay(engine, prompt, tokens, on_progress)):
        adjusted = distribution.adjusted(row[None], [*prompt, *tokens[:index]])
        replayed.append(_replayed(index, tokens[index], drawn_from[index], row, adjusted, distribution.warp))
        on_progress(Progress("replay", index + 1, len(tokens), "tokens"))
    chosen = _spread(len(tokens), num_recomputed)
    recomputed = []
    for index, row in zip(chosen, _recompute(engine, prompt, tokens, chosen, on_progress), strict=True):
        best = int(distribution.adjusted(row[None], [*prompt, *tokens[:index]]).argmax())
        recomputed.append(_recomputed(index, tokens[index], best, drawn_from[index], row))
    limit = tolerance_for(engine.plan.request, engine.worker.target.config) if tolerance is None else tolerance
    return ExactnessReport(len(prompt), tokens, replayed, recomputed, limit)


def tolerance_for(request: PlannedRequest, target: ModelConfig) -> float:
    """The largest difference of a logit from a fresh prefill's that rounding explains, in standard deviations of the
    row's logits."""
    rounds = request.device == "cpu" and request.dtype != "fp32" and target.stored_in
    return TOLERANCES[request.dtype] * (ROUNDED if rounds else 1)


class Recorder:
    """A recorder of the target's logits. It keeps the rows of tokens that stayed: a row [V] on the CPU for each
    position."""

    def __init__(self) -> None:
        self._rows: dict[int, Tensor] = {}

    def hear(self, num_before: int, num_after: int, logits: Tensor) -> None:
        """Record the logits of a pass. Earlier rows after the first `num_before` were rejected and are dropped."""
        self._rows = {place: row for place, row in self._rows.items() if place < num_before}
        for place, row in enumerate(logits.detach().float().cpu(), start=num_after - len(logits)):
            self._rows[place] = row.clone()

    def rows(self, first: int, last: int) -> list[Tensor]:
        """The rows of positions from `first` until `last`."""
        return [self._rows[place] for place in range(first, last)]


def _written(engine: Engine, request: GenerationRequest, recorder: Recorder, on_progress: OnProgress) -> list[int]:
    """The tokens of the generated text. The recorder receives the logits of every target pass."""
    target, tokens = engine.levels["target"], list[int]()
    with closing(engine.in_passes(request, on_progress=on_progress)) as work:
        for item in work:
            if not isinstance(item, Pass):
                tokens += item.tokens
            elif item.level is target:
                num_before, logits = target.length, forward(target, item.tokens, item.num_logits)
                recorder.hear(num_before, target.length, logits)
                item.made = item.compute(logits, *item.given)
            else:
                item.run()
    return tokens


def _replay(engine: Engine, prompt: Sequence[int], tokens: Sequence[int], on_progress: OnProgress) -> Iterator[Tensor]:
    """The target's logits [V] for each of `tokens`, one row per pass, after the cached prefill."""
    prefix, target = engine.prefix, engine.levels["target"]
    prefix.begin(prompt, reuse=False)
    engine.worker.record_mass(False)
    prefix.prefill(prompt[: prefix.num_prefilled(prompt)], on_progress)
    yield forward(target, prompt[target.length :], 1)[0].float().cpu()
    for token in tokens[:-1]:
        yield forward(target, [token], 1)[0].float().cpu()


def _recompute(
    engine: Engine, prompt: Sequence[int], tokens: Sequence[int], chosen: Sequence[int], on_progress: OnProgress
) -> Iterator[Tensor]:
    """The target's logits [V] for the tokens at `chosen`, after a fresh prefill of all earlier tokens."""
    prefix, target, sequence = engine.prefix, engine.levels["target"], [*prompt, *tokens]
    prefix.truncate(0)
    for index in chosen:
        last = len(prompt) + index - 1
        prefix.prefill(sequence[:last], on_progress)
        yield forward(target, sequence[last : last + 1], 1)[0].float().cpu()
        prefix.truncate(last)


def _spread(count: int, wanted: int) -> list[int]:
    """At most `wanted` of the numbers below `count`, spread evenly and including the last."""
    return sorted({(count * place // wanted) - 1 for place in range(1, wanted + 1)} - {-1}) if wanted else []


def _replayed(index: int, token: int, drawn_from: Tensor, row: Tensor, adjusted: Tensor, warp: Warp) -> Replayed:
    """The comparison of one replayed token. row [V]: the logits of plain decoding. adjusted [1, V]: the same after the
    adjustments for the text before."""
    return Replayed(
        index=index,
        token=token,
        best=int(adjusted.argmax()),
        possible=bool(warp(adjusted)[0, token] > 0),
        same_bits=torch.equal(drawn_from, row),
        difference=_difference(drawn_from, row),
        margin=_margin(row),
    )


def _recomputed(index: int, token: int, best: int, drawn_from: Tensor, row: Tensor) -> Recomputed:
    scale = float(row.std())
    return Recomputed(index, token, best, _difference(drawn_from, row) / scale, _margin(row) / scale)


def _difference(first: Tensor, second: Tensor) -> float:
    """The largest difference between finite logits: models mask entries of a vocabulary with -inf."""
    same = first == second
    return float(torch.where(same, 0.0, (first - second).abs()).max())


def _margin(row: Tensor) -> float:
    best, second = row.topk(2).values.tolist()
    return float(best - second)
