"""SentencePiece tokenizers of GGUF files: tokens with scores or with merges, which cut a text into them.

With scores, of all neighbours that form a token together, the pair whose token has the highest score is merged first;
of equal scores, the leftmost. All tokens count, whatever their type. Source: llama.cpp's llama-vocab.cpp
(llm_tokenizer_spm).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from heapq import heapify, heappop, heappush
from math import inf, isnan
from typing import Any

from tokenizers import PreTokenizedString, Token, Tokenizer, decoders, normalizers
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import PreTokenizer

from offload.config.gguf_tokens import CONTROL, PIECES, UNKNOWN, USER_DEFINED, token_id
from offload.errors import ModelError

_SPACE = "\u2581"
_NUM_WORDS = 1 << 14  # words whose tokens are cached


def pieces(values: Mapping[str, Any], tokens: list[str], merges: Sequence[tuple[str, str]] | None = None) -> Tokenizer:
    """A pipeline for texts between special tokens. With scores it puts a space before each text, unless the file says
    otherwise; then it merges. Characters without a token become their bytes, or the unknown token where bytes have
    none. merges: by rank, as a tokenizer.json has them; None: by scores."""
    unknown = token_id(values, "unknown", len(tokens))
    pipeline = Tokenizer(
        BPE(
            vocab=ids_of(tokens),
            merges=[*(merges or ())],
            unk_token=None if unknown is None else tokens[unknown] or None,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaced = values.get("model") == PIECES and values.get("add_space_prefix") is not False
    written, read = [normalizers.Replace(" ", _SPACE)], [decoders.Replace(_SPACE, " "), decoders.ByteFallback()]
    pipeline.normalizer = normalizers.Sequence([*([normalizers.Prepend(_SPACE)] if spaced else []), *written])
    if merges is None:
        pipeline.pre_tokenizer = PreTokenizer.custom(PieceEncoder(tokens, _scores(values, len(tokens)), unknown))
    pipeline.decoder = decoders.Sequence([*read, decoders.Fuse(), *([decoders.Strip(" ", 1, 0)] if spaced else [])])
    return pipeline


def ranked_merges(values: Mapping[str, Any], tokens: list[str]) -> list[tuple[str, str]]:
    """All pairs that form a token, the highest score first, without tokens that are split off before merges. Raises
    ModelError where two tokens of equal score can be merged."""
    scores, kinds = _scores(values, len(tokens)), values.get("token_type") or ()
    taken = {token for token, kind in zip(tokens, kinds, strict=False) if kind in (UNKNOWN, CONTROL, USER_DEFINED)}
    ids = {token: i for token, i in ids_of(tokens).items() if token not in taken}
    of_score, found = dict[float, str](), []
    for token, i in ids.items():
        parts = [(token[:at], token[at:]) for at in range(1, len(token)) if token[:at] in ids and token[at:] in ids]
        if parts and (other := of_score.setdefault(scores[i], token)) != token:
            raise ModelError(
                f"its tokens {other!r} and {token!r} have one score, {scores[i]:g}, which no tokenizer.json can say; "
                "run the GGUF file itself"
            )
        found += [(-scores[i], ids[left], ids[right], left, right) for left, right in parts]
    return [(left, right) for *_, left, right in sorted(found)]


def ids_of(tokens: Sequence[str]) -> dict[str, int]:
    """The id of each token, without empty ones."""
    return {token: i for i, token in enumerate(tokens) if token}


def _scores(values: Mapping[str, Any], count: int) -> list[float]:
    """The tokens' scores; 0 where the file has none, the lowest number in place of NaN."""
    found = values.get("scores") or [0.0] * count
    return [-inf if isnan(each) else each for each in found[:count]]


class PieceEncoder:
    """Encoder of normalised text into tokens. Time: n log n for n characters, if tokens are short beside the text."""

    def __init__(self, tokens: Sequence[str], scores: Sequence[float], unknown: int | None) -> None:
        """scores: of each token. unknown: the id for a character that has neither a token nor byte tokens; None if the
        vocabulary has no such id."""
        self._ids, self._unknown = ids_of(tokens), unknown
        self._costs = {token: -scores[i] for token, i in self._ids.items()}
        self._neighbours = {token[at : at + 2] for token in tokens for at in range(len(token) - 1)}
        self._word = lru_cache(_NUM_WORDS)(self._merged)

    def pre_tokenize(self, text: PreTokenizedString) -> None:
        """The hook of the tokenizers library: text that gets its tokens here is not split any further."""
        text.tokenize(self._tokens)

    def _tokens(self, text: str) -> list[Token]:
        """The tokens of `text`, with offsets in bytes. Consecutive unknown characters are one token."""
        found, stop = list[Token](), 0
        for word in self._words(text):
            for piece in self._word(word):
                start, stop = stop, stop + len(piece.encode())
                ids = self._ids_of(piece)
                if found and ids == [self._unknown] == [found[-1].id]:
                    start = found.pop().offsets[0]
                found += [Token(i, piece, (start, stop)) for i in ids]
        return found

    def _ids_of(self, piece: str) -> list[int]:
        if piece in self._ids:
            return [self._ids[piece]]
        found = [self._ids.get(f"<0x{byte:02X}>") for byte in piece.encode()]
        known = [i for i in found if i is not None]
        return known if len(known) == len(found) else [] if self._unknown is None else [self._unknown]

    def _words(self, text: str) -> Iterator[str]:
        """Parts of `text` that no token crosses: merges in one part do not affect another."""
        start = 0
        for at in range(1, len(text)):
            if text[at - 1 : at + 1] not in self._neighbours:
                yield text[start:at]
                start = at
        yield text[start:]

    def _merged(self, text: str) -> tuple[str, ...]:
        """The pieces of `text` after all merges: no two neighbours form a token."""
        ends, starts = [*range(1, len(text) + 1)], [*range(-1, len(text))]  # of the piece from, and up to, each place
        queue = [
            (self._costs[text[at : at + 2]], at, at + 1, at + 2)
            for at in range(len(text) - 1)
            if text[at : at + 2] in self._costs
        ]
        heapify(queue)
        while queue:
            _, first, middle, last = heappop(queue)
            if ends[first] != middle or ends[middle] != last:
                continue  # one of the two pieces was merged already
            ends[first], ends[middle], starts[last] = last, 0, first
            around = [(starts[first], first, last)] if first else []
            around += [(first, last, ends[last])] if last < len(text) else []
            for each in around:
                cost = self._costs.get(text[each[0] : each[2]])
                if cost is not None:
                    heappush(queue, (cost, *each))
        found, at = list[str](), 0
        while at < len(text):
            found.append(text[at : ends[at]])
            at = ends[at]
        return tuple(found)
