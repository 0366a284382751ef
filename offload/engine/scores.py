"""How likely a model finds the tokens of a text, and how far another model's distributions are from its own.

Both are made of a prefill's rows as they leave the last layer, a few rows at a time, so that logits of a long text
never exist together.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from offload.errors import TriforceError, UsageError
from offload.model.decoder import Decoder
from offload.transfer.memory import sent
from offload.worker.worker import Worker

_MOST_ROWS = 64  # that the distributions are made of at a time
_LOGITS_BYTES = 2**27  # that these take at most, where a row takes no more
_LARGEST_EXPONENT = 700.0  # of e, in a float
_NUMBER_BYTES = 32  # of a logit: itself, in fp32, its logarithm, and those of two models beside each other


@dataclass(frozen=True)
class Head:
    """What makes distributions of the rows that leave a model's last layer: the final norm and the head, which stay in
    the device's memory while this is kept, and nothing else of the weights. num_tokens: that can follow."""

    decoder: Decoder
    num_tokens: int

    @property
    def num_rows(self) -> int:
        """Rows whose distributions are made at a time."""
        return max(1, min(_MOST_ROWS, _LOGITS_BYTES // (_NUMBER_BYTES * self.decoder.config.vocab_size)))

    def log_probabilities(self, hidden: Tensor) -> Tensor:
        """hidden [n, hidden] of the last layer -> fp32 [n, V], in nats."""
        return self.decoder.logits(hidden)[:, : self.num_tokens].float().log_softmax(1)


@dataclass(frozen=True)
class Reference:
    """What the distributions of another model over the same text are compared with, after this one's engine is closed:
    rows [T - 1, hidden] of the last layer on the host, in the model's dtype, and the head on the device."""

    head: Head
    rows: Tensor


@dataclass(frozen=True)
class Scores:
    """Of a text of T tokens, on the host and in nats, [T - 1] each: of place i the logarithm of the probability that
    token i + 1 has after all before it, the likeliest token there, and the logarithm of its probability.

    divergences: KL(reference || this model) of each place, where there was a reference. reference: where it was asked
    for.
    """

    tokens: tuple[int, ...]
    log_probabilities: Tensor
    likeliest: Tensor
    likeliest_log_probabilities: Tensor
    divergences: Tensor | None = None
    reference: Reference | None = None


@dataclass(frozen=True)
class Likelihood:
    """How likely a model finds texts: tokens that are scored, and their mean log-likelihood in nats."""

    num_scored: int
    mean: float

    @classmethod
    def of(cls, scores: Sequence[Scores]) -> Likelihood:
        """Of all texts together, each token the same weight."""
        found = torch.cat([each.log_probabilities for each in scores]).double()
        return cls(len(found), float(found.mean()))

    @property
    def perplexity(self) -> float:
        """Of how many equally likely tokens each would be one; infinite beyond what a float holds."""
        return math.exp(-self.mean) if -self.mean < _LARGEST_EXPONENT else math.inf


@dataclass(frozen=True)
class Distance:
    """How far a model's distributions are from a reference's, over all places: the mean of KL(reference || model) in
    nats, what 99 of 100 places are not above, the largest, and the share of places where the likeliest token is the
    same."""

    mean: float
    percentile_99: float
    largest: float
    same_likeliest: float

    @classmethod
    def of(cls, reference: Sequence[Scores], other: Sequence[Scores]) -> Distance:
        """Of all texts together. other: scores with divergences, of the same texts."""
        values = torch.cat([each.divergences for each in other if each.divergences is not None]).double()
        pairs = zip(reference, other, strict=True)
        same = torch.cat([ours.likeliest == theirs.likeliest for ours, theirs in pairs])
        ordered = values.sort().values
        place = math.ceil(0.99 * len(ordered)) - 1
        return cls(float(values.mean()), float(ordered[place]), float(ordered[-1]), float(same.double().mean()))


class Scoring:
    """Takes the rows of a text's prefill as they leave the last layer, and makes its scores."""

    def __init__(
        self,
        worker: Worker,
        tokens: Sequence[int],
        *,
        num_tokens: int | None = None,
        keep_rows: bool = False,
        reference: Reference | None = None,
    ) -> None:
        """num_tokens: of the vocabulary, the first so many can follow; None: all. keep_rows: have a `Reference`, for
        T - 1 rows of host memory. Raises UsageError for fewer than two tokens, DoesNotFit."""
        count, width = len(tokens) - 1, worker.vocab_size if num_tokens is None else num_tokens
        if count < 1:
            raise UsageError(f"a text of {len(tokens)} token has none that another comes before; give at least 2")
        if not 0 < width <= worker.vocab_size:
            raise ValueError(f"the first {width} tokens, the model has {worker.vocab_size}")
        if (highest := max(tokens)) >= width:
            raise UsageError(f"the text has token {highest}, only those below {width} are in all vocabularies")
        if reference is not None and (len(reference.rows), reference.head.num_tokens) != (count, width):
            raise ValueError(
                f"the reference has {len(reference.rows)} rows over {reference.head.num_tokens} tokens, this model "
                f"{count} over {width}"
            )
        self._tokens, self._head = tuple(tokens), Head(worker.target.without_layers(), width)
        self._reference = reference
        device, size = worker.memory.device, worker.target.config.hidden_size
        self._next = sent(torch.tensor(self._tokens[1:]), device)
        self._rows: Tensor | None = None
        if keep_rows:
            dtype = worker.target.weights.embedding.dtype
            self._rows = worker.memory.allocate((count, size), dtype, tier="host", purpose="reference rows")
        self._found: list[tuple[Tensor, ...]] = []  # on the device, of each few rows

    def take(self, start: int, hidden: Tensor) -> None:
        """The rows [n, hidden] from `start` on. Blocks come in order. Peak memory: distributions of
        `Head.num_rows` rows, of two models where there is a reference; what stays is a few numbers a row."""
        for part in hidden.split(self._head.num_rows):
            self._found.append(tuple(self._scored(slice(start, start + len(part)), part)))
            start += len(part)

    def scores(self) -> Scores:
        """After the last block. Raises TriforceError where the model computes what is no number."""
        own, best, likeliest, *divergences = (torch.cat(parts).cpu() for parts in zip(*self._found, strict=True))
        if not bool(own.isfinite().all()):
            place = int((~own.isfinite()).nonzero()[0]) + 1
            raise TriforceError(f"the probability of token {place} is no number; try --dtype fp32")
        return Scores(
            self._tokens,
            own,
            likeliest,
            best,
            divergences=divergences[0] if divergences else None,
            reference=None if self._rows is None else Reference(self._head, self._rows),
        )

    def _scored(self, places: slice, hidden: Tensor) -> list[Tensor]:
        """Of these places [n] each: see `Scores`."""
        if self._rows is not None:
            self._rows[places].copy_(hidden)
        logs = self._head.log_probabilities(hidden)
        best, likeliest = logs.max(1)
        found = [logs.gather(1, self._next[places, None])[:, 0], best, likeliest]
        if self._reference is not None:
            rows = self._reference.rows[places].to(hidden.device)
            found.append(divergence(self._reference.head.log_probabilities(rows), logs))
        return found


def divergence(reference: Tensor, other: Tensor) -> Tensor:
    """KL(reference || other) of distributions fp32 [n, V], given as logarithms -> [n], in nats: the mean, over what the
    reference would say, of how much likelier it finds that than the other does."""
    return (reference.exp() * (reference - other)).sum(1).clamp_min_(0)


def give_memory_back() -> None:
    """After an engine was closed and is referred to no more: have its memory free for the plan of another one."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
