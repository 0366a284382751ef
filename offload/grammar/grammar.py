"""Constrained output: masks of the tokens that a grammar allows next.

llguidance parses the text so far and finds the allowed tokens. Where a text is certain, as a field's name, its mask
allows only the tokens into which the tokenizer would split it; `advance` also accepts other tokens that spell an
allowed text.

The text begins with the first generated token; with a tokenizer whose words include the space before them, that token
has no space. End tokens are never given to the library, which would lose its count of consumed tokens.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offload.errors import ModelError
from offload.grammar.constraint import MOST_LETTERS as MOST_LETTERS
from offload.grammar.constraint import Constraint as Constraint
from offload.grammar.constraint import library_grammar, on_stack_of, refusal
from offload.grammar.grammar_tokenizer import served
from offload.grammar.json_style import NUMBER, STRUCTURE, bare, gap
from offload.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_FORCED = 32  # tokens that `forced` looks ahead
MAX_GUESSED = 96  # letters that `guessed` looks ahead
TRIED = 128  # tokens of the trial text before a grammar is used
_MARK = re.compile(r"<\[(\d+)\]>")  # a token by its id, in Lark's syntax


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
        marks: frozenset[int] = frozenset(),
    ) -> None:
        """See `compiled`. end: the end token that `forced` names where several could follow. marks: tokens that the
        grammar names by their ids."""
        self._matcher, self._tokenizer, self.vocab_size = matcher, tokenizer, vocab_size
        self.end_tokens, self.end, self.cut = end_tokens, end, lru_cache(maxsize=1024)(self._cut)
        self.marks = marks
        self.letters = {letter: self.cut(letter) for letter in STRUCTURE} if is_json else {}

    @classmethod
    def compiled(
        cls, constraint: Constraint, tokenizer: Tokenizer, vocab_size: int, end_tokens: Collection[int]
    ) -> Grammar:
        """Compile a constraint. vocab_size: the number of logits; ids without a token are never allowed.

        Raises UsageError where the constraint is not supported, with the place and the remedy; also where it is over
        MOST_LETTERS, or so large that the library gives up within the first TRIED tokens.
        """
        ends = frozenset(end_tokens)
        return on_stack_of(constraint, lambda: cls._compiled(constraint, tokenizer, vocab_size, ends))

    @classmethod
    def _compiled(cls, constraint: Constraint, tokenizer: Tokenizer, vocab_size: int, ends: frozenset[int]) -> Grammar:
        from llguidance import LLMatcher, LLParserLimits

        library_tokenizer = served(tokenizer, vocab_size, ends)
        limits = LLParserLimits(verbose_errors=False)
        grammar = library_grammar(constraint)
        matcher = LLMatcher(library_tokenizer, grammar, log_level=0, limits=limits)
        if error := _tried(matcher.deep_copy(), ends):
            raise refusal(constraint, error)
        own = tokenizer.eos_token_id
        usable = frozenset(library_tokenizer.eos_tokens)
        end, is_json = own if own is not None and own in usable else min(usable), constraint.kind == "json-schema"
        marks = frozenset(map(int, _MARK.findall(grammar)))
        return cls(matcher, library_tokenizer, vocab_size, usable, end, is_json=is_json, marks=marks)

    def state(self) -> GrammarState:
        """The state at the beginning of a sequence."""
        return GrammarState(self)

    def matcher(self) -> LLMatcher:
        """A new matcher, which has consumed no token."""
        return self._matcher.deep_copy()

    def _cut(self, text: str) -> list[int]:
        """The tokens of a text in the middle of a longer one."""
        return self._tokenizer.tokenize_str(text)

    def text(self, tokens: Sequence[int]) -> str:
        """The text of `tokens`, without incomplete characters."""
        return self._tokenizer.decode_bytes(list(tokens)).decode(errors="ignore")


class GrammarState:
    """The state of a grammar in one sequence, a function of the tokens consumed since the beginning.

    Methods raise ModelError where the library gives up on a text as too complex; the state is then unchanged.
    """

    def __init__(self, grammar: Grammar) -> None:
        self._grammar, self._matcher = grammar, grammar.matcher()
        self._tokens, self._ended = list[int](), False

    @property
    def place(self) -> int:
        """The number of consumed tokens, including an end token."""
        return len(self._tokens)

    @property
    def is_complete(self) -> bool:
        """Whether the text so far satisfies the constraint; more may be allowed."""
        return self._ended or bool(self._matcher.is_accepting())

    @property
    def is_over(self) -> bool:
        """Whether only the end may follow."""
        return self._ended or bool(self._matcher.is_accepting() and self._matcher.is_stopped())

    def advance(self, tokens: Sequence[int]) -> int:
        """Consume `tokens` up to the first that is not allowed, and return their number. An end token allows no further
        token."""
        for count, token in enumerate(tokens):
            if not self._takes(token):
                return count
        return len(tokens)

    def rewind(self, place: int) -> None:
        """Go back to the state after the first `place` tokens."""
        if not 0 <= place <= self.place:
            raise ValueError(f"place {place} is not one of 0 to {self.place}")
        num_inside = self.place - self._ended
        if place < self.place:
            self._ended = False
        has_marks = not self._grammar.marks.isdisjoint(self._tokens[place:])  # the library forgets a bound before them
        del self._tokens[place:]
        if place < num_inside and (has_marks or not self._matcher.rollback(num_inside - place)):
            self._begin_again()

    def allowed(self) -> Tensor:
        """The mask of allowed next tokens, bool [V]; all True after an end token."""
        if self._ended:
            return torch.ones(self._grammar.vocab_size, dtype=torch.bool)
        return torch.from_numpy(self._unpacked(self._bits()))

    def masks(self, tokens: Sequence[int]) -> Tensor:
        """The masks here and after each of `tokens`, bool [len(tokens) + 1, V]. The state does not change.

        Rows after a forbidden token are all True: that token is always rejected, so the rows are never used.
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
        """The number of leading `tokens` that are allowed. The state does not change."""
        start = self.place
        try:
            return self.advance(tokens)
        finally:
            self.rewind(start)

    def forced(self) -> list[int]:
        """The tokens that must follow, at most MAX_FORCED, perhaps none. The state does not change."""
        start = self.place
        try:
            while self.place - start < MAX_FORCED and self.advance(self._only()):
                pass
            return self._tokens[start : start + MAX_FORCED]
        finally:
            self.rewind(start)

    def guessed(self) -> list[int]:
        """The likely next tokens of JSON in the style of the text so far, perhaps none. They end at the next place
        where more is open than white space and whether a value is a string. The state does not change."""
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
        """The next guessed piece after `text`, which the state then consumes; "" where there is no guess."""
        more = self._matcher.compute_ff_bytes().decode(errors="ignore")
        written = None if more else bare(text)
        if written is not None:
            able = [letter for letter, tokens in self._grammar.letters.items() if self._matcher.validate_tokens(tokens)]
            self._check()
            letter = '"' if '"' in able else able[0] if len(able) == 1 else ""
            more = gap(written, letter) + letter
            if not letter and not set(able) <= NUMBER:
                more = more[:-1]  # a word's token includes the space before it
        tokens = self._grammar.cut(more)
        return more if self.advance(tokens) == len(tokens) else ""

    def _only(self) -> list[int]:
        """The next tokens, if no others are allowed."""
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
        """The mask of allowed next tokens, one bit per token."""
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
            self._ended = taken = self.is_complete or bool(self.allowed()[token])  # a grammar may name an end token
        else:
            taken = self._matcher.try_consume_tokens([token]) == 1
            self._check()
        if taken:
            self._tokens.append(token)
        return taken

    def _check(self) -> None:
        """Raises ModelError after a matcher's error. Matchers never recover: a new one is brought to the same state."""
        if self._matcher.is_error():
            words = self._matcher.get_error().removesuffix("\n<non-verbose/>")
            with suppress(ModelError):  # the first error is the cause
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
    """The library's error where no text fits the grammar, or where it gives up on a trial text; "" otherwise. The trial
    text repeats a token as long as it is allowed: for nested repetitions, that text has the most continuations."""
    token, count = -1, 0
    while count < TRIED and not matcher.is_error():
        if token < 0 or matcher.try_consume_tokens([token]) != 1:
            bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            allowed = set(np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist()) - set(ends)
            if not allowed:
                break
            token = max(allowed)  # later tokens are longer
            matcher.try_consume_tokens([token])
        count += 1
    error = str(matcher.get_error()) if matcher.is_error() else ""
    if count <= 1:
        return error
    return "" if error.startswith("NoExtension") else error and f"after {count} tokens of a trial: {error}"
