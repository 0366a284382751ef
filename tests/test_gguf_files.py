"""GGUF files byte by byte: every type of tensors is read as the package gguf reads it, in one file or several, and
whatever a file claims that it has not is refused by its name."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from random import Random

import gguf
import numpy as np
import pytest
import torch

from kit.families import GEMMA4_ROPES, save_tiny
from kit.fuzzing import damaged_bytes, growth_under, outcomes, put
from kit.gguf_models import add_tokens, write_gguf
from kit.models import random_model, save
from kit.stored import GGUF, YOUNG
from offload.config.gguf_header import MAX_HEADER_BYTES, Items, read_header
from offload.config.reading import read_config
from offload.errors import ModelError
from offload.text.tokenizer import Tokenizer
from offload.weights import gguf_file
from offload.weights.checkpoint import Checkpoint, check_model
from offload.weights.gguf_file import MappedFile
from test_gguf_tokenizer import gemma_values

WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 64, "vocab_size": 40}
NUMBERS = ("F32", "F16")
OTHERS = ("TQ1_0",)
NUM_FILES = 3000
FEW_BYTES = 48 << 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(random_model(**WIDE), tmp_path_factory.mktemp("wide"))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole file with a tokenizer."""
    made = tmp_path_factory.mktemp("small")
    write_gguf(save(random_model(vocab_size=258), made), made / "small.gguf")
    return made / "small.gguf"


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole file of Gemma 4 with experts and its tokenizer."""
    made, values = tmp_path_factory.mktemp("gemma"), gemma_values()
    fields = {"vocab_size": len(values["tokens"]), "rope_parameters": GEMMA4_ROPES}
    folder = save_tiny("gemma4, sparse", made, **fields)
    write_gguf(folder, made / "gemma.gguf", tokenizer="", change=lambda writer: add_tokens(writer, values))
    return made / "gemma.gguf"


@pytest.mark.parametrize("kind", [*NUMBERS, *(name for name in GGUF if name not in YOUNG), *OTHERS])
def test_tensors_are_read_as_the_library_reads_them(folder: Path, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "model.gguf"
    stored = write_gguf(folder, path, kind=kind)
    config = read_config(path)
    assert config.stored_in == ((kind,) if kind in GGUF else ())
    assert config.table_encoding == (kind if kind in GGUF else "")
    with Checkpoint.open(path) as checkpoint:
        check_model(checkpoint, config)
        for name, numbers in stored.items():
            read = torch.empty(checkpoint.shape(name))
            if checkpoint.encoding(name):
                read = checkpoint_rows(checkpoint, name)
            else:
                checkpoint.read_into(name, read)
            assert torch.equal(read, torch.from_numpy(numbers)), name


def checkpoint_rows(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    """The numbers of a matrix in blocks, of the blocks that are copied as they are."""
    kind, (outputs, inputs) = gguf.GGMLQuantizationType[checkpoint.encoding(name)], checkpoint.shape(name)
    numbers, nbytes = gguf.GGML_QUANT_SIZES[kind]
    rows = torch.empty(outputs, inputs // numbers * nbytes, dtype=torch.uint8)
    checkpoint.read_stored(name, rows)
    return torch.from_numpy(gguf.quants.dequantize(rows.numpy(), kind))


def test_parts_of_a_matrix_that_is_unpacked_are_read_piece_by_piece(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = write_gguf(folder, tmp_path / "model.gguf", kind="TQ1_0")
    name = "model.layers.1.mlp.down_proj.weight"
    monkeypatch.setattr("offload.weights.checkpoint._UNPACKED_NUMBERS", 256 * 7)
    with Checkpoint.open(tmp_path / "model.gguf") as checkpoint:
        read = torch.empty(100, 40, dtype=torch.bfloat16)
        checkpoint.read_into(name, read, rows=range(50, 150), columns=range(8, 48))
        assert torch.equal(read, torch.from_numpy(stored[name])[50:150, 8:48].bfloat16())
        with pytest.raises(ModelError, match=r"has shape \[256, 256\], \[3, 256\] is needed"):
            checkpoint.read_into(name, torch.empty(3, 256))


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "TQ1_0"])
def test_pages_that_were_read_are_given_back_whatever_a_matrix_is_in(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Those of a matrix that is unpacked stayed in the process's memory."""
    write_gguf(folder, tmp_path / "model.gguf", kind=kind)
    forgotten = list[str]()
    monkeypatch.setattr(MappedFile, "forget", lambda file, name: forgotten.append(name))
    with Checkpoint.open(tmp_path / "model.gguf") as checkpoint:
        checkpoint.read_into("model.layers.1.mlp.down_proj.weight", torch.empty(256, 256))
    assert forgotten == ["blk.1.ffn_down.weight"]


def test_types_that_are_unpacked_are_told_and_need_a_package(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from offload.config.gguf import unpacked_note

    path = tmp_path / "model.gguf"
    write_gguf(folder, path, kind=lambda name: "TQ1_0" if "down" in name else "Q4_K")
    count = 2 * 256 * 256
    assert unpacked_note(read_header(path), 2) == (
        f"model.gguf: matrices in TQ1_0 are unpacked as they are read, to {2 * count / 1e9:.3g} GB"
    )
    write_gguf(folder, tmp_path / "other.gguf", kind="Q4_K")
    assert unpacked_note(read_header(tmp_path / "other.gguf"), 2) == ""
    monkeypatch.setattr(gguf_file.importlib.util, "find_spec", lambda name: None)
    with (
        Checkpoint.open(path) as checkpoint,
        pytest.raises(ModelError, match=r"is in TQ1_0, which needs: pip install"),
    ):
        checkpoint.read_into("model.layers.0.mlp.down_proj.weight", torch.empty(256, 256))


def test_a_model_in_several_files_is_one_whichever_is_named(small: Path, tmp_path: Path) -> None:
    write_gguf(small.parent, tmp_path / "model.gguf", split=5)
    paths = sorted(tmp_path.glob("*.gguf"))
    assert len(paths) > 2
    whole = read_config(small)
    for path in paths:
        assert read_config(path) == whole
        assert Tokenizer.from_folder(path).encode("ab") == Tokenizer.from_folder(small).encode("ab")
        with Checkpoint.open(path) as checkpoint:
            check_model(checkpoint, whole)
            assert checkpoint.files() == tuple(paths)
    last = paths[-1].read_bytes()
    put(paths[-1], paths[1].read_bytes())
    with pytest.raises(ModelError, match=rf"{paths[-1].name} is not a whole .*: it says it is part 1 of {len(paths)}"):
        read_config(paths[0])
    put(paths[-1], last)
    paths[1].unlink()
    with pytest.raises(ModelError, match=rf"part {paths[1].name} is missing"):
        read_config(paths[-1])


# --- files that lie ---


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def value(key: str | bytes, kind: int, data: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + data


def tensor(name: str, sizes: tuple[int, ...], kind: int = 0, start: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, start)


def made(
    *parts: bytes, tensors: int | None = None, values: int | None = None, version: int = 3, data: int = 1024
) -> bytes:
    kinds = [part for part in parts if part.startswith(b"\x01\0\0\0\0\0\0\0")]
    num_tensors = len(kinds) if tensors is None else tensors
    num_values = len(parts) - len(kinds) if values is None else values
    head = b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_values) + b"".join(parts)
    return head + bytes(-len(head) % 32) + bytes(data)


T = "t"  # tensors of these files have one letter, values more
LIES: list[tuple[bytes, str]] = [
    (b"", "it has 0 bytes"),
    (b"GGUF" + bytes(10), "it has 14 bytes"),
    (b"GGML" + bytes(40), "does not begin with GGUF"),
    (made(version=1), "its version is 1, known are 2 and 3"),
    (made(version=3 << 24), "it is big-endian"),
    (made(values=2**63, data=0), "would end at byte 36 of the header, past its end"),
    (made(tensors=2**64 - 1), "0 dimensions"),
    (made(value("ab", 4, b"\1\0\0\0"), value("ab", 4, b"\1\0\0\0")), "ab is there twice"),
    (made(value(b"\xff\xff", 4, b"\1\0\0\0")), "is not UTF-8"),
    (made(value("ab", 8, text(b"\xc3\x28"))), "ab is not UTF-8"),
    (made(value("ab", 99, b"")), "ab is of type 99"),
    (made(value("ab", 8, struct.pack("<Q", 2**63))), "ab would end at byte"),
    (made(value("ab", 9, struct.pack("<IQ", 4, 2**62))), "ab, a list of 4611686018427387904 values, would end"),
    (made(value("ab", 9, struct.pack("<IQ", 8, 2**40))), "a list of 1099511627776 values, would end"),
    (made(value("ab", 9, struct.pack("<IQQ", 8, 1, 2**63 + 7))), "ab, value 0 of 1, would end"),
    (made(value("ab", 9, struct.pack("<IQ", 77, 1))), "ab is a list of type 77"),
    (made(value("ab", 9, struct.pack("<IQ", 9, 1) * 40)), "ab is lists in lists, 5 deep"),
    (made(value("general.alignment", 4, bytes(4))), "general.alignment is 0"),
    (made(value("general.alignment", 4, struct.pack("<I", 48))), "general.alignment is 48"),
    (made(value("general.alignment", 8, text("ab"))), "general.alignment is ab"),
    (made(tensor(T, (4,)), tensor(T, (4,), start=32)), "tensor t is there twice"),
    (made(tensor(T, ())), "t has 0 dimensions"),
    (made(tensor(T, (1, 1, 1, 1, 1))), "t has 5 dimensions"),
    (made(tensor(T, (4, 0))), r"t has sizes \[4, 0\]"),
    (made(tensor(T, (2**32, 2**32))), "t has sizes"),
    (made(tensor(T, (2**63, 2))), "t has sizes"),
    (made(tensor(T, (4,), kind=4)), "t is of type 4, which is not known"),
    (made(tensor(T, (40,), kind=2)), "rows of 40 numbers, and Q4_0 has blocks of 32"),
    (made(tensor(T, (4,), start=8)), "t begins at 8, no multiple of 32"),
    (made(tensor(T, (4,), start=2**63)), "t ends at byte"),
    (made(tensor(T, (4,), start=2**64 - 32)), "t ends at byte"),
    (made(tensor(T, (4000,))), "t ends at byte 16064, and the file has 1088; it is truncated"),
    (made(tensor(T, (16,)), tensor("u", (4,), start=32)), "u begins at byte 128, and t ends at 160"),
]


@pytest.mark.parametrize(("data", "said"), LIES, ids=[said[:30] for _, said in LIES])
def test_what_a_file_claims_and_has_not_is_refused(tmp_path: Path, data: bytes, said: str) -> None:
    path = tmp_path / "lying.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelError, match=said) as caught:
        read_header(path)
    assert str(path) in str(caught.value)


def test_what_lies_beside_each_other_is_read(tmp_path: Path) -> None:
    path = tmp_path / "right.gguf"
    list_of_lists = struct.pack("<IQ", 9, 2) + 2 * (struct.pack("<IQ", 0, 3) + b"\1\2\3")
    parts = (value("general.alignment", 4, struct.pack("<I", 64)), value("ab", 9, list_of_lists),
             value("cd", 6, struct.pack("<f", 1e-5)), tensor(T, (16,)), tensor("u", (4, 2), start=64))  # fmt: skip
    for version in (2, 3):
        path.write_bytes(made(*parts, version=version))
        header = read_header(path)
        assert header.values["cd"] == 1e-5
        assert [each.read() for each in header.items("ab") or () if isinstance(each, Items)] == [[1, 2, 3], [1, 2, 3]]
        assert (header.tensors["u"].shape, header.tensors["u"].start % 64) == ((2, 4), 0)
        assert header.tensors["u"].start - header.tensors[T].start == 64


def test_a_header_has_a_limit(tmp_path: Path) -> None:
    path = tmp_path / "long.gguf"
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + value("ab", 9, struct.pack("<IQ", 0, MAX_HEADER_BYTES))
    with path.open("wb") as file:
        file.write(head)
        file.truncate(2 * MAX_HEADER_BYTES)
    with pytest.raises(ModelError, match=f"over the limit of {MAX_HEADER_BYTES}"):
        read_header(path)


def damaged(data: bytes, random: Random, header_bytes: int) -> bytes:
    """Bytes of the header changed, or numbers in it made wild, or the file cut."""
    head, rest = bytearray(data[:header_bytes]), data[header_bytes:]
    match random.randrange(4):
        case 0:
            return damaged_bytes(bytes(head), random) + rest
        case 1:
            return data[: random.randrange(len(data))]
        case _:
            for _ in range(random.randint(1, 3)):
                at = random.randrange(len(head) - 8)
                wild = random.choice((0, 1, 2, 3, 31, 2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1))
                head[at : at + 8] = struct.pack("<Q", wild)
            return bytes(head) + rest


@pytest.mark.parametrize("name", ["small", "gemma"])
def test_damaged_files(
    name: str, request: pytest.FixtureRequest, tmp_path: Path, num_cases: Callable[[int], int]
) -> None:
    file: Path = request.getfixturevalue(name)
    path, whole = tmp_path / "damaged.gguf", file.read_bytes()
    first = min(each.start for each in read_header(file).tensors.values())

    def read() -> None:
        config = read_config(path)
        with Checkpoint.open(path) as checkpoint:
            check_model(checkpoint, config)
            checkpoint.read_into(config.names.embeddings, torch.empty(config.vocab_size, config.hidden_size))
        Tokenizer.from_folder(path)

    read_all = outcomes(1, lambda random: put(path, whole), read)
    assert read_all["works"] == 1
    with growth_under(FEW_BYTES):
        counts = outcomes(num_cases(NUM_FILES), lambda random: put(path, damaged(whole, random, first)), read)
    assert min(counts["works"], counts["refused"]) > 0.05 * counts.total(), counts


def test_the_headers_of_small_numbers_are_the_shortest() -> None:
    from offload.config.gguf_header import shortest

    for number in (1e-5, 1e-6, 0.1, 1.1, 10000.0, 0.0078125, 3.4028234663852886e38, -2.5, 0.0):
        assert shortest(float(np.float32(number))) == number
