"""Long texts: the lower bound of their tokens, and parts that have the tokens of the whole."""

from __future__ import annotations

import random
import resource
from collections.abc import Callable
from functools import cache, partial

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from kit.constrained import demo, llama_like
from kit.examples import at_most
from offload.errors import DoesNotFit
from offload.text import long_texts, tokenizer
from offload.text.long_texts import Coverage
from offload.text.tokenizer import Tokenizer
from test_gguf_tokenizer import gemma, made, pieces
from test_tokenizer import byte_fallback, byte_level, trained

Make = Callable[[], Tokenizer]
WORDS = [
    *("the", " the", "cat", " ", "  ", "\n", "\n\n", "\t", "x" * 30, "12", "1234567", "é", "e\u0301", "日本語", "。\n"),
    *(
        "\u3000",
        "👍🏽",
        "ก็",
        "...",
        "it's",
        "<end>",
        "</s>",
        "\u2581",
        "\u2581the",
        "\r\n",
        "the\nthe",
        "the cat",
        "\0",
    ),
]
TEXT = st.lists(st.one_of(st.sampled_from(WORDS), st.text(max_size=3)), max_size=60).map("".join)
TEXT = TEXT.map(lambda text: text.encode("utf-8", "ignore").decode())


def of(inner: tokenizers.Tokenizer) -> Tokenizer:
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=inner))


@cache
def composing() -> Tokenizer:
    """As Qwen's: NFC, then a pattern."""
    inner = trained(["the cat é the café\n\nthe"] * 3, vocab_size=290)
    inner.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(r"\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"), behavior="isolated")
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    return of(inner)


@cache
def taking_spaces() -> Tokenizer:
    """As Phi-3's: a special token takes the spaces behind it."""
    inner = trained(["the cat"] * 3, vocab_size=280)
    inner.add_tokens([AddedToken("<end>", rstrip=True), AddedToken("the cat", lstrip=True)])
    return of(inner)


@cache
def without_some_bytes() -> Tokenizer:
    """Letters that the vocabulary has not are dropped."""
    inner = tokenizers.Tokenizer(models.BPE(vocab={"a": 0, "t": 1, "at": 2, "Ġ": 3, "Ċ": 4}, merges=[("a", "t")]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return of(inner)


@cache
def over_words() -> Tokenizer:
    """Tokens that reach over spaces and line ends, since nothing cuts the text before."""
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=290, initial_alphabet=alphabet, show_progress=False)
    inner.train_from_iterator(["the\nthe the\nthe cat"] * 3, trainer)
    return of(inner)


@cache
def fusing() -> Tokenizer:
    """Unknown letters are one token together."""
    vocabulary = {"<unk>": 0, "t": 1, "h": 2, " ": 3}
    return of(tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", fuse_unk=True)))


@cache
def unigram() -> Tokenizer:
    return of(tokenizers.Tokenizer(models.Unigram([("<unk>", 0.0), ("the", -1.0), ("t", -2.0)], unk_id=0)))


@cache
def whole_words() -> Tokenizer:
    inner = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "the": 1}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return of(inner)


@cache
def lowercasing() -> Tokenizer:
    inner = trained(["the cat"] * 3, vocab_size=270)
    inner.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase(), normalizers.Strip()])
    return of(inner)


@cache
def shrinking() -> Tokenizer:
    inner = trained(["the cat"] * 3, vocab_size=270)
    inner.normalizer = normalizers.Replace(Regex(r"\s+"), " ")
    return of(inner)


@cache
def removing() -> Tokenizer:
    inner = trained(["the cat"] * 3, vocab_size=270)
    split = pre_tokenizers.Split(" ", behavior="removed")
    inner.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(use_regex=False)])
    return of(inner)


MADE = {name: cache(partial(made, name)) for name in ("llama3", "qwen2", "smollm", "tekken")}
COVERING: dict[str, Make] = {
    **{make.__name__: make for make in (demo, byte_level, byte_fallback, llama_like, composing, taking_spaces)},
    "without_some_bytes": without_some_bytes,
    "over_words": over_words,
    "pieces": cache(pieces),
    "gemma": cache(gemma),
    **MADE,
}
LOSSES = {
    "é": (fusing, unigram, whole_words),
    " ": (lowercasing, shrinking, removing),
}  # by what they make few tokens of
OTHERS = [make for makes in LOSSES.values() for make in makes]


def bound(tokenizer: Tokenizer) -> Coverage:
    found = tokenizer._coverage
    assert found is not None
    return found


@pytest.mark.parametrize("make", COVERING.values(), ids=COVERING)
@given(text=TEXT)
@example(text="<end>" + " " * 200)
@example(text="é" * 99 + "e\u0301" * 99)
@example(text="\u2581" * 99)
@at_most(25)
def test_a_text_has_no_fewer_tokens_than_the_bound(make: Make, text: str) -> None:
    assert bound(make()).fewest(text) <= len(make()._pieces(text))


@pytest.mark.parametrize(("letter", "make"), [(letter, make) for letter, makes in LOSSES.items() for make in makes])
def test_where_letters_may_be_lost_or_fused_there_is_no_bound(letter: str, make: Make) -> None:
    assert make()._coverage is None
    assert len(make()._pieces(letter * 50)) < 2


@pytest.fixture
def short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_texts, "PART", 40)
    monkeypatch.setattr(tokenizer, "PART", 40)
    monkeypatch.setattr(long_texts, "AROUND", 32)


@pytest.mark.usefixtures("short_parts")
@pytest.mark.parametrize("make", [*COVERING.values(), *OTHERS], ids=[*COVERING, *(make.__name__ for make in OTHERS)])
@given(text=TEXT)
@example(text="the cat\nthe the 12\n\n\tthe cat " * 9)
@example(text="日本語。\n\u3000\u3000日本語\n日本語" * 9)
@at_most(25)
def test_parts_have_the_tokens_and_places_of_the_whole(make: Make, text: str) -> None:
    found, whole = make(), make()._whole(text, True)
    assert (found.encode(text), found.places(text)) == whole
    assert found.num_tokens(text) == len(whole[0])
    assert found._pieces(text) == make()._whole(text, False)[0]


@pytest.mark.usefixtures("short_parts")
@pytest.mark.parametrize("make", [demo, made, byte_fallback, llama_like])
def test_words_and_lines_are_cut_into_parts(make: Make) -> None:
    found = made("llama3") if make is made else make()
    text = "the cat sat\non the mat " * 50
    sizes = [len(places) for _, places in found._parts(text)]
    assert len(sizes) > len(text) // 80


def test_a_token_over_a_place_forbids_to_cut_there() -> None:
    text = "the\nthe the cat " * 9
    assert set(bound(byte_level()).places(text, 0, len(text)))
    assert "\n" not in {text[place] for place in bound(over_words()).places(text, 0, len(text))}


def test_a_text_that_is_surely_too_long_is_not_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: 9 MB of one letter took 3.9 GB and 38 s before they were found too long."""

    def encoded(self: Tokenizer, text: str, *, special: bool) -> None:
        raise AssertionError(len(text))

    monkeypatch.setattr(Tokenizer, "_encoded", encoded)
    for text in ("x" * 9_000_000, "\n" * 9_000_000):
        with pytest.raises(
            DoesNotFit, match=r"the text has at least [14-9][\d,]+ tokens and the context is 32,768: sh"
        ):
            demo().limited(32_768).encode(text)


def test_encoding_ends_where_the_limit_is_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_texts, "PART", 10_000)
    monkeypatch.setattr(tokenizer, "PART", 10_000)
    encoded = 0
    whole = Tokenizer._encoded

    def counted(self: Tokenizer, text: str, *, special: bool) -> object:
        nonlocal encoded
        encoded += len(text)
        return whole(self, text, special=special)

    monkeypatch.setattr(Tokenizer, "_encoded", counted)
    text = " ".join(random.Random(0).choices(["ship", "sea", "of the", "whale"], k=100_000))
    found = demo().limited(30_000)
    bound(found)
    with pytest.raises(DoesNotFit, match="at least 3"):
        found.encode(text)
    assert encoded < len(text) / 2


def test_limit_is_of_long_texts_only() -> None:
    """Of others the plan says how many tokens they have."""
    assert len(demo().limited(2).encode("one two three four")) > 2


def test_memory_does_not_grow_with_the_text() -> None:
    text = "the cat sat\non the mat " * 50_000
    demo().num_tokens(text[: 2 * long_texts.PART])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert demo().num_tokens(text) > 250_000
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 200_000  # kB; at once .5 GB


def test_a_stretch_that_nothing_cuts_is_refused_with_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_texts, "MOST_PART", 1 << 19)
    with pytest.raises(DoesNotFit, match=r"at least 600,000 tokens .* in 524,288 of its 600,000 characters; shorten"):
        demo().encode("x" * 600_000)
    with pytest.raises(
        DoesNotFit, match="600,000 characters, and this model's tokenizer takes 524,288 at most: shorten"
    ):
        unigram().encode("x" * 600_000)
