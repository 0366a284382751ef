"""DRY's sequence breakers, texts that end a repetition, found in tokens however the tokens split them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from offload.grammar.grammar_tokenizer import spellings
from offload.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Breakers:
    """Sequence breakers of one tokenizer. whole: tokens whose text contains a breaker. heads: for tokens that begin
    with the end of a breaker, the beginnings that must precede them. texts: of every token."""

    whole: frozenset[int]
    heads: Mapping[int, Sequence[bytes]]
    texts: Mapping[int, bytes]

    def completed(self, before: NDArray[np.int32], token: int) -> bool:
        """Whether `token` after `before` completes a breaker."""
        if token in self.whole:
            return True
        heads = self.heads.get(token)
        return heads is not None and self._end(before, max(map(len, heads))).endswith(tuple(heads))

    def _end(self, tokens: NDArray[np.int32], size: int) -> bytes:
        """The end of the tokens' text: at least `size` bytes, or all of it."""
        text, at = b"", len(tokens)
        while len(text) < size and at:
            at -= 1
            text = self.texts.get(int(tokens[at]), b"") + text
        return text


@lru_cache(maxsize=16)
def breakers_of(tokenizer: Tokenizer, breakers: tuple[str, ...]) -> Breakers:
    """The breakers as found in a tokenizer's tokens; none may be empty. A special token's text is its name here, as in
    llama.cpp."""
    texts, wanted = _texts(tokenizer), [breaker.encode() for breaker in breakers]
    splits = [(breaker[:at], breaker[at:]) for breaker in wanted for at in range(1, len(breaker))]
    ends = tuple({end for _, end in splits})
    whole = frozenset(token for token, text in texts.items() if any(breaker in text for breaker in wanted))
    heads = defaultdict[int, list[bytes]](list)
    for token, text in texts.items():
        if text.startswith(ends) and token not in whole:
            heads[token] += [head for head, end in splits if text.startswith(end)]
    return Breakers(whole, heads, texts)


@lru_cache(maxsize=2)
def _texts(tokenizer: Tokenizer) -> dict[int, bytes]:
    special = tokenizer.added_tokens(special=True)
    return spellings(tokenizer) | {token: name.encode() for name, token in special.items()}
