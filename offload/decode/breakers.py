"""Texts that end a repetition, found in tokens: DRY's sequence breakers, however the tokens cut them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from offload.decode.grammar_tokenizer import spellings
from offload.decode.tokenizer import Tokenizer


@dataclass(frozen=True)
class Breakers:
    """whole: tokens whose text has a breaker in it. heads: of tokens that begin with the end of a breaker, what has to
    stand right before them for it to be whole. texts: of every token."""

    whole: frozenset[int]
    heads: Mapping[int, Sequence[bytes]]
    texts: Mapping[int, bytes]

    def completed(self, before: NDArray[np.int32], token: int) -> bool:
        """Whether a breaker that is not whole in the text of `before` is with `token` behind it."""
        if token in self.whole:
            return True
        heads = self.heads.get(token)
        return heads is not None and self._end(before, max(map(len, heads))).endswith(tuple(heads))

    def _end(self, tokens: NDArray[np.int32], size: int) -> bytes:
        """The last `size` bytes of their text, or more, or all."""
        text, at = b"", len(tokens)
        while len(text) < size and at:
            at -= 1
            text = self.texts.get(int(tokens[at]), b"") + text
        return text


@lru_cache(maxsize=16)
def breakers_of(tokenizer: Tokenizer, breakers: tuple[str, ...]) -> Breakers:
    """breakers: none of them empty. A special token's text is its name here, as in llama.cpp."""
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
