"""A constraint along one sequence, whose end goes forth with drafted tokens and back with rejected ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from offload.decode.grammar import GrammarState
from offload.decode.sequence import num_common


class GrammarText:
    """The state of a grammar at any place of a sequence behind its prompt."""

    def __init__(self, state: GrammarState, num_prompt: int, vocab_size: int) -> None:
        self._state, self._num_prompt, self._vocab_size = state, num_prompt, vocab_size
        self._taken: list[int] = []  # up to the state's place

    def masks(self, tokens: Sequence[int], first: int) -> Tensor:
        """Which tokens may come at the places from `first` on, bool [n, V]: see `GrammarState.masks`. Behind a token
        that the grammar forbids, and behind the text's end, all: nothing there is ever kept."""
        if not self.move(tokens[self._num_prompt : first]):
            return torch.ones(len(tokens) - first + 1, self._vocab_size, dtype=torch.bool)
        return self._state.masks(tokens[first:])

    def move(self, generated: Sequence[int]) -> bool:
        """To the place behind these tokens. False where the grammar forbids them; then it is somewhere before."""
        common = num_common(self._taken, generated)
        if common < len(self._taken):
            self._state.rewind(common)
            del self._taken[common:]
        num_taken = self._state.advance(generated[common:])
        self._taken += generated[common : common + num_taken]
        return len(self._taken) == len(generated)

    def forced(self, tokens: Sequence[int]) -> list[int]:
        """What has to follow, as far as that is known."""
        return self._state.forced() if self.move(tokens[self._num_prompt :]) else []

    def is_over(self, tokens: Sequence[int]) -> bool:
        """Whether nothing but the end may follow."""
        return self.move(tokens[self._num_prompt :]) and self._state.is_over

    def guessed(self, tokens: Sequence[int]) -> list[int]:
        """What follows if the text keeps its style; it may."""
        return self._state.guessed() if self.move(tokens[self._num_prompt :]) else []

    def num_allowed(self, tokens: Sequence[int], further: Sequence[int]) -> int:
        """How many of `further` may follow."""
        return self._state.longest(further) if self.move(tokens[self._num_prompt :]) else 0
