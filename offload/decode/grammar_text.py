"""The state of a constraint along one sequence, which grows with drafted tokens and shrinks with rejected ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from offload.decode.sequence import num_common
from offload.grammar.grammar import GrammarState


class GrammarText:
    """The state of a grammar at any place of a sequence after its prompt."""

    def __init__(self, state: GrammarState, num_prompt: int, vocab_size: int) -> None:
        self._state, self._num_prompt, self._vocab_size = state, num_prompt, vocab_size
        self._taken: list[int] = []  # up to the state's place

    def masks(self, tokens: Sequence[int], first: int) -> Tensor:
        """The masks of allowed tokens at the places from `first` on, bool [n, V]: see `GrammarState.masks`. All True
        after a token that the grammar forbids and after the text's end: tokens there are never accepted."""
        if not self.move(tokens[self._num_prompt : first]):
            return torch.ones(len(tokens) - first + 1, self._vocab_size, dtype=torch.bool)
        return self._state.masks(tokens[first:])

    def move(self, generated: Sequence[int]) -> bool:
        """Move the state to the place after `generated`. False where the grammar forbids them; the state is then at an
        earlier place."""
        common = num_common(self._taken, generated)
        if common < len(self._taken):
            self._state.rewind(common)
            del self._taken[common:]
        num_taken = self._state.advance(generated[common:])
        self._taken += generated[common : common + num_taken]
        return len(self._taken) == len(generated)

    def forced(self, tokens: Sequence[int]) -> list[int]:
        """The tokens that must follow, see `GrammarState.forced`."""
        return self._state.forced() if self.move(tokens[self._num_prompt :]) else []

    def is_over(self, tokens: Sequence[int]) -> bool:
        """Whether only the end may follow."""
        return self.move(tokens[self._num_prompt :]) and self._state.is_over

    def guessed(self, tokens: Sequence[int]) -> list[int]:
        """The likely next tokens, see `GrammarState.guessed`."""
        return self._state.guessed() if self.move(tokens[self._num_prompt :]) else []

    def num_allowed(self, tokens: Sequence[int], further: Sequence[int]) -> int:
        """The number of leading tokens of `further` that are allowed."""
        return self._state.longest(further) if self.move(tokens[self._num_prompt :]) else 0
