"""Draft lengths: which proposer drafts next and how far, decided from what is known before the next token is drawn.

A token has a going rate: the seconds that a token costs in this text at present. Drafting one more token pays while its
acceptance probability, times the rate, is more than it costs. Over equal rounds this maximises tokens per second
(Dinkelbach's method for ratios), and plain decoding is the round in which no draft pays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from offload.decode.proposal import Offer
from offload.decode.speculation import Draft
from offload.decode.verify import Verdict

LOOKUP_CHANCES = (0.2, 0.4, 0.55, 0.75, 0.9, 0.95, 0.97, 0.99)  # by grade, measured on four kinds of text
SURE_MATCH = 3  # the grade of a lookup that fixed lengths trust: 8 tokens and more
GUESS_WEIGHT = 8.0  # observations that a guessed chance is worth
LOOKUP_MEMORY = 0.9  # share of a lookup's weight left after each token: a copied run is accepted or rejected as a whole
CHANCE_MEMORY = 0.995  # share of the weight of earlier tokens left after each: texts change within some 200
IDLE_MEMORY = 0.99  # share of an estimate's weight left after a round in which its proposer drafted nothing
SECONDS_MEMORY = 0.95  # share of the weight of earlier seconds left after new ones
RATE_MEMORY = 0.9  # the same for the going rate: a text changes within some ten rounds
PAUSE = 2.0  # a step that takes more than this many times its estimate was a pause of the machine
STIFFNESS = 2.0  # observations, two rows apart, that the guessed share of a row in a pass's seconds is worth


class Fixed:
    """Fixed lengths: `gamma` tokens a round, by lookup where it is sure, otherwise by the last proposer that can draft
    any number."""

    def __init__(self, gamma: int) -> None:
        self.gamma, self._left = gamma, 0

    def start(self, limit: int) -> None:
        self._left = min(self.gamma, limit)

    def next(self, offers: Sequence[Offer]) -> Draft | None:
        if self._left <= 0:
            return None
        models = [index for index, offer in enumerate(offers) if offer.num_tokens is None]
        for index, offer in enumerate(offers):
            if offer.num_tokens and (not models or offer.grade >= SURE_MATCH):
                return Draft(index, min(self._left, offer.num_tokens))
        return Draft(models[-1], self._left) if models else None

    def drafted(self, index: int, grades: Sequence[int], seconds: float) -> None:
        self._left -= len(grades)

    def verified(self, verdict: Verdict, num_rows: int, seconds: float) -> None: ...

    def wants(self, index: int) -> bool:
        return True

    def prepared(self, index: int, seconds: float | None) -> None: ...


@dataclass
class Mean:
    """A mean of recent observations that starts as `weight` observations of `guess`. Each new observation leaves
    `memory` of the weight of earlier ones."""

    guess: float
    weight: float
    memory: float
    _count: float = 0.0
    _total: float = 0.0

    @property
    def value(self) -> float:
        return (self.weight * self.guess + self._total) / (self.weight + self._count)

    def add(self, value: float, times: int = 1) -> None:
        self.fade(self.memory**times)
        self._count += times
        self._total += value * times

    def fade(self, share: float) -> None:
        self._count *= share
        self._total *= share


class PassSeconds:
    """The seconds of a verification as a function of its rows, fixed * blocks + slope * rows: a least-squares fit to
    recent passes.

    It starts from the guess (fixed, slope). Passes of one length scale both; only different lengths change their
    proportion. block: rows that are computed together; 0: all, as where a pass waits for a link.
    """

    def __init__(self, fixed: float, slope: float, *, block: int = 0) -> None:
        self.fixed, self.slope, self._guess, self._block = fixed, slope, (fixed, slope), block
        self._sums = [1.0, 1.0, 1.0, fixed + slope, fixed + slope]  # see `add`: the guess, seen once at one row

    def add(self, rows: int, seconds: float) -> None:
        blocks, (fixed, slope) = self._blocks(rows), self._guess
        terms = (blocks * blocks, blocks * rows, rows * rows, blocks * seconds, rows * seconds)
        self._sums = [SECONDS_MEMORY * total + term for total, term in zip(self._sums, terms, strict=True)]
        bb, br, rr, bs, rs = self._sums
        guess = slope * bs / max(fixed * bb + slope * br, 1e-12)
        self.slope = max((rs - br * bs / bb + STIFFNESS * guess) / (rr - br * br / bb + STIFFNESS), 0.0)
        self.fixed = max((bs - self.slope * br) / bb, 0.0)

    def at(self, rows: int) -> float:
        return self.fixed * self._blocks(rows) + self.slope * rows

    def _blocks(self, rows: int) -> int:
        return -(-rows // self._block) if self._block else 1


class Estimate:
    """The estimate of one proposer: the acceptance probability of its tokens, by grade, and the seconds that they cost.

    weight: observations that the guesses are worth. prepare_seconds: for each round in which it should be ready.
    chances: guesses by grade; if they are given, the proposer is a lookup.
    """

    def __init__(
        self,
        chance: float,
        seconds: float,
        *,
        weight: float = GUESS_WEIGHT,
        prepare_seconds: float = 0.0,
        chances: Sequence[float] = (),
    ) -> None:
        self.chance, self.is_lookup = Mean(chance, weight, CHANCE_MEMORY), bool(chances)
        self._by_grade = {grade: Mean(guess, weight, LOOKUP_MEMORY) for grade, guess in enumerate(chances)}
        self.seconds = Mean(seconds, max(weight / GUESS_WEIGHT, 1.0), SECONDS_MEMORY)
        self.prepare_seconds = Mean(prepare_seconds, 1.0, SECONDS_MEMORY)
        self.ready = True

    def chance_of(self, grade: int) -> float:
        return self._of(grade).value

    def learn(self, grade: int, chance: float) -> None:
        self.chance.add(chance)
        self._of(grade).add(chance)

    def took(self, seconds: float, num_tokens: int) -> None:
        self.seconds.add(min(seconds / num_tokens, PAUSE * self.seconds.value), num_tokens)

    def idle(self) -> None:
        """Fade towards the guesses, so that a proposer that looked bad is tried again."""
        for mean in (self.chance, self.seconds, *self._by_grade.values()):
            mean.fade(IDLE_MEMORY)

    def _of(self, grade: int) -> Mean:
        if self.is_lookup:
            return self._by_grade[min(grade, len(self._by_grade) - 1)]
        mean = self._by_grade.setdefault(grade, Mean(0.0, self.chance.weight, CHANCE_MEMORY))
        mean.guess = self.chance.value
        return mean


class Adaptive:
    """Lengths that adapt to the observed seconds and acceptance. most: limit of drafted tokens in a round. estimates:
    one for each proposer, in their order."""

    def __init__(self, most: int, passes: PassSeconds, estimates: Sequence[Estimate]) -> None:
        self.most, self.passes, self.estimates = most, passes, estimates
        self._left, self._kept = 0, 1.0  # _kept: the probability that all drafted tokens are accepted
        self._drafted: list[tuple[Estimate, int]] = []  # each token's proposer and grade
        self._seconds = self._recent_seconds = self._recent_tokens = 0.0  # the first: of this round

    @property
    def rate(self) -> float:
        """Seconds that a token costs at present, at most those of plain decoding."""
        plain = self.passes.at(1)
        return min(self._recent_seconds / self._recent_tokens, plain) if self._recent_tokens else plain

    def start(self, limit: int) -> None:
        self._left, self._kept, self._drafted = min(self.most, limit), 1.0, []

    def next(self, offers: Sequence[Offer]) -> Draft | None:
        """The step that is worth the most."""
        best, most = None, 0.0
        for index, (estimate, offer) in enumerate(zip(self.estimates, offers, strict=True)):
            if offer.num_tokens is not None:
                num_tokens, worth = self._part(estimate, offer, offers)
            else:
                num_tokens, worth = self._chain(estimate, self._kept, len(self._drafted), self._left)
            if estimate.ready and num_tokens and worth > most:
                best, most = Draft(index, num_tokens), worth
        return best

    def drafted(self, index: int, grades: Sequence[int], seconds: float) -> None:
        estimate = self.estimates[index]
        for grade in grades:
            self._kept *= estimate.chance_of(grade)
            self._drafted.append((estimate, grade))
        estimate.took(seconds, len(grades))
        self._left -= len(grades)
        self._seconds += seconds

    def verified(self, verdict: Verdict, num_rows: int, seconds: float) -> None:
        for (estimate, grade), chance in zip(self._drafted, verdict.chances, strict=False):
            estimate.learn(grade, chance)
        for estimate in set(self.estimates) - {estimate for estimate, _ in self._drafted}:
            estimate.idle()
        self.passes.add(num_rows, seconds)
        self._recent_seconds = RATE_MEMORY * self._recent_seconds + self._seconds + seconds
        self._recent_tokens = RATE_MEMORY * self._recent_tokens + verdict.num_accepted + 1
        self._seconds = 0.0

    def wants(self, index: int) -> bool:
        """Whether the proposer's tokens are worth more than the best other model's by at least its preparation cost."""
        estimate = self.estimates[index]
        if not estimate.prepare_seconds.value:
            return True
        others = [other for other in self.estimates if other is not estimate and not other.is_lookup]
        worth, *others_worth = (self._chain(model, 1.0, 0, self.most)[1] for model in (estimate, *others))
        return worth - max(others_worth, default=0.0) > estimate.prepare_seconds.value

    def prepared(self, index: int, seconds: float | None) -> None:
        estimate = self.estimates[index]
        estimate.ready = seconds is not None
        if seconds:
            estimate.prepare_seconds.add(seconds)
            self._seconds += seconds

    def _chain(self, estimate: Estimate, kept: float, drafted: int, limit: int) -> tuple[int, float]:
        """(tokens, worth in seconds) of drafting with a model as long as that pays, after `drafted` tokens that are all
        accepted with probability `kept`."""
        rate, chance, seconds = self.rate, estimate.chance.value, estimate.seconds.value
        before, gained, best = self.passes.at(1 + drafted), 0.0, (0, 0.0)
        for count in range(1, limit + 1):
            kept *= chance
            if rate * kept < seconds + self.passes.slope:
                break  # no later token pays either
            gained += rate * kept
            worth = gained - count * seconds - self.passes.at(1 + drafted + count) + before
            best = max(best, (count, worth), key=lambda pair: pair[1])
        return best

    def _part(self, estimate: Estimate, offer: Offer, offers: Sequence[Offer]) -> tuple[int, float]:
        """(tokens, worth) of the best part of a lookup (all, a half, a quarter, ...) and of drafting by a model after
        it."""
        models = [e for e, o in zip(self.estimates, offers, strict=True) if o.num_tokens is None and e.ready]
        chance, drafted, best = estimate.chance_of(offer.grade), len(self._drafted), (0, 0.0)
        count = min(offer.num_tokens or 0, self._left)
        while count:
            cost = self.passes.at(1 + drafted + count) - self.passes.at(1 + drafted)
            gained = self.rate * self._kept * sum(chance**n for n in range(1, count + 1))
            kept, left = self._kept * chance**count, self._left - count
            chains = (self._chain(model, kept, drafted + count, left) for model in models)
            worth = gained - cost + max((worth for _, worth in chains), default=0.0)
            best = max(best, (count, worth), key=lambda pair: pair[1])
            count //= 2
        return best
