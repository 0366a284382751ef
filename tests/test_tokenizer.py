"""Text decoded token by token: whole characters, nothing lost, and stop strings found wherever the text is cut."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from kit.examples import at_most
from kit.models import byte_tokenizer
from offload.errors import ModelError
from offload.text.stops import StopStrings
from offload.text.tokenizer import Detokenizer, Tokenizer

CORPUS = ["the cat sat on the mat, the café was naïve; 日本語のテキスト 👍🏽 the end"] * 3
REPLACEMENT = "\ufffd"


def trained(corpus: list[str], **settings: object) -> tokenizers.Tokenizer:
    """Byte-level BPE of `corpus`."""
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator(corpus, trainers.BpeTrainer(initial_alphabet=alphabet, show_progress=False, **settings))
    return inner


@cache
def byte_level() -> Tokenizer:
    """Byte-level BPE as in GPT-2, Llama 3 and Qwen: a rare character is several tokens."""
    inner = trained(CORPUS, vocab_size=300, special_tokens=["<end>"])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>"))


@cache
def byte_fallback() -> Tokenizer:
    """SentencePiece as in Llama 2: words carry their space, unknown characters are byte tokens, all valid or none."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *"▁thecaonm", "▁t", "▁th", "▁the"]
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e")]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, unk_token="<unk>"))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    inner.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>"))


BOTH = pytest.mark.parametrize("make", [byte_level, byte_fallback])
WORDS = ["the cat", " ", "\n", "é", "e\u0301", "👍🏽", "👨‍👩‍👧", "日本語", "𠮷", "ก็", "\u200d", "a", "©"]
TEXT = st.one_of(st.lists(st.sampled_from(WORDS), max_size=8).map("".join), st.text(max_size=12))


def pieces_of(tokenizer: Tokenizer, context: list[int], tokens: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer, context)
    return [detokenizer.push(token) for token in tokens] + [detokenizer.flush()]


def split(tokenizer: Tokenizer, text: str, at: int) -> tuple[list[int], list[int]]:
    """The tokens of `text`, split after a token at which the decoded text has whole characters only."""
    tokens = tokenizer.encode(text)
    at = min(at, len(tokens))
    while tokenizer.decode(tokens[:at]).endswith(REPLACEMENT):
        at -= 1
    return tokens[:at], tokens[at:]


@BOTH
@given(text=TEXT, at=st.integers(0, 30))
@example(text="本語のテキスト日本語", at=28)
@at_most(150)
def test_pieces_join_to_the_decoding_of_all(make: Callable[[], Tokenizer], text: str, at: int) -> None:
    tokenizer = make()
    context, tokens = split(tokenizer, text, at)
    expected = tokenizer.decode(context + tokens).removeprefix(tokenizer.decode(context))
    assert "".join(pieces_of(tokenizer, context, tokens)) == expected


@BOTH
@given(text=TEXT.filter(lambda text: REPLACEMENT not in text))
@at_most(100)
def test_no_piece_holds_a_part_of_a_character(make: Callable[[], Tokenizer], text: str) -> None:
    tokenizer = make()
    pieces = pieces_of(tokenizer, [], tokenizer.encode(text))
    assert not any(REPLACEMENT in piece for piece in pieces)
    assert pieces[-1] == ""  # all characters were complete, so nothing had to wait for the end


@given(st.text(alphabet="日本語👍é𠮷", min_size=1, max_size=6))
@at_most(50)
def test_where_a_token_ends_a_character_all_text_so_far_is_out(text: str) -> None:
    """Text is withheld only while its last token ends inside a character."""
    tokenizer = byte_level()
    tokens = tokenizer.encode(text)
    detokenizer, shown = Detokenizer(tokenizer, []), ""
    for count, token in enumerate(tokens, 1):
        shown += detokenizer.push(token)
        so_far = tokenizer.decode(tokens[:count])
        assert so_far.startswith(shown)
        assert shown == so_far or so_far.endswith(REPLACEMENT)


@given(st.lists(st.integers(1, 299), max_size=30))
@at_most(150)
def test_tokens_that_are_no_text_lose_nothing_either(tokens: list[int]) -> None:
    """Bytes that are not a character become U+FFFD, as when all tokens are decoded at once."""
    tokenizer = byte_level()
    assert len(tokenizer) == 300
    assert "".join(pieces_of(tokenizer, [], tokens)) == tokenizer.decode(tokens)


BAD_RUN = st.lists(st.integers(0x80, 0xFF), max_size=9).map(lambda data: [3 + byte for byte in (0xFF, *data)])
THE = st.sampled_from(["▁the", "▁", "a"]).map(lambda piece: [byte_fallback().vocabulary()[piece]])
GOOD_RUN = TEXT.map(lambda text: byte_fallback().encode_piece(text))


@given(st.lists(st.tuples(st.one_of(BAD_RUN, GOOD_RUN), THE), max_size=5), st.integers(0, 3), THE)
@at_most(100)
def test_bytes_that_are_no_text_lose_nothing_either(
    parts: list[tuple[list[int], ...]], cut: int, the: list[int]
) -> None:
    """A run of byte tokens is characters, or a U+FFFD for each: also at the end, where it may be cut."""
    tokenizer = byte_fallback()
    tokens = [token for part in parts for run in part for token in run] + [3 + byte for byte in "𠮷".encode()[:cut]]
    expected = tokenizer.decode(the + tokens).removeprefix(tokenizer.decode(the))
    assert "".join(pieces_of(tokenizer, the, tokens)) == expected


def test_valid_bytes_of_a_broken_run_that_were_shown_stay() -> None:
    tokenizer = byte_fallback()
    the = tokenizer.vocabulary()["▁the"]
    tokens = [*(3 + byte for byte in "日本".encode()), 3 + 0xE6, 3 + 0xFF, 3 + 0x80, the]
    pieces = ["", "", "日", "", "", "本", "", REPLACEMENT * 2, REPLACEMENT, " the", ""]
    assert pieces_of(tokenizer, [the], tokens) == pieces
    assert pieces_of(tokenizer, [the], [3 + 0xE6, 3 + 0x97, the]) == ["", "", REPLACEMENT * 2 + " the", ""]


@pytest.mark.parametrize("text", [REPLACEMENT, f"a{REPLACEMENT}", f"{REPLACEMENT}👍🏽", "\U0010ffff", "日本"])
@BOTH
def test_a_run_of_any_character_is_out_at_once_with_the_same_work_for_each_token(
    make: Callable[[], Tokenizer], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: U+FFFD that the model wrote was taken for half a character, and held back to the end in quadratic time."""
    tokenizer = make()
    tokens, join, most = tokenizer.encode_piece("a" + text * 200), tokenizer.join, 0

    def watched(self: Tokenizer, strings: list[str]) -> str:
        nonlocal most
        most = max(most, sum(map(len, strings)))
        return join(strings)

    monkeypatch.setattr(Tokenizer, "join", watched)
    pieces = pieces_of(tokenizer, [], tokens)
    assert "".join(pieces) == "a" + text * 200
    assert pieces[-1] == ""
    assert all(any(pieces[at : at + 4]) for at in range(len(tokens) - 3))  # a character has 4 bytes at most
    assert most < 20


@given(st.lists(st.integers(1, 299), max_size=20))
@example([1 + byte for byte in b"a"])
@example([170, 95])  # half of a surrogate, which no third byte makes a character
@at_most(100)
def test_at_most_one_character_is_withheld(tokens: list[int]) -> None:
    tokenizer = byte_level()
    detokenizer, shown = Detokenizer(tokenizer, []), ""
    for count, token in enumerate(tokens, 1):
        shown += detokenizer.push(token)
        so_far = tokenizer.decode(tokens[:count])
        assert so_far in (shown, shown + REPLACEMENT)


def test_flush_gives_an_unfinished_character_once() -> None:
    tokenizer = byte_level()
    tokens = tokenizer.encode("a𠮷")
    detokenizer = Detokenizer(tokenizer, [])
    assert [detokenizer.push(token) for token in tokens[:-1]] == ["a", *[""] * (len(tokens) - 2)]
    assert detokenizer.flush() == REPLACEMENT
    assert detokenizer.flush() == ""


def test_a_context_cut_inside_a_character_spoils_nothing() -> None:
    """Bug: the last 8 tokens of this prompt begin inside a character, and all later bytes became U+FFFD."""
    tokenizer = byte_fallback()
    prompt, tokens = tokenizer.encode("日本語日本語"), tokenizer.encode("語a")[2:]
    assert tokenizer.decode(prompt[-8:]).startswith(REPLACEMENT)
    assert "".join(pieces_of(tokenizer, prompt, tokens)) == "語a"


def test_a_space_after_a_special_token_is_kept() -> None:
    """Bug: a token without text moved the window, and the next word lost its space as if it began the text."""
    tokenizer = byte_fallback()
    the, start = tokenizer.vocabulary()["▁the"], 1
    assert pieces_of(tokenizer, [the], [the, start, the]) == [" the", "", " the", ""]
    assert pieces_of(tokenizer, [the, *[start] * 70], [the]) == [" the", ""]  # as a prompt from a chat template ends


def test_a_prompt_is_not_closed_and_decoding_skips_special_tokens() -> None:
    tokenizer = byte_fallback()
    tokens = tokenizer.encode("the the")
    assert tokens == [1, *[tokenizer.vocabulary()["▁the"]] * 2]
    assert tokenizer.decode([*tokens, 2]) == "the the"
    assert tokenizer.eos_token_id == 2


def test_decoding_leaves_the_spaces_before_punctuation() -> None:
    """Many tokenizer configs ask for a clean-up that removes them."""
    tokenizer = byte_level.__wrapped__()
    tokenizer._inner.clean_up_tokenization_spaces = True
    tokenizer._inner.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output = True
    tokens = tokenizer.encode("the cat , naïve . do n't")
    assert tokenizer._inner.decode(tokens) == "the cat, naïve. don't"
    assert tokenizer.decode(tokens) == "the cat , naïve . do n't"


def test_a_saved_tokenizer_loads_from_its_folder(tmp_path: Path) -> None:
    byte_level()._inner.save_pretrained(tmp_path)
    loaded = Tokenizer.from_folder(tmp_path)
    assert loaded.vocabulary() == byte_level().vocabulary()
    assert loaded.encode("the naïve 👍🏽") == byte_level().encode("the naïve 👍🏽")


def test_a_folder_without_a_tokenizer_is_an_error_that_names_it(tmp_path: Path) -> None:
    """It said four lines of transformers' advice."""
    with pytest.raises(ModelError) as raised:
        Tokenizer.from_folder(tmp_path)
    said = f"{tmp_path} has no tokenizer: none of tokenizer.json, tokenizer.model, "
    assert str(raised.value).startswith(said)
    assert str(raised.value).endswith(" is there; copy it from where the model comes from")


# Pieces of a text


@cache
def spaced() -> Tokenizer:
    """Byte-level BPE that keeps line ends together, except the last one before a word, and digits too."""
    inner = trained(["\n\n\n", "\n\n", "00", "01", " a"] * 3, vocab_size=264)
    inner.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>"))


ALL = pytest.mark.parametrize("make", [byte_level, byte_fallback, spaced])
PIECE = st.lists(st.sampled_from([*WORDS, "\n\n", "0", "01", " a"]), min_size=1, max_size=5).map("".join)


def test_a_piece_has_no_space_in_front_that_is_not_there() -> None:
    """SentencePiece puts a space before every text; in the middle of a text it would start a new word."""
    tokenizer = byte_fallback()
    vocabulary = tokenizer.vocabulary()
    assert tokenizer.encode_piece("the", first=True) == [vocabulary["▁the"]]
    assert tokenizer.encode_piece("the") == [vocabulary[letter] for letter in "the"]
    assert tokenizer.encode_piece(" the") == [vocabulary["▁the"]]
    assert tokenizer.encode_piece("\nthe") == [vocabulary["<0x0A>"], *(vocabulary[letter] for letter in "the")]


def test_what_follows_a_piece_may_decide_how_its_end_is_cut() -> None:
    tokenizer = spaced()
    one, two = tokenizer.vocabulary()["Ċ"], tokenizer.vocabulary()["ĊĊ"]
    assert tokenizer.encode_piece("\n\n") == [two]
    assert tokenizer.encode_piece("\n\n", until="A") == [one, one]
    assert tokenizer.encode_piece("\n", until="\n") == [one]  # a token would reach over the end


def test_a_token_does_not_reach_into_a_piece_from_before_it() -> None:
    tokenizer = spaced()
    assert tokenizer.encode_piece("\n\n\n") == tokenizer.encode("\n\n\n")
    assert tokenizer.encode_piece("01") == tokenizer.encode("01")


@ALL
@given(texts=st.lists(PIECE, max_size=4), until=PIECE)
@at_most(100)
def test_pieces_join_to_the_text_and_nothing_else(make: Callable[[], Tokenizer], texts: list[str], until: str) -> None:
    tokenizer = make()
    pieces = [tokenizer.encode_piece(text, first=i == 0, until=until) for i, text in enumerate(texts)]
    assert tokenizer.decode([token for piece in pieces for token in piece]) == "".join(texts)


def test_the_tokens_at_the_start_of_a_text_are_those_that_the_model_wants() -> None:
    assert byte_fallback().start_tokens() == [1]
    assert byte_level().start_tokens() == []


def test_added_tokens_are_the_strings_that_become_one_token() -> None:
    tokenizer = spaced()
    tool, end = len(tokenizer) - 2, len(tokenizer) - 1
    assert tokenizer.added_tokens(special=True) == {"<end>": end}
    assert tokenizer.added_tokens(special=False) == {"<tool>": tool, "<end>": end}
    assert tokenizer.encode_piece("a<tool><end>")[1:] == [tool, end]


# Chat templates


def test_a_template_is_the_tokenizers_own_or_the_default_of_several() -> None:
    tokenizer = byte_level.__wrapped__()
    assert tokenizer.chat_template is None
    for template, expected in (("x", "x"), ({"default": "y", "rag": "x"}, "y"), ({"rag": "x"}, None)):
        tokenizer._inner.chat_template = template
        assert tokenizer.chat_template == expected


def test_a_template_may_be_in_a_file_of_its_own(tmp_path: Path) -> None:
    """The older of them, chat_template.json, was not read."""
    byte_tokenizer().save_pretrained(tmp_path)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": "config"}
    for name, text, template in (
        ("tokenizer_config.json", json.dumps(config), "config"),
        ("chat_template.json", '{"chat_template": "json"}', "json"),
        ("chat_template.jinja", "jinja", "jinja"),
    ):  # each goes before those above it
        (tmp_path / name).write_text(text)
        assert Tokenizer.from_folder(tmp_path).chat_template == template
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tools.jinja").write_text("tools")
    found = Tokenizer.from_folder(tmp_path)
    assert (found.chat_template, set(found.named_templates)) == ("json", {"default", "tools"})
    (tmp_path / "chat_template.json").write_text('{"chat_template": 1}')
    with pytest.raises(ModelError, match=r'chat_template.json has no text "chat_template"'):
        Tokenizer.from_folder(tmp_path)


def test_a_conversation_is_written_up_to_where_the_reply_begins() -> None:
    template = "{{ day }}{% for m in messages %}{{ m.role + m.content + eos_token }}{% endfor %}"
    template += "{% if add_generation_prompt %}:{% endif %}"
    text = byte_level().render_chat([{"role": "user", "content": " hi "}], template, day="Monday ")
    assert text == "Monday user hi <end>:"


# Stop strings

STOPS = st.lists(st.text("abc", max_size=4), max_size=4)
PIECES = st.lists(st.text("abc", max_size=4), max_size=8)


def first_stop(text: str, stops: list[str]) -> tuple[str, bool]:
    """Reference, character by character: the text before the first complete stop string (the longest of several)."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if stop and text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))], True
    return text, False


@given(PIECES, STOPS)
@example(["ab", "c"], ["abc", "b"])  # "b" is complete before "abc", which begins before it
@example(["abc"], ["abc", "b"])
@example(["a", "ab"], ["aab", "ab"])
@at_most(500)
def test_the_text_before_the_first_stop_string_however_it_is_cut(pieces: list[str], stops: list[str]) -> None:
    """Bug: if one stop string began inside another, the first one found depended on the cuts."""
    watch = StopStrings(stops)
    shown = "".join([watch.push(piece) for piece in pieces] + [watch.flush()])
    assert (shown, watch.found) == first_stop("".join(pieces), stops)


@given(PIECES, STOPS)
@at_most(200)
def test_only_what_may_become_a_stop_string_is_held_back(pieces: list[str], stops: list[str]) -> None:
    watch, text, shown = StopStrings(stops), "", ""
    for piece in pieces:
        text, shown = text + piece, shown + watch.push(piece)
        if not watch.found:
            held = text.removeprefix(shown)
            assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


def test_nothing_comes_after_a_stop_string() -> None:
    watch = StopStrings(["END"])
    assert [watch.push(text) for text in ("one E", "ND two", "three")] == ["one ", "", ""]
    assert (watch.flush(), watch.found) == ("", True)


def test_without_stop_strings_all_text_passes_at_once() -> None:
    for stops in ([], [""]):
        watch = StopStrings(stops)
        assert (watch.push("text"), watch.push(""), watch.flush(), watch.found) == ("text", "", "", False)
