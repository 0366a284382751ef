"""Constraints on four kinds of tokenizers, and random texts under them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest
import tokenizers
import torch
from tokenizers import decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from offload.grammar.constraint import Constraint, Kind
from offload.grammar.grammar import Grammar
from offload.grammar.grammar_tokenizer import spellings
from offload.text.tokenizer import Tokenizer
from test_gguf_tokenizer import made, pieces

ROOT = Path(__file__).resolve().parents[2]
MORE = 7  # logits that no token has
MAX_TOKENS = 160


@cache
def demo() -> Tokenizer:
    return Tokenizer.from_folder(ROOT / "triforce_cli" / "models" / "demo-target")


@cache
def llama_like() -> Tokenizer:
    """Words carry the space before them, bytes are tokens, "a" and <0x61> are two tokens for one letter."""
    words = [
        "\u2581",
        *'{}[]:,"abcdetrunfls\u00e9',
        "\u2581{",
        '\u2581"',
        "true",
        "\u2581the",
        "null",
        "ab",
        '":',
        '",',
    ]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    merges = [("\u2581", "{"), ("\u2581", '"'), ("a", "b"), ('"', ":"), ('"', ",")]
    vocabulary = {name: i for i, name in enumerate(names)}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, unk_token="<unk>"))
    inner.add_special_tokens(["<unk>", "<s>", "</s>"])
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    inner.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>"))


@cache
def gguf_bytes() -> Tokenizer:
    return made("smollm")


@cache
def gguf_pieces() -> Tokenizer:
    return pieces()


TOKENIZERS = (demo, llama_like, gguf_bytes, gguf_pieces)
EACH = pytest.mark.parametrize("make", TOKENIZERS)


@cache
def compiled(make: Callable[[], Tokenizer], kind: Kind, text: str, more_ends: tuple[int, ...] = ()) -> Grammar:
    tokenizer = make()
    assert tokenizer.eos_token_id is not None
    return Grammar.compiled(
        Constraint(kind, text), tokenizer, len(tokenizer) + MORE, {tokenizer.eos_token_id, *more_ends}
    )


def of_schema(make: Callable[[], Tokenizer], schema: object) -> Grammar:
    return compiled(make, "json-schema", json.dumps(schema))


def ids(mask: torch.Tensor) -> list[int]:
    return [int(i) for i in mask.nonzero().flatten()]


def walk(grammar: Grammar, tokenizer: Tokenizer, seed: int, max_tokens: int = MAX_TOKENS) -> list[int] | None:
    """Tokens up to an end token, drawn from those that are allowed; None where there was none in time. Often those that
    close something are drawn, as most draws would never end."""
    draw, state, closing, tokens = random.Random(seed), grammar.state(), closers(tokenizer), list[int]()
    for _ in range(max_tokens):
        allowed = ids(state.allowed())
        closes = [token for token in allowed if token in closing or token in grammar.end_tokens]
        token = draw.choice(closes if closes and draw.random() < 0.4 else allowed)
        tokens.append(token)
        assert state.advance([token]) == 1
        if token in grammar.end_tokens:
            return tokens
    return None


@cache
def closers(tokenizer: Tokenizer) -> frozenset[int]:
    return frozenset(token for token, data in spellings(tokenizer).items() if data.strip()[:1] in (b'"', b"}", b"]"))


def text_of(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    """Of tokens behind others: at the beginning of a text some decoders leave out a space."""
    before = tokenizer.encode("a")
    return tokenizer.decode([*before, *tokens]).removeprefix(tokenizer.decode(before))


def spelled(tokenizer: Tokenizer, text: str) -> list[int]:
    """Tokens of `text`, a byte each."""
    tokens = {data: token for token, data in sorted(spellings(tokenizer).items(), reverse=True)}
    return [tokens[bytes([byte])] for byte in text.encode()]


ARITHMETIC = """
start: sum
sum: product (("+" | "-") product)*
product: atom (("*" | "/") atom)*
atom: NUMBER | "(" sum ")"
NUMBER: /[1-9][0-9]{0,3}/
"""
