"""Constrained output: which tokens may come next, so that the text becomes what was asked for.

llguidance parses the text so far and finds the tokens. Where a text is certain, as a field's name, it allows the tokens
alone that the tokenizer would cut it into; `advance` takes other ones in too, as long as they spell an allowed text.

The text begins with the first generated token: of a tokenizer whose words carry the space before them, the first one is
then one without. End tokens are never given to the library, which would forget how many it has taken in.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offload.decode.constraint import Constraint as Constraint
from offload.decode.constraint import library_grammar, refusal
from offload.decode.grammar_tokenizer import served
from offload.decode.json_style import NUMBER, STRUCTURE, bare, gap
from offload.decode.tokenizer import Tokenizer
from offload.errors import ModelError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_FORCED = 32  # tokens that `forced` looks ahead
MAX_GUESSED = 96  # letters that `guessed` looks ahead
TRIED = 128  # tokens of a text that is followed before a grammar is used


class Grammar:
    """A constraint for one tokenizer, ready for any number of sequences."""

    def __init__(
        self,
        matcher: LLMatcher,
        tokenizer: LLTokenizer,
        vocab_size: int,
        end_tokens: frozenset[int],
        end: int,
        *,
        is_json: bool,
    ) -> None:
        """See `compiled`. end: the end token that `forced` names where several could follow."""
        self._matcher, self._tokenizer, self.vocab_size = matcher, tokenizer, vocab_size
        self.end_tokens, self.end, self.cut = end_tokens, end, lru_cache(maxsize=1024)(self._cut)
        self.letters = {letter: self.cut(letter) for letter in STRUCTURE} if is_json else {}

    @classmethod
    def compiled(
        cls, constraint: Constraint, tokenizer: Tokenizer, vocab_size: int, end_tokens: Collection[int]
    ) -> Grammar:
        """vocab_size: the number of logits; ids that the tokenizer has not are never allowed.

        Raises UsageError where the constraint cannot be followed, with the place and the remedy; also where it is so
        large that the library gives up within the first TRIED tokens.
        """
        from llguidance import LLMatcher, LLParserLimits

        ends = frozenset(end_tokens)
        library_tokenizer = served(tokenizer, vocab_size, ends)
        limits = LLParserLimits(verbose_errors=False)
        matcher = LLMatcher(library_tokenizer, library_grammar(constraint), log_level=0, limits=limits)
        if error := _tried(matcher.deep_copy(), ends):
            raise refusal(constraint, error)
        own = tokenizer.eos_token_id
        usable = frozenset(library_tokenizer.eos_tokens)
        end, is_json = own if own is not None and own in usable else min(usable), constraint.kind == "json-schema"
        return cls(matcher, library_tokenizer, vocab_size, usable, end, is_json=is_json)

    def state(self) -> GrammarState:
        """Of a sequence that begins."""
        return GrammarState(self)

    def matcher(self) -> LLMatcher:
        """One that has taken nothing in."""
        return self._matcher.deep_copy()

    def _cut(self, text: str) -> list[int]:
        """Tokens of a text in the middle of a longer one."""
        return self._tokenizer.tokenize_str(text)

    def text(self, tokens: Sequence[int]) -> str:
        """What they spell, as far as it is whole characters."""
        return self._tokenizer.decode_bytes(list(tokens)).decode(errors="ignore")


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

    @property
    def is_over(self) -> bool:
        """Whether nothing but the end may follow."""
        return self._ended or bool(self._matcher.is_accepting() and self._matcher.is_stopped())

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
        return torch.from_numpy(self._unpacked(self._bits()))

    def masks(self, tokens: Sequence[int]) -> Tensor:
        """`allowed` here and after each of `tokens`, bool [len(tokens) + 1, V]; the place stays.

        After a token that may not follow, all is True: it is rejected with certainty, so these rows are never used.
        """
        masks, start = np.ones((len(tokens) + 1, self._grammar.vocab_size), np.bool_), self.place
        try:
            for row in range(len(masks)):
                if row and not self._takes(tokens[row - 1]):
                    break
                if not self._ended:
                    masks[row] = self._unpacked(self._bits())
        finally:
            self.rewind(start)
        return torch.from_numpy(masks)

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

    def guessed(self) -> list[int]:
        """How JSON goes on in the style of the text so far, up to the next place where more than white space is open,
        or whether something is a string; maybe not at all. The place stays."""
        if self._ended or not self._grammar.letters:
            return []
        start, text, added = self.place, self._grammar.text(self._tokens), ""
        try:
            while len(added) < MAX_GUESSED and (more := self._next(text + added)):
                added += more
            guess = self._grammar.cut(added)
        finally:
            self.rewind(start)
        return guess[: self.longest(guess)]

    def _next(self, text: str) -> str:
        """A piece that may follow `text`, where this is, and was taken in."""
        more = self._matcher.compute_ff_bytes().decode(errors="ignore")
        written = None if more else bare(text)
        if written is not None:
            able = [letter for letter, tokens in self._grammar.letters.items() if self._matcher.validate_tokens(tokens)]
            self._check()
            letter = '"' if '"' in able else able[0] if len(able) == 1 else ""
            more = gap(written, letter) + letter
            if not letter and not set(able) <= NUMBER:
                more = more[:-1]  # words carry the space before them
        tokens = self._grammar.cut(more)
        return more if self.advance(tokens) == len(tokens) else ""

    def _only(self) -> list[int]:
        """The tokens that come next where no others are allowed."""
        if self._ended:
            return []
        if tokens := self._matcher.compute_ff_tokens():
            return tokens
        bits = self._bits()
        if int.from_bytes(bits, "little").bit_count() > len(self._grammar.end_tokens):
            return []
        found = np.flatnonzero(self._unpacked(bits)).tolist()
        if self._grammar.end_tokens.issuperset(found):
            return [self._grammar.end]
        return found if len(found) == 1 else []

    def _bits(self) -> bytes:
        """A bit for each token, set where it may come next."""
        bits = self._matcher.compute_bitmask()
        self._check()
        return bits

    def _unpacked(self, bits: bytes) -> NDArray[np.bool_]:
        found = np.unpackbits(np.frombuffer(bits, np.uint8), count=self._grammar.vocab_size, bitorder="little")
        return found.view(np.bool_)

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
            with suppress(ModelError):  # the first error says why
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


def _tried(matcher: LLMatcher, ends: Collection[int]) -> str:
    """The library's error where no text fits, or where it gives up on a text that repeats a token as long as it may;
    "" where neither is so. Of nested repetitions that is the text with the most ways to go on."""
    token, count = -1, 0
    while count < TRIED and not matcher.is_error():
        if token < 0 or matcher.try_consume_tokens([token]) != 1:
            bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            allowed = set(np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist()) - set(ends)
            if not allowed:
                break
            token = max(allowed)  # the later ones are longer
            matcher.try_consume_tokens([token])
        count += 1
    error = str(matcher.get_error()) if matcher.is_error() else ""
    if count <= 1:
        return error
    return "" if error.startswith("NoExtension") else error and f"after {count} tokens of a trial: {error}"
