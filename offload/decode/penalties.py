"""Penalties: adjustments of logits by the tokens before a place. They lower or forbid repetitions.

Each is a function of the earlier tokens alone, drafted ones included, so it can be applied to places in any order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offload.decode.breakers import Breakers, breakers_of
from offload.decode.sampling import SamplingParams, ThoughtBudget
from offload.text.tokenizer import Tokenizer

Tokens = NDArray[np.int32]

_LARGEST_EXPONENT = math.log(torch.finfo(torch.float32).max)


@dataclass(frozen=True)
class Text:
    """The tokens of a sequence, and the number of prompt tokens among them."""

    tokens: Tokens
    num_prompt: int


class Penalty(Protocol):
    def __call__(self, logits: Tensor, text: Text, first: int) -> Tensor:
        """Change logits [n, V] fp32 of n consecutive places and return them. The first place is after the first `first`
        tokens of `text`, the last after all of them. A logit of -inf forbids a token. The caller ensures that no
        forbidden token is allowed again and that some token remains (`Adjustment`)."""
        ...


@dataclass(frozen=True)
class Repetition:
    """Repetition penalty: divides the positive logits of tokens that occur among the last `window` (0: all) by
    `penalty`, and multiplies the negative ones by it (Keskar et al., 2019, arXiv 1909.05858)."""

    penalty: float
    window: int

    def __call__(self, logits: Tensor, text: Text, first: int) -> Tensor:
        seen = _counts(text, 0, first, logits, self.window) > 0
        return torch.where(seen, torch.where(logits > 0, logits / self.penalty, logits * self.penalty), logits)


@dataclass(frozen=True)
class Occurrences:
    """Presence and frequency penalties: subtracts `presence` from the logit of a generated token that occurs among the
    last `window` (0: all), and `frequency` once for each occurrence."""

    presence: float
    frequency: float
    window: int

    def __call__(self, logits: Tensor, text: Text, first: int) -> Tensor:
        counts = _counts(text, text.num_prompt, first, logits, self.window)
        return logits - self.frequency * counts - self.presence * (counts > 0)


@dataclass(frozen=True)
class NoRepeatNgram:
    """No-repeat n-grams: forbids each token that would complete an n-gram of `size` tokens that the text has."""

    size: int

    def __call__(self, logits: Tensor, text: Text, first: int) -> Tensor:
        banned = np.zeros(logits.shape, dtype=np.bool_)
        for row, place in enumerate(range(first, len(text.tokens) + 1)):
            banned[row, self._followers(text.tokens[:place])] = True
        return _without(logits, torch.from_numpy(banned))

    def _followers(self, tokens: Tokens) -> Tokens:
        """The tokens after earlier occurrences of the last size - 1 tokens."""
        if len(tokens) < self.size:
            return tokens[:0]
        ends = np.arange(self.size - 1, len(tokens))
        for back in range(1, self.size):
            ends = ends[tokens[ends - back] == tokens[-back]]
        return tokens[ends]


@dataclass(frozen=True)
class Dry:
    """DRY (Weidmann, 2024): subtracts multiplier * base^(n - allowed_length) from the logit of a token that would
    prolong a repetition of n tokens, n >= allowed_length, among the last `window` (0: all); of several repetitions the
    longest counts. A repetition ends at each token that completes one of `breakers`; such a token has no penalty."""

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
        """The earlier occurrences of the last tokens that are long enough, as (token after each, length of each)."""
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
        """The longest repetition that counts: back to the last breaker, and short enough that its penalty is finite."""
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
        return _without(logits, banned & too_short[:, None])


@dataclass(frozen=True)
class Mark:
    """The mark that opens or closes thoughts. tokens: its tokens, if special or added ones are among them, which count
    alone; without them it is its text in any tokens. decode: from tokens to text."""

    text: str
    tokens: tuple[int, ...]
    decode: Callable[[Sequence[int]], str]

    def is_in(self, tokens: Sequence[int]) -> bool:
        if not self.tokens:
            return self.text in self.decode(tokens)
        return any(self._is_at(place, tokens) for place, token in enumerate(tokens) if token == self.tokens[0])

    def end_at_start(self, tokens: Sequence[int]) -> int | None:
        """The number of leading tokens through the end of the mark, if `tokens` begin with it after optional white
        space; otherwise None."""
        shown = (i for i, token in enumerate(tokens) if token in self.tokens[:1] or self.decode([token]).strip())
        blank = next(shown, len(tokens))
        if self.tokens:
            return blank + len(self.tokens) if self._is_at(blank, tokens) else None
        for end in range(blank + 1, len(tokens) + 1):
            begin = self.decode(tokens[blank:end]).lstrip()
            if len(begin) >= len(self.text) or not self.text.startswith(begin):
                return end if begin.startswith(self.text) else None
        return None

    def _is_at(self, place: int, tokens: Sequence[int]) -> bool:
        return tuple(tokens[place : place + len(self.tokens)]) == self.tokens


@dataclass(frozen=True)
class ClosedThoughts:
    """The thought budget: allows only the tokens of `close`, one after the other, after `budget` tokens of thoughts
    without `mark` among them. Thoughts begin after `open`, if the generated text begins with it; None: they begin with
    the text."""

    budget: int
    close: tuple[int, ...]
    mark: Mark
    open: Mark | None = None

    def __call__(self, logits: Tensor, text: Text, first: int) -> Tensor:
        generated = text.tokens[text.num_prompt :].tolist()
        start = 0 if self.open is None else self.open.end_at_start(generated)
        if start is None:
            return logits
        due = start + self.budget  # where `close` begins
        written = range(due, due + len(self.close))
        banned = torch.zeros(logits.shape, dtype=torch.bool)
        for row in range(len(logits)):
            place = first + row - text.num_prompt
            if place in written and not self.mark.is_in(generated[start:due]):
                banned[row] = True
                banned[row, self.close[place - due]] = False
        return _without(logits, banned)


def penalties_of(sampling: SamplingParams, tokenizer: Tokenizer, end_tokens: Collection[int]) -> list[Penalty]:
    """The penalties that are on, in the order in which they apply (docs/sampling.md). end_tokens: the tokens that end
    the text."""
    found: list[Penalty] = [] if sampling.thoughts is None else [_closed(sampling.thoughts, tokenizer)]
    if sampling.repetition_penalty != 1.0:
        found.append(Repetition(sampling.repetition_penalty, sampling.penalty_window))
    if sampling.presence_penalty or sampling.frequency_penalty:
        found.append(Occurrences(sampling.presence_penalty, sampling.frequency_penalty, sampling.penalty_window))
    if sampling.no_repeat_ngram:
        found.append(NoRepeatNgram(sampling.no_repeat_ngram))
    if sampling.dry_multiplier:
        breakers = breakers_of(tokenizer, sampling.dry_breakers)
        found.append(
            Dry(sampling.dry_multiplier, sampling.dry_base, sampling.dry_allowed_length, sampling.dry_window, breakers)
        )
    if sampling.min_tokens and not sampling.ignore_eos:
        found.append(MinTokens(sampling.min_tokens, end_tokens))
    return found


def _closed(thoughts: ThoughtBudget, tokenizer: Tokenizer) -> ClosedThoughts:
    added = {token: name for name, token in tokenizer.added_tokens(special=False).items() if not name.isspace()}

    def mark(text: str) -> Mark:
        tokens = tuple(tokenizer.encode_piece(text))
        return Mark(text, tokens if added.keys() & set(tokens) else (), tokenizer.decode)

    close = tuple(tokenizer.encode_piece(thoughts.close))
    closing = next((added[token] for token in close if token in added), thoughts.close.strip())
    opening = mark(thoughts.open) if thoughts.open else None
    return ClosedThoughts(thoughts.tokens, close, mark(closing), opening)


def _without(logits: Tensor, banned: Tensor) -> Tensor:
    return logits.masked_fill(banned.to(logits.device), -torch.inf)


def _counts(text: Text, start: int, first: int, logits: Tensor, window: int) -> Tensor:
    """The number of occurrences of each token, among the tokens from `start` on and the last `window` before each place
    of `logits`, [n, V] int32."""
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
