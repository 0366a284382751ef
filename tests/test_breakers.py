"""DRY's breakers, however the tokens of a text cut them."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from kit.sampling_reference import Words
from offload.decode.breakers import Breakers, breakers_of
from offload.decode.penalties import Dry, Text
from offload.decode.sampling import SamplingParams
from offload.errors import UsageError
from offload.text.tokenizer import Tokenizer

DEMO = Path(__file__).parent.parent / "triforce_cli" / "models" / "demo-target"
WORDS = ("a", "b", "ab", "ba", "abb", "\u00e9", "<x>")
TEXTS = st.text("ab\u00e9<x>", min_size=1, max_size=4)


def breakers(*texts: str, words: tuple[str, ...] = WORDS) -> Breakers:
    tokenizer: Any = Words(words[:-1], words[-1:])
    return breakers_of(tokenizer, texts)


def completing(found: Breakers, tokens: list[int]) -> list[bool]:
    array = np.array(tokens, np.int32)
    return [found.completed(array[:place], token) for place, token in enumerate(tokens)]


@given(st.lists(st.integers(0, len(WORDS) - 1), max_size=9), st.lists(TEXTS, max_size=3))
@example([0, 1, 1], ["abb", "bb"])
@example([2, 1], ["abb"])
@example([6], ["<x>"])
def test_a_token_completes_a_breaker_where_the_text_of_all_has_it(tokens: list[int], texts: list[str]) -> None:
    words = [WORDS[token] for token in tokens]
    ends = [len("".join(words[:count])) for count in range(len(words) + 1)]
    text, expected = "".join(words), []
    for start, end in pairwise(ends):
        places = range(start + 1, end + 1)
        expected.append(any(text[:place].endswith(breaker) for place in places for breaker in texts))
    assert completing(breakers(*texts), tokens) == expected


def test_tokens_of_a_real_vocabulary() -> None:
    tokenizer = Tokenizer.from_folder(DEMO)
    found = breakers_of(tokenizer, ("\n", "looked at"))
    tokens = tokenizer.encode_piece("Anne looked at the sea\nand so on")
    ended = [tokenizer.decode([token]) for token, ends in zip(tokens, completing(found, tokens), strict=True) if ends]
    assert len(ended) == 2
    assert ended[0].endswith("t")
    assert "\n" in ended[1]


def costs(found: Breakers, tokens: list[int], **fields: Any) -> dict[int, float]:
    """What each token that costs something does, behind `tokens`."""
    dry = Dry(**{"multiplier": 1.0, "base": 2.0, "allowed_length": 2, "window": 0, "breakers": found} | fields)
    row = dry(torch.zeros(1, 99), Text(np.array(tokens, np.int32), 1), len(tokens))[0]
    return {token: -cost for token, cost in enumerate(row.tolist()) if cost}


A, B, AB, X = 0, 1, 2, 6


def test_a_breaker_of_several_tokens_ends_a_repetition_and_completing_it_costs_nothing() -> None:
    """It broke nothing: only tokens that had all of it in them did."""
    cycle, other = [90, 91, A, B], breakers("q")
    assert costs(other, 3 * cycle + cycle[:2]) == {A: 2.0**8}
    assert costs(breakers("ab"), 3 * cycle + cycle[:2]) == {A: 1.0}
    assert costs(breakers("ab"), 3 * cycle + cycle[:3]) == {}
    assert costs(breakers("ab"), 3 * [90, 91, 92, AB] + [90, 91, 92]) == {}
    assert costs(breakers("<x>"), 3 * [90, 91, 92, X] + [90, 91, 92]) == {}
    assert costs(breakers("<x"), 3 * [90, 91, 92, X] + [90, 91]) == {92: 1.0}


@pytest.mark.parametrize("length", [1, 2, 3, 8, 9, 10, 11, 12, 30, 100])
def test_a_repetition_of_any_length_costs_its_power(length: int) -> None:
    """Two faults that no test noticed: lengths over 8 beyond the allowed one counted as 8, or as one more."""
    tokens = [*range(10, 10 + min(length, 80)), 5] if length <= 80 else [*([9] * length), 5]
    expected = {5: 1.1 ** (length - 2)} if length >= 2 else {}
    found = costs(Breakers(frozenset(), {}, {}), [*tokens, 98, *tokens[:-1]], base=1.1)
    assert {token: cost for token, cost in found.items() if token == 5} == pytest.approx(expected)


@pytest.mark.parametrize("length", [1, 7, 8, 9, 11, 12, 13, 40])
def test_a_breaker_ends_a_repetition_however_far_back_it_is(length: int) -> None:
    """`length` tokens follow it, and before it the texts are alike, too."""
    repeated = [*range(20, 30), B, *range(30, 30 + length)]
    tokens = [*repeated, 5, 98, *repeated]
    for window in (0, len(tokens)):
        found = costs(breakers("b"), tokens, allowed_length=1, base=1.5, window=window)
        assert found == {5: pytest.approx(1.5 ** (length - 1))}


@pytest.mark.parametrize("window", [9, 13, 30, 31, 32, 100])
def test_a_window_of_any_length_is_looked_at(window: int) -> None:
    """The token before stands at its beginning: 30 tokens from the end."""
    tokens = [7, 5, *range(20, 48), 7]
    found = costs(breakers(), tokens, allowed_length=1, window=window)
    assert found == ({5: 1.0} if window >= len(tokens) else {})


@pytest.mark.parametrize("allowed", [1, 8, 9, 12, 13, 29, 30, 31])
def test_a_repetition_of_any_length_may_be_allowed(allowed: int) -> None:
    tokens = [*range(20, 50), 5, 98, *range(20, 50)]
    found = costs(breakers(), tokens, allowed_length=allowed, base=1.1)
    assert found == ({5: pytest.approx(1.1 ** (30 - allowed))} if allowed <= 30 else {})


@pytest.mark.parametrize("allowed", [1, 40, 200])
def test_a_penalty_is_a_number_however_long_the_repetition_is(allowed: int) -> None:
    """Of base 4 the 64th power is the first that fp32 does not have: longer repetitions cost as much as the last."""
    tokens = [9] * 300
    (cost,) = costs(breakers(), tokens, allowed_length=allowed, base=4.0).values()
    assert cost == pytest.approx(4.0**63)


def test_an_empty_breaker_is_refused() -> None:
    """It was in every token, so nothing was ever a repetition."""
    with pytest.raises(UsageError, match="dry-breaker is empty, it must be at least one character"):
        SamplingParams(dry_breakers=("a", ""))
    assert SamplingParams(dry_breakers=()).dry_breakers == ()


@pytest.mark.parametrize("breakers", [("a" * 65,), tuple(map(str, range(65)))])
def test_breakers_are_few_and_short(breakers: tuple[str, ...]) -> None:
    """All splits of one are compared with every token: 20,000 letters took 9 seconds and 200 MB."""
    with pytest.raises(UsageError, match="it may have 64 of 64"):
        SamplingParams(dry_breakers=breakers)
