"""A GGUF file's tokenizer cuts text as the model's own tokenizer.json does, or is refused by the name of its cuts."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from offload.decode import gguf_tokenizer
from offload.decode.tokenizer import Tokenizer
from offload.errors import ModelError

TEXT = "It'S 12345 Ab9 x.\n\n  y"
# What pieces a text is in before merges, by the names of some cuts, each of another kind.
PIECES = {
    "gpt-2": ["It", "'", "S", "Ġ12345", "ĠAb", "9", "Ġx", ".", "ĊĊĠ", "Ġy"],
    "smollm": ["It", "'", "S", "Ġ", *"12345", "ĠAb", "9", "Ġx", ".", "ĊĊĠ", "Ġy"],
    "llama-bpe": ["It", "'S", "Ġ", "123", "45", "ĠAb", "9", "Ġx", ".ĊĊ", "Ġ", "Ġy"],
    "qwen2": ["It", "'S", "Ġ", *"12345", "ĠAb", "9", "Ġx", ".ĊĊ", "Ġ", "Ġy"],
    "seed-coder": ["It", "'S", "Ġ", *"12345", "ĠAb", "9", "Ġx", ".", "ĊĊ", "Ġ", "Ġy"],
    "tekken": ["It", "'S", "Ġ", *"12345", "ĠAb", "9", "Ġx", ".ĊĊ", "Ġ", "Ġy"],
    "gpt-4o": ["It'S", "Ġ", "123", "45", "ĠAb", "9", "Ġx", ".ĊĊ", "Ġ", "Ġy"],
    "deepseek-v3": ["It", "'S", "Ġ", "123", "45", "ĠAb", "9", "Ġx", ".ĊĊ", "Ġ", "Ġy"],
    "deepseek-coder": ["It", "'", "S", "Ġ", *"12345", "ĠAb", "9", "Ġx", ".", "Ċ", "Ċ", "Ġ", "Ġy"],
}
ALIKE = [("refact", "smollm"), ("starcoder", "smollm"), ("command-r", "smollm"), ("exaone", "smollm"),
         ("olmo", "gpt-2"), ("deepseek-r1-qwen", "qwen2"), ("smaug-bpe", "llama-bpe")]  # fmt: skip
UNKNOWN = ["falcon", "deepseek-llm", "bloom", "viking", "superbpe", "an unheard-of one", "default", None]
LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
SPECIAL = ["<\uff5cbegin\uff5c>", "<|end|>", "<tool>"]


def values(pre: str | None, **more: object) -> dict[str, Any]:
    """A file's: two letters that merge, a whole word that no merge makes, three added tokens."""
    tokens = [*LETTERS, "ab", "abc", "12", *SPECIAL]
    found = {
        "model": "gpt2", "pre": pre, "tokens": tokens, "merges": ["a b", "1 2"], "token_type": [1] * 259 + [3, 3, 4],
        "bos_token_id": 259, "eos_token_id": 260, "tokenizer.chat_template": "{{ x }}", **more,
    }  # fmt: skip
    return {key: value for key, value in found.items() if value is not None}


def made(pre: str | None, **more: object) -> Tokenizer:
    pipeline, settings = gguf_tokenizer.of_values(values(pre, **more))
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=RawTokenizer(BPE()), **settings), pipeline)


@pytest.mark.parametrize("pre", PIECES)
def test_text_is_cut_as_the_name_says(pre: str) -> None:
    assert [piece for piece, _ in gguf_tokenizer.CUTS[pre]().pre_tokenize_str(TEXT)] == PIECES[pre]


@pytest.mark.parametrize(("name", "like"), ALIKE)
def test_several_names_stand_for_the_same_cuts(name: str, like: str) -> None:
    assert [piece for piece, _ in gguf_tokenizer.CUTS[name]().pre_tokenize_str(TEXT)] == PIECES[like]


@pytest.mark.parametrize("pre", UNKNOWN)
def test_unknown_cuts_are_refused_by_name(pre: str | None) -> None:
    """Bug: they were taken for GPT-2's, so all digits of a number could be one token."""
    named = "names no way to cut text" if pre in (None, "default") else f"cuts text as {pre!r}"
    with pytest.raises(ModelError, match=rf"its tokenizer {named}.*known are .*smollm.*Pull the model's safetensors"):
        gguf_tokenizer.of_values(values(pre))


def test_ids_are_those_of_the_file_and_special_tokens_are_one_each() -> None:
    """Bug: transformers spells special tokens outside of ASCII in bytes and adds them again, after all weights."""
    tokenizer = made("smollm")
    assert tokenizer.encode("ab12<\uff5cbegin\uff5c>a<tool><|end|>") == [
        256, LETTERS.index("1"), LETTERS.index("2"), 259, LETTERS.index("a"), 261, 260,
    ]  # fmt: skip
    assert (len(tokenizer), tokenizer.eos_token_id, tokenizer.chat_template) == (262, 260, "{{ x }}")
    assert tokenizer.added_tokens(special=True) == {SPECIAL[0]: 259, SPECIAL[1]: 260}


def test_a_text_begins_as_the_file_or_else_the_kind_says() -> None:
    for pre, said, begins in (
        ("smollm", None, []),
        ("smollm", True, [259]),
        ("llama-bpe", None, [259]),
        ("qwen2", False, []),
    ):
        assert made(pre, add_bos_token=said).encode("a") == [*begins, LETTERS.index("a")]


def test_words_that_are_tokens_are_whole_where_the_kind_takes_them_so() -> None:
    assert made("llama-bpe").encode("abc")[1:] == [257]
    assert made("qwen2").encode("abc") == [256, LETTERS.index("c")]


def test_characters_are_composed_where_the_models_own_tokenizer_does() -> None:
    for pre, count in (("qwen2", 2), ("llama-bpe", 4)):
        assert len(made(pre).encode("e\u0301")) == count


PIECES_OF_TEXT = ["<unk>", "<s>", "</s>", "\u2581", "a", "b", "c", "ab", "bc", "\u2581ab", "<tool>"]
SCORES = [0.0, 0.0, 0.0, -8.0, -9.0, -10.0, -11.0, -2.0, -1.0, -3.0, 0.0]


def pieces(**more: object) -> Tokenizer:
    """SentencePiece's, of which "bc" is likelier than "ab"; bytes after them."""
    tokens = [*PIECES_OF_TEXT, *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [2, 3, 3, *[1] * 7, 4, *[6] * 256]
    found = {
        "model": "llama", "tokens": tokens, "scores": [*SCORES, *[0.0] * 256], "token_type": types, "bos_token_id": 1,
        "eos_token_id": 2, "unknown_token_id": 0, **more,
    }  # fmt: skip
    pipeline, settings = gguf_tokenizer.of_values(found)
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=RawTokenizer(BPE()), **settings), pipeline)


def test_the_likeliest_pair_of_pieces_is_merged_first_and_what_has_none_is_bytes() -> None:
    tokenizer = pieces()
    assert tokenizer.encode("ab") == [1, 9]
    assert tokenizer.encode("abc") == [1, 3, 4, 8]
    assert tokenizer.encode("a ab\n") == [1, 3, 4, 9, 11 + ord("\n")]
    assert tokenizer.encode(" ab") == [1, 3, 9]
    assert tokenizer.encode("ab<tool>ab</s>") == [1, 9, 10, 9, 2]
    assert tokenizer.decode([9, 9, 11 + 0xC3, 11 + 0xA9]) == "ab ab\u00e9"


def test_a_text_of_pieces_begins_as_the_file_says() -> None:
    assert pieces(add_bos_token=False).encode("ab") == [9]
    assert pieces(add_space_prefix=False).encode("ab ab") == [1, 7, 9]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"model": "t5"}, "has tokens of kind 't5', and known are gpt2 and llama"),
        ({"tokens": None}, "has no tokens"),
        ({"tokens": ["a", "a"]}, "has one token twice"),
        ({"scores": [0.0]}, "267 tokens, 1 scores and 267 types"),
    ],
)
def test_a_tokenizer_that_is_not_known_or_not_whole_is_refused(more: dict[str, object], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        pieces(**more)


def test_named_templates_are_those_of_a_folder() -> None:
    more = {"tokenizer.chat_template.tool_use": "{{ y }}"}
    tokenizer = made("smollm", **more)
    assert (tokenizer.chat_template, tokenizer.named_templates) == ("{{ x }}", ("default", "tool_use"))
