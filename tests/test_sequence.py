"""A sequence that grows is the list that it would be, and no round copies what it begins with."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.decode.sequence import Extended

TOKENS = st.lists(st.integers(0, 9), max_size=6)
PLACES = st.none() | st.integers(-15, 15)


@given(head=TOKENS, middle=TOKENS, tail=TOKENS, start=PLACES, stop=PLACES)
def test_it_is_the_list_that_it_would_be(
    head: list[int], middle: list[int], tail: list[int], start: int | None, stop: int | None
) -> None:
    both, whole = Extended(Extended(head, middle)), [*head, *middle, *tail]
    both.tail += tail
    assert (len(both), [*both]) == (len(whole), whole)
    assert both[start:stop] == whole[start:stop]
    for index in range(-len(whole), len(whole)):
        assert both[index] == whole[index]
    with pytest.raises(IndexError):
        both[len(whole)]
    with pytest.raises(ValueError, match="step"):
        both[::2]
