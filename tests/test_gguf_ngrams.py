"""n-grams of Qwen3.8-Flash-Next in GGUF files (`qwen4exp`): the integers that hash them, with all of their bits, and
the table in its kind; what a file claims and this program has not is refused by its name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from torch import Tensor

from kit.families import save_tiny
from kit.gguf_models import write_gguf
from kit.models import TOKENIZER_SIZE, Sizes, load, random_tokens, target_cache
from offload.config.reading import read_config
from offload.errors import ModelError
from offload.formats.encodings import ENCODINGS
from offload.weights.checkpoint import Checkpoint, check_model
from test_parity import in_prefill

SIZES = Sizes(capacity=61, rows=4, prefill_block=7, page=8, pages=2)
Change = Callable[[gguf.GGUFWriter], None]
TOKENS = random_tokens(60)
END = TOKENS[30]
FIELDS: dict[str, object] = {"indexer_budget": 16, "hidden_size": 64, "ple_embed_dim": 256}  # rows of 32 numbers
HEADS = [211, 223, 227, 229, 233, 239, 241, 251]


def logits(path: Path) -> Tensor:
    decoder = load(path)
    return in_prefill(decoder, target_cache(decoder, SIZES), TOKENS, SIZES.prefill_block)


def made(root: Path, *changes: Change, eos: object = END, vocab_size: int = 96, **form: Any) -> Path:
    def change(writer: gguf.GGUFWriter) -> None:
        for each in changes:
            each(writer)

    folder = save_tiny(
        "qwen4_exp, n-grams", root / "folder", **{**FIELDS, "eos_token_id": eos, "vocab_size": vocab_size}
    )
    write_gguf(folder, root / "model.gguf", change=change, **form)
    return root / "model.gguf"


def put(key: str, value: Any) -> Change:
    """A number, or a list of whole numbers in 64 bits, in the metadata; None: nothing under this key."""

    def change(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0].pop(f"{writer.arch}.{key}", None)
        if isinstance(value, list) and isinstance(value[0], int):
            kinds = gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.UINT64
            writer.add_key_value(f"{writer.arch}.{key}", value, *kinds)
        elif value is not None:
            add = writer.add_array if isinstance(value, list) else writer.add_uint32
            add(f"{writer.arch}.{key}", value)

    return change


def test_a_file_says_what_its_folder_says(tmp_path: Path) -> None:
    """With an end of text among the tokens."""
    path = made(tmp_path)
    torch.testing.assert_close(logits(path), logits(tmp_path / "folder"), rtol=0, atol=2e-4)


def test_no_bit_of_the_integers_that_hash_is_lost(tmp_path: Path) -> None:
    own, folder = read_config(made(tmp_path)).ngrams(1), read_config(tmp_path / "folder").ngrams(1)
    assert own.hashes == folder.hashes
    assert any(int(float(each)) != each for each in own.multipliers)
    assert (own.num_rows, own.row_size, own.parts) == (folder.num_rows, 32, 1)


def test_an_end_of_text_is_the_files_own(tmp_path: Path) -> None:
    """Of several in config.json, llama.cpp's converter takes the last, transformers the first."""
    own = read_config(made(tmp_path, eos=[3, END]))  # whose tokenizer names none
    assert (own.ngrams(1).eos, own.eos_token_ids) == (END, (END,))
    assert read_config(tmp_path / "folder").ngrams(1).eos == 3
    own = read_config(made(tmp_path, eos=[3, END], vocab_size=TOKENIZER_SIZE))
    assert (own.ngrams(1).eos, own.eos_token_ids) == (END, (257,))


def test_integers_of_another_seed_and_other_sizes_are_the_files(tmp_path: Path) -> None:
    """Which no default of config.json gives."""
    offsets = [211 * head for head in range(8)]
    sizes = put("ple.head_vocab_sizes", [211] * 8), put("ple.head_offsets", offsets)
    path = made(tmp_path, put("ple.layer_multipliers", [3, 5, 7]), *sizes)
    assert read_config(path).ngrams(1).hashes == ((3, 5, 7), (211,) * 8, tuple(offsets))
    assert not torch.allclose(logits(path), logits(tmp_path / "folder"), rtol=0, atol=0.1)


@pytest.mark.few(3)
@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0", "Q4_0", "Q5_1", "IQ4_NL", "MXFP4"])
def test_a_table_and_the_matrices_behind_it_stay_in_their_kinds(tmp_path: Path, kind: str) -> None:
    wanted = {"ple_embedding": kind, "key_proj": "Q8_0", "value_proj": "Q4_0"}

    def of(name: str) -> str:
        return next((kind for part, kind in wanted.items() if f".ple.{part}" in name), "F32")

    path, twin = made(tmp_path), tmp_path / "twin.gguf"
    numbers = write_gguf(tmp_path / "folder", path, kind=of)
    write_gguf(tmp_path / "folder", twin, numbers=numbers)
    own, table = read_config(path).ngrams(1), kind if kind in ENCODINGS else ""
    assert (own.table_encoding, own.key_encoding, own.value_encoding) == (table, "Q8_0", "Q4_0")
    torch.testing.assert_close(logits(path), logits(twin), rtol=0, atol=2e-4)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("layers", [1, 2], "ple.layers is a list of 2; it must be a list of 1, each a whole number from 0 to 3"),
        ("layers", [4], "ple.layers is a list of 1; it must be a list of 1, each a whole number from 0 to 3"),
        ("layer_multipliers", [3, 5], "is a list of 2; it must be a list of 3, each a whole number from 1"),
        ("layer_multipliers", [3, 5, 1 << 60], "is a list of 3; it must be a list of 3, each a whole number from 1"),
        ("layer_multipliers", [3.0, 5.0, 7.0], "is a list of 3; it must be a list of 3, each a whole number from 1"),
        ("head_vocab_sizes", [0] * 8, "is a list of 8; it must be a list of 8, each a whole number from 1"),
        ("head_vocab_sizes", [*HEADS[:-1], 1 << 20], "must be numbers that add up to the 1856 rows of per_layer_token"),
        ("head_offsets", [0] * 8, "must be the sums of ple.head_vocab_sizes before each head, 211 for the second one"),
        ("eos_token_id", 96, "ple.eos_token_id is 96; it must be a whole number from 0 to 95"),
        ("eos_token_id", None, "ple.eos_token_id is missing; it must be a whole number"),
        ("ngram_size", 1, "ple_embed_dim is 0; it must be"),
        ("heads_per_ngram", 3, "ple.head_vocab_sizes is a list of 8; it must be a list of 6"),
        ("dilation", 2, "ple.dilation is 2; it must be absent or 0: it changes the arithmetic"),
        ("conv_kernel", 9, "ple_conv_kernel_size is 9; it must be a whole number from 1 to 8"),
    ],
)
def test_metadata_that_contradict_are_refused_by_name(tmp_path: Path, key: str, value: Any, said: str) -> None:
    path = made(tmp_path, put(f"ple.{key}", value), tokenizer="")
    with pytest.raises(ModelError) as error:
        read_config(path)
    assert said in str(error.value)


def test_a_table_of_other_rows_or_none_is_told(tmp_path: Path) -> None:
    path = made(tmp_path, put("embedding_length_per_layer_input", 16))
    with Checkpoint.open(path) as checkpoint, pytest.raises(ModelError, match=r"shard_0\.weight \[1856, 32\], not \["):
        check_model(checkpoint, read_config(path))
    path = made(tmp_path, without="ple_embedding.table")
    with Checkpoint.open(path) as checkpoint, pytest.raises(ModelError, match=r"1 missing \(.*shard_0"):
        check_model(checkpoint, read_config(path))


def test_n_grams_without_metadata_are_unexpected(tmp_path: Path) -> None:
    path = made(tmp_path, lambda writer: [writer.kv_data[0].pop(key) for key in [*writer.kv_data[0]] if ".ple." in key])
    with Checkpoint.open(path) as checkpoint, pytest.raises(ModelError, match=r"7 unexpected"):
        check_model(checkpoint, read_config(path))
