"""Damaged session files: refused, or the same tokens and rows; never another exception, never other output."""

from __future__ import annotations

import copy
import json
import os
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kit.sessions import IDENTITY, LAYERS, Rows, bits, page_files, restore, save, saved
from offload.errors import SessionError
from offload.session import manifest as manifests
from offload.session.catalogue import summaries
from offload.session.manifest import MANIFEST_FILE, checksum

TOKENS = (5, 6, 7, 8, 9, 10, 11, 12, 13, 14)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save(tmp_path / "chat", TOKENS, turns=[{"role": "user", "text": "Hello"}, {"role": "assistant", "text": "Hi"}])
    return tmp_path / "chat"


def refusal(path: Path) -> str:
    """The error message, which is the same for a reader and a writer."""
    with pytest.raises(SessionError) as caught:
        restore(path)
    return str(caught.value)


def put(file: Path, content: bytes) -> None:
    """Overwrite a file in place; some file systems wait for the disk when a file is truncated first."""
    with file.open("r+b", buffering=0) as open_file:
        open_file.write(content)
        open_file.truncate()


# --- bytes ---


def flip(content: bytes, chance: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(chance.choice((1, 1, 1, 2, 8))):
        changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def cut(content: bytes, chance: random.Random) -> bytes:
    return content[: chance.randrange(len(content))]


def append(content: bytes, chance: random.Random) -> bytes:
    return content + chance.randbytes(chance.choice((1, 8, 4096)))


def drop(content: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(content))
    return content[:at] + content[at + chance.randint(1, 64) :]


def overwrite(content: bytes, chance: random.Random) -> bytes:
    at, count = chance.randrange(len(content)), chance.choice((1, 4, 16, 512))
    filling = chance.choice((bytes(count), b"\xff" * count, chance.randbytes(count)))
    return (content[:at] + filling + content[at + count :])[: len(content)]


def move(content: bytes, chance: random.Random) -> bytes:
    a, b = sorted(chance.sample(range(len(content)), 2))
    return content[b:] + content[a:b] + content[:a]


def other(content: bytes, chance: random.Random) -> bytes:
    return chance.choice((b"", b"\0", b"{}", b"null", b"PK\x03\x04", chance.randbytes(len(content))))


MUTATIONS: list[Callable[[bytes, random.Random], bytes]] = [flip, flip, cut, append, drop, overwrite, move, other]


@pytest.mark.parametrize("kind", ["manifest", "page"])
def test_no_damaged_byte_gets_through(path: Path, kind: str, num_cases: Callable[[int], int]) -> None:
    """Every mutant differs in at least one byte, so all are refused."""
    chance, files = random.Random(f"damage {kind}"), [path / MANIFEST_FILE] if kind == "manifest" else page_files(path)
    for _ in range(num_cases(4500)):
        file = chance.choice(files)
        whole = file.read_bytes()
        mutant = chance.choice(MUTATIONS)(whole, chance)
        if mutant == whole:
            assert restore(path) == saved(TOKENS)
            continue
        put(file, mutant)
        with pytest.raises(SessionError):
            restore(path)
        put(file, whole)
    assert restore(path) == saved(TOKENS)


def test_pages_that_changed_places_are_refused(path: Path) -> None:
    first, second, third = page_files(path)
    whole = first.read_bytes()
    first.write_bytes(third.read_bytes())
    assert f"{first}: its checksum differs from the manifest's" in refusal(path)
    first.write_bytes(whole)
    second.rename(path / "page-00007-0000000000000000.safetensors")
    assert "No such file" in refusal(path)


def test_the_message_names_file_and_remedy(path: Path) -> None:
    file = page_files(path)[1]
    file.write_bytes(file.read_bytes()[:-1])
    size = IDENTITY.page_format.nbytes
    assert refusal(path) == (
        f"{file}: it has {size - 1} bytes, this page has {size}: it was cut off or changed; "
        f"remove the folder {path}, or name another one"
    )


def test_a_header_of_another_shape_is_refused_even_with_its_checksum(path: Path) -> None:
    file = page_files(path)[0]
    content = file.read_bytes().replace(b"layers.0", b"layers.9")
    file.write_bytes(content)
    edit(path, lambda record: record["pages"][0].update(checksum=checksum(content)))
    assert "its header is not that of a page of this session" in refusal(path)


@pytest.mark.parametrize("name", ["manifest.json", "page"])
def test_links_pipes_and_folders_are_not_followed(path: Path, tmp_path: Path, name: str) -> None:
    file = page_files(path)[0] if name == "page" else path / name
    whole = file.read_bytes()
    (tmp_path / "elsewhere").write_bytes(whole)
    file.unlink()
    file.symlink_to(tmp_path / "elsewhere")
    assert "a symbolic link, which is not followed" in refusal(path)
    file.unlink()
    os.mkfifo(file)
    assert "not a regular file" in refusal(path)
    file.unlink()
    file.mkdir()
    assert "not a regular file" in refusal(path)
    file.rmdir()
    file.write_bytes(whole)
    assert restore(path) == saved(TOKENS)


# --- content that somebody made up, sealed with the right checksum ---


def seal(body: str) -> bytes:
    content = body.encode("utf-8", "surrogatepass")[1:]
    return b'{"checksum":"%s",\n' % checksum(content).encode() + content


def record_of(path: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((path / MANIFEST_FILE).read_bytes())
    del record["checksum"]
    return record


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    record = record_of(path)
    change(record)
    (path / MANIFEST_FILE).write_bytes(seal(json.dumps(record)))


MADE_UP: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (lambda record: record.update(format=8), "its format is 8, this program reads 1 to 7"),
    (lambda record: record.update(format="1"), 'its format is "1"'),
    (lambda record: record.update(format=True), "its format is true"),
    (lambda record: record.pop("format"), "its format is null"),
    (lambda record: record.pop("extra"), "extra is missing"),
    (lambda record: record.update(more=1), "more is not known"),
    (lambda record: record.update(identity=[]), "identity is []; it must be an object"),
    (lambda record: record["identity"].pop("rope"), "identity.rope is missing"),
    (
        lambda record: record["identity"].update(dtype="int8"),
        'dtype is "int8"; it must be one of bf16, fp16, fp32',
    ),
    (lambda record: record["identity"].update(page_tokens=0), "page_tokens is 0; it must be a whole number from 1 to"),
    (
        lambda record: record["identity"].update(num_layers=2**40),
        "num_layers is 1099511627776; it must be",
    ),
    (lambda record: record["identity"].update(num_layers=0), "num_layers is 0; it must be a whole number from 1 to"),
    (lambda record: record["identity"].update(head_dim=4.0), "head_dim is 4.0; it must be a whole number"),
    (lambda record: record["identity"].update(model_name="\x1b[2J"), 'model_name is "\\u001b[2J"; it must be a line'),
    (lambda record: record["identity"].update(model="m" * 257), "it must be a line of at most 256 characters"),
    (lambda record: record.update(tokens={}), "tokens is {}; it must be a list"),
    (lambda record: record["tokens"].append(-1), "is -1; it must be a whole number from 0 to 2147483647"),
    (lambda record: record["tokens"].append(2**31), "is 2147483648; it must be a whole number"),
    (lambda record: record["tokens"].append(True), "] is true; it must be a whole number"),
    (lambda record: record["tokens"].append(1.0), "is 1.0; it must be a whole number"),
    (lambda record: record["tokens"].extend([1, 2, 3]), "it names 3 pages, its tokens need 4"),
    (lambda record: record["pages"].pop(), "it names 2 pages, its tokens need 3"),
    (lambda record: record["pages"].append(record["pages"][0]), "it names 4 pages, its tokens need 3"),
    (lambda record: record["pages"].__setitem__(1, record["pages"][0]), "it must be the file of page 1"),
    (lambda record: record["pages"].reverse(), "it must be the file of page 0"),
    (lambda record: record["pages"].__setitem__(0, "page"), 'page 0 is "page"; it must be an object'),
    (
        lambda record: record["pages"][0].update(file="../../etc/passwd"),
        '"../../etc/passwd"; it must be the file of',
    ),
    (
        lambda record: record["pages"][0].update(file="/etc/passwd"),
        '"/etc/passwd"; it must be the file of page 0',
    ),
    (lambda record: record["pages"][0].update(file="page-000000-0123456789abcdef.safetensors"), "it must be the file"),
    (lambda record: record["pages"][0].update(file="page-00000-0123456789ABCDEF.safetensors"), "it must be the file"),
    (lambda record: record["pages"][0].update(file="page-00000-0123456789abcdef.safetensors\n"), "it must be the file"),
    (lambda record: record["pages"][0].update(checksum="0" * 31), "it must be 32 digits from 0 to f"),
    (lambda record: record["pages"][0].update(checksum=None), "page 0.checksum is null; it must be 32 digits"),
    (lambda record: record.update(capacity=-1), "capacity is -1; it must be a whole number from 0 to"),
    (lambda record: record.update(capacity=None), "capacity is null; it must be a whole number"),
    (lambda record: record.update(extra=[]), "extra is []; it must be an object"),
    (lambda record: record.update(extra={"a": [[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]}), "nested deeper than 16"),
    (lambda record: record.update(created=-0.5), "created is -0.5; it must be a number from 0 to"),
    (lambda record: record.update(updated="now"), 'updated is "now"; it must be a number'),
    (lambda record: record.update(updated=True), "updated is true; it must be a number"),
    (lambda record: record.update(writer=None), "writer is null; it must be a line"),
]


@pytest.mark.parametrize(("change", "words"), MADE_UP, ids=lambda value: value if isinstance(value, str) else "")
def test_a_made_up_field_is_refused_by_name(path: Path, change: Callable[[dict[str, Any]], object], words: str) -> None:
    edit(path, change)
    message = refusal(path)
    assert words in message
    assert message.startswith(f"{path / MANIFEST_FILE}: ")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"capacity":100', '"capacity":NaN', "NaN is not a JSON number"),
        ('"capacity":100', '"capacity":1e999', "1e999 is not a JSON number"),
        ('"capacity":100', '"capacity":-Infinity', "-Infinity is not a JSON number"),
        ('"capacity":100', '"capacity":100,"capacity":101', "a field occurs twice: 'capacity'"),
        ('"capacity":100', '"capacity":' + "9" * 5000, "4300"),
        ('"role":"user"', '"role":' + "[" * 100_000 + "]" * 100_000, "recursion"),
        ('"role":"user"', '"role":"\u00e9"', "'ascii' codec"),
        ('"role":"user"', '"role":"\x00"', "control character"),
        ('"role":"user"', '"role":"user"}', "Expecting"),
    ],
)
def test_text_that_is_no_strict_json_is_refused(path: Path, old: str, new: str, words: str) -> None:
    body = json.dumps(record_of(path), separators=(",", ":"))
    assert old in body
    (path / MANIFEST_FILE).write_bytes(seal(body.replace(old, new, 1)))
    assert words in refusal(path)


def test_a_manifest_over_the_limit_is_not_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (path / MANIFEST_FILE).open("r+b") as file:
        file.truncate(1 << 40)  # a hole
    monkeypatch.setattr(manifests, "MAX_BYTES", 1 << 20)
    tracemalloc.start()
    try:
        assert "it is over the limit of 1.05 MB" in refusal(path)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_a_page_over_its_size_is_not_read(path: Path) -> None:
    os.truncate(page_files(path)[0], 1 << 40)
    tracemalloc.start()
    try:
        assert "1099511627776 bytes" in refusal(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.integers(0, 20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


def places(value: object, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The keys that lead to everything in `value`."""
    keys: Any = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [at, *(place for key in keys for place in places(value[key], (*at, key)))]  # type: ignore[index]


def mutate(record: dict[str, Any], data: st.DataObject) -> dict[str, Any]:
    """One value replaced, dropped, doubled, or put somewhere else in the record."""
    *way, last = data.draw(st.sampled_from(places(record)[1:]))
    parent: Any = record
    for key in way:
        parent = parent[key]
    action = data.draw(st.sampled_from(["replace", "nudge", "drop", "double", "exchange"]))
    if action == "replace":
        parent[last] = data.draw(JSON)
    elif action == "nudge" and type(parent[last]) in (int, float):
        parent[last] += data.draw(st.sampled_from([-1, 1, 2**31, 0.5]))
    elif action == "drop":
        del parent[last]
    elif action == "double":
        parent.append(copy.copy(parent[last])) if isinstance(parent, list) else parent.update(again=parent[last])
    else:
        source: Any = record
        for key in data.draw(st.sampled_from(places(record))):
            source = source[key]
        parent[last] = copy.deepcopy(source)
    return record


@settings(suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_whatever_is_made_up_is_refused_or_is_a_session(path: Path, data: st.DataObject) -> None:
    """A forged manifest with a valid checksum may change tokens and texts, but never the rows that are loaded."""
    whole = (path / MANIFEST_FILE).read_bytes()
    record = record_of(path)
    for _ in range(data.draw(st.integers(1, 3))):
        record = mutate(record, data)
    put(path / MANIFEST_FILE, seal(json.dumps(record)))
    expected = Rows(TOKENS)
    for layer in range(LAYERS):
        expected.page(layer, 2)[:, :, 2:] = 0  # what the file holds where no token was
    try:
        tokens, rows = restore(path)
        assert list(tokens) == record["tokens"]
        expected.length = len(tokens)
        assert rows == bits(expected)
    except SessionError:
        pass
    finally:
        assert [summary.path for summary in summaries(path.parent)] == [path]
        put(path / MANIFEST_FILE, whole)
