"""What tokens before a place do to its logits: repetitions cost, or are forbidden.

Each is a function of those tokens alone, drafted ones included, so it can be applied at any place in any order.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offload.decode.breakers import Breakers
from offload.decode.warp import without

Tokens = NDArray[np.int32]

_LARGEST_EXPONENT = math.log(torch.finfo(torch.float32).max)


@dataclass(frozen=True)
class Text:
    """The tokens of a sequence, and how many of them are its prompt."""

    tokens: Tokens
    num_prompt: int


class Penalty(Protocol):
    def __call__(self, logits: Tensor, text: Text, first: int) -> Tensor:
        """logits [n, V] fp32 of n places that follow each other -> the same, changed. The first one is behind the first
        `first` tokens of `text`, the last behind all of them."""
        ...


@dataclass(frozen=True)
class Repetition:
    """Divides the positive logits of tokens that stand among the last `window` (0: all) by `penalty`, and multiplies
    the negative ones by it (Keskar et al., 2019, arXiv 1909.05858)."""

    penalty: float
    window: int

    def __call__(self, logits: Tensor, text: Text, first: int) -> Tensor:
        seen = _counts(text, 0, first, logits, self.window) > 0
        return torch.where(seen, torch.where(logits > 0, logits / self.penalty, logits * self.penalty), logits)


@dataclass(frozen=True)
class Occurrences:
    """Takes `presence` from the logit of a generated token that stands among the last `window` (0: all), and
    `frequency` as often as it does."""

    presence: float
    frequency: float
    window: int

    def __call__(self, logits: Tensor, text: Text, first: int) -> Tensor:
        counts = _counts(text, text.num_prompt, first, logits, self.window)
        return logits - self.frequency * counts - self.presence * (counts > 0)


@dataclass(frozen=True)
class NoRepeatNgram:
    """Forbids each token with which the text would have the same `size` tokens in a row a second time."""

    size: int

    def __call__(self, logits: Tensor, text: Text, first: int) -> Tensor:
        banned = np.zeros(logits.shape, dtype=np.bool_)
        for row, place in enumerate(range(first, len(text.tokens) + 1)):
            banned[row, self._followers(text.tokens[:place])] = True
        return without(logits, torch.from_numpy(banned).to(logits.device))

    def _followers(self, tokens: Tokens) -> Tokens:
        """What stands behind earlier occurrences of the last size - 1 tokens."""
        if len(tokens) < self.size:
            return tokens[:0]
        ends = np.arange(self.size - 1, len(tokens))
        for back in range(1, self.size):
            ends = ends[tokens[ends - back] == tokens[-back]]
        return tokens[ends]


@dataclass(frozen=True)
class Dry:
    """Takes multiplier * base^(n - allowed_length) from the logit of a token that would prolong a repetition of n
    tokens, n >= allowed_length, among the last `window` (0: all); of several the longest counts. A repetition ends at
    each token with which one of `breakers` is complete, and such a token costs nothing. (DRY: Weidmann, 2024.)"""

    multiplier: float
    base: float
    allowed_length: int
    window: int
    breakers: Breakers

    def __call__(self, logits: Tensor, text: Text, first: int) -> Tensor:
        taken = np.zeros(logits.shape, dtype=np.float32)
        for row, place in enumerate(range(first, len(text.tokens) + 1)):
            tokens = text.tokens[max(place - self.window, 0) if self.window else 0 : place]
            followers, lengths = self._repetitions(tokens)
            penalties = self.multiplier * self.base ** (lengths - self.allowed_length).astype(np.float64)
            np.maximum.at(taken[row], followers, penalties.astype(np.float32))
        return logits - torch.from_numpy(taken).to(logits.device)

    def _repetitions(self, tokens: Tokens) -> tuple[Tokens, NDArray[np.int64]]:
        """Of each earlier occurrence of the last tokens that is long enough, what stands behind it and its length."""
        longest = self._longest(tokens)
        if longest < self.allowed_length or len(tokens) < 2:
            return tokens[:0], np.zeros(0, np.int64)
        ends = np.flatnonzero(tokens[:-1] == tokens[-1]) + 1
        lengths = np.ones(len(ends), np.int64)
        going = np.arange(len(ends))
        for length in range(1, longest):
            going = going[ends[going] > length]
            going = going[tokens[ends[going] - 1 - length] == tokens[-1 - length]]
            if not len(going):
                break
            lengths[going] = length + 1
        followers, enough = tokens[ends], lengths >= self.allowed_length
        enough[enough] = [not self.breakers.completed(tokens, token) for token in followers[enough].tolist()]
        return followers[enough], lengths[enough]

    def _longest(self, tokens: Tokens) -> int:
        """A repetition reaches back to the last breaker, and no further than its penalty is a number."""
        most = len(tokens)
        if self.base > 1.0:
            most = min(most, self.allowed_length + int(_LARGEST_EXPONENT / math.log(self.base)))
        places = range(len(tokens) - 1, len(tokens) - 1 - most, -1)
        last = tokens[len(tokens) - most :].tolist()[::-1]
        found = (self.breakers.completed(tokens[:place], token) for place, token in zip(places, last, strict=True))
        return next((i for i, ends in enumerate(found) if ends), most)


@dataclass(frozen=True)
class MinTokens:
    """Forbids `end_tokens` until `least` tokens were generated."""

    least: int
    end_tokens: Collection[int]

    def __call__(self, logits: Tensor, text: Text, first: int) -> Tensor:
        too_short = torch.arange(first, len(text.tokens) + 1) < text.num_prompt + self.least
        banned = torch.zeros(logits.shape, dtype=torch.bool)
        banned[:, sorted(token for token in self.end_tokens if token < logits.shape[-1])] = True
        return without(logits, (banned & too_short[:, None]).to(logits.device))


@dataclass(frozen=True)
class ClosedThoughts:
    """Allows `close` alone from the token at `budget` on, one after the other, where the generated text has not had
    `mark` before."""

    budget: int
    close: tuple[int, ...]
    mark: tuple[int, ...]

    def __call__(self, logits: Tensor, text: Text, first: int) -> Tensor:
        for row, place in enumerate(range(first, len(text.tokens) + 1)):
            generated = text.tokens[text.num_prompt : place].tolist()
            at = len(generated) - self.budget
            if 0 <= at < len(self.close) and not _has(generated[: self.budget], self.mark):
                only = torch.full_like(logits[row], -torch.inf)
                only[self.close[at]] = 0.0
                logits[row] = only
        return logits


def _has(tokens: list[int], wanted: tuple[int, ...]) -> bool:
    starts = range(len(tokens) - len(wanted) + 1)
    return any(tokens[start : start + len(wanted)] == list(wanted) for start in starts)


def _counts(text: Text, start: int, first: int, logits: Tensor, window: int) -> Tensor:
    """How often each token stands among those from `start` on and the last `window` before each of the places of
    `logits`, [n, V] int32."""
    rows = np.zeros(logits.shape, dtype=np.int32)

    def oldest(place: int) -> int:
        return max(start, place - window) if window else start

    rows[0] = np.bincount(text.tokens[oldest(first) : first], minlength=rows.shape[1])[: rows.shape[1]]
    for row in range(1, len(rows)):
        place = first + row
        rows[row] = rows[row - 1]
        rows[row, text.tokens[place - 1]] += 1
        rows[row, text.tokens[oldest(place - 1) : oldest(place)]] -= 1
    return torch.from_numpy(rows).to(logits.device)
