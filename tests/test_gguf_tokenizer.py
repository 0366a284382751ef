"""A GGUF file's tokenizer cuts text as the model's own tokenizer.json does, or is refused by the name of its cuts."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from math import nan
from random import Random
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as RawTokenizer
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast, Qwen3_5Tokenizer

from offload.errors import ModelError
from offload.text import gguf_tokenizer
from offload.text.gguf_cuts import CUTS
from offload.text.tokenizer import Detokenizer, Tokenizer

TEXT = "It'S 12345 Ab9 x.\n\n  y"
# What pieces a text is in before merges, by the names of some cuts, each of another kind.
PIECES = {
    "gpt-2": ["It", "'", "S", "Ġ12345", "ĠAb", "9", "Ġx", ".", "ĊĊĠ", "Ġy"],
    "smollm": ["It", "'", "S", "Ġ", *"12345", "ĠAb", "9", "Ġx", ".", "ĊĊĠ", "Ġy"],
    "llama-bpe": ["It", "'S", "Ġ", "123", "45", "ĠAb", "9", "Ġx", ".ĊĊ", "Ġ", "Ġy"],
    "qwen2": ["It", "'S", "Ġ", *"12345", "ĠAb", "9", "Ġx", ".ĊĊ", "Ġ", "Ġy"],
    "qwen35": ["It", "'S", "Ġ", *"12345", "ĠAb", "9", "Ġx", ".ĊĊ", "Ġ", "Ġy"],
    "seed-coder": ["It", "'S", "Ġ", *"12345", "ĠAb", "9", "Ġx", ".", "ĊĊ", "Ġ", "Ġy"],
    "tekken": ["It", "'S", "Ġ", *"12345", "ĠAb", "9", "Ġx", ".ĊĊ", "Ġ", "Ġy"],
    "gpt-4o": ["It'S", "Ġ", "123", "45", "ĠAb", "9", "Ġx", ".ĊĊ", "Ġ", "Ġy"],
    "tiny_aya": ["It'S", "Ġ", "12", "345", "ĠAb", "9", "Ġx", ".ĊĊ", "Ġ", "Ġy"],
    "deepseek-v3": ["It", "'S", "Ġ", "123", "45", "ĠAb", "9", "Ġx", ".ĊĊ", "Ġ", "Ġy"],
    "deepseek-coder": ["It", "'", "S", "Ġ", *"12345", "ĠAb", "9", "Ġx", ".", "Ċ", "Ċ", "Ġ", "Ġy"],
    "deepseek-llm": ["It", "'", "S", "Ġ", *"12345", "ĠAb", "9", "Ġx", ".", "Ċ", "Ċ", "Ġ", "Ġy"],
    "afmoe": ["It", "'S", "Ġ", "12", "345", "ĠAb", "9", "Ġx", ".ĊĊ", "Ġ", "Ġy"],
    "laguna": ["It", "'S", "Ġ", *"12345", "ĠAb", "9", "Ġx", ".", "ĊĊ", "Ġ", "Ġy"],
    "kimi-k2": ["It'S", "Ġ", "123", "45", "ĠAb", "9", "Ġx", ".ĊĊ", "Ġ", "Ġy"],
    "exaone-moe": ["It", "'S", "Ġ", *"12345", "ĠAb", "9", "Ġx", ".Ċ", "Ċ", "Ġ", "Ġy"],
}
ALIKE = [("refact", "smollm"), ("starcoder", "smollm"), ("command-r", "smollm"), ("exaone", "smollm"),
         ("olmo", "gpt-2"), ("a.x-4.0", "gpt-2"), ("deepseek-r1-qwen", "qwen2"),
         ("smaug-bpe", "llama-bpe"), ("cohere2moe", "tiny_aya"), ("bailingmoe2", "qwen2")]  # fmt: skip
UNKNOWN = ["falcon", "bloom", "viking", "superbpe", "an unheard-of one", "default", None]
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
    assert [piece for piece, _ in CUTS[pre]().pre_tokenize_str(TEXT)] == PIECES[pre]


@pytest.mark.parametrize(
    ("pre", "pieces"), [("qwen2", ["क", "ाम", " ह", "िन", "्द", "ी.", "x"]), ("qwen35", ["काम", " हिन्दी", ".x"])]
)
def test_marks_are_of_their_letters_in_qwen_3_5_and_not_in_qwen_2(pre: str, pieces: list[str]) -> None:
    """As transformers' tokenizer of that model has it."""
    text = "काम हिन्दी.x"
    found = [text[slice(*place)] for _, place in CUTS[pre]().pre_tokenize_str(text)]
    assert found == pieces


def test_the_cuts_of_qwen_3_5_are_those_of_transformers() -> None:
    theirs = Qwen3_5Tokenizer(vocab={letter: number for number, letter in enumerate(LETTERS)}, merges=[])
    cuts, random = theirs.backend_tokenizer.pre_tokenizer, Random(0)
    letters = "aZé\u0301\u0915\u093f\u094d7\u0661 \t\r\n'sS.,!\u3042\u4e2d\U0001f600\u200d_"
    for _ in range(300):
        text = "".join(random.choices(letters, k=random.randint(1, 30)))
        assert CUTS["qwen35"]().pre_tokenize_str(text) == cuts.pre_tokenize_str(text)


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("afmoe", "a1234567½ ١٢٣٤", ["a", "1", "234", "567", "½", " ", "١", "٢٣٤"]),
        ("afmoe", "中文ไทย한국어かな", ["中文", "ไทย", "한국어", "かな"]),
        ("tiny_aya", "1234567, 1234ab", ["1", "234", "567", ",", " ", "123", "4", "ab"]),
        ("laguna", "f(x):\r\n\n  y\rz\n", ["f", "(x", "):", "\r\n\n", " ", " y", "\r", "z", "\n"]),
        ("exaone-moe", "한국 어는 두  말, ok.\n\n", ["한국 어는 두", " ", " 말", ",", " ok", ".\n", "\n"]),
        ("deepseek-llm", "Ab ბა中文 ǅ\u01bb，x\t\t", ["Ab", " ", "ბა中文", " ǅ", "\u01bb", "，", "x", "\t\t"]),
        ("kimi-k2", "getUserName한국어A中文b", ["get", "User", "Name한국어", "A", "中文", "b"]),
        ("deepseek-llm", "12½ 3", ["1", "2", "½", " ", "3"]),
    ],
)
def test_text_of_other_scripts_is_cut_as_the_name_says(pre: str, text: str, pieces: list[str]) -> None:
    """Where llama.cpp's list differs, as the models' own tokenizer.json says: of Trinity, decimal digits alone are by
    threes, and scripts are apart; of Laguna, lines may end in two characters."""
    assert [text[slice(*place)] for _, place in CUTS[pre]().pre_tokenize_str(text)] == pieces


def test_a_number_of_any_length_is_cut_from_its_end() -> None:
    text = "12" + "345" * 1000
    assert [text[slice(*place)] for _, place in CUTS["afmoe"]().pre_tokenize_str(text)] == ["12", *["345"] * 1000]


@pytest.mark.parametrize(("name", "like"), ALIKE)
def test_several_names_stand_for_the_same_cuts(name: str, like: str) -> None:
    assert [piece for piece, _ in CUTS[name]().pre_tokenize_str(TEXT)] == PIECES[like]


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


def test_merges_that_are_there_twice_or_make_no_token_change_nothing() -> None:
    """Bugs: of a pair that was there twice the last counted, and one that made no token was taken for a damaged
    tokenizer.json. llama.cpp's count from the first, and what makes no token is its parts."""
    tokenizer = made(
        "smollm", merges=["b c", "a b", "x y", "y no", "b c"], tokens=[*LETTERS, "ab", "bc", "12", *SPECIAL]
    )
    assert tokenizer.encode("abcxy") == [LETTERS.index("a"), 257, LETTERS.index("x"), LETTERS.index("y")]


def test_characters_are_composed_where_the_models_own_tokenizer_does() -> None:
    for pre, count in (("qwen2", 2), ("qwen35", 2), ("llama-bpe", 4)):
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


def merged(text: str, scores: dict[str, float]) -> list[str]:
    """The rule word for word: of all neighbours that make a token the two of the highest score, of equal ones the
    leftmost."""
    found = list(text)
    while True:
        pairs = [(scores[one + two], -at) for at, (one, two) in enumerate(pairwise(found)) if one + two in scores]
        if not pairs:
            return found
        at = -max(pairs)[1]
        found[at : at + 2] = [found[at] + found[at + 1]]


def with_scores(tokens: list[str], scores: list[float] | None, **more: object) -> Tokenizer:
    """Pieces without bytes; <unk> is 0, <s> 1, </s> 2."""
    named = ["<unk>", "<s>", "</s>", *tokens]
    all_scores = None if scores is None else [0.0] * 3 + scores
    return pieces(tokens=named, scores=all_scores, **{"token_type": [2, 3, 3] + [1] * len(tokens), **more})


@pytest.mark.parametrize("kind", ["one", "none", "few", "many", "signed zeros"])
def test_of_equal_scores_the_leftmost_pair_is_merged_first(kind: str) -> None:
    """Bug: pairs were merged in the order of their tokens' ids, so files that were converted without tokenizer.model,
    where all pieces have one score or none, had other tokens than in llama.cpp in most texts."""
    random = Random(kind)
    letters = ["\u2581", "a", "b", "c"]
    for _ in range(20):
        longer = {"".join(random.choices(letters, k=random.randint(2, 5))) for _ in range(25)}
        tokens = [*letters, *sorted(longer)]
        scores = {
            "one": [-1000.0] * len(tokens), "none": None, "few": [float(random.randint(-2, 0)) for _ in tokens],
            "many": [random.random() for _ in tokens], "signed zeros": [random.choice([0.0, -0.0]) for _ in tokens],
        }[kind]  # fmt: skip
        tokenizer = with_scores(tokens, scores)
        expected = dict(zip(tokens, scores or [0.0] * len(tokens), strict=True))
        for _ in range(15):
            text = "".join(random.choices("abc ", k=random.randint(1, 40)))
            pieces_of_text = merged("\u2581" + text.replace(" ", "\u2581"), expected)
            assert tokenizer.encode(text) == [1, *(3 + tokens.index(piece) for piece in pieces_of_text)]


def test_tokens_of_every_type_are_merged_and_a_score_that_is_no_number_is_the_lowest() -> None:
    tokens = ["\u2581", "a", "b", "ab", "ba"]
    for text, expected in (("bab", [1, 3, 5, 6]), ("aba", [1, 3, 6, 4])):
        assert with_scores(tokens, [0.0, 0.0, 0.0, -1.0, nan]).encode(text) == expected
    assert with_scores(tokens, [0.0] * 5, token_type=[2, 3, 3, 1, 5, 0, 5, 0]).encode("bab") == [1, 3, 7, 5]


def test_a_character_without_a_token_or_bytes_is_unknown_and_several_are_one() -> None:
    tokenizer = with_scores(["\u2581", "a", "<0xC3>", "<0xA9>"], None)
    assert tokenizer.encode("a\u00e9xyz xa") == [1, 3, 4, 5, 6, 0, 3, 0, 4]
    assert tokenizer.places("a\u00e9xyz xa") == [0, 0, 0, 1, 1, 2, 5, 6, 7]
    assert with_scores(["\u2581", "a"], None, unknown_token_id=99).encode("ax") == [1, 3, 4, 0]
    assert with_scores(["\u2581", "a"], None, unknown_token_id=-1).encode("ax") == [1, 3, 4]


def test_empty_tokens_are_there_any_number_of_times() -> None:
    tokenizer = with_scores(["\u2581", "a", "", "b", "", ""], None)
    assert tokenizer.encode("ab") == [1, 3, 4, 6]
    assert tokenizer.decode([4, 5, 6, 7, 8]) == "ab"
    assert "" not in tokenizer.vocabulary()


@pytest.mark.parametrize("name", ["Phi3", "My Phi-3.5-mini", "PHI-3"])
def test_the_special_tokens_of_phi_3_take_the_white_space_behind_them(name: str) -> None:
    """Bug: its templates have line ends there, which became tokens of their own. llama.cpp goes by the name as well."""
    tokens, types = ["\u2581", "a", "\n", "<|end|>", "<|user|>", "<x>"], [2, 3, 3, 1, 1, 1, 3, 3, 4]
    text = "<|user|>\n a<|end|> \n\t<|user|><s> a</s> <unk> <x> a"
    stripped, plain = (
        with_scores(tokens, None, token_type=types, **{"general.name": each}).encode(text) for each in (name, "demo")
    )
    assert stripped == [1, 7, 3, 4, 6, 7, 1, 3, 3, 4, 2, 0, 3, 3, 8, 3, 4]
    assert plain == [1, 7, 3, 5, 3, 4, 6, 3, 3, 5, 0, 7, 1, 3, 3, 4, 2, 3, 3, 0, 3, 3, 8, 3, 3, 4]


def test_a_tokenizer_json_says_scores_as_ranks_or_is_refused() -> None:
    """It cannot say that two merges are equal. A run of the file itself can."""
    tokens = ["\u2581", "a", "b", "ab", "ba"]
    values = {"model": "llama", "tokens": tokens, "scores": [0.0, 0.0, 0.0, -2.0, -1.0], "bos_token_id": -1}
    pipeline, _ = gguf_tokenizer.of_values(values, ranked=True)
    for text in ("bab", "abab", "baab"):
        saved = RawTokenizer.from_str(pipeline.to_str()).encode(text, add_special_tokens=False).ids
        assert saved == gguf_tokenizer.of_values(values)[0].encode(text, add_special_tokens=False).ids
    with pytest.raises(ModelError, match=r"'ab' and 'ba' have one score, -1, .* run the GGUF file itself"):
        gguf_tokenizer.of_values({**values, "scores": [-1.0] * 5}, ranked=True)
    gguf_tokenizer.of_values({**values, "scores": [-1.0] * 5, "token_type": [1, 1, 1, 1, 4]}, ranked=True)


def test_a_long_text_without_a_cut_is_encoded_in_time_that_grows_with_it() -> None:
    """Every two letters are neighbours in some token here, so the text is one word; pair by pair it takes hours."""
    tokens = ["\u2581", *("a" * count for count in range(1, 20)), "ab", "ba", "b", "bb", "a\u2581", "b\u2581"]
    text = "".join(Random(0).choices("ab", k=100_000))
    assert with_scores(tokens, None).decode(with_scores(tokens, None).encode(text)) == text


GEMMA_SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>", "<|turn>", "<turn|>"]
GEMMA_NAMED = ["<|tool_call>", '<|"|>']  # which have a text
GEMMA_LETTERS = ["\n", "\u2581", *"abcde.1\u00e9\u65e5"]


def gemma_values(**more: object) -> dict[str, Any]:
    """Gemma 4's, small: of each token that is no letter all pairs that make it are merges, by the tokens' order."""
    random, letters = Random(4), GEMMA_LETTERS[1:]
    longer = {"".join(random.choices(letters, k=random.randint(2, 4))): None for _ in range(80)}
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    runs = ["\n" * count for count in range(2, 6)] + ["\u2581" * count for count in range(2, 6)]
    words = [*GEMMA_LETTERS, *dict.fromkeys((*runs, *longer))]
    merges = [
        f"{word[:at]} {word[at:]}"
        for word in words
        for at in range(1, len(word))
        if word[:at] in words and word[at:] in words
    ]
    types = [3] * len(GEMMA_SPECIAL) + [4] * len(GEMMA_NAMED) + [6] * 256 + [1] * len(words)
    return {
        "model": "gemma4", "tokens": [*GEMMA_SPECIAL, *GEMMA_NAMED, *bytes_, *words], "merges": merges,
        "token_type": types, "scores": [0.0] * len(types), "eos_token_id": 1, "bos_token_id": 2, "unknown_token_id": 3,
        "add_bos_token": True, "add_space_prefix": False, "tokenizer.chat_template": "{{ bos_token }}{{ x }}", **more,
    }  # fmt: skip


def gemma_json() -> RawTokenizer:
    """The same as the tokenizer.json of Gemma 4 has it."""
    values = gemma_values()
    ids = {token: i for i, token in enumerate(values["tokens"])}
    merges = [tuple(merge.split(" ")) for merge in values["merges"]]
    found = RawTokenizer(BPE(vocab=ids, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    found.normalizer = normalizers.Replace(" ", "\u2581")
    found.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    found.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    found.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in GEMMA_SPECIAL])
    found.add_tokens([AddedToken(token, normalized=False, special=False) for token in GEMMA_NAMED])
    found.post_processor = processors.TemplateProcessing(single=["<bos>", "$A"], special_tokens=[("<bos>", 2)])
    return found


def gemma(**more: object) -> Tokenizer:
    pipeline, settings = gguf_tokenizer.of_values(gemma_values(**more))
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=RawTokenizer(BPE()), **settings), pipeline)


def gemma_texts(count: int) -> Iterator[str]:
    random = Random(0)
    parts = [
        "\n",
        "\n\n",
        "\n" * 9,
        " ",
        "   ",
        *"abcde.1",
        "\u00e9",
        "\u65e5",
        "\u2581",
        "\u00fc",
        "\t",
        "\r\n",
        "\U0001f600",
    ]
    for _ in range(count):
        yield "".join(random.choices([*parts, *GEMMA_SPECIAL, *GEMMA_NAMED, "<0x41>"], k=random.randint(0, 25)))


@pytest.mark.parametrize("spaced", [False, True])
def test_tokens_of_gemma_4_are_those_of_its_tokenizer_json(spaced: bool) -> None:
    """Spaces are letters, lines do not part, and what has no token is bytes. No space is put before a text, whatever
    the file says."""
    ours, theirs = gemma(add_space_prefix=spaced), gemma_json()
    for text in gemma_texts(400):
        expected = theirs.encode(text)
        assert ours.encode(text) == expected.ids
        assert ours.places(text) == [first for first, _ in expected.offsets]
        assert ours.decode(expected.ids) == theirs.decode(expected.ids)
    assert ours.decode(ours.encode(" a  \n\n \u00fc\U0001f600b")) == " a  \n\n \u00fc\U0001f600b"
    assert ours.added_tokens(special=True) == {token: i for i, token in enumerate(GEMMA_SPECIAL)}
    assert ours.decode(ours.encode("<|turn>a<|tool_call>b<turn|>")) == "a<|tool_call>b"


def test_a_run_of_lines_that_is_a_token_of_gemma_4_is_that_token() -> None:
    tokenizer = gemma()
    for count in range(1, 6):
        [_, found] = tokenizer.encode("\n" * count)
        assert tokenizer.decode([found]) == "\n" * count


def test_a_reply_of_gemma_4_is_whole_characters_as_it_streams() -> None:
    tokenizer = gemma()
    for text in gemma_texts(60):
        tokens = tokenizer.encode(text)
        shown = Detokenizer(tokenizer, [])
        pieces_of_text = [*map(shown.push, tokens), shown.flush()]
        assert "".join(pieces_of_text) == tokenizer.decode(tokens)
        assert not any("\ufffd" in piece for piece in pieces_of_text)


@pytest.mark.parametrize("said", [True, False, None])
def test_a_text_of_gemma_4_always_begins_with_its_first_token(said: bool | None) -> None:
    """As in llama.cpp, whatever the file says."""
    assert gemma(add_bos_token=said).start_tokens() == [2]


def test_the_tokenizer_of_gemma_4_is_written_as_a_tokenizer_json() -> None:
    pipeline, settings = gguf_tokenizer.of_values(gemma_values(), ranked=True)
    saved, theirs = RawTokenizer.from_str(pipeline.to_str()), gemma_json()
    for text in gemma_texts(50):
        assert saved.encode(text).ids == theirs.encode(text).ids
    assert settings == {"bos_token": "<bos>", "eos_token": "<eos>", "chat_template": "{{ bos_token }}{{ x }}"}


def test_a_tokenizer_of_gemma_4_without_merges_is_refused() -> None:
    values = gemma_values()
    del values["merges"]
    with pytest.raises(ModelError, match=r"its tokenizer has no merges \(tokenizer\.ggml\.merges\)"):
        gguf_tokenizer.of_values(values)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"model": "t5"}, "has tokens of kind 't5', and known are gpt2, llama, gemma4"),
        ({"tokens": None}, "has no tokens"),
        ({"tokens": ["a", "a"]}, "has one token twice, 'a'"),
        ({"scores": [0.0]}, "267 tokens and 1 scores, not a number for each"),
        ({"scores": ["0"] * 267}, "267 tokens and 267 scores, not a number for each"),
        ({"token_type": [1]}, "267 tokens and 1 types, not a number for each"),
    ],
)
def test_a_tokenizer_that_is_not_known_or_not_whole_is_refused(more: dict[str, object], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        pieces(**more)


def test_named_templates_are_those_of_a_folder() -> None:
    more = {"tokenizer.chat_template.tool_use": "{{ y }}"}
    tokenizer = made("smollm", **more)
    assert (tokenizer.chat_template, tokenizer.named_templates) == ("{{ x }}", ("default", "tool_use"))
