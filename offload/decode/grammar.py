"""Constrained output: which tokens may come next, so that the text becomes what was asked for.

llguidance parses the text so far and finds the tokens. Where a text is certain, as a field's name, it allows the tokens
alone that the tokenizer would cut it into; `advance` takes other ones in too, as long as they spell an allowed text.

The text begins with the first generated token: of a tokenizer whose words carry the space before them, the first one is
then one without. End tokens are never given to the library, which would forget how many it has taken in.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from offload.decode.constraint import Constraint as Constraint
from offload.decode.constraint import library_grammar, refusal
from offload.decode.grammar_tokenizer import served
from offload.decode.tokenizer import Tokenizer
from offload.errors import ModelError

if TYPE_CHECKING:
    from llguidance import LLMatcher

MAX_FORCED = 32  # tokens that `forced` looks ahead


class Grammar:
    """A constraint for one tokenizer, ready for any number of sequences."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, end_tokens: frozenset[int], end: int) -> None:
        """See `compiled`. end: the end token that `forced` names where several could follow."""
        self._matcher, self.vocab_size, self.end_tokens, self.end = matcher, vocab_size, end_tokens, end

    @classmethod
    def compiled(
        cls, constraint: Constraint, tokenizer: Tokenizer, vocab_size: int, end_tokens: Collection[int]
    ) -> Grammar:
        """vocab_size: the number of logits; ids that the tokenizer has not are never allowed.

        Raises UsageError where the constraint cannot be followed, with the place and the remedy.
        """
        from llguidance import LLMatcher, LLParserLimits

        ends = frozenset(end_tokens)
        library_tokenizer = served(tokenizer, vocab_size, ends)
        limits = LLParserLimits(verbose_errors=False)
        matcher = LLMatcher(library_tokenizer, library_grammar(constraint), log_level=0, limits=limits)
        trial = matcher.deep_copy()
        trial.compute_bitmask()  # fails where no text fits
        if trial.is_error():
            raise refusal(constraint, trial.get_error())
        own = tokenizer.eos_token_id
        usable = frozenset(library_tokenizer.eos_tokens)
        return cls(matcher, vocab_size, usable, own if own is not None and own in usable else min(usable))

    def state(self) -> GrammarState:
        """Of a sequence that begins."""
        return GrammarState(self)

    def matcher(self) -> LLMatcher:
        """One that has taken nothing in."""
        return self._matcher.deep_copy()


class GrammarState:
    """Where one sequence is. All it says is a function of the tokens that it has taken in since the beginning.

    Raises ModelError where the library gives a text up, as too complex, and stays where it was.
    """

    def __init__(self, grammar: Grammar) -> None:
        self._grammar, self._matcher = grammar, grammar.matcher()
        self._tokens, self._ended = list[int](), False

    @property
    def place(self) -> int:
        """Number of generated tokens that were taken in, an end token too."""
        return len(self._tokens)

    @property
    def is_complete(self) -> bool:
        """Whether the text so far is all that was asked for; more may be allowed."""
        return self._ended or bool(self._matcher.is_accepting())

    def advance(self, tokens: Sequence[int]) -> int:
        """Take in as many of `tokens` as may follow, and return how many. Nothing follows an end token."""
        for count, token in enumerate(tokens):
            if not self._takes(token):
                return count
        return len(tokens)

    def rewind(self, place: int) -> None:
        """Back to where `place` tokens were taken in."""
        if not 0 <= place <= self.place:
            raise ValueError(f"place {place} is not one of 0 to {self.place}")
        num_inside = self.place - self._ended
        if place < self.place:
            self._ended = False
        del self._tokens[place:]
        if place < num_inside and not self._matcher.rollback(num_inside - place):
            self._begin_again()

    def allowed(self) -> Tensor:
        """The tokens that may come next, bool [V]; all of them after an end token, where no text is."""
        if self._ended:
            return torch.ones(self._grammar.vocab_size, dtype=torch.bool)
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        return torch.from_numpy(np.unpackbits(bits, count=self._grammar.vocab_size, bitorder="little").view(np.bool_))

    def masks(self, tokens: Sequence[int]) -> Tensor:
        """`allowed` here and after each of `tokens`, bool [len(tokens) + 1, V]; the place stays.

        After a token that may not follow, all is True: it is rejected with certainty, so these rows are never used.
        """
        masks, start = torch.ones(len(tokens) + 1, self._grammar.vocab_size, dtype=torch.bool), self.place
        try:
            masks[0] = self.allowed()
            for row, token in enumerate(tokens, 1):
                if not self._takes(token):
                    break
                masks[row] = self.allowed()
        finally:
            self.rewind(start)
        return masks

    def longest(self, tokens: Sequence[int]) -> int:
        """How many of `tokens` could follow; the place stays."""
        start = self.place
        try:
            return self.advance(tokens)
        finally:
            self.rewind(start)

    def forced(self) -> list[int]:
        """The tokens that follow with certainty, at most MAX_FORCED of them, maybe none; the place stays."""
        start = self.place
        try:
            while self.place - start < MAX_FORCED and self.advance(self._only()):
                pass
            return self._tokens[start : start + MAX_FORCED]
        finally:
            self.rewind(start)

    def _only(self) -> list[int]:
        """The tokens that come next where no others are allowed."""
        if self._ended:
            return []
        if tokens := self._matcher.compute_ff_tokens():
            return tokens
        allowed = self.allowed()
        if int(allowed.count_nonzero()) > len(self._grammar.end_tokens):
            return []
        found = allowed.nonzero().flatten().tolist()
        if self._grammar.end_tokens.issuperset(found):
            return [self._grammar.end]
        return found if len(found) == 1 else []

    def _takes(self, token: int) -> bool:
        if self._ended or not 0 <= token < self._grammar.vocab_size:
            return False
        if token in self._grammar.end_tokens:
            self._ended = taken = self.is_complete or bool(self.allowed()[token])  # a grammar may name it, too
        else:
            taken = self._matcher.try_consume_tokens([token]) == 1
            self._check()
        if taken:
            self._tokens.append(token)
        return taken

    def _check(self) -> None:
        """Matchers never recover from an error: another one takes over where this one was."""
        if self._matcher.is_error():
            words = self._matcher.get_error().removesuffix("\n<non-verbose/>")
            self._begin_again()
            raise ModelError(
                f"the text cannot go on as the constraint wants it, after {self.place} tokens: {words}; make the "
                "constraint simpler"
            )

    def _begin_again(self) -> None:
        self._matcher = self._grammar.matcher()
        tokens = self._tokens[: -1 if self._ended else None]
        if self._matcher.try_consume_tokens(tokens) < len(tokens):
            raise ModelError(f"the library does not follow a text of {len(tokens)} tokens twice; begin another one")
