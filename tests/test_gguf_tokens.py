"""The special tokens of a GGUF file are those of llama.cpp: by ids that the file names, or by their texts."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest

from kit.gguf_models import write_gguf
from kit.models import random_model, save
from offload.config.gguf import notes
from offload.config.gguf_header import read_header
from offload.config.reading import read_config
from offload.text.tokenizer import Tokenizer

NONE = 0xFFFFFFFF  # -1, as the package gguf writes it


@pytest.mark.parametrize(
    ("tokenizer", "change", "bos", "ends"),
    [
        ("gpt2", {}, 256, (257,)),
        ("gpt2", {"bos": 300, "eos": 300}, None, (257,)),
        ("gpt2", {"bos": NONE, "eos": NONE}, None, (257,)),
        ("gpt2", {"eos": 5, "eot": 6, "eom": 300}, 256, (5, 6, 257)),
        ("gpt2", {"eos": 5, "fim_pad": 7}, 256, (5, 7, 257)),
        ("llama", {"bos": 300, "eos": 300}, 1, (2, 257)),
        ("llama", {"bos": NONE, "eos": NONE}, None, (257,)),
        ("", {"bos": 299, "eos": 299}, 299, (299,)),
        ("", {"bos": 300, "eos": 300}, None, ()),
    ],
)
def test_special_tokens_that_are_not_there_are_none_or_llama_cpps(
    tmp_path: Path, tokenizer: str, change: dict[str, int], bos: int | None, ends: tuple[int, ...]
) -> None:
    """Bug: a file that names an end token outside its vocabulary was refused; llama.cpp warns and goes on. -1 is none.
    Where pieces are the tokens, 1 begins and 2 ends a text by default, and </s>, here 257, always ends one."""

    def change_ids(writer: gguf.GGUFWriter) -> None:
        for name, value in change.items():
            writer.kv_data[0].pop(key := f"tokenizer.ggml.{name}_token_id", None)
            writer.add_uint32(key, value)

    folder = save(random_model(vocab_size=300), tmp_path)
    write_gguf(folder, path := tmp_path / "model.gguf", tokenizer=tokenizer, change=change_ids)
    config = read_config(path)
    assert (config.bos_token_id, config.eos_token_ids) == (bos, ends)
    told = [note.split()[1:3] for note in notes(read_header(path), 2)]
    assert told == [[f"tokenizer.ggml.{name}_token_id", "is"] for name, value in change.items() if value == 300]


def test_a_row_of_the_table_without_a_token_is_none(tmp_path: Path) -> None:
    """Tables are padded."""

    def change(writer: gguf.GGUFWriter) -> None:
        del writer.kv_data[0]["tokenizer.ggml.tokens"].value[258:]
        writer.kv_data[0].pop("tokenizer.ggml.eos_token_id")
        writer.add_eos_token_id(258)

    write_gguf(save(random_model(vocab_size=300), tmp_path), path := tmp_path / "model.gguf", change=change)
    assert read_config(path).eos_token_ids == (257,)
    assert Tokenizer.from_folder(path).eos_token_id is None


@pytest.mark.parametrize(
    ("texts", "ends"),
    [
        (("<|end|>", "<|return|>", "<|call|>"), (257, 5, 7)),
        (("<|end|>", "<|return|>"), (257, 3, 5)),
        (("<|end|>",), (257, 3)),
    ],
)
def test_the_end_of_a_message_is_none_of_a_reply_in_gpt_oss(
    tmp_path: Path, texts: tuple[str, ...], ends: tuple[int, ...]
) -> None:
    """Bug: a reply ended behind its thoughts, as replies of Phi do. Also where the file names <|end|> for a turn's."""

    def change(writer: gguf.GGUFWriter) -> None:
        tokens = writer.kv_data[0]["tokenizer.ggml.tokens"].value
        for at, text in zip((3, 5, 7), texts, strict=False):
            tokens[at] = text

    write_gguf(save(random_model(vocab_size=258), tmp_path), path := tmp_path / "model.gguf", change=change)
    assert read_config(path).eos_token_ids == ends
    named = tmp_path / "named.gguf"
    write_gguf(tmp_path, named, change=lambda writer: (change(writer), writer.add_eot_token_id(3)))
    assert set(read_config(named).eos_token_ids) == set(ends)


@pytest.mark.parametrize("has_tools", [True, False])
def test_a_word_of_html_is_no_end_in_gemma_4(tmp_path: Path, has_tools: bool) -> None:
    """</s> ended replies about web pages, and had no text."""

    def change(writer: gguf.GGUFWriter) -> None:
        tokens = writer.kv_data[0]["tokenizer.ggml.tokens"].value
        tokens[3], tokens[5] = "<turn|>", "<|tool_response>" if has_tools else "x5"
        tokens[257] = "</s>"
        writer.kv_data[0]["tokenizer.ggml.token_type"].value[257] = 1
        writer.kv_data[0].pop("tokenizer.ggml.eos_token_id")
        writer.add_eos_token_id(3)

    write_gguf(save(random_model(vocab_size=258), tmp_path), path := tmp_path / "model.gguf", change=change)
    assert read_config(path).eos_token_ids == ((3, 5) if has_tools else (3, 257))
    assert Tokenizer.from_folder(path).decode([257]) == ("</s>" if has_tools else "")


def test_suppressed_tokens_of_a_file(tmp_path: Path) -> None:
    """They were drawn. A table's padding has no token."""
    folder, path = save(random_model(vocab_size=258), tmp_path), tmp_path / "model.gguf"
    write_gguf(
        folder, path, change=lambda writer: writer.add_array("tokenizer.ggml.suppress_tokens", [7, 2, 7, 258, -1])
    )
    assert read_config(path).suppressed == (7, 2)
    write_gguf(folder, path)
    assert read_config(path).suppressed == ()


def test_tokens_end_a_reply_by_their_texts(tmp_path: Path) -> None:
    """Bug: a file that names the end of a text alone ran on past the end of a turn, which llama.cpp knows by its
    text. What ends a file of code does so where the file names no other token for it."""
    named = {3: "<|im_end|>", 5: "<|file_sep|>", 7: "<|fim_pad|>", 9: "<|im_start|>"}

    def change(writer: gguf.GGUFWriter) -> None:
        tokens = writer.kv_data[0]["tokenizer.ggml.tokens"].value
        for at, text in named.items():
            tokens[at] = text
        writer.add_uint32("tokenizer.ggml.fim_pad_token_id", 8)

    write_gguf(save(random_model(vocab_size=258), tmp_path), path := tmp_path / "model.gguf", change=change)
    assert read_config(path).eos_token_ids == (257, 8, 3, 5)
    tokenizer = Tokenizer.from_folder(path)
    assert tokenizer.encode("<|im_end|><|file_sep|>") == [3, 5]
    assert 7 not in tokenizer.encode("<|fim_pad|>")
    assert tokenizer.decode([3, 5]) == ""


def test_an_end_token_that_is_not_there_is_told_and_the_model_runs(triforce, tmp_path: Path) -> None:
    folder = save(random_model(vocab_size=300), tmp_path)
    (tmp_path / "prompt.txt").write_text("ab")
    texts = []
    for name, end in (("plain", 257), ("other", 99999)):

        def change(writer: gguf.GGUFWriter, end: int = end) -> None:
            writer.kv_data[0].pop("tokenizer.ggml.eos_token_id")
            writer.add_eos_token_id(end)

        write_gguf(folder, tmp_path / f"{name}.gguf", change=change)
        fixed = ("--draft", "none", "--max-tokens", "4", "--temperature", "0", "--dtype", "fp32")
        files = ("--model", str(tmp_path / f"{name}.gguf"), "--prompt-file", str(tmp_path / "prompt.txt"))
        code, out, err = triforce("generate", *files, *fixed)
        assert code == 0, err
        texts.append(out)
    assert texts[0] == texts[1]
    assert "other.gguf: tokenizer.ggml.eos_token_id is 99999, and there are 300 tokens: there is none then" in err
