"""What is known of one proposer at one level, as it runs: how often its tokens are kept, and what they cost."""

from __future__ import annotations

from collections.abc import Sequence

from offload.decode.estimates import Mean

_LOOKUP_CHANCES = (0.2, 0.4, 0.55, 0.75, 0.9, 0.95, 0.97, 0.99)  # by grade (docs/log.md)
_LOOKUP_MEMORY = 0.9  # of the weight of a looked up token is left after the next: a run stands or falls as one
_IDLE = 0.98  # of an estimate's weight is left after a round in which its proposer was not asked
_PACE = 0.95  # of the weight of earlier seconds, after new ones
_STEADY_PACE = 0.98  # the same of seconds that were given with trust
_LEAST_SHARE = 0.4  # of the given seconds, however much lookups save
_GUESSED = 8.0  # observations that a guess is worth
_ASKED = 0.99  # of the weight of a round is left after the next, in how often a proposer that is ready is asked
_FORESEEN = 0.98  # of the weight of a token is left after the next, in how hard the text seems
_PLACES = 6  # in a block: the first, the 2nd and 3rd, the 4th to 7th, ...
_CATCH_UP = 2  # rounds after which a proposer that was not asked has more to do than usual


class Source:
    """What is known of one proposer at one level: the chance that a token of it is kept, and what it costs.

    Chances are kept by grade, for drafted tokens, and by place in the block, for those that would follow: texts
    are easy and hard in stretches, so a block that went well so far goes on better than the mean.
    trust: observations that the given chance and seconds are worth. seconds: of one token; round_seconds: of each round
    in which it may be asked, for getting it ready; pass_share: what that adds to a verification, as a share of its
    seconds; guessed_chances: by grade, where they are known beforehand; doubts: by the grade that the verifying level
    gives to a token, how much oftener than on the average it is not kept.
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
        doubts: Sequence[float] = (),
    ) -> None:
        weight = _GUESSED if trust is None else trust
        self.chance, self._by_place = Mean(chance, weight), [Mean(chance, weight) for _ in range(_PLACES)]
        self.seconds = Mean(seconds, 1.0, _PACE) if trust is None else Mean(seconds, trust, _STEADY_PACE)
        self._given_seconds, self.round_seconds = seconds, Mean(round_seconds, 1.0, _PACE)
        self.pass_share, self.is_lookup = pass_share, bool(guessed_chances)
        self._foreseen = Mean(chance, _GUESSED, _FORESEEN)
        self._foreseen_by_grade = [max(1.0 - doubt * (1.0 - chance), 0.0) for doubt in doubts]
        self.asked = Mean(1.0, 1.0, _ASKED)  # in rounds in which it could be
        self.ready, self.idle_rounds = True, _CATCH_UP + 1
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

    def foresee(self, grades: Sequence[int]) -> None:
        """The verifying level emitted tokens of these grades. Whether or not any were drafted by this proposer, they
        tell how hard the text is now, and so what the chance is guessed to be.
        """
        if self._foreseen_by_grade:
            for grade in grades:
                self._foreseen.add(self._foreseen_by_grade[grade])
            self.chance.guess = self._foreseen.value

    def took(self, seconds: float, num_tokens: int) -> None:
        """A step did. What is far above the estimate was a pause of the machine, or, after rounds in which it was not
        asked, a cache that had to catch up.
        """
        most = 1.3 if self.idle_rounds > _CATCH_UP else 2.0
        self.seconds.add(min(seconds / num_tokens, most * self.seconds.value), num_tokens)

    def cheapen(self, share: float) -> None:
        """A token of it is guessed to take that share of the seconds given, at most all: lookups serve a level that
        proposes as well as the one above. What was taken to be dear while it rested would never be tried.

        share: what a token costs now, of a pass as it was given. A machine that is slower than was given makes up for
        lookups.
        """
        self.seconds.guess = min(max(share, _LEAST_SHARE), 1.0) * self._given_seconds

    def ended(self, *, asked: bool, could_be: bool) -> None:
        """A round did, in which it was asked, or could have been."""
        self.idle_rounds = 0 if asked else self.idle_rounds + 1
        if could_be:
            self.asked.add(float(asked))
        else:
            self.asked.fade(_ASKED)
        if not asked:
            for mean in (self.chance, self.seconds, *self._by_place, *self._by_grade.values()):
                mean.fade(_IDLE)

    def _at(self, place: int) -> Mean:
        return self._by_place[min((place + 1).bit_length(), _PLACES) - 1]

    def _of(self, grade: int) -> Mean:
        if self._last_grade >= 0:
            grade = min(grade, self._last_grade)
        return self._by_grade.setdefault(grade, Mean(self.chance.value, self.chance.weight))
