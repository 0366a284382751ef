"""Tokenizers that are damaged: refused as models are, or they encode and decode. Their library panics, which is no
Exception."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from kit.fuzzing import damaged_json, growth_under, outcomes, put
from kit.models import byte_tokenizer
from offload.errors import ModelError
from offload.text.tokenizer import Detokenizer, Tokenizer
from offload.text.tokenizer_files import MAX_FILE_BYTES
from test_tokenizer import byte_fallback, byte_level

NUM_PLAIN, NUM_AUTO = 1500, 200
TEXT = "the cat naïve 👍🏽\n\ta 日本"
FEW_BYTES = 64 << 20
# Parts of other tokenizers, some of them broken, that take the place of its own.
PARTS: dict[str, list[object]] = {
    "normalizer": [
        {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
        {"type": "Replace", "pattern": {"Regex": ""}, "content": "x"},
        {"type": "Prepend", "prepend": ""},
    ],
    "pre_tokenizer": [
        {"type": "Split", "pattern": {"Regex": ""}, "behavior": "Isolated", "invert": False},
        {"type": "Metaspace", "replacement": "", "prepend_scheme": "always", "split": True},
        {"type": "FixedLength", "length": 0},
    ],
    "model": [
        {"type": "Unigram", "unk_id": None, "vocab": [["a", 0.0]]},
        {"type": "Unigram", "unk_id": 5, "vocab": [["a", 0.0]]},
        {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "x"},
        {"type": "WordPiece", "unk_token": "?", "continuing_subword_prefix": "#", "max_input_chars_per_word": 9,
         "vocab": {"a": 0}},
        {"type": "BPE", "vocab": {"a": 0, "ab": 2**32 - 1}, "merges": [["a", "b"]]},
    ],
    "decoder": [
        {"type": "Strip", "content": "a", "start": 0, "stop": 3},
        {"type": "Sequence", "decoders": [  # makes a mark of nothing
            {"type": "Fuse"}, {"type": "CTC", "pad_token": "", "word_delimiter_token": "", "cleanup": True},
            {"type": "Replace", "pattern": {"String": " "}, "content": "\ufffd"}]},
        {"type": "CTC", "pad_token": "", "word_delimiter_token": "", "cleanup": True},
        {"type": "Replace", "pattern": {"String": ""}, "content": "\ufffd"},
    ],
    "padding": [{"strategy": {"Fixed": 2**40}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
                 "pad_type_id": 0, "pad_token": "a"}],
    "truncation": [{"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0}],
}  # fmt: skip
Make = Callable[[], Tokenizer]


def use(folder: Path) -> list[int]:
    """Load, encode, decode: all at once and token by token."""
    tokenizer = Tokenizer.from_folder(folder)
    assert len(tokenizer) >= 0
    assert isinstance(tokenizer.vocabulary(), dict)
    tokens = tokenizer.encode(TEXT)
    detokenizer = Detokenizer(tokenizer, tokens)
    assert isinstance("".join(detokenizer.push(token) for token in tokens) + detokenizer.flush(), str)
    assert isinstance(tokenizer.decode([*tokens, 0, 2**31]), str)
    return tokens


@pytest.mark.parametrize(
    "make",
    [lambda: Tokenizer(byte_tokenizer()), byte_level, byte_fallback],
    ids=["bytes", "byte-level", "byte-fallback"],
)
def test_tokenizer_files(
    tmp_path: Path, make: Make, num_cases: Callable[[int], int], capfd: pytest.CaptureFixture[str]
) -> None:
    make()._inner.save_pretrained(tmp_path)
    tokenizer, config = tmp_path / "tokenizer.json", tmp_path / "tokenizer_config.json"
    whole, settings = json.loads(tokenizer.read_text()), json.loads(config.read_text())

    def damage(random: Random) -> None:
        document = dict(whole)
        if random.random() < 0.4:
            part = random.choice(sorted(PARTS))
            document[part] = random.choice(PARTS[part])
        for path, content, chance in ((tokenizer, document, 0.6), (config, settings, 0.4)):
            damaged = random.random() < chance
            put(path, damaged_json(content, random) if damaged else json.dumps(content).encode())

    use(tmp_path)
    with growth_under(FEW_BYTES):
        counts = outcomes(num_cases(NUM_PLAIN // 3), damage, lambda: use(tmp_path))
    assert min(counts["works"], counts["refused"]) > 0.1 * counts.total(), counts


@pytest.mark.parametrize("class_name", ["GPT2Tokenizer", "Qwen2Tokenizer"])
def test_older_files_without_a_tokenizer_json(
    tmp_path: Path, class_name: str, num_cases: Callable[[int], int], capfd: pytest.CaptureFixture[str]
) -> None:
    byte_level()._inner.save_pretrained(tmp_path)
    model = json.loads((tmp_path / "tokenizer.json").read_text())["model"]
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "merges.txt").write_text("\n".join(" ".join(merge) for merge in model["merges"]))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text()) | {"tokenizer_class": class_name}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    files = {path: json.loads(path.read_text()) for path in sorted(tmp_path.glob("*.json"))}

    def damage(random: Random) -> None:
        for path, document in files.items():
            put(path, json.dumps(document).encode())
        path = random.choice(list(files))
        put(path, damaged_json(files[path], random))

    use(tmp_path)
    counts = outcomes(num_cases(NUM_AUTO // 2), damage, lambda: use(tmp_path))
    assert min(counts["works"], counts["refused"]) > 0, counts


def test_a_panic_is_refused_with_a_remedy(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    byte_tokenizer().save_pretrained(tmp_path)
    path = tmp_path / "tokenizer.json"
    whole = json.loads(path.read_text())
    path.write_text(json.dumps(whole | {"normalizer": PARTS["normalizer"][0]}))
    with pytest.raises(ModelError, match=r"no usable tokenizer \(Precompiled.*download it again"):
        Tokenizer.from_folder(tmp_path)
    path.write_text(json.dumps(whole | {"pre_tokenizer": {"type": "FixedLength", "length": 0}}))
    tokenizer = Tokenizer.from_folder(tmp_path)
    with pytest.raises(ModelError, match=rf"{tmp_path}: the tokenizer cannot encode \(chunk size.*download"):
        tokenizer.encode("text")
    path.write_text(json.dumps(whole | {"decoder": PARTS["decoder"][0]}))
    tokenizer = Tokenizer.from_folder(tmp_path)
    with pytest.raises(ModelError, match=rf"{tmp_path}: the tokenizer cannot decode \(index out of.*download"):
        tokenizer.decode(tokenizer.encode("a"))


def test_a_decoder_that_makes_a_mark_of_nothing_ends_no_prompt(tmp_path: Path) -> None:
    """The end of a prompt was shortened for as long as it began inside a character."""
    byte_tokenizer().save_pretrained(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"decoder": PARTS["decoder"][1]}))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.decode([]) == "\ufffd"
    assert isinstance(Detokenizer(tokenizer, tokenizer.encode("text")).push(1), str)


def test_a_tokenizer_neither_shortens_nor_pads_a_prompt(tmp_path: Path) -> None:
    byte_tokenizer().save_pretrained(tmp_path)
    path = tmp_path / "tokenizer.json"
    expected = Tokenizer.from_folder(tmp_path).encode(TEXT)
    whole = json.loads(path.read_text())
    for part in ("padding", "truncation"):
        path.write_text(json.dumps(whole | {part: PARTS[part][0]}))
        assert Tokenizer.from_folder(tmp_path).encode(TEXT) == expected


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_file_over_the_limit_is_not_read(tmp_path: Path, name: str) -> None:
    byte_tokenizer().save_pretrained(tmp_path)
    with (tmp_path / name).open("r+b") as file:
        file.truncate(MAX_FILE_BYTES + 1)  # sparse
    with growth_under(FEW_BYTES), pytest.raises(ModelError, match=f"{name} is over the limit of {MAX_FILE_BYTES}"):
        Tokenizer.from_folder(tmp_path)
