"""Tokenization of long texts: a lower bound of their tokens, and cuts whose parts have the same tokens as the whole.

A tokenizer takes some hundred bytes of memory for each character of a text, so a long text is encoded in parts. Bound
and cuts follow from a property of byte-pair encodings: their tokens are the text's own bytes, in order and without
gaps. Where that is not certain, as with several unknown letters that become one token, there is neither bound nor cut.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, models
from tokenizers.pre_tokenizers import PreTokenizer

from offload.errors import DoesNotFit
from offload.text.characters import byte_letters

PART = 1 << 18  # characters that are encoded at a time, some hundred bytes of memory for each
MOST_PART = 1 << 22  # the limit where no place to cut is found
AROUND = 1 << 9  # characters before and after a part that are encoded with it
_PIECE = 1 << 20  # characters that are counted at a time
_WHOLE = {"Prepend", "Replace", "NFC"}  # normalizers that leave no letter out
_CUTTING = {"ByteLevel", "Digits", "Metaspace", "Punctuation", "Split"}  # pre-tokenizers, unless they remove something
_PLACE = re.compile(r"(?<=[^\W_])(?=\n[^\W_])|(?<=\n)(?=\w)|(?<=[^\W_])(?= [^\W_])")
_REPLACED = {'"Replace","pattern":{"String":" "},"content":"\u2581"'}
_SPACES = b" \t\n\v\f\r"


@dataclass(frozen=True)
class Coverage:
    """The coverage of texts by a vocabulary's tokens. longest: bytes of the longest token. most: the largest number of
    occurrences of each byte in one token, int64 [256]. joined: pairs of bytes that are adjacent in some token, bool
    [256, 256]. counts: bytes that certainly are in some token, bool [256]. composes: whether letters before combining
    marks change."""

    longest: int
    most: NDArray[np.int64]
    joined: NDArray[np.bool_]
    counts: NDArray[np.bool_]
    composes: bool

    @classmethod
    def of(cls, pipeline: Tokenizer) -> Coverage | None:
        """The coverage of a pipeline's tokens; None where they need not cover a text."""
        if not _covers(pipeline):
            return None
        added = pipeline.get_added_tokens_decoder().values()
        spellings = set(_spellings(pipeline, [token.content for token in added]))
        data = np.frombuffer(b"".join(spellings), np.uint8)
        lengths = np.fromiter(map(len, spellings), np.int64, len(spellings))
        owner = np.repeat(np.arange(len(spellings)), lengths)
        keys, times = np.unique(owner * 256 + data, return_counts=True)
        most = np.ones(256, np.int64)
        np.maximum.at(most, keys % 256, times)
        joined, inside = np.zeros((256, 256), np.bool_), owner[1:] == owner[:-1]
        joined[data[:-1][inside], data[1:][inside]] = True
        counts = np.ones(256, np.bool_)
        if _is_byte_level(pipeline):  # unknown letters are left out, or become one token
            counts[:] = False
            counts[
                [byte for letter, byte in byte_letters().items() if pipeline.model.token_to_id(letter) is not None]
            ] = True
        if any(token.lstrip or token.rstrip for token in added):  # they take any spaces with them
            counts[128:] = counts[list(_SPACES)] = False
        return cls(int(lengths.max()), most, joined, counts, "NFC" in _kinds(pipeline.normalizer))

    def fewest(self, text: str) -> int:
        """A lower bound of the number of tokens of `text`: by all its bytes, and by each byte for itself."""
        found = np.zeros(256, np.int64)
        for start in range(0, len(text), _PIECE):
            data = np.frombuffer(text[start : start + _PIECE].encode("utf-8", "surrogatepass"), np.uint8)
            if self.composes:  # ASCII letters alone do not change
                data = data[:-1][(data[:-1] < 128) & (data[1:] < 128)]
            found += np.bincount(data, minlength=256)
        found[~self.counts] = 0
        return int(max(-(-found.sum() // self.longest), (-(-found // self.most)).max()))

    def places(self, text: str, start: int, end: int) -> Iterator[int]:
        """Places between `start` and `end` at which `text` may be cut: no token crosses them."""
        for found in _PLACE.finditer(text, start, end):
            before, after = (letter.encode() for letter in text[found.start() - 1 : found.start() + 1])
            if not self.joined[before[-1], after[0]]:
                yield found.start()


def parts(encode: Callable[[str], Any], coverage: Coverage | None, text: str) -> Iterator[tuple[list[int], list[int]]]:
    """(tokens, start of each in `text`) of consecutive parts, which together equal `encode` of the whole text.

    encode: a pipeline's, without special tokens. Raises DoesNotFit where a part would take too much memory.
    """
    start = 0
    while start < len(text):
        end = _end(encode, coverage, text, start)
        yield _between(encode, text, start, end, AROUND)
        start = end


def _end(encode: Callable[[str], Any], coverage: Coverage | None, text: str, start: int) -> int:
    """The end of the part that begins at `start`."""
    if len(text) - start <= PART:
        return len(text)
    if coverage is not None:
        for place in coverage.places(text, start + PART, min(start + MOST_PART, len(text))):
            if _is_clean(encode, text, place):
                return place
    if len(text) - start > MOST_PART:
        raise _too_long(coverage, text)
    return len(text)


def _too_long(coverage: Coverage | None, text: str) -> DoesNotFit:
    if coverage is None:
        return DoesNotFit(
            f"the text has {len(text):,} characters, and this model's tokenizer takes {MOST_PART:,} at most: shorten it"
        )
    return DoesNotFit(
        f"the text has at least {coverage.fewest(text):,} tokens and cannot be counted: no line or word ends in "
        f"{MOST_PART:,} of its {len(text):,} characters; shorten it, or break its lines"
    )


def _is_clean(encode: Callable[[str], Any], text: str, place: int) -> bool:
    """Whether the tokens on both sides of a place do not depend on text further away."""
    return all(
        _between(encode, text, *side, AROUND) == _between(encode, text, *side, AROUND // 2)
        for side in ((max(place - AROUND, 0), place), (place, min(place + AROUND, len(text))))
    )


def _between(encode: Callable[[str], Any], text: str, start: int, end: int, around: int) -> tuple[list[int], list[int]]:
    """(tokens, start of each) of a part, encoded with some of the text around it."""
    first = max(start - around, 0)
    found = encode(text[first : end + around])
    places = [first + place for place, _ in found.offsets]
    low, high = bisect_left(places, start), bisect_left(places, end)
    return found.ids[low:high], places[low:high]


def _covers(pipeline: Tokenizer) -> bool:
    """Whether tokens contain every letter of a text, and no token stands for two unknown letters."""
    model, cuts = pipeline.model, _state(pipeline.pre_tokenizer)
    if not isinstance(model, models.BPE) or model.dropout or pipeline.truncation is not None or '"Removed"' in cuts:
        return False
    if not (_kinds(pipeline.normalizer) <= _WHOLE and _kinds(pipeline.pre_tokenizer) <= _CUTTING):
        return False
    if not _REPLACED.issuperset(re.findall(r'"Replace","pattern":.*?,"content":".*?"', _state(pipeline.normalizer))):
        return False
    fallback = model.byte_fallback and all(model.token_to_id(f"<0x{byte:02X}>") is not None for byte in range(256))
    return fallback or _is_byte_level(pipeline)


def _is_byte_level(pipeline: Tokenizer) -> bool:
    return "ByteLevel" in _kinds(pipeline.pre_tokenizer)


def _state(part: Any) -> str:
    """A pipeline's part as JSON; "" where there is none, or for this project's own part (decode/gguf_pieces), which
    omits no letter that the vocabulary or its bytes have."""
    return "" if part is None or type(part) is PreTokenizer else part.__getstate__().decode()


def _kinds(part: Any) -> set[str]:
    """The types of a normalizer or pre-tokenizer; of a sequence, of each member."""
    return set(_listed(json.loads(state))) if (state := _state(part)) else set()


def _listed(state: dict[str, Any]) -> Iterator[str]:
    inside = state.get("normalizers") or state.get("pretokenizers")
    if inside is None:
        yield state["type"]
    for each in inside or ():
        yield from _listed(each)


def _spellings(pipeline: Tokenizer, added: Iterable[str]) -> Iterator[bytes]:
    """The bytes of every token. A token with U+2581 is given with that letter and with a space."""
    letters = byte_letters() if _is_byte_level(pipeline) else {}
    for token in pipeline.get_vocab(with_added_tokens=False):
        if letters and letters.keys() >= set(token):
            yield bytes(map(letters.__getitem__, token))
        else:
            yield token.encode()
            yield token.replace("\u2581", " ").encode()
    for token in added:
        yield token.encode()
        yield token.replace(" ", "\u2581").encode()
