"""How far to draft, and by whom: decided before each token is drawn, from what is known by then.

A token has a going rate in seconds: what one costs at present. To draft another one is worth it while the chance that
it will be kept, times the rate, is more than it costs. This maximises tokens per second over rounds of any lengths
(the argument is Dinkelbach's for ratios), and plain decoding is the round of no drafts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from offload.decode.estimates import Line, Mean
from offload.decode.verify import Verdict

GRADES = 11  # of a model's tokens: tenths of the largest probability in their law
SURE_MATCH = 3  # the grade of a lookup that fixed lengths trust: 8 tokens and more
_LOOKUP_CHANCES = (0.2, 0.4, 0.55, 0.75, 0.9, 0.95)  # by grade (docs/log.md)
_LOOKUP_MEMORY = 0.9  # of the weight of a looked up token is left after the next: a run stands or falls as one
_IDLE = 0.99  # of an estimate's weight is left after a round in which its proposer was not asked
_PACE = 0.95  # of the weight of earlier seconds, after new ones
_STEADY_PACE = 0.98  # the same of seconds that were given with trust
_GUESSED = 4.0  # observations that a guess is worth
_MARGIN = 1.1  # by which a token's worth must exceed its price: both are estimates, and the best looking one flatters
_LATELY = 0.9  # of the weight of a round is left after the next, in what a token has cost lately
_LEAST_RATE = 0.5  # of what a model alone would make a token cost: an easy stretch ends
_PLACES = 6  # in a block: the first, the 2nd and 3rd, the 4th to 7th, ...
_PROBE = 16  # rounds from one short one to the next: only different lengths show what a row costs
_CATCH_UP = 2  # rounds after which a proposer that was not asked has more to do than usual
_REST = 8  # rounds after which a proposer that was not asked need not be ready, ...
_RETRY = 32  # ... but once in so many, since what it could do has changed; ...
_TRIAL = 3  # ... then for so many: one to look at the text, one to get ready, one to be asked


def grade_of(rows: Tensor) -> list[int]:
    """Grades of tokens drawn from the laws `rows` [n, V]: 0 to 10, by their largest probability."""
    grades: list[int] = (rows.amax(-1) * 10.0).int().clamp_(max=10).tolist()
    return grades


@dataclass(frozen=True)
class Outlook:
    """What a proposer could do now: at most `num_tokens` tokens (None: any number), of `grade` where it is known."""

    num_tokens: int | None = None
    grade: int | None = None


@dataclass(frozen=True)
class Ask:
    """One step of the proposer at `index`."""

    index: int
    num_tokens: int


class Lookahead(Protocol):
    """One level's. Calls come in this order: start, then ask and drafted in turns, then verified."""

    def start(self, limit: int) -> None:
        """A round begins, with at most `limit` drafted tokens."""
        ...

    def ask(self, outlooks: Sequence[Outlook]) -> Ask | None:
        """The next step of drafting; None: verify now."""
        ...

    def drafted(self, index: int, grades: Sequence[int], seconds: float) -> None:
        """The proposer at `index` gave tokens of these grades."""
        ...

    def verified(self, verdict: Verdict, num_rows: int, seconds: float) -> None:
        """How it came out; the pass had `num_rows` real rows."""
        ...

    def wants(self, index: int) -> bool:
        """Between rounds: whether it pays to get the proposer at `index` ready for the next."""
        ...

    def readied(self, index: int, seconds: float | None) -> None:
        """It took so long; None: it is not ready, and must not be asked."""
        ...


class Fixed:
    """`gamma` tokens a round: by lookup where it is sure, by the last proposer where that always can."""

    def __init__(self, gamma: int) -> None:
        self.gamma = gamma
        self._left = 0

    def start(self, limit: int) -> None:
        self._left = min(self.gamma, limit)

    def ask(self, outlooks: Sequence[Outlook]) -> Ask | None:
        if self._left <= 0:
            return None
        always = [index for index, outlook in enumerate(outlooks) if outlook.num_tokens is None]
        for index, outlook in enumerate(outlooks):
            if outlook.num_tokens and (not always or (outlook.grade or 0) >= SURE_MATCH):
                return Ask(index, min(self._left, outlook.num_tokens))
        return Ask(always[-1], self._left) if always else None

    def drafted(self, index: int, grades: Sequence[int], seconds: float) -> None:
        self._left -= len(grades)

    def verified(self, verdict: Verdict, num_rows: int, seconds: float) -> None: ...

    def wants(self, index: int) -> bool:
        return True

    def readied(self, index: int, seconds: float | None) -> None: ...


class Source:
    """What is known of one proposer at one level: the chance that a token of it is kept, and what it costs.

    Chances are kept by grade, for drafted tokens, and by place in the block, for those that would follow: texts
    are easy and hard in stretches, so a block that went well so far goes on better than the mean.
    trust: observations that the given chance and seconds are worth. seconds: of one token; round_seconds: of each round
    in which it may be asked, for getting it ready; pass_share: what that adds to a verification, as a share of its
    seconds; guessed_chances: by grade, where they are known beforehand.
    """

    def __init__(
        self,
        chance: float,
        seconds: float,
        *,
        trust: float | None = None,
        round_seconds: float = 0.0,
        pass_share: float = 0.0,
        guessed_chances: Sequence[float] = (),
    ) -> None:
        weight = _GUESSED if trust is None else trust
        self.chance, self._by_place = Mean(chance, weight), [Mean(chance, weight) for _ in range(_PLACES)]
        self.seconds = Mean(seconds, 1.0, _PACE) if trust is None else Mean(seconds, trust, _STEADY_PACE)
        self.round_seconds = Mean(round_seconds, 1.0, _PACE)
        self.pass_share, self.is_lookup = pass_share, bool(guessed_chances)
        self.ready, self.idle_rounds = True, _REST
        self._by_grade = {grade: Mean(chance, _GUESSED, _LOOKUP_MEMORY) for grade, chance in enumerate(guessed_chances)}
        self._last_grade = len(guessed_chances) - 1

    @classmethod
    def lookup(cls) -> Source:
        """Of point masses found in the sequence: nearly free."""
        return cls(0.5, 1e-5, guessed_chances=_LOOKUP_CHANCES)

    def chance_of(self, grade: int) -> float:
        """That a drafted token of `grade` is kept."""
        return self._of(grade).value if self.is_lookup else self._of(grade).from_guess(self.chance.value)

    def chance_at(self, place: int) -> float:
        """That a token which is not drafted yet is kept, the `place` tokens before it in the block being so."""
        return self._at(place).from_guess(self.chance.value)

    def learn(self, grade: int, place: int, chance: float) -> None:
        self.chance.add(chance)
        self._of(grade).add(chance)
        self._at(place).add(chance)

    def took(self, seconds: float, num_tokens: int) -> None:
        """A step did. What is far above the estimate was a pause of the machine, or, after rounds in which it was not
        asked, a cache that had to catch up.
        """
        most = 1.3 if self.idle_rounds > _CATCH_UP else 2.0
        self.seconds.add(min(seconds / num_tokens, most * self.seconds.value), num_tokens)

    def fade(self) -> None:
        for mean in (self.chance, self.seconds, *self._by_place, *self._by_grade.values()):
            mean.fade(_IDLE)

    def _at(self, place: int) -> Mean:
        return self._by_place[min((place + 1).bit_length(), _PLACES) - 1]

    def _of(self, grade: int) -> Mean:
        if self._last_grade >= 0:
            grade = min(grade, self._last_grade)
        return self._by_grade.setdefault(grade, Mean(self.chance.value, self.chance.weight))


class Adaptive:
    """Lengths by seconds and running acceptance.

    most: tokens of a round; passes: seconds of a verification by its rows; sources: of the proposers, in their order.
    measured: seconds are learned as they come. Otherwise those given at the start stay, and all that decides is a
    function of the text, so that a seed gives the same text on every run.
    """

    def __init__(self, most: int, passes: Line, sources: Sequence[Source], *, measured: bool = True) -> None:
        self.most, self.passes, self.sources, self._measured = most, passes, sources, measured
        self._left = self._rounds = 0
        self._rate = 0.0  # seconds that a token costs at present
        self._spent = self._emitted = 0.0  # seconds and tokens of the latest rounds
        self._kept = 1.0  # the chance that all drafted so far is kept
        self._drafted: list[tuple[Source, int]] = []  # each token's source and grade

    def start(self, limit: int) -> None:
        self._left, self._kept, self._drafted = min(self.most, limit), 1.0, []
        self._rate = self.rate()
        self._rounds += 1

    def ask(self, outlooks: Sequence[Outlook]) -> Ask | None:
        """The step that is worth the most. A lookup's worth includes that a model may go on after it."""
        best, most = None, 0.0
        for index, (source, outlook) in enumerate(zip(self.sources, outlooks, strict=True)):
            if not source.ready:
                continue
            if outlook.num_tokens is None:
                num_tokens, worth = self._chain(source, self._kept, len(self._drafted), self._left)
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
        if self._measured:
            source.took(seconds, len(grades))

    def verified(self, verdict: Verdict, num_rows: int, seconds: float) -> None:
        for place, ((source, grade), chance) in enumerate(zip(self._drafted, verdict.chances, strict=False)):
            source.learn(grade, place, chance)
        self._count(verdict.num_accepted + 1, num_rows)
        used = {source for source, _ in self._drafted}
        for source in self.sources:
            source.idle_rounds = 0 if source in used else source.idle_rounds + 1
            if source.idle_rounds:
                source.fade()
        if self._measured:
            share = sum(source.pass_share for source in self.sources if source.ready)
            self.passes.add(num_rows, seconds / (1.0 + share))

    def wants(self, index: int) -> bool:
        """Where it is worth more than what another model could do at once. Not where others drafted for some rounds
        without it, whatever it would be worth alone."""
        source, self._rate = self.sources[index], self.rate()
        rests = source.idle_rounds >= _REST and source.idle_rounds % _RETRY >= _TRIAL
        if rests and self._drafted:
            return False
        others = [other for other in self.sources if other is not source and not other.is_lookup]
        worth, *others_worth = (self._chain(model, 1.0, 0, self.most)[1] for model in (source, *others))
        price = source.round_seconds.value + source.pass_share * self.passes.at(1)
        return worth - price > max(others_worth, default=0.0)

    def readied(self, index: int, seconds: float | None) -> None:
        source = self.sources[index]
        source.ready = seconds is not None
        if seconds is not None and self._measured:
            source.round_seconds.add(seconds)

    def rate(self) -> float:
        """Seconds that a token costs: of none drafted, or of the best length by one model; less where all proposers
        together have made it less lately."""
        models = [self._best_rate(source) for source in self.sources if not source.is_lookup]
        expected = min([self.passes.at(1), *models])
        lately = self._spent / self._emitted if self._emitted else expected
        return min(expected, max(lately, _LEAST_RATE * expected))

    def _count(self, num_tokens: int, num_rows: int) -> None:
        """A round emitted so many tokens; what it cost, by what is known of costs."""
        ready = [source for source in self.sources if source.ready]
        seconds = self.passes.at(num_rows) * (1.0 + sum(source.pass_share for source in ready))
        seconds += sum(source.round_seconds.value for source in ready)
        seconds += sum(source.seconds.value for source, _ in self._drafted)
        self._spent = _LATELY * self._spent + seconds
        self._emitted = _LATELY * self._emitted + num_tokens

    def _best_rate(self, source: Source) -> float:
        """Seconds per token with the best fixed length of `source`."""
        fixed, slope = self.passes.coefficients()
        seconds = (fixed + slope) * (1.0 + source.pass_share) + source.round_seconds.value
        step = source.seconds.value + slope
        kept, tokens, best = 1.0, 1.0, math.inf
        for place in range(self.most):
            kept *= source.chance_at(place)
            tokens += kept
            seconds += step
            best = min(best, seconds / tokens)
        return best

    def _chain(self, source: Source, kept: float, place: int, limit: int) -> tuple[int, float]:
        """(tokens, worth) of going on with a model as long as it pays, `place` tokens being drafted and kept with the
        chance `kept`."""
        cost, worth = source.seconds.value + self.passes.slope, 0.0
        for count in range(limit):
            kept *= source.chance_at(place + count)
            if self._rate * kept < _MARGIN * cost:
                return count, worth
            worth += self._rate * kept - cost
        return max(limit, 0), worth

    def _run(self, source: Source, outlook: Outlook, outlooks: Sequence[Outlook]) -> tuple[int, float]:
        """(tokens, worth) of the best part of a lookup, a model going on after it. Parts are halves of halves."""
        models = [s for s, o in zip(self.sources, outlooks, strict=True) if o.num_tokens is None and s.ready]
        chance, cost = source.chance_of(outlook.grade or 0), source.seconds.value + self.passes.slope
        place, count, best = len(self._drafted), min(outlook.num_tokens or 0, self._left), (0, 0.0)
        while count:
            kept = self._kept * chance**count
            gained = self._rate * self._kept * sum(chance**n for n in range(1, count + 1)) - count * cost
            after = max(
                (self._chain(model, kept, place + count, self._left - count)[1] for model in models), default=0.0
            )
            best = max(best, (count, gained + after), key=lambda pair: pair[1])
            count //= 2
        return best
