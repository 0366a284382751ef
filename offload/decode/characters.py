"""Tokens that end inside a character wait until it is whole.

Only their bytes can tell: U+FFFD at the end of a decoded text may be half a character, or one that was written.
"""

from __future__ import annotations

import codecs
import re
from functools import cache
from typing import Any

REPLACEMENT = "\ufffd"
_STEP = re.compile(rb'"type":\s*"(\w+)"')  # of a decoder written as JSON
_SURROGATE = re.compile(rb"\xed[\xa0-\xbf]\Z")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Characters:
    """Of a decoder that knows no bytes: each token is whole characters."""

    def push(self, token: str) -> list[str]:
        """Strings that a decoder makes the text of that is complete with this token of the vocabulary."""
        return [token]

    def flush(self) -> list[str]:
        """Those of what waits: a character that stays a part of one."""
        return []

    def bytes_of(self, token: str) -> bytes | None:
        """What a token of the vocabulary adds to a text, maybe parts of characters; None: what its decoder says."""
        return None


class ByteLetters(Characters):
    """Byte-level vocabularies, as GPT-2's: each letter of a token is a byte."""

    def __init__(self) -> None:
        self._held = ""

    def push(self, token: str) -> list[str]:
        letters = self._held + token
        try:
            data = bytes(byte_letters()[letter] for letter in letters)
        except KeyError:  # an added token, which stands for itself
            return [*self.flush(), token]
        _, num_whole = _decoded(data, "replace")
        self._held = letters[num_whole:]
        return [letters[:num_whole]] if num_whole else []

    def flush(self) -> list[str]:
        held, self._held = self._held, ""
        return [held] if held else []

    def bytes_of(self, token: str) -> bytes:
        letters = byte_letters()
        return bytes(map(letters.__getitem__, token)) if letters.keys() >= set(token) else token.encode()


class ByteTokens(Characters):
    """Vocabularies with a token for each byte, as Llama 2's.

    A run of such tokens is characters if all of it is valid UTF-8, else U+FFFD for each. Characters of a run that were
    complete before the first byte that is not stay.
    """

    def __init__(self) -> None:
        self._held, self._broken = b"", False

    def push(self, token: str) -> list[str]:
        byte = _BYTE_TOKEN.fullmatch(token)
        if byte is None:
            return [*self.flush(), token]
        self._held += bytes.fromhex(byte[1])
        try:
            text, num_whole = _decoded(self._held)
        except UnicodeDecodeError:
            self._broken = True
        if self._broken:
            text, num_whole = REPLACEMENT * len(self._held), len(self._held)
        self._held = self._held[num_whole:]
        return [text] if text else []

    def flush(self) -> list[str]:
        left, self._held, self._broken = REPLACEMENT * len(self._held), b"", False
        return [left] if left else []

    def bytes_of(self, token: str) -> bytes | None:
        byte = _BYTE_TOKEN.fullmatch(token)
        return None if byte is None else bytes.fromhex(byte[1])


def _decoded(data: bytes, errors: str = "strict") -> tuple[str, int]:
    """What is whole of it, and how many bytes that is. Python would wait for a surrogate's third byte, though it is no
    character with it either."""
    return codecs.utf_8_decode(data, errors, _SURROGATE.search(data) is not None)


def characters_of(decoder: Any) -> Characters:
    """decoder: a tokenizer's, of the tokenizers library, or None."""
    steps = set(_STEP.findall(decoder.__getstate__())) if decoder is not None else set()
    return ByteLetters() if b"ByteLevel" in steps else ByteTokens() if b"ByteFallback" in steps else Characters()


@cache
def byte_letters() -> dict[str, int]:
    """The byte of each letter: its own where it is printable, the others in order from U+0100 on (GPT-2)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
