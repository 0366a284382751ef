"""The special tokens of a GGUF file: the tokens that its metadata name by id, and the end tokens known by text.

Source: llama.cpp's llama-vocab.cpp, which knows more end tokens than the one that a file names.
"""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Mapping, Sequence

PIECES = "llama"  # the `tokenizer.ggml.model` of SentencePiece's tokens
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # types of tokens
_NONE = (-1, 0xFFFFFFFF)  # ids of no token
_OF_PIECES = {"bos": 1, "eos": 2, "unknown": 0}  # defaults of a file with pieces that names no valid token
_NAMED_ENDS = ("eos", "eot", "eom")  # end of a text, of a turn, of a message
_ENDS = frozenset((
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
    "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>",
    "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "[e~[",
))  # fmt: skip
# gpt-oss ends a reply with one of the latter; the former ends a message, after which another may follow.
_OF_MESSAGE, _OF_REPLIES = "<|end|>", frozenset(("<|return|>", "<|call|>"))
# Gemma 4 ends a turn with one of its own tokens; in its vocabulary </s> is a word of HTML.
_WORD, _OF_GEMMA4 = "</s>", "<|tool_response>"
# End-of-file tokens of code-infilling models: the metadata key that names each, and its texts if no key does.
_CODE_ENDS: Mapping[str, frozenset[str]] = {
    "fim_pad": frozenset(("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]")),
    "fim_rep": frozenset(("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>")),
    "fim_sep": frozenset(("<|file_sep|>",)),
}


def token_id(named: Mapping[str, object], name: str, count: int) -> int | None:
    """The id of a special token, below `count`, or None. named: metadata by key without the prefix tokenizer.ggml."""
    told = named.get(f"{name}_token_id")
    if told in _NONE or (type(told) is int and 0 <= told < count):
        return None if told in _NONE else int(told)
    default = _OF_PIECES.get(name, count) if named.get("model") == PIECES else count
    return default if default < count else None


def end_texts(named: Mapping[str, object], tokens: Collection[object]) -> frozenset[str]:
    """The texts of the tokens that end a reply, if they are among `tokens`, the texts by id."""
    count = len(tokens)
    found = _ENDS.union(*(texts for name, texts in _CODE_ENDS.items() if token_id(named, name, count) is None))
    return found - {_WORD} if _OF_GEMMA4 in tokens else found


def end_ids(named: Mapping[str, object], tokens: Sequence[object], count: int) -> list[int]:
    """The ids of all tokens that end a reply, with the end of a text first. tokens: texts by id, `count` of which are
    of the model."""
    tokens = tokens[:count]
    texts = end_texts(named, tokens)
    known = {i: text for i, text in enumerate(tokens) if text in texts}
    found = [token_id(named, name, count) for name in (*_NAMED_ENDS, *_CODE_ENDS)]
    of_message = _OF_MESSAGE if _OF_REPLIES.issubset(known.values()) else None
    return list(dict.fromkeys(i for i in (*found, *known) if i is not None and known.get(i, "") != of_message))


def notes(named: Mapping[str, object], count: int) -> list[str]:
    """Notes for the user on special tokens that are named but not in the vocabulary."""
    found = []
    for name in (*_OF_PIECES, *_NAMED_ENDS[1:]):
        told = named.get(f"{name}_token_id")
        if told is not None and told not in _NONE and told != (used := token_id(named, name, count)):
            instead = "there is none then" if used is None else f"{used} is taken for it, as llama.cpp does"
            found.append(
                f"tokenizer.ggml.{name}_token_id is {reprlib.repr(told)}, and there are {count} tokens: {instead}"
            )
    return found
