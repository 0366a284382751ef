"""A tokenizer as llguidance wants it: the bytes of every token, and how a text that is certain is cut into tokens.

Bytes are taken from this project's tokenizers and not from the text of a tokenizer.json, so all of them can be served,
a GGUF file's too, and a token spells what `Tokenizer.decode` shows in the middle of a text.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from offload.decode.tokenizer import Tokenizer
from offload.errors import UsageError

if TYPE_CHECKING:
    from llguidance import LLTokenizer

_MARKER = 0xFF  # what the names of special tokens begin with in llguidance; in UTF-8 no such byte exists
_NEEDED = bytes(range(0x20, 0x7F))


@lru_cache(maxsize=2)  # .9 s for 150,000 tokens, and each is asked for with one vocabulary size and some ends
def served(tokenizer: Tokenizer, vocab_size: int, end_tokens: frozenset[int]) -> LLTokenizer:
    """Ids 0 to `vocab_size` - 1. Those that are no token, and special ones, are no text, nor are the end tokens.

    Raises UsageError where the tokenizer cannot write any text, or nothing can end one.
    """
    from llguidance import LLTokenizer, TokenizerWrapper

    ends = sorted(token for token in end_tokens if 0 <= token < vocab_size)
    if not ends:
        raise UsageError(
            "constrained output needs a token that ends the text, and this model has none; name it as eos_token_id in "
            "its generation_config.json"
        )
    return LLTokenizer(TokenizerWrapper(Vocabulary(tokenizer, vocab_size, ends)), eos_token=ends)


class Vocabulary:
    """What llguidance asks of a tokenizer.

    tokens: the bytes of each id, those of special tokens their name; none where there is no token.
    """

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, ends: list[int]) -> None:
        self._tokenizer, self.eos_token_id = tokenizer, ends[0]
        texts, special = spellings(tokenizer), tokenizer.added_tokens(special=True)
        for token in (*special.values(), *ends):
            texts.pop(token, None)
        self._ids = {text: token for token, text in sorted(texts.items(), reverse=True) if token < vocab_size}
        self._longest = max(map(len, self._ids), default=0)
        self._check()
        names = {i: f"<end {i}>".encode() for i in ends} | {token: name.encode() for name, token in special.items()}
        self.tokens = [texts.get(i) or names.get(i, b"") for i in range(vocab_size)]
        self.special_token_ids = sorted(token for token in names if token < vocab_size)

    def _check(self) -> None:
        missing = bytes(byte for byte in _NEEDED if bytes([byte]) not in self._ids).decode()
        if missing:
            raise UsageError(
                f"constrained output needs a tokenizer that can write every letter, and this model's has no token for "
                f"{' '.join(missing[:8])}{' ...' if len(missing) > 8 else ''}; take a model with a byte-level tokenizer"
            )

    def __call__(self, text: str | bytes) -> list[int]:
        """Tokens of `text` in the middle of a longer one, as the tokenizer cuts it where that spells just this text: it
        may change letters, and names of special tokens."""
        if isinstance(text, bytes):
            text = text.decode()
        tokens, data = self._tokenizer.encode_piece(text), text.encode()
        special = set(self.special_token_ids)
        inside = all(token < len(self.tokens) and token not in special for token in tokens)
        spelled = inside and b"".join(self.tokens[token] for token in tokens) == data
        return tokens if spelled else self._greedy(data)

    def _greedy(self, data: bytes) -> list[int]:
        """The longest token first, up to a byte that has none."""
        tokens, at = list[int](), 0
        while at < len(data):
            sizes = range(min(self._longest, len(data) - at), 0, -1)
            size = next((size for size in sizes if data[at : at + size] in self._ids), None)
            if size is None:
                break
            tokens.append(self._ids[data[at : at + size]])
            at += size
        return tokens


def spellings(tokenizer: Tokenizer) -> dict[int, bytes]:
    """The bytes that each token adds to a text, special tokens and ids without one left out.

    None of them is empty, and none has a byte that UTF-8 has not.
    """
    characters, inside = tokenizer.characters(), _Inside(tokenizer)
    found = dict[int, bytes]()
    for written, token in tokenizer.vocabulary().items():
        data = characters.bytes_of(written)
        data = inside.bytes_of(written) if data is None else data
        if data and _MARKER not in data:
            found[token] = data
    for token in tokenizer.added_tokens(special=True).values():
        found.pop(token, None)
    return found


class _Inside:
    """What a decoder makes of a token behind another one: at the beginning of a text some leave a space out."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._join, self._before = tokenizer.join, "0"
        self._text = tokenizer.join([self._before])

    def bytes_of(self, written: str) -> bytes:
        return self._join([self._before, written])[len(self._text) :].encode()
