"""Sampling parameters of a request, and the table of samplers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, get_type_hints

from offload.errors import UsageError
from offload.grammar.constraint import Constraint
from offload.seeds import NUM_SEEDS

BREAKERS = ("\n", ":", '"', "*")  # strings that end a repetition, as in llama.cpp
MOST_BREAKERS, MOST_OF_BREAKER = 64, 64  # texts, characters of one: all their splits are compared with every token
_BIAS = 100.0  # the largest bias


@dataclass(frozen=True)
class Setting:
    """Help text and range of a field of `SamplingParams` that is a number or a switch.

    low, high: the least and the greatest value; above: `low` itself is not allowed. off: the value with which the
    sampler changes nothing; None: the field is no sampler by itself. means: what other single values are. common:
    --help shows the option, not only --help-all.
    """

    help: str
    low: float = -math.inf
    high: float = math.inf
    above: bool = False
    off: float | None = None
    means: Mapping[float, str] = field(default_factory=dict)
    common: bool = False

    @property
    def wanted(self) -> str:
        """The range in words."""
        named = self.means if self.off is None else {self.off: "off"} | dict(self.means)
        low, high = (_written(end) + (f" ({named[end]})" if end in named else "") for end in (self.low, self.high))
        if self.high == math.inf:
            return f"{low} or more"
        inner = "".join(f" ({value:g} is {name})" for value, name in named.items() if self.low < value < self.high)
        return (f"above {low} and at most {high}" if self.above else f"from {low} to {high}") + inner

    def allows(self, value: float) -> bool:
        """Whether the range has the value; it has no NaN."""
        return (self.low < value if self.above else self.low <= value) and value <= self.high


@dataclass(frozen=True)
class ThoughtBudget:
    """A limit on the thoughts at the beginning of a text: after that many tokens of them, `close` is forced.

    open: the text that begins thoughts; "" where the prompt has opened them. close: the text that ends them, with the
    white space around it.
    """

    tokens: int
    close: str
    open: str = ""

    def __post_init__(self) -> None:
        if self.tokens < 0:
            raise UsageError(f"thinking-tokens is {self.tokens}, it must be 0 or more")


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """The parameters of the distribution that a request samples from, a function of the tokens before a place and of
    the model's logits there. `temperature` 0 is greedy: one-hot, not a limit of soft distributions.

    Samplers that are on apply in the order of docs/sampling.md: the constraint, biases, the end of thoughts, penalties,
    no-repeat n-grams, DRY, end tokens; temperature; top-n-sigma, top-k, top-p, min-p, typical, XTC, each truncation to
    the renormalised result of the one before.
    Fields with a `Setting` are the table of samplers (`SETTINGS`). Options have the order of fields.
    logit_bias: pairs of a token, as its id or its text, and the number added to its logit; -inf bans the token.
    """

    temperature: Annotated[
        float,
        Setting("Randomness; 0 is none.", 0, 100, means={0: "greedy"}, common=True),
    ] = 0.6
    top_p: Annotated[
        float,
        Setting("Keep likely tokens up to this total probability; 1 is off.", 0, 1, above=True, off=1, common=True),
    ] = 0.9
    top_k: Annotated[int, Setting("Keep N tokens; 0 is off.", 0, off=0, common=True)] = 0
    min_p: Annotated[
        float,
        Setting(
            "Drop tokens below this share of the likeliest; 0 is off.",
            0,
            1,
            off=0,
            means={1: "only the likeliest"},
            common=True,
        ),
    ] = 0.0
    seed: Annotated[
        int | None,
        Setting("Number that gives the same text again.", 0, NUM_SEEDS - 1, common=True),
    ] = None
    constraint: Constraint | None = None
    repetition_penalty: Annotated[
        float,
        Setting("Make tokens that the text has already less likely; 1 is off.", 0, 10, above=True, off=1, common=True),
    ] = 1.0
    presence_penalty: Annotated[
        float, Setting("Number taken from the logits of generated tokens; 0 is off.", -2, 2, off=0)
    ] = 0.0
    frequency_penalty: Annotated[
        float, Setting("Number taken from a token's logit for each time it was generated; 0 is off.", -2, 2, off=0)
    ] = 0.0
    penalty_window: Annotated[
        int,
        Setting(
            "Number of last tokens that the repetition, presence and frequency penalties look at; 0: the whole text.",
            0,
            means={0: "the whole text"},
        ),
    ] = 512
    no_repeat_ngram: Annotated[
        int, Setting("Never write this many tokens in a row a second time; 0 is off.", 0, off=0)
    ] = 0
    dry_multiplier: Annotated[
        float,
        Setting("DRY: strength of the penalty on prolonging a repetition; 0 is off, 0.8 is usual.", 0, 100, off=0),
    ] = 0.0
    dry_base: Annotated[float, Setting("DRY: each further repeated token multiplies the penalty by this.", 1, 10)] = (
        1.75
    )
    dry_allowed_length: Annotated[int, Setting("DRY: repetitions of fewer tokens have no penalty.", 1)] = 2
    dry_window: Annotated[
        int,
        Setting("DRY: number of last tokens that are looked at; 0: the whole text.", 0, means={0: "the whole text"}),
    ] = 0
    dry_breakers: tuple[str, ...] = BREAKERS
    typical_p: Annotated[
        float,
        Setting("Keep the most typical tokens up to this total probability; 1 is off.", 0, 1, above=True, off=1),
    ] = 1.0
    top_n_sigma: Annotated[
        float,
        Setting("Keep logits within this many standard deviations of the largest; 0 is off.", 0, 100, off=0),
    ] = 0.0
    xtc_probability: Annotated[
        float, Setting("XTC: probability of leaving out the likeliest tokens; 0 is off.", 0, 1, off=0)
    ] = 0.0
    xtc_threshold: Annotated[
        float,
        Setting("XTC: tokens above this probability are left out, but for the least likely of them.", 0, 1, above=True),
    ] = 0.1
    logit_bias: tuple[tuple[int | str, float], ...] = ()
    min_tokens: Annotated[int, Setting("Number of new tokens before the text may end.", 0, off=0)] = 0
    ignore_eos: Annotated[bool, Setting("Write until --max-tokens: the text cannot end.", off=False)] = False
    thoughts: ThoughtBudget | None = None

    def __post_init__(self) -> None:
        for row in SETTINGS.values():
            row.check(getattr(self, row.name))
        for token, bias in self.logit_bias:
            if not (abs(bias) <= _BIAS or bias == -math.inf):
                raise UsageError(
                    f"logit-bias of {token!r} is {bias}, it must be from -{_BIAS:g} to {_BIAS:g}, or -inf (never)"
                )
        if "" in self.dry_breakers:
            raise UsageError("dry-breaker is empty, it must be at least one character")
        if len(self.dry_breakers) > MOST_BREAKERS or any(len(text) > MOST_OF_BREAKER for text in self.dry_breakers):
            raise UsageError(
                f"dry-breaker has {len(self.dry_breakers)} texts, the longest of "
                f"{max(map(len, self.dry_breakers))} characters; it may have {MOST_BREAKERS} of {MOST_OF_BREAKER}"
            )
        if self.ignore_eos and self.constraint is not None:
            raise UsageError("ignore-eos lets no text end, and a constraint says where it ends; leave one of them out")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True, kw_only=True)
class Row(Setting):
    """A row of the table of samplers: a field of `SamplingParams` with its setting. kind: its type."""

    name: str
    kind: Any
    default: Any

    @property
    def label(self) -> str:
        """The name in options and messages: "top-p"."""
        return self.name.replace("_", "-")

    @property
    def optional(self) -> bool:
        """Whether the value may be None, as for a seed that is not given."""
        return self.default is None

    def check(self, value: Any) -> None:
        """Raises UsageError for a value out of range."""
        if not (self.allows(value) if value is not None else self.optional):
            raise UsageError(f"{self.label} is {value}, it must be {self.wanted}")


def _written(number: float) -> str:
    return "2^63 - 1" if number == NUM_SEEDS - 1 else f"{number:g}"


def _rows() -> Iterator[Row]:
    hints = get_type_hints(SamplingParams, include_extras=True)
    for each in fields(SamplingParams):
        for setting in getattr(hints[each.name], "__metadata__", ()):
            yield Row(name=each.name, kind=hints[each.name].__origin__, default=each.default, **vars(setting))


# The table of samplers: options, batch lines, /set and configuration keys are generated from it.
SETTINGS: Mapping[str, Row] = {row.name: row for row in _rows()}
