"""The distribution of one place by its definition, in fp64 and in plain Python: slow, and apart from the real code.

Also what stands in for a tokenizer and a grammar where tokens are small numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from offload.decode.sampling import SamplingParams
from offload.grammar.grammar import Grammar
from offload.text.characters import Characters

Row = list[float]


class Words:
    """A tokenizer of some texts, token 0 the first of them."""

    def __init__(self, words: Sequence[str], special: Sequence[str] = ()) -> None:
        self.words, self._special = (*words, *special), special

    def vocabulary(self) -> dict[str, int]:
        return {word: token for token, word in enumerate(self.words)}

    def added_tokens(self, *, special: bool) -> dict[str, int]:
        return {name: self.words.index(name) for name in self._special}

    def characters(self) -> Characters:
        return Characters()

    def join(self, strings: Sequence[str]) -> str:
        return "".join(strings)

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(self.words[token] for token in tokens if self.words[token] not in self._special)


class Letters(Words):
    """Token 0 is "a", 1 is "b" ..."""

    def __init__(self, size: int) -> None:
        super().__init__([chr(ord("a") + token) for token in range(size)])

    def encode_piece(self, text: str) -> list[int]:
        return [ord(letter) - ord("a") for letter in text]


@dataclass(frozen=True)
class Rule:
    """A grammar: `allowed(tokens)` are the tokens that may follow the generated `tokens`; none: the text is over.
    guesses: how it is thought to go on behind these, which nothing may depend on."""

    size: int
    allowed: Callable[[tuple[int, ...]], Collection[int]]
    guesses: Callable[[tuple[int, ...]], list[int]] = lambda tokens: []

    def state(self) -> Any:
        return RuleState(self)


@dataclass(frozen=True)
class GrammarRule(Rule):
    """A rule that says what a real grammar means."""

    grammar: Grammar | None = None

    def state(self) -> Any:
        assert self.grammar is not None
        return self.grammar.state()


class RuleState:
    """The protocol of `GrammarState`, for a rule."""

    def __init__(self, rule: Rule) -> None:
        self._rule, self._tokens = rule, tuple[int, ...]()

    @property
    def place(self) -> int:
        return len(self._tokens)

    def advance(self, tokens: Sequence[int]) -> int:
        for count, token in enumerate(tokens):
            if token not in self._rule.allowed(self._tokens):
                return count
            self._tokens += (token,)
        return len(tokens)

    def rewind(self, place: int) -> None:
        assert 0 <= place <= self.place
        self._tokens = self._tokens[:place]

    def masks(self, tokens: Sequence[int]) -> Tensor:
        """All may come where the text is over."""
        rows = torch.ones(len(tokens) + 1, self._rule.size, dtype=torch.bool)
        for count in range(len(tokens) + 1):
            allowed = self._rule.allowed((*self._tokens, *tokens[:count]))
            if allowed:
                rows[count] = torch.tensor([token in allowed for token in range(self._rule.size)])
            if count < len(tokens) and tokens[count] not in allowed:
                break
        return rows

    def longest(self, tokens: Sequence[int]) -> int:
        start = self.place
        count = self.advance(tokens)
        self.rewind(start)
        return count

    def forced(self) -> list[int]:
        found: list[int] = []
        while len(allowed := self._rule.allowed((*self._tokens, *found))) == 1 and len(found) < 8:
            found += allowed
        return found

    def guessed(self) -> list[int]:
        return self._rule.guesses(self._tokens)


def probabilities(
    logits: Row,
    before: Sequence[int],
    num_prompt: int,
    params: SamplingParams,
    *,
    end_tokens: Collection[int] = (),
    rule: Rule | None = None,
) -> Row:
    """Of the token behind `before`."""
    row = list(logits)
    if rule is not None:
        allowed = rule.allowed(tuple(before[num_prompt:]))
        row = [x if token in allowed else -math.inf for token, x in enumerate(row)]
    row = _biased(row, params, end_tokens)
    row = _penalised(row, before, num_prompt, params)
    if params.no_repeat_ngram:
        row = _without(row, _ngram_ends(before, params.no_repeat_ngram))
    if params.dry_multiplier:
        row = [x - _dry(token, before, params) for token, x in enumerate(row)]
    if len(before) - num_prompt < params.min_tokens and not params.ignore_eos:
        row = _without(row, end_tokens)
    return _warped(row, params)


def _biased(row: Row, params: SamplingParams, end_tokens: Collection[int]) -> Row:
    never = [token for token, bias in params.logit_bias if bias == -math.inf]
    added = {token: bias for token, bias in params.logit_bias if bias > -math.inf}
    row = [x + added.get(token, 0.0) for token, x in enumerate(row)]
    return _without(row, [*never, *(end_tokens if params.ignore_eos else ())])


def _without(row: Row, banned: Collection[int]) -> Row:
    left = [-math.inf if token in banned else x for token, x in enumerate(row)]
    return left if any(x > -math.inf for x in left) else row


def _penalised(row: Row, before: Sequence[int], num_prompt: int, params: SamplingParams) -> Row:
    start = max(len(before) - params.penalty_window, 0) if params.penalty_window else 0
    seen, generated = list(before[start:]), list(before[max(start, num_prompt) :])
    penalty = params.repetition_penalty
    row = [(x / penalty if x > 0 else x * penalty) if token in seen else x for token, x in enumerate(row)]
    frequency, presence = params.frequency_penalty, params.presence_penalty
    return [x - frequency * generated.count(t) - presence * (t in generated) for t, x in enumerate(row)]


def _ngram_ends(before: Sequence[int], size: int) -> set[int]:
    """Tokens that would end a run of `size` tokens that is there already."""
    last = tuple(before[len(before) - size + 1 :])
    runs = [tuple(before[start : start + size]) for start in range(len(before) - size + 1)]
    return {run[-1] for run in runs if run[:-1] == last} if len(before) >= size - 1 else set()


def _dry(token: int, before: Sequence[int], params: SamplingParams) -> float:
    """What `token` costs."""
    text = list(before[max(len(before) - params.dry_window, 0) :] if params.dry_window else before)
    letters = "".join(chr(ord("a") + each) for each in text)

    def ends(end: int, last: str = "") -> bool:
        """Whether a breaker ends with the last one of the first `end` letters and `last`."""
        return (letters[:end] + last).endswith(params.dry_breakers)

    if ends(len(text), chr(ord("a") + token)):
        return 0.0
    longest = 0
    for at in range(1, len(text)):
        if text[at] != token:
            continue
        length = 0
        while length < at and text[at - 1 - length] == text[-1 - length] and not ends(len(text) - length):
            length += 1
        longest = max(longest, length)
    if longest < params.dry_allowed_length:
        return 0.0
    return params.dry_multiplier * params.dry_base ** (longest - params.dry_allowed_length)


def _warped(row: Row, params: SamplingParams) -> Row:
    best = max(row)
    if params.temperature == 0.0:
        return [1.0 if token == row.index(best) else 0.0 for token in range(len(row))]
    if params.top_n_sigma:
        there = [x for x in row if x > -math.inf]
        mean = sum(there) / len(there)
        sigma = math.sqrt(sum((x - mean) ** 2 for x in there) / len(there))
        row = [x if x >= best - params.top_n_sigma * sigma else -math.inf for x in row]
    row = [(x - best) / params.temperature for x in row]
    if 0 < params.top_k < len(row):
        least = sorted(row, reverse=True)[params.top_k - 1]
        row = [x if x >= least else -math.inf for x in row]
    probs = _normalised([math.exp(x) for x in row])
    if params.top_p < 1.0:
        kept, mass = set[int](), 0.0
        for token in sorted(range(len(probs)), key=lambda token: -probs[token]):
            if mass < params.top_p:
                kept.add(token)
            mass += probs[token]
        probs = _normalised([p if token in kept else 0.0 for token, p in enumerate(probs)])
    if params.min_p:
        probs = _normalised([p if p >= params.min_p * max(probs) else 0.0 for p in probs])
    if params.typical_p < 1.0:
        probs = _typical(probs, params.typical_p)
    if params.xtc_probability:
        above = [p for p in probs if p >= params.xtc_threshold]
        rest = _normalised([0.0 if above and p > min(above) else p for p in probs])
        share = params.xtc_probability
        probs = [(1 - share) * p + share * other for p, other in zip(probs, rest, strict=True)]
    return probs


def _typical(probs: Row, wanted: float) -> Row:
    entropy = sum(-p * math.log(p) for p in probs if p > 0)
    distance = [abs(-math.log(p) - entropy) if p > 0 else math.inf for p in probs]
    mass, last = 0.0, math.inf
    for token in sorted(range(len(probs)), key=lambda token: distance[token]):
        if mass < wanted:
            last = distance[token]
        mass += probs[token]
    return _normalised([p if distance[token] <= last else 0.0 for token, p in enumerate(probs)])


def _normalised(weights: Row) -> Row:
    total = sum(weights)
    return [weight / total for weight in weights]
