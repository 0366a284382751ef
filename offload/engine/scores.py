"""Scores of a text: the log probabilities of its tokens, and the divergence of another model's distributions.

They are computed from a prefill's rows after the last layer, a few rows at a time, so that the logits of a long text
never exist all at once.
"""

from __future__ import annotations

import ctypes
import gc
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from offload.config.reading import read_config
from offload.errors import ModelError, TriforceError, UsageError
from offload.model.decoder import Decoder
from offload.text.tokenizer import Tokenizer
from offload.transfer.memory import sent
from offload.worker.models import num_scored
from offload.worker.worker import Worker

_MOST_ROWS = 64  # rows whose distributions are computed at a time, at most
_LOGITS_BYTES = 2**27  # limit of the distributions' memory, unless one row needs more
_LARGEST_EXPONENT = 700.0  # of e, in a float
_NUMBER_BYTES = 32  # memory for each logit: the logit, its fp32 copy and its logarithm, for two models


@dataclass(frozen=True)
class Head:
    """The output head of a model: final norm and head matrix, which turn rows of the last layer into distributions.
    Only these weights stay in the device's memory. num_tokens: number of ids that can follow."""

    decoder: Decoder
    num_tokens: int

    @property
    def num_rows(self) -> int:
        """The number of rows whose distributions are computed at a time."""
        return max(1, min(_MOST_ROWS, _LOGITS_BYTES // (_NUMBER_BYTES * self.decoder.config.vocab_size)))

    def log_probabilities(self, hidden: Tensor) -> Tensor:
        """The log probabilities of rows hidden [n, hidden] of the last layer -> fp32 [n, V], in nats."""
        return self.decoder.logits(hidden)[:, : self.num_tokens].float().log_softmax(1)


@dataclass(frozen=True)
class Reference:
    """The reference for another model's distributions over the same text, valid after this model's engine is closed:
    rows [T - 1, hidden] of the last layer on the host, in the model's dtype, and the head on the device."""

    head: Head
    rows: Tensor


@dataclass(frozen=True)
class Scores:
    """The scores of a text of T tokens, on the host and in nats, [T - 1] each: for place i the log probability of token
    i + 1 after all tokens before it, the likeliest token, and its log probability.

    divergences: KL(reference || this model) at each place, if there was a reference. reference: if it was requested.
    """

    tokens: tuple[int, ...]
    log_probabilities: Tensor
    likeliest: Tensor
    likeliest_log_probabilities: Tensor
    divergences: Tensor | None = None
    reference: Reference | None = None


@dataclass(frozen=True)
class Likelihood:
    """The likelihood of texts: the number of scored tokens, and their mean log-likelihood in nats."""

    num_scored: int
    mean: float

    @classmethod
    def of(cls, scores: Sequence[Scores]) -> Likelihood:
        """The likelihood of all texts together, with equal weight for each token."""
        found = torch.cat([each.log_probabilities for each in scores]).double()
        return cls(len(found), float(found.mean()))

    @property
    def perplexity(self) -> float:
        """The perplexity, exp(-mean); infinite where a float cannot hold it."""
        return math.exp(-self.mean) if -self.mean < _LARGEST_EXPONENT else math.inf


@dataclass(frozen=True)
class Distance:
    """The distance of a model's distributions from a reference's, over all places: mean, 99th percentile and maximum of
    KL(reference || model) in nats, and the share of places with the same likeliest token."""

    mean: float
    percentile_99: float
    largest: float
    same_likeliest: float

    @classmethod
    def of(cls, reference: Sequence[Scores], other: Sequence[Scores]) -> Distance:
        """The distance over all texts together. other: scores of the same texts, with divergences."""
        values = torch.cat([each.divergences for each in other if each.divergences is not None]).double()
        pairs = zip(reference, other, strict=True)
        same = torch.cat([ours.likeliest == theirs.likeliest for ours, theirs in pairs])
        ordered = values.sort().values
        place = math.ceil(0.99 * len(ordered)) - 1
        return cls(float(values.mean()), float(ordered[place]), float(ordered[-1]), float(same.double().mean()))


class Scoring:
    """The scoring of a text, from its prefill's rows after the last layer."""

    def __init__(
        self,
        worker: Worker,
        tokens: Sequence[int],
        *,
        num_tokens: int | None = None,
        keep_rows: bool = False,
        reference: Reference | None = None,
    ) -> None:
        """num_tokens: only the first `num_tokens` ids of the vocabulary can follow; None: all. keep_rows: make a
        `Reference`, which takes T - 1 rows of host memory. Raises UsageError for fewer than two tokens, DoesNotFit."""
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
        device, size = worker.memory.device, worker.target.config.row_size
        self._next = sent(torch.tensor(self._tokens[1:]), device)
        self._rows: Tensor | None = None
        if keep_rows:
            dtype = worker.target.weights.embedding.dtype
            self._rows = worker.memory.allocate((count, size), dtype, tier="host", purpose="reference rows")
        self._found: list[tuple[Tensor, ...]] = []  # scores of successive rows, on the device

    def take(self, start: int, hidden: Tensor) -> None:
        """Score the rows [n, hidden] from `start` on. Blocks come in order. Peak memory: distributions of
        `Head.num_rows` rows, of two models with a reference; a few numbers a row are kept."""
        for part in hidden.split(self._head.num_rows):
            self._found.append(tuple(self._scored(slice(start, start + len(part)), part)))
            start += len(part)

    def scores(self) -> Scores:
        """The scores, after the last block. Raises TriforceError where a probability is not a number."""
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
        """The scores of `places`, [n] each, see `Scores`."""
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
    """KL(reference || other) of distributions fp32 [n, V], given as log probabilities -> [n], in nats: the expectation
    under the reference of the difference in log probability."""
    return (reference.exp() * (reference - other)).sum(1).clamp_min_(0)


def give_memory_back() -> None:
    """Free the memory of an engine that was closed and is not referenced any more, for the plan of another one."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    with suppress(OSError, AttributeError):  # another C library than glibc, whose heap keeps pages that are free
        ctypes.CDLL(None).malloc_trim(0)


def num_common_tokens(model: Path, tokenizer: Tokenizer, other: Path) -> int:
    """The number of ids, from 0 on, that are the same tokens in both models. Reads no weights.

    An id without a token in one model may have one in the other: GGUF files name a vocabulary's padding. Raises
    ModelError where an id stands for two tokens, or where each model has tokens that the other lacks.
    """
    theirs = Tokenizer.from_folder(other)
    names = [{number: name for name, number in each.vocabulary().items()} for each in (tokenizer, theirs)]
    both = names[0].keys() & names[1].keys()
    differ = next((number for number in sorted(both) if names[0][number] != names[1][number]), None)
    if differ is not None or len(both) < min(map(len, names)):
        what = "" if differ is None else f", token {differ} is {names[1][differ]!r} for {names[0][differ]!r}"
        raise ModelError(
            f"{other} has another vocabulary ({len(names[1])} tokens) than {model} ({len(names[0])} tokens){what}; "
            "distributions are compared over the same tokens: name models with one tokenizer"
        )
    sizes = [num_scored(read_config(path), len(each)) for path, each in ((model, tokenizer), (other, theirs))]
    return min(sizes)
