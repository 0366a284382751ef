"""Words that an answer has in common with passages, by BM25 (Robertson and Zaragoza, 2009)."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence

_WORD = re.compile(r"[^\W_]+")
_SATURATION, _LENGTH = 1.2, 0.75  # k1 and b


def words(text: str) -> list[str]:
    """The words and numbers of a text, in lower case."""
    return [word.casefold() for word in _WORD.findall(text)]


def scores(answer: str, passages: Sequence[str]) -> list[float]:
    """The BM25 score of each passage for the answer's words; a word that few of the passages have counts for more. 0:
    no word in common."""
    counts = [Counter(words(passage)) for passage in passages]
    mean = sum(count.total() for count in counts) / max(len(counts), 1)
    weights = {word: _weight(word, counts) for word in dict.fromkeys(words(answer))}
    return [sum(weight * _saturated(count, word, mean) for word, weight in weights.items()) for count in counts]


def _weight(word: str, counts: Sequence[Counter[str]]) -> float:
    having = sum(word in count for count in counts)
    return math.log(1.0 + (len(counts) - having + 0.5) / (having + 0.5))


def _saturated(count: Counter[str], word: str, mean: float) -> float:
    """The word's number in a passage: twice as many count for less than twice, and for less in a longer passage."""
    if not (number := count[word]):
        return 0.0
    return number * (_SATURATION + 1.0) / (number + _SATURATION * (1.0 - _LENGTH + _LENGTH * count.total() / mean))
