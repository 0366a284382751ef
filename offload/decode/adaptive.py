"""Lengths that adapt to the text: decided before each token is drawn, from what is known by then.

A token has a going rate in seconds: what one costs where the text is now. To draft another one is worth it while the
chance that it will be kept, times the rate, is more than it costs. Over rounds that are alike this maximises tokens per
second (the argument is Dinkelbach's for ratios), whatever their lengths; plain decoding is the round of no drafts.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from offload.decode.estimates import PassSeconds, Ratio
from offload.decode.lookahead import Ask, Outlook
from offload.decode.source import Source
from offload.decode.verify import Verdict

_MARGIN = 1.05  # by which a token's worth must exceed its price: both are estimates, and the best looking one flatters
_GUESSED_PASSES = 2  # that the guess of a going rate is worth where only rounds of one kind count
_LEAST_RATE = 0.5  # of what a model alone would make a token cost: an easy stretch ends
_PROBE = 32  # rounds from one short one to the next: only different lengths show what a row costs


class Adaptive:
    """Lengths by seconds and running acceptance.

    most: tokens of a round; passes: seconds of a verification by its rows; sources: of the proposers, in their order.
    """

    def __init__(self, most: int, passes: PassSeconds, sources: Sequence[Source]) -> None:
        self.most, self.passes, self.sources = most, passes, sources
        self._given_pass = passes.at(1)  # seconds
        self._left = self._rounds = 0
        self._may_draft = False  # in this round
        self._rate = 0.0  # seconds that a token costs at present
        self._model_rate: float | None = None  # of one model, or none; until something is learned
        self._lately: defaultdict[int | None, Ratio] = defaultdict(Ratio)  # seconds a token, by match; None: of all
        self._match = 0  # the best lookup's, where the round began
        self._kept = 1.0  # the chance that all drafted so far is kept
        self._drafted: list[tuple[Source, int]] = []  # each token's source and grade

    def start(self, limit: int) -> None:
        self._begin(limit)
        self._may_draft = self._left > 0
        self._rounds += 1

    def ask(self, outlooks: Sequence[Outlook]) -> Ask | None:
        """The step that is worth the most. A lookup's worth includes that a model may go on after it."""
        if not self._drafted:
            self._match = _best_match(outlooks)
            self._rate = self.rate(self._match)
        best, most = None, 0.0
        for index, (source, outlook) in enumerate(zip(self.sources, outlooks, strict=True)):
            if not source.ready:
                continue
            if outlook.num_tokens is None:
                num_tokens, worth = self._chain(source, self._kept, len(self._drafted), self._left, outlook.expected)
            else:
                num_tokens, worth = self._run(source, outlook, outlooks)
            if num_tokens and worth > most:
                best, most = Ask(index, num_tokens), worth
        if best and not self._drafted and self._rounds % _PROBE == 0:
            self._left = (best.num_tokens + 1) // 2
            best = Ask(best.index, self._left)
        return best

    def drafted(self, index: int, grades: Sequence[int], seconds: float) -> None:
        source = self.sources[index]
        self._left -= len(grades)
        for grade in grades:
            self._kept *= source.chance_of(grade)
            self._drafted.append((source, grade))
        source.took(seconds, len(grades))

    def verified(self, verdict: Verdict, grades: Sequence[int], num_rows: int, seconds: float) -> None:
        for place, ((source, grade), chance) in enumerate(zip(self._drafted, verdict.chances, strict=False)):
            source.learn(grade, place, chance)
        self._count(verdict.num_accepted + 1, num_rows)
        used = {source for source, _ in self._drafted}
        for source in self.sources:
            source.foresee(grades)
            source.ended(asked=source in used, could_be=source.ready and self._may_draft)
        self.passes.add(num_rows, seconds / (1.0 + self._pass_share))
        self._model_rate = None

    def outlook(self, outlooks: Sequence[Outlook]) -> Outlook:
        """Where a lookup would be drafted, a round emits more than usual for one pass."""
        self._begin(self.most, _best_match(outlooks))
        for source, outlook in zip(self.sources, outlooks, strict=True):
            count = self._run(source, outlook, outlooks)[0] if outlook.num_tokens else 0
            if count:
                tokens = 1.0 + _kept_of(source.chance_of(outlook.grade or 0), count)
                return Outlook(expected=(tokens, self.passes.at(1 + count)))
        return Outlook()

    def wants(self, index: int) -> bool:
        """Where what it adds to the other models, as often as it is asked when it is ready, is worth its price."""
        source, self._rate = self.sources[index], self.rate()
        source.cheapen(self._rate / self._given_pass)
        others = [other for other in self.sources if other is not source and not other.is_lookup]
        worth, *others_worth = (self._chain(model, 1.0, 0, self.most)[1] for model in (source, *others))
        price = source.round_seconds.value + source.pass_share * self.passes.at(1)
        return source.asked.value * (worth - max(others_worth, default=0.0)) > price

    def readied(self, index: int, seconds: float | None) -> None:
        source = self.sources[index]
        source.ready = seconds is not None
        if seconds is not None:
            source.round_seconds.add(seconds)
            self._model_rate = None

    def rate(self, match: int | None = None) -> float:
        """Seconds that a token costs: of none drafted, or of the best length by one model; less where all proposers
        together have made it less lately, in rounds that began with such a match (None: in all)."""
        if self._model_rate is None:
            models = [self._best_rate(source) for source in self.sources if not source.is_lookup]
            self._model_rate = min([self.passes.at(1), *models])
        expected = self._model_rate
        guessed = 0.0 if match is None else _GUESSED_PASSES * self.passes.at(1)
        return min(expected, max(self._lately[match].from_guess(expected, guessed), _LEAST_RATE * expected))

    def _begin(self, limit: int, match: int | None = None) -> None:
        self._left, self._kept, self._drafted = min(self.most, limit), 1.0, []
        self._rate = self.rate(match)

    @property
    def _pass_share(self) -> float:
        """What the proposers that are ready add to a pass, as a share of its seconds."""
        return sum(source.pass_share for source in self.sources if source.ready)

    def _count(self, num_tokens: int, num_rows: int) -> None:
        """A round emitted so many tokens; what it cost, by what is known of costs."""
        seconds = self.passes.at(num_rows) * (1.0 + self._pass_share)
        seconds += sum(source.round_seconds.value for source in self.sources if source.ready)
        seconds += sum(source.seconds.value for source, _ in self._drafted)
        for match in (self._match, None):
            self._lately[match].add(seconds, num_tokens)

    def _best_rate(self, source: Source) -> float:
        """Seconds per token with the best fixed length of `source`."""
        seconds = self.passes.at(1) * (1.0 + source.pass_share) + source.round_seconds.value
        kept, tokens, best, least = 1.0, 1.0, math.inf, source.seconds.value + self.passes.slope
        for place, row in zip(range(self.most), self.passes.steps(1), strict=False):
            kept *= source.chance_at(place)
            if best * kept < least:
                break  # no later token costs less
            tokens += kept
            seconds += source.seconds.value + row
            best = min(best, seconds / tokens)
        return best

    def _chain(
        self, source: Source, kept: float, place: int, limit: int, expected: tuple[float, float] | None = None
    ) -> tuple[int, float]:
        """(tokens, worth) of going on with a model as long as it pays, `place` tokens being drafted and kept with the
        chance `kept`. expected: of its first step, where that is cheaper than usual."""
        slope, usual, (tokens, seconds) = self.passes.slope, source.seconds.value, expected or (0.0, 0.0)
        worth = cautious = most = 0.0  # cautious: with a margin, which decides
        best = (0, 0.0)
        for count, row in zip(range(limit), self.passes.steps(1 + place), strict=False):
            drafting = min(seconds / tokens, usual) if count < tokens else usual
            kept *= source.chance_at(place + count)
            gained = self._rate * kept
            if gained < _MARGIN * (drafting + slope):
                break
            worth += gained - drafting - row
            cautious += gained - _MARGIN * (drafting + row)
            if cautious >= most:
                best, most = (count + 1, worth), cautious
        return best

    def _run(self, source: Source, outlook: Outlook, outlooks: Sequence[Outlook]) -> tuple[int, float]:
        """(tokens, worth) of the best part of a lookup, a model going on after it."""
        models = [s for s, o in zip(self.sources, outlooks, strict=True) if o.num_tokens is None and s.ready]
        chance, place, best = source.chance_of(outlook.grade or 0), len(self._drafted), (0, 0.0)
        sunk = self.passes.at(1 + place)
        for count in self._parts(1 + place, min(outlook.num_tokens or 0, self._left)):
            kept = self._kept * chance**count
            cost = count * source.seconds.value + self.passes.at(1 + place + count) - sunk
            gained = self._rate * self._kept * _kept_of(chance, count) - cost
            after = max(
                (self._chain(model, kept, place + count, self._left - count)[1] for model in models), default=0.0
            )
            best = max(best, (count, gained + after), key=lambda pair: pair[1])
        return best

    def _parts(self, rows: int, num_tokens: int) -> list[int]:
        """Halves of halves of that many tokens after `rows` rows, and what ends in a whole block; the most first."""
        halves = {num_tokens >> times for times in range(num_tokens.bit_length())}
        return sorted(halves | set(self.passes.full_blocks(rows, num_tokens)) - {0}, reverse=True)


def _best_match(outlooks: Sequence[Outlook]) -> int:
    """How good the best lookup is. Texts are copied and made up in stretches, and a token costs less in the former."""
    return max((1 + (outlook.grade or 0) for outlook in outlooks if outlook.num_tokens), default=0)


def _kept_of(chance: float, count: int) -> float:
    """Of `count` tokens of that chance in a row, how many are kept."""
    return sum(chance**n for n in range(1, count + 1))
