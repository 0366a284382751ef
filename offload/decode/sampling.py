"""What a request asks of the distribution that its tokens are drawn from."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from offload.decode.constraint import Constraint
from offload.errors import UsageError
from offload.seeds import NUM_SEEDS

BREAKERS = ("\n", ":", '"', "*")  # strings that end a repetition, as in llama.cpp
_BIAS = 100.0  # at most

# Of each field, whether a value is allowed and what it must be.
_RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "temperature": (lambda x: 0.0 <= x <= 100.0, "from 0 (greedy) to 100"),
    "top_k": (lambda x: x >= 0, "0 (off) or more"),
    "top_p": (lambda x: 0.0 < x <= 1.0, "above 0 and at most 1 (off)"),
    "min_p": (lambda x: 0.0 <= x <= 1.0, "from 0 (off) to 1 (only the likeliest)"),
    "typical_p": (lambda x: 0.0 < x <= 1.0, "above 0 and at most 1 (off)"),
    "top_n_sigma": (lambda x: 0.0 <= x <= 100.0, "from 0 (off) to 100"),
    "xtc_probability": (lambda x: 0.0 <= x <= 1.0, "from 0 (off) to 1"),
    "xtc_threshold": (lambda x: 0.0 < x <= 1.0, "above 0 and at most 1"),
    "repetition_penalty": (lambda x: 0.0 < x <= 10.0, "above 0 and at most 10 (1 is off)"),
    "presence_penalty": (lambda x: -2.0 <= x <= 2.0, "from -2 to 2 (0 is off)"),
    "frequency_penalty": (lambda x: -2.0 <= x <= 2.0, "from -2 to 2 (0 is off)"),
    "penalty_window": (lambda x: x >= 0, "0 (the whole text) or more"),
    "no_repeat_ngram": (lambda x: x >= 0, "0 (off) or more"),
    "dry_multiplier": (lambda x: 0.0 <= x <= 100.0, "from 0 (off) to 100"),
    "dry_base": (lambda x: 1.0 <= x <= 10.0, "from 1 to 10"),
    "dry_allowed_length": (lambda x: x >= 1, "1 or more"),
    "dry_window": (lambda x: x >= 0, "0 (the whole text) or more"),
    "min_tokens": (lambda x: x >= 0, "0 (off) or more"),
    "seed": (lambda x: x is None or 0 <= x < NUM_SEEDS, "from 0 to 2^63 - 1"),
}


@dataclass(frozen=True)
class ThoughtBudget:
    """Thoughts at the beginning of a text: after so many tokens of them `close` is written, unless it was before.

    open: what has to be written for thoughts to begin; "" where the prompt has opened them. close: with the white space
    around it.
    """

    tokens: int
    close: str
    open: str = ""

    def __post_init__(self) -> None:
        if self.tokens < 0:
            raise UsageError(f"thinking-tokens is {self.tokens}, it must be 0 or more")


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """The distribution a request samples from, as a function of the tokens before a place and of the model's logits
    there. `temperature` 0 is greedy: one-hot, not a limit of soft distributions.

    What is on applies in the order of docs/sampling.md: the constraint, biases, the end of thoughts, penalties,
    no-repeat n-grams, DRY, end tokens; temperature; top-n-sigma, top-k, top-p, min-p, typical, XTC, each truncation to
    the renormalised result of the one before.
    logit_bias: pairs of a token, its id or its text, and what is added to its logit; -inf: it is never taken.
    """

    temperature: float = 0.6
    top_k: int = 0
    top_p: float = 0.9
    min_p: float = 0.0
    typical_p: float = 1.0
    top_n_sigma: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_window: int = 512
    no_repeat_ngram: int = 0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_window: int = 0
    dry_breakers: tuple[str, ...] = BREAKERS
    logit_bias: tuple[tuple[int | str, float], ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    constraint: Constraint | None = None
    thoughts: ThoughtBudget | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        for name, (allowed, wanted) in _RANGES.items():
            value = getattr(self, name)
            if not allowed(value):
                raise UsageError(f"{name.replace('_', '-')} is {value}, it must be {wanted}")
        for token, bias in self.logit_bias:
            if not (abs(bias) <= _BIAS or bias == -math.inf):
                raise UsageError(
                    f"logit-bias of {token!r} is {bias}, it must be from -{_BIAS:g} to {_BIAS:g}, or -inf (never)"
                )
        if "" in self.dry_breakers:
            raise UsageError("dry-breaker is empty, it must be at least one character")
        if self.ignore_eos and self.constraint is not None:
            raise UsageError("ignore-eos lets no text end, and a constraint says where it ends; leave one of them out")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def looks_back(self) -> bool:
        """Whether the distribution of a place depends on the tokens before it, otherwise than through the logits."""
        repeats = self.repetition_penalty != 1.0 or self.presence_penalty or self.frequency_penalty
        return bool(
            self.constraint is not None
            or self.thoughts is not None
            or repeats
            or self.no_repeat_ngram
            or self.dry_multiplier
            or (self.min_tokens and not self.ignore_eos)
        )
