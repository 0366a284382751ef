"""SentencePiece's tokens of a GGUF file, which say how likely each is, as a pipeline of merges."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer, decoders, normalizers
from tokenizers.models import BPE

from offload.errors import ModelError

PIECES = "llama"  # the `tokenizer.ggml.model` of these files
_SPACE = "\u2581"
_NORMAL = 1  # the type of a token that may be merged


def pieces(values: Mapping[str, Any], tokens: list[str]) -> Tokenizer:
    """As llama.cpp cuts text: the likeliest pair first, bytes of what has no token, and a space before each text that
    is between special tokens, unless the file says otherwise. Raises ModelError where tokens have no scores."""
    unknown = values.get("unknown_token_id", 0)
    merges = read_merges(values["merges"]) if values.get("merges") else _merges(values, tokens)
    model = BPE(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=merges,
        unk_token=tokens[unknown] if type(unknown) is int and unknown < len(tokens) else None,
        fuse_unk=True,
        byte_fallback=True,
    )
    pipeline = Tokenizer(model)
    spaced = values.get("add_space_prefix") is not False
    written, read = [normalizers.Replace(" ", _SPACE)], [decoders.Replace(_SPACE, " "), decoders.ByteFallback()]
    pipeline.normalizer = normalizers.Sequence([*([normalizers.Prepend(_SPACE)] if spaced else []), *written])
    pipeline.decoder = decoders.Sequence([*read, decoders.Fuse(), *([decoders.Strip(" ", 1, 0)] if spaced else [])])
    return pipeline


def read_merges(named: list[str]) -> list[tuple[str, str]]:
    """Of a file that names them. Raises ModelError."""
    merges = []
    for merge in named:
        at = merge.find(" ", 1)
        if at < 0:
            raise ModelError(f"its tokenizer merges {merge!r}, which is no pair; fetch it again")
        merges.append((merge[:at], merge[at + 1 :]))
    return merges


def _merges(values: Mapping[str, Any], tokens: list[str]) -> list[tuple[str, str]]:
    """All pairs that make a token, the likeliest first."""
    scores, kinds = values.get("scores") or [], values.get("token_type") or [_NORMAL] * len(tokens)
    if not len(scores) == len(kinds) == len(tokens):
        raise ModelError(f"its tokenizer has {len(tokens)} tokens, {len(scores)} scores and {len(kinds)} types")
    normal = {token: i for i, token in enumerate(tokens) if kinds[i] == _NORMAL}
    found = []
    for token, i in normal.items():
        for at in range(1, len(token)):
            left, right = token[:at], token[at:]
            if left in normal and right in normal:
                found.append((-scores[i], normal[left], normal[right], left, right))
    return [(left, right) for *_, left, right in sorted(found)]
