"""Speculation under penalties, other samplers and constraints: what is emitted follows the target's own distribution,
which depends on the tokens before a place, drafted ones included."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import combinations
from typing import Any

import pytest
from tokenizers import AddedToken

from kit.enumeration import (
    Case,
    Distribution,
    MixedLengths,
    TurnLengths,
    emission_error,
    generation_error,
    only,
    proposal_error,
)
from kit.models import byte_tokenizer
from kit.sampling_reference import GrammarRule, Rule
from offload.decode.distribution import grammar_of
from offload.decode.sampling import SETTINGS, SamplingParams
from offload.text.tokenizer import Tokenizer
from test_exactness import one_level, two_levels
from triforce_cli.tools.call_grammar import with_calls
from triforce_cli.tools.calls import Calls
from triforce_cli.tools.choice import ToolChoice

ROUNDED = 1e-5  # the real distribution is in fp32, its definition in fp64
PROMPT = (0, 1, 2, 0, 1)


def by_turns(tokens: tuple[int, ...]) -> set[int]:
    """Of the tokens 0, 1 and 2; after a 0 only 1 may come."""
    if len(tokens) % 2 == 0:
        return {0, 2}
    return {1} if tokens[-1] == 0 else {0, 1, 2}


def guesses(tokens: tuple[int, ...]) -> list[int]:
    """One that may follow or may not, and two behind it."""
    return [len(tokens) % 3, sum(tokens) % 3, 1]


TURNS = Rule(3, by_turns)
GUESSED = Rule(3, by_turns, guesses)
CONTROLS: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 2.5, "penalty_window": 0},
    "repetition in a window": {"repetition_penalty": 2.5, "penalty_window": 2},
    "occurrences": {"presence_penalty": 1.0, "frequency_penalty": 0.7, "penalty_window": 0},
    "occurrences in a window": {"presence_penalty": -0.5, "frequency_penalty": 1.5, "penalty_window": 2},
    "no pair twice": {"no_repeat_ngram": 2},
    "no triple twice": {"no_repeat_ngram": 3},
    "DRY": {"dry_multiplier": 1.0, "dry_base": 2.0, "dry_allowed_length": 1, "dry_breakers": ("c",)},
    "DRY in a window": {"dry_multiplier": 1.0, "dry_allowed_length": 1, "dry_window": 4, "dry_breakers": ()},
    "biases": {"logit_bias": ((0, 1.5), (1, -float("inf")))},
    "end tokens wait": {"min_tokens": 2},
    "no end": {"ignore_eos": True},
    "top-n-sigma": {"top_n_sigma": 0.8},
    "temperature": {"temperature": 0.5},
    "top-p": {"top_p": 0.7},
    "top-k": {"top_k": 2},
    "min-p": {"min_p": 0.4},
    "typical": {"typical_p": 0.6},
    "XTC": {"xtc_probability": 0.5, "xtc_threshold": 0.25},
}


def controlled(case: Case, **params: Any) -> Case:
    return replace(case, params=SamplingParams(**({"temperature": 1.0, "top_p": 1.0} | params)))


CASES: dict[str, Case] = {
    **{f"one level, {name}": controlled(one_level(3, 2, prompt=PROMPT), **own) for name, own in CONTROLS.items()},
    **{f"two levels, {name}": controlled(two_levels(3, 2, 1, prompt=PROMPT), **own) for name, own in CONTROLS.items()},
    **{
        f"{levels}, a rule{where}": controlled(replace(case, rule=TURNS, **changes))
        for levels, case in (("one level", one_level(3, 3, 4)), ("two levels", two_levels(3, 2, 1)))
        for where, changes in {
            "": {},
            ", lookups": {"lookup": True, "prompt": PROMPT},
            ", lookups among drafted tokens": {"lookup": True, "prompt": (0, 1, 0), "adapt": MixedLengths},
        }.items()
    },
    "one level, a rule, guesses": controlled(one_level(3, 3, 4, rule=GUESSED)),
    "one level, a rule, guesses alone": controlled(one_level(3, 3, 4, draft=None, rule=GUESSED)),
    "two levels, a rule, guesses, lookups": controlled(
        two_levels(3, 2, 1, rule=GUESSED, lookup=True, adapt=MixedLengths, prompt=PROMPT)
    ),
    "one level, a rule, guesses, greedy": controlled(one_level(3, 3, 4, draft=None, rule=GUESSED), temperature=0.0),
    "one level, a rule, proposals that break it": controlled(
        one_level(3, 3, 4, draft=None, ngram=True, rule=TURNS, prompt=(0, 1))
    ),
    "one level, a rule, greedy": controlled(one_level(3, 3, 4, rule=TURNS), temperature=0.0),
    "one level, penalties, greedy": controlled(
        one_level(4, 3, 4, prompt=PROMPT), temperature=0.0, repetition_penalty=2.0, dry_multiplier=1.0
    ),
    "two levels, a draft of both": controlled(
        two_levels(3, 3, 2, straight=True, adapt=TurnLengths, prompt=PROMPT), **CONTROLS["repetition in a window"]
    ),
    **{
        f"{levels}, tokens that are never drawn": controlled(replace(case, suppressed=(1,)), **CONTROLS["top-k"])
        for levels, case in (
            ("one level", one_level(3, 2, prompt=PROMPT, lookup=True)),
            ("two levels", two_levels(3, 2, 1, prompt=PROMPT)),
        )
    },
    "top-p after penalties": controlled(one_level(3, 2, prompt=PROMPT), **CONTROLS["repetition"], **CONTROLS["top-p"]),
    "biases and repetition": controlled(one_level(3, 2, prompt=PROMPT), **CONTROLS["repetition"], **CONTROLS["biases"]),
    "lookups, DRY": controlled(one_level(3, 3, 3, lookup=True, prompt=PROMPT), **CONTROLS["DRY"]),
}
PAIRS: dict[str, Case] = {
    f"{one} and {other}": controlled(one_level(3, 2, prompt=PROMPT, rule=None), **(CONTROLS[one] | CONTROLS[other]))
    for one, other in combinations(CONTROLS, 2)
    if not CONTROLS[one].keys() & CONTROLS[other].keys()
} | {
    f"a rule and {name}": controlled(one_level(3, 2, prompt=PROMPT, rule=TURNS), **own)
    for name, own in CONTROLS.items()
    if name != "no end"
}
MIXES: dict[str, Callable[..., float]] = {
    f"{name}, a whole text": partial(generation_error, controlled(case, **params), (2,), 1)
    for name, case, params in [
        ("penalties", one_level(3, 2, 4), CONTROLS["repetition"] | CONTROLS["occurrences in a window"]),
        ("DRY and no triple twice", one_level(3, 3, 4), CONTROLS["DRY"] | CONTROLS["no triple twice"]),
        ("end tokens wait", two_levels(3, 2, 1), CONTROLS["end tokens wait"]),
        ("XTC and typical", two_levels(3, 2, 1), CONTROLS["XTC"] | CONTROLS["typical"]),
    ]
}
CHECKS: dict[str, Callable[..., float]] = {
    **{f"controlled: {name}": partial(emission_error, case) for name, case in CASES.items()},
    **{f"controlled: {name}": check for name, check in MIXES.items()},
}


def test_every_setting_is_among_the_controls() -> None:
    """But for the seed, which the enumeration replaces."""
    assert SETTINGS.keys() - {"seed"} <= {name for own in CONTROLS.values() for name in own}


# Controls that two levels are tried with by default, one of each kind; one level with all of them.
KINDS = ("repetition in a window", "no pair twice", "DRY in a window", "biases", "end tokens wait", "XTC", "top-p")
DEEP = {f"two levels, {name}" for name in CONTROLS if name not in KINDS}


def marked(name: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.deep] if name in DEEP else []


@pytest.mark.parametrize("case", [pytest.param(case, id=name, marks=marked(name)) for name, case in CASES.items()])
def test_every_emitted_prefix_follows_the_controlled_distribution(case: Case) -> None:
    assert emission_error(case) < ROUNDED


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=[pytest.mark.deep] * (i % 9 > 0))
        for i, (name, case) in enumerate(PAIRS.items())
    ],
)
def test_two_at_a_time(case: Case) -> None:
    assert emission_error(case) < ROUNDED


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=marked(name)) for name in CASES if name.startswith("two levels")]
)
def test_proposed_tokens_follow_the_rows_handed_up_with_them(name: str) -> None:
    assert proposal_error(CASES[name]) < ROUNDED


@pytest.mark.parametrize("check", MIXES.values(), ids=MIXES)
def test_whole_texts_follow_it(check: Callable[..., float]) -> None:
    assert check() < ROUNDED


THOUGHT, CLOSE, OPEN, CLOSED = "x", "</think>", "<tool_call>", "</tool_call>"
BEGIN, END = '{"name": "f", "arguments": {"n": ', "}}"
FUNCTION = {"name": "f", "parameters": {"properties": {"n": {"enum": [1, 12]}}, "required": ["n"]}}
CALLED = [f"{THOUGHT * k}{CLOSE}{OPEN}{BEGIN}{n}{END}{CLOSED}" for k in range(9) for n in (1, 12)]


def due_call() -> tuple[GrammarRule, list[int]]:
    """(the grammar of thoughts and a call, with the rule that CALLED are all such replies; tokens of which they are
    made)."""
    inner = byte_tokenizer()
    inner.add_tokens([AddedToken(text, special=False, normalized=False) for text in (CLOSE, OPEN, BEGIN, END, CLOSED)])
    tokenizer = Tokenizer(inner)
    ids = {text: tokenizer.encode_piece(text)[0] for text in (THOUGHT, CLOSE, OPEN, BEGIN, "1", "2", END, CLOSED)}
    names = {token: text for text, token in ids.items()}
    calls = Calls([{"type": "function", "function": FUNCTION}], OPEN, ToolChoice(is_due=True, is_one=True))
    constraint = with_calls(None, calls, {ids[mark]: mark for mark in (CLOSE, OPEN)}, ("", CLOSE))
    end = tokenizer.eos_token_id or 0

    def allowed(tokens: tuple[int, ...]) -> set[int]:
        text = "".join(names.get(token, "") for token in tokens)
        if text in CALLED:
            return {end}  # drafts go on past the end of a call
        return {token for token, more in names.items() if any(each.startswith(text + more) for each in CALLED)}

    size = len(tokenizer)
    grammar = grammar_of(constraint, tokenizer, size, frozenset({end}))
    return GrammarRule(size, allowed, grammar=grammar), [*names, end]


@pytest.mark.parametrize("levels", [one_level(3, 2), pytest.param(two_levels(3, 2, 1), marks=pytest.mark.deep)])
@pytest.mark.parametrize("lookup", [False, True])
def test_a_call_that_is_due_follows_the_targets_distribution_under_its_grammar(levels: Case, lookup: bool) -> None:
    """Thoughts before it, and its arguments by their schema."""
    rule, tokens = due_call()

    def law(name: str) -> Distribution:
        thoughts, call = only(rule.size, name, tokens[:2]), only(rule.size, name, tokens)
        return lambda sequence: call(sequence) if tokens[1] in sequence else thoughts(sequence)

    laws: dict[str, Any] = {name: law(name) for name in ("target", "retrieval", "draft") if getattr(levels, name)}
    case = replace(levels, vocabulary=rule.size, rule=rule, lookup=lookup, prompt=(tokens[0],), num_tokens=6, **laws)
    assert emission_error(controlled(case)) < ROUNDED
