"""Any text in, the same text out: characters of every kind through tokens, pieces and the whole command line."""

from __future__ import annotations

import json
import subprocess
import sys
import unicodedata
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from random import Random

import pytest

from kit.fuzzing import put
from offload.engine.request import GenerationRequest
from offload.errors import UsageError
from offload.text.stops import StopStrings
from offload.text.tokenizer import Detokenizer, Tokenizer
from test_cli_fake import ROOT, Engine, Step, environment, install, load, play
from triforce_cli.app import main
from triforce_cli.screen.utf8 import read_text
from triforce_cli.setup.choice import choose_models

NUM_CHARACTERS = 100_000
CLUSTERS = (
    *("👨\u200d👩\u200d👧\u200d👦", "🏳\ufe0f\u200d🌈", "👍🏽", "🇩🇪", "e\u0301\u0323\u0302", "क्षि", "ก็", "한", "ﷺ"),
    *("שָׁלוֹם", "مرحبا", "𠮷", "𝔘", "\ufeff", "\ufffd", "\u200d", "\u202e", "\u2066", "\u2028", "\u2029", "\x85"),
    *("\0", "\x1b[31m", "\r\n", "\n\r", "\t", "\x7f", "\ud7ff", "\ue000", "\uffff", "\U0010ffff", "\u0378"),
    *(" ", "  ", "a", "the ", "0", "<", "s", ">"),
)


@cache
def any_text(num_characters: int = NUM_CHARACTERS, seed: int = 0) -> str:
    """Random code points of all planes, combining characters in heaps, and clusters that belong together."""
    random, parts, length = Random(seed), [], 0
    while length < num_characters:
        match random.randrange(4):
            case 0:
                part = random.choice(CLUSTERS)
            case 1:
                part = chr(random.randrange(0x80))
            case 2:
                part = chr(random.randrange(0x300, 0x370))  # combining
            case _:
                part = chr(random.choice((random.randrange(0xD800), random.randrange(0xE000, 0x110000))))
        parts.append(part)
        length += len(part)
    return "".join(parts)[:num_characters]


@cache
def embedded() -> Tokenizer:
    return Tokenizer.from_folder(choose_models(None, None).target)


def ordinary(text: str) -> str:
    """Without the strings that are special tokens, which are no text, and without a byte order mark at the start."""
    assert set(embedded().added_tokens(special=True)) == {"<s>", "</s>"}
    return text.replace("s>", "").removeprefix("\ufeff")


def test_the_text_is_of_every_kind() -> None:
    text = any_text()
    assert len(text) == NUM_CHARACTERS
    assert {unicodedata.category(character) for character in text} >= {
        *("Cc", "Cf", "Cn", "Co", "Ll", "Lo", "Lu", "Mc", "Me", "Mn", "Nd", "Nl", "No", "Pc", "Pd", "Pe", "Po", "Ps"),
        *("Sc", "Sk", "Sm", "So", "Zl", "Zp", "Zs"),
    }
    assert "Cs" not in {unicodedata.category(character) for character in text}


def test_tokens_of_the_embedded_model_are_the_text() -> None:
    text = ordinary(any_text())
    tokens = embedded().encode(text)
    assert embedded().decode(tokens) == text


def test_pieces_are_the_text_and_are_whole_characters() -> None:
    """Token by token, as a reply comes, behind any context."""
    text = ordinary(any_text(8_000, seed=1))
    tokens = embedded().encode_piece(text)
    for at in (0, 1, 7, 1000):
        detokenizer = Detokenizer(embedded(), tokens[:at])
        pieces = [detokenizer.push(token) for token in tokens[at:]] + [detokenizer.flush()]
        assert "".join(pieces) == embedded().decode(tokens[at:])
        if at == 0:
            assert "".join(pieces) == text
            shown = 0
            for piece in pieces:  # U+FFFD is there where the text has one
                assert text.startswith(piece, shown)
                shown += len(piece)


def test_a_text_cut_inside_a_character_ends_with_one_mark_and_loses_nothing_before_it() -> None:
    """As at --max-tokens: whatever token it is cut behind."""
    text = "a👨‍👩‍👧é日𠮷ก็"
    tokens = embedded().encode_piece(text)
    assert len(tokens) > 2 * len("a👨é日𠮷")
    for count in range(len(tokens) + 1):
        detokenizer = Detokenizer(embedded(), [])
        shown = "".join(detokenizer.push(token) for token in tokens[:count])
        assert text.startswith(shown)
        rest = detokenizer.flush()
        assert set(rest) <= {"\ufffd"}
        assert len(rest) <= 1
        assert shown + rest == embedded().decode(tokens[:count])


@pytest.mark.parametrize("stop", ["👩", "\u0301", "\u200d👧", "語", "\0", "\u202e"])
def test_a_stop_string_of_several_tokens_is_found_and_nothing_behind_it_is_shown(stop: str) -> None:
    """It begins and ends inside clusters, and its tokens may begin inside a character before it."""
    text = "x👨\u200d👩\u200d👧e\u0301日本語\0\u202ezz"
    detokenizer, stops, shown = Detokenizer(embedded(), []), StopStrings([stop]), ""
    for token in embedded().encode_piece(text):
        shown += stops.push(detokenizer.push(token))
    assert stops.found
    assert shown == text[: text.index(stop)]


# The whole way


class Echo(Engine):
    """Says the prompt, a few tokens a step."""

    def generate(self, request: GenerationRequest, **_: object) -> Iterator[Step]:
        detokenizer, random = Detokenizer(embedded(), []), Random(0)
        tokens = list(request.prompt)
        while tokens:
            said = [tokens.pop(0) for _ in range(min(len(tokens), random.randint(1, 50)))]
            text = "".join(detokenizer.push(token) for token in said)
            yield Step(text if tokens else text + detokenizer.flush(), said, None if tokens else "length")


def given_back(data: bytes, tmp_path: Path, *args: str) -> subprocess.CompletedProcess[bytes]:
    """`triforce generate` on `Echo`, in a fork: standard input, tokens, pieces of text, standard output."""

    def begin() -> None:
        say_the_prompt()
        play(["generate", *arguments], environment(), stand_in=False)

    arguments = ("--model", str(tmp_path), "--quiet", *args)
    load()
    embedded()
    return subprocess.run(["true"], preexec_fn=begin, input=data, capture_output=True)


def say_the_prompt() -> None:
    install()
    vars(sys.modules["offload.engine.engine"]).update(Engine=Echo, load_tokenizer=lambda model, draft: embedded())


def test_any_text_goes_through_the_pipe_and_comes_back(tmp_path: Path, num_cases: Callable[[int], int]) -> None:
    """In a process with another encoding than the text's."""
    data = ordinary(any_text(num_cases(NUM_CHARACTERS))).encode()
    done = subprocess.run(
        [sys.executable, __file__, "generate", "--model", str(tmp_path), "--quiet"],
        env=environment(LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0", PYTHONPATH=str(ROOT)),
        input=data,
        capture_output=True,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout == data


def test_any_text_comes_back_in_json(tmp_path: Path) -> None:
    text = ordinary(any_text(8_000, seed=2))
    document = json.loads(given_back(text.encode(), tmp_path, "--json").stdout)
    assert document["text"] == text


def test_random_bytes_are_text_or_refused_with_the_offset_of_the_first_that_is_none(tmp_path: Path) -> None:
    random = Random(3)
    prompt = tmp_path / "prompt"
    refused = 0
    for _ in range(2000):
        data = bytearray(any_text(40, seed=random.randrange(50)).encode())
        for _ in range(random.randrange(3)):
            data[random.randrange(len(data))] = random.randrange(256)
        put(prompt, bytes(data))
        refused += check_reading(prompt, bytes(data))
    assert 200 < refused < 1800


def check_reading(file: Path, data: bytes) -> bool:
    """Was it refused, and rightly?"""
    try:
        expected = data.decode("utf-8")
    except UnicodeDecodeError as error:
        with pytest.raises(UsageError, match=rf"byte 0x{data[error.start]:02x} at offset {error.start};"):
            read_text(file, "the prompt")
        return True
    assert read_text(file, "the prompt") == expected.removeprefix("\ufeff")
    return False


def test_invalid_bytes_in_a_pipe_end_with_2(tmp_path: Path) -> None:
    done = given_back(any_text(1000).encode() + b"\xed\xa0\x80", tmp_path)  # half a surrogate pair
    assert (done.returncode, done.stdout) == (2, b"")
    assert b"byte 0xed at offset " in done.stderr


if __name__ == "__main__":
    say_the_prompt()
    sys.exit(main())
