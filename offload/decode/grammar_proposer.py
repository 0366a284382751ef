"""Proposers under a constraint: one drafts the tokens that it forces, and lookups end at the first forbidden token."""

from __future__ import annotations

from collections.abc import Sequence

from offload.decode.grammar_text import GrammarText
from offload.decode.lookup import LONGEST, LookupProposer
from offload.decode.proposal import Offer, Proposal

SURE = 7  # the highest grade of a lookup
LIKELY = 5


class GrammarProposer:
    """A proposer of the tokens that a constraint forces, or otherwise of JSON in the style of the text. Its proposals
    are point masses under the usual acceptance rule."""

    name = "grammar"

    def __init__(self, text: GrammarText) -> None:
        self._text = text
        self._tokens, self._grade = list[int](), SURE  # of the latest offer

    def offer(self, sequence: Sequence[int]) -> Offer:
        self._tokens, self._grade = self._text.forced(sequence), SURE
        if not self._tokens:
            self._tokens, self._grade = self._text.guessed(sequence), LIKELY
        return Offer(len(self._tokens), self._grade)

    def propose(self, sequence: Sequence[int], num_tokens: int) -> Proposal:
        """See `Proposer.propose`. Call it directly after `offer` of the same sequence."""
        tokens = self._tokens[:num_tokens]
        return Proposal(tokens, None, [self._grade] * len(tokens), 0.0)

    def truncate(self, length: int) -> None: ...

    def prepare(self, num_rows: int, *, wanted: bool) -> float | None:
        return 0.0


class AllowedLookupProposer(LookupProposer):
    """Prompt lookup up to the first token that the constraint forbids, which would be rejected with all after it."""

    def __init__(self, text: GrammarText, *, least: int = 2) -> None:
        super().__init__(least=least)
        self._text = text

    def offer(self, sequence: Sequence[int]) -> Offer:
        offer = super().offer(sequence)
        if not offer.num_tokens:
            return offer
        found = super().propose(sequence, min(offer.num_tokens, LONGEST)).tokens
        return Offer(self._text.num_allowed(sequence, found), offer.grade)
