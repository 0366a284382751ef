"""What a constraint has to say about drafts: where it leaves no choice it proposes, and lookups end where it does."""

from __future__ import annotations

from collections.abc import Sequence

from offload.decode.grammar_text import GrammarText
from offload.decode.lookup import LONGEST, LookupProposer
from offload.decode.proposal import Offer, Proposal

SURE = 7  # the highest grade of a lookup


class GrammarProposer:
    """Proposes what has to follow. Point masses, and the rule of verification is that of all proposals."""

    name = "grammar"

    def __init__(self, text: GrammarText) -> None:
        self._text = text
        self._forced: list[int] = []  # of the latest offer

    def offer(self, sequence: Sequence[int]) -> Offer:
        self._forced = self._text.forced(sequence)
        return Offer(len(self._forced), SURE)

    def propose(self, sequence: Sequence[int], num_tokens: int) -> Proposal:
        """Right behind the offer of the same sequence."""
        tokens = self._forced[:num_tokens]
        return Proposal(tokens, None, [SURE] * len(tokens), 0.0)

    def truncate(self, length: int) -> None: ...

    def prepare(self, num_rows: int, *, wanted: bool) -> float | None:
        return 0.0


class AllowedLookupProposer(LookupProposer):
    """Lookups up to the first token that the constraint forbids: all behind it would be rejected."""

    def __init__(self, text: GrammarText, *, least: int = 2) -> None:
        super().__init__(least=least)
        self._text = text

    def offer(self, sequence: Sequence[int]) -> Offer:
        offer = super().offer(sequence)
        if not offer.num_tokens:
            return offer
        found = super().propose(sequence, min(offer.num_tokens, LONGEST)).tokens
        return Offer(self._text.num_allowed(sequence, found), offer.grade)
