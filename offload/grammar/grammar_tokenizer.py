"""A tokenizer in llguidance's interface: the bytes of every token, and the tokens of a certain text.

Bytes come from this project's tokenizers and not from a tokenizer.json, so every tokenizer is supported, including GGUF
files', and a token's bytes are the text that `Tokenizer.decode` shows for it in the middle of a text.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from offload.errors import UsageError
from offload.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer

_MARKER = 0xFF  # first byte of special tokens' names in llguidance; UTF-8 has no such byte
_NEEDED = bytes(range(0x20, 0x7F))


@lru_cache(maxsize=2)  # .9 s for 150,000 tokens; a tokenizer has one vocabulary size and one set of end tokens
def served(tokenizer: Tokenizer, vocab_size: int, end_tokens: frozenset[int]) -> LLTokenizer:
    """The library's tokenizer of ids 0 to `vocab_size` - 1. Ids without a token, special tokens and end tokens have no
    text.

    Raises UsageError where the tokenizer cannot write every text, or where no token ends a text.
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
    """A tokenizer's vocabulary in llguidance's interface.

    tokens: the bytes of each id; of special tokens their name; empty where there is no token.
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
        """The tokens of `text` in the middle of a longer one: the tokenizer's, if they spell exactly this text. It may
        change letters, or take names for special tokens; then the longest tokens first."""
        if isinstance(text, bytes):
            text = text.decode()
        tokens, data = self._tokenizer.encode_piece(text), text.encode()
        special = set(self.special_token_ids)
        inside = all(token < len(self.tokens) and token not in special for token in tokens)
        spelled = inside and b"".join(self.tokens[token] for token in tokens) == data
        return tokens if spelled else self._greedy(data)

    def _greedy(self, data: bytes) -> list[int]:
        """The tokens of `data`, the longest first at each place, up to a byte without a token."""
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
    """The bytes that each token adds to a text, without special tokens and ids without a token.

    Empty bytes, and bytes that UTF-8 does not have, are left out.
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
    """A decoder's text of a token after another one: some decoders drop a space at the beginning of a text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._join, self._before = tokenizer.join, "0"
        self._text = tokenizer.join([self._before])

    def bytes_of(self, written: str) -> bytes:
        return self._join([self._before, written])[len(self._text) :].encode()
