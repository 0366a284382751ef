"""Assembly of whole characters from tokens: a token that ends inside a character is held until it is complete.

It works on bytes: U+FFFD at the end of a decoded text may be half a character, or a generated U+FFFD.
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
    """Assembly for a decoder without byte tokens: each token is whole characters."""

    def push(self, token: str) -> list[str]:
        """The strings that are complete with `token` of the vocabulary, for the decoder to join."""
        return [token]

    def flush(self) -> list[str]:
        """The strings of the held tokens, an unfinished character, at the end of the text."""
        return []

    def bytes_of(self, token: str) -> bytes | None:
        """The bytes that a token of the vocabulary adds to a text, perhaps parts of characters. None: only the decoder
        can tell."""
        return None


class ByteLetters(Characters):
    """Assembly for byte-level vocabularies, as GPT-2's: each letter of a token is a byte."""

    def __init__(self) -> None:
        self._held = ""

    def push(self, token: str) -> list[str]:
        letters = self._held + token
        try:
            data = bytes(byte_letters()[letter] for letter in letters)
        except KeyError:  # an added token: its text is literal
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
    """Assembly for vocabularies with a token for each byte, as Llama 2's.

    A run of byte tokens is decoded as UTF-8 if all of it is valid, otherwise as U+FFFD for each token. Characters that
    were complete before the first invalid byte stay.
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
    """(text of the complete characters, number of their bytes). Python's decoder would wait for a surrogate's third
    byte, though no byte makes it a character."""
    return codecs.utf_8_decode(data, errors, _SURROGATE.search(data) is not None)


def characters_of(decoder: Any) -> Characters:
    """The assembly for a decoder of the tokenizers library, or for None."""
    steps = set(_STEP.findall(decoder.__getstate__())) if decoder is not None else set()
    return ByteLetters() if b"ByteLevel" in steps else ByteTokens() if b"ByteFallback" in steps else Characters()


@cache
def byte_letters() -> dict[str, int]:
    """The byte of each letter of a byte-level vocabulary: printable bytes are themselves, the others follow in order
    from U+0100 on (GPT-2)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
