"""Sessions whose pages are packed: what comes back, what lies on the disk, what of before is read, what is refused.

Without the CPU's kernels pages are written as they are, and packed ones are read all the same.
"""

from __future__ import annotations

import errno
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor

from kit.processor import OPERATORS, process_uses
from kit.sessions import LAYERS, PACKED, Rows, bits, identity_of, page_files, restore, save, saved
from offload.errors import DoesNotFit, SessionError
from offload.formats.layout import Packing
from offload.formats.packed import unpack_with_torch
from offload.kv.kept import Kept
from offload.session import manifest as manifests
from offload.session import units
from offload.session.catalogue import inspect, summaries
from offload.session.folder import Folder
from offload.session.layout import PageFile, PageFormat
from offload.session.manifest import MANIFEST_FILE, checksum, encode
from offload.session.store import Store
from offload.transfer.link import PacedLink
from test_caches import ROWS, Driver, Tape
from test_packed import TILE, make
from test_session_crash import at_step
from test_session_damage import MUTATIONS, edit, mutate, put, record_of, seal
from test_session_store import fingerprint

ROOT = Path(__file__).resolve().parents[1]
FORM = PACKED.page_format
PACKING = FORM.packing
assert PACKING is not None
SIZE, TOKENS = FORM.page_tokens, tuple(range(7, 7 + 80))  # two pages, and a half whose last group is all zeros
ALL_PACKED = PageFile(FORM, FORM.most_packed)
pytestmark = pytest.mark.usefixtures("unsynced")


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    """What is saved is packed, if a test does not say otherwise."""
    with process_uses("kernels"):
        yield


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "chat"


def flags(path: Path) -> list[str]:
    return [page.packed for page in inspect(path).parts.get("rows", ())]


def save_rows(path: Path, rows: Rows) -> None:
    with Store.open(path, PACKED) as store:
        store.save(Kept(rows), range(rows.length), capacity=0, extra={}, unchanged=0)


def scattered(home: Tensor) -> None:
    """Fill a block with numbers of all exponents, so that it has too many escapes."""
    numbers = torch.arange(home.numel()) * 40503 % (1 << 16)
    home.copy_(numbers.to(torch.int16).view(torch.bfloat16).view_as(home))


# --- what comes back ---


@pytest.mark.parametrize("reading", OPERATORS)
@pytest.mark.parametrize("num_tokens", [0, 1, 16, 31, 32, 40, 64, 80])
def test_what_is_loaded_is_what_was_saved(path: Path, num_tokens: int, reading: str) -> None:
    tokens = TOKENS[:num_tokens]
    save(path, tokens, identity=PACKED)
    with process_uses(reading):
        assert restore(path, PACKED) == saved(tokens, PACKED)
    whole, rest = divmod(num_tokens, SIZE)
    assert flags(path)[:whole] == [FORM.most_packed] * whole
    assert flags(path)[whole:] == [FORM.most_packed if rest == 16 else ""] * (rest > 0)  # zeros in a group escape


@pytest.mark.parametrize("reading", OPERATORS)
def test_what_has_too_many_escapes_lies_as_it_is_beside_what_is_packed(path: Path, reading: str) -> None:
    """Those are also all the bits that are no number."""
    rows = Rows.of(PACKED, range(2 * SIZE))
    scattered(rows.page(1, 0)[0])
    scattered(rows.page(0, 1)[1])
    live = bits(rows)
    save_rows(path, rows)
    assert flags(path) == ["1101", "1011"]
    assert bits(rows) == live
    with process_uses(reading):
        assert restore(path, PACKED) == (tuple(range(2 * SIZE)), live)
    with safe_open(page_files(path)[0], "pt") as file:
        assert sorted(file.keys()) == ["layers.0.keys", "layers.0.values", "layers.1.keys", "layers.1.values"]
        assert torch.equal(file.get_tensor("layers.1.keys").view(torch.int16), rows.page(1, 0)[0].view(torch.int16))
        packed = file.get_tensor("layers.1.values")
        assert (packed.dtype, packed.shape) == (torch.uint8, (PACKING.nbytes,))
        assert torch.equal(unpack_with_torch(packed, PACKING).view(FORM.block_shape), rows.page(1, 0)[1])


def test_equal_sequences_are_equal_files_and_the_live_rows_stay(path: Path) -> None:
    clean, dirty = Rows.of(PACKED, TOKENS), Rows.of(PACKED, TOKENS)
    for layer in range(LAYERS):
        clean.page(layer, 2)[:, :, 16:] = 0
    garbage = dirty.page(1, 2).clone()
    for name, rows in (("a", clean), ("b", dirty)):
        save_rows(path / name, rows)
        assert flags(path / name) == [FORM.most_packed] * 3
    contents = [[file.read_bytes() for file in page_files(path / name)] for name in "ab"]
    assert contents[0] == contents[1]
    assert torch.equal(dirty.page(1, 2), garbage)
    assert garbage[:, :, 16:].count_nonzero()


@pytest.mark.parametrize("reading", OPERATORS)
def test_rows_that_the_host_cannot_reach_go_through_a_buffer(
    path: Path, monkeypatch: pytest.MonkeyPatch, reading: str
) -> None:
    monkeypatch.setattr(units, "_on_host", lambda layer: False)
    save(path, TOKENS, identity=PACKED)
    with process_uses(reading):
        assert restore(path, PACKED) == saved(TOKENS, PACKED)


@pytest.mark.cuda
def test_rows_on_a_gpu_are_packed_and_come_back(path: Path) -> None:
    rows, back = Rows.of(PACKED, TOKENS, "cuda"), Rows.of(PACKED, range(9), "cuda")
    with Store.open(path, PACKED) as store:
        store.save(Kept(rows), TOKENS, capacity=0, extra={}, unchanged=0)
        store.load(Kept(back), len(TOKENS))
    assert flags(path)[0] == FORM.most_packed
    assert bits(back) == saved(TOKENS, PACKED)[1]


# --- what lies on the disk ---


def test_a_page_takes_as_many_bytes_as_its_packed_blocks(path: Path) -> None:
    save(path, TOKENS[:70], identity=PACKED)
    sizes = [file.stat().st_size for file in page_files(path)]
    assert flags(path) == [FORM.most_packed] * 2 + [""]
    assert sizes == [ALL_PACKED.nbytes] * 2 + [FORM.nbytes]
    assert ALL_PACKED.nbytes == len(ALL_PACKED.header) + 2 * LAYERS * PACKING.nbytes
    assert ALL_PACKED.nbytes < 0.85 * FORM.nbytes
    kept = Kept(Rows.of(PACKED))
    with Store.open(path, PACKED) as store:
        assert store.nbytes == store.bytes_to_read(kept, 70) == sum(sizes)
        assert [store.bytes_to_read(kept, count) for count in (0, 1, SIZE, SIZE + 1)] == [
            0,
            sizes[0],
            sizes[0],
            sum(sizes[:2]),
        ]
    (summary,) = summaries(path.parent)
    assert summary.nbytes == sum(file.stat().st_size for file in path.iterdir())


def test_what_is_still_to_be_written_counts_as_it_is(path: Path) -> None:
    save(path, TOKENS[:40], identity=PACKED)
    written, read = list[tuple[int, ...]](), list[int]()
    with Store.open(path, PACKED) as store:
        assert store.bytes_to_write(64, 40, Kept(Rows.of(PACKED))) == FORM.nbytes
        rows = Rows.of(PACKED, TOKENS[:64])
        store.save(
            Kept(rows), TOKENS[:64], capacity=0, extra={}, unchanged=40, on_bytes=lambda *each: written.append(each)
        )
        assert written.pop(0) == (0, FORM.nbytes - ALL_PACKED.nbytes)
        assert sum(num_bytes for (num_bytes,) in written) == ALL_PACKED.nbytes
        store.load(Kept(rows), 64, on_bytes=read.append)
        assert sum(read) == store.bytes_to_read(Kept(rows), 64) - 2 * len(ALL_PACKED.header)


def test_a_disk_has_to_have_room_for_pages_that_do_not_pack(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(path, TOKENS[:32], identity=PACKED)
    free = 2 * FORM.nbytes
    monkeypatch.setattr(Folder, "free_bytes", lambda folder: free)
    with pytest.raises(DoesNotFit, match="takes up to"):
        save(path, TOKENS, 32, identity=PACKED)
    assert restore(path, PACKED) == saved(TOKENS[:32], PACKED)
    free += 4096  # the manifest
    save(path, TOKENS, 32, identity=PACKED)
    assert restore(path, PACKED) == saved(TOKENS, PACKED)


def test_a_manifest_that_could_get_too_long_is_refused_before_anything_is_written(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three pages of which all is packed take 48 bytes more in it."""
    save(path / "kept", TOKENS, identity=PACKED)
    monkeypatch.setattr(manifests, "MAX_BYTES", (path / "kept" / MANIFEST_FILE).stat().st_size - 24)
    with Store.open(path / "new", PACKED) as store:
        with pytest.raises(SessionError, match="is the limit"), at_step(-1, lambda *call: None) as calls:
            store.save(Kept(Rows.of(PACKED, TOKENS)), TOKENS, capacity=100, extra={}, unchanged=0)
        assert not calls


@pytest.mark.parametrize("packs", [True, False], ids=["from a packed cache", "to a packed cache"])
def test_caches_that_lie_packed_themselves_are_saved_and_filled(path: Path, packs: bool) -> None:
    tape = Tape(torch.bfloat16)
    link = PacedLink(None)
    source, other = make(tape, link=link, packs=packs), make(tape, link=link, packs=not packs)
    for cache, history in ((source, 2 * TILE + 5), (other, TILE + 20)):
        driver = Driver(cache, tape, padding=ROWS)
        driver.extend([0] * history, phase="prefill", blocks=9)
        driver.extend([packs])
    identity, expected = identity_of(source, "bf16"), bits(source)
    with Store.open(path, identity) as store:
        store.save(Kept(source), range(source.length), capacity=0, extra={}, unchanged=0)
        assert flags(path)[0] == identity.page_format.most_packed
        store.load(Kept(other), source.length)
    assert bits(source) == bits(other) == expected
    drivers = [Driver(each, tape, padding=ROWS, history=[0] * (2 * TILE + 5) + [packs]) for each in (source, other)]
    assert torch.equal(*(driver.extend([0] * 3) for driver in drivers))
    link.close()


def test_a_page_whose_file_would_not_be_smaller_lies_as_it_is(path: Path) -> None:
    small = replace(PACKED, head_dim=8, page_tokens=16)
    rows = Rows.of(small, range(16))
    for layer, half in ((0, 0), (0, 1), (1, 0)):
        scattered(rows.page(layer, 0)[half])
    assert PageFile(small.page_format, "0001").nbytes > small.page_format.nbytes
    with Store.open(path, small) as store:
        store.save(Kept(rows), range(16), capacity=0, extra={}, unchanged=0)
    assert flags(path) == [""]
    assert restore(path, small) == (tuple(range(16)), bits(rows))


@pytest.mark.parametrize(
    "other", [{"dtype": "fp16"}, {"dtype": "fp32"}, {"head_dim": 6}, {"page_tokens": 20}], ids=lambda each: str(each)
)
def test_what_cannot_be_packed_lies_as_it_is(path: Path, other: dict[str, Any]) -> None:
    identity = replace(PACKED, **other)
    assert identity.page_format.packing is None
    save(path, TOKENS, identity=identity)
    assert record_of(path)["format"] == 1
    assert restore(path, identity) == saved(TOKENS, identity)
    edit(path, lambda record: record.update(format=2, pages=[{**each, "packed": "1111"} for each in record["pages"]]))
    with pytest.raises(SessionError, match=r'page 0\.packed is "1111"; it must be 1 or 0 for each block'):
        restore(path, identity)


def test_files_are_packed_as_they_have_always_been(path: Path) -> None:
    """Whatever a cache packs its pages by, or a kernel does: these bytes are on people's disks."""
    assert PageFormat(32, 32, 128, 512, "bf16").packing == Packing(2097152, 2048, 32768)
    assert Packing(1024, 256, 16) == PACKING
    save_rows(path, simple_rows())
    assert flags(path) == [FORM.most_packed]
    assert checksum(page_files(path)[0].read_bytes()) == "44eaf7575e929f2c62a3e5589cf19c30"


# --- sessions of before, and programs of before ---


def simple_rows() -> Rows:
    """A page that is easily made again, with some escapes."""
    rows = Rows.of(PACKED, range(SIZE))
    for number, home in enumerate(half for layer in rows.page_of_all(0) for half in layer):
        places = torch.arange(home.numel())
        numbers = 1 + places * 31 % 97 + (1 << 15) * (places % 128 == 5 + number)
        home.copy_((numbers / 4096).bfloat16().view_as(home))
    return rows


OLD_PAGE = "page-00000-0123456789abcdef.safetensors"
OLD_HEADER = (
    b'\x98\0\0\0\0\0\0\0{"layers.0":{"dtype":"BF16","shape":[2,2,32,16],"data_offsets":[0,4096]},'
    b'"layers.1":{"dtype":"BF16","shape":[2,2,32,16],"data_offsets":[4096,8192]}}    '
)
OLD_MANIFEST = (
    b'{"checksum":"c54ab80fa05e41176e69be4289cc8a0f",\n"format":1,"identity":{"model":"model","tokenizer":"tokenizer",'
    b'"rope":"rope","dtype":"bf16","num_layers":2,"num_kv_heads":2,"head_dim":16,"page_tokens":32,"model_name":"tiny"},'
    b'"tokens":[0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,28,29,30,31],"pages":[{"file":'
    b'"page-00000-0123456789abcdef.safetensors","checksum":"2c3d8d05fde32cccf5e8e105bb36687a"}],"capacity":100,'
    b'"extra":{},"created":1000.0,"updated":1000.0,"writer":"0.1"}'
)


def test_the_files_of_before_are_a_session(path: Path) -> None:
    rows = simple_rows()
    path.mkdir()
    (path / MANIFEST_FILE).write_bytes(OLD_MANIFEST)
    (path / OLD_PAGE).write_bytes(OLD_HEADER + bits(rows))
    assert restore(path, PACKED) == (tuple(range(SIZE)), bits(rows))
    assert encode(inspect(path)) == OLD_MANIFEST
    with Store.open(path, PACKED) as store:
        assert store.nbytes == FORM.nbytes
        store.save(Kept(rows), range(SIZE), capacity=200, extra={}, unchanged=SIZE)
    assert [file.name for file in page_files(path)] == [OLD_PAGE]
    assert record_of(path)["format"] == 1


def test_a_session_of_before_is_read_and_saved_on(path: Path) -> None:
    """What is unchanged stays as it is, what is new is packed."""
    with process_uses("torch"):
        save(path, TOKENS[:70], identity=PACKED)
    record, before = record_of(path), [fingerprint(file) for file in page_files(path)]
    assert record["format"] == 1
    assert all(each.keys() == {"file", "checksum"} for each in record["pages"])
    assert {status[3] for status in before} == {FORM.nbytes}
    assert restore(path, PACKED) == saved(TOKENS[:70], PACKED)
    save(path, TOKENS, 70, identity=PACKED)
    assert [fingerprint(file) for file in page_files(path)][:2] == before[:2]
    assert record_of(path)["format"] == 2
    assert flags(path) == ["", "", FORM.most_packed]
    for reading in OPERATORS:
        with process_uses(reading):
            assert restore(path, PACKED) == saved(TOKENS, PACKED)
    with Store.open(path, PACKED) as store:
        assert store.nbytes == sum(file.stat().st_size for file in page_files(path))


def test_a_session_is_saved_on_where_there_are_no_kernels(path: Path) -> None:
    save(path, TOKENS[:40], identity=PACKED)
    with process_uses("torch"):
        save(path, TOKENS, 40, identity=PACKED)
        assert flags(path) == [FORM.most_packed, "", ""]
        assert restore(path, PACKED) == saved(TOKENS, PACKED)


def test_a_page_that_is_dropped_takes_its_form_along(path: Path) -> None:
    """Programs that know the first format alone can read the session again, once nothing in it is packed."""
    save(path, TOKENS[:40], identity=PACKED)
    assert record_of(path)["format"] == 2
    save(path, TOKENS[:10], 10, identity=PACKED)
    assert (record_of(path)["format"], flags(path)) == (1, [""])
    assert restore(path, PACKED) == saved(TOKENS[:10], PACKED)


def test_packed_sessions_are_listed_without_torch(path: Path) -> None:
    save(path, TOKENS, identity=PACKED)
    code = (
        "import sys; from pathlib import Path; from offload.session.catalogue import summaries\n"
        "(found,) = summaries(Path(sys.argv[1])); assert found.num_tokens == 80 and not found.problem, found\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code, path.parent], cwd=ROOT, check=False).returncode == 0


# --- what is refused ---


@pytest.mark.parametrize("kind", ["manifest", "page"])
def test_no_damaged_byte_gets_through(path: Path, kind: str, num_cases: Callable[[int], int]) -> None:
    save(path, TOKENS, identity=PACKED)
    chance, files = random.Random(f"packed {kind}"), [path / MANIFEST_FILE] if kind == "manifest" else page_files(path)
    for _ in range(num_cases(2500)):
        file = chance.choice(files)
        whole = file.read_bytes()
        mutant = chance.choice(MUTATIONS)(whole, chance)
        if mutant == whole:
            continue
        put(file, mutant)
        with pytest.raises(SessionError):
            restore(path, PACKED)
        put(file, whole)
    assert restore(path, PACKED) == saved(TOKENS, PACKED)


@pytest.mark.parametrize("reading", OPERATORS)
def test_nothing_is_unpacked_before_the_checksum_is_right(
    path: Path, monkeypatch: pytest.MonkeyPatch, reading: str
) -> None:
    save(path, TOKENS, identity=PACKED)
    file = page_files(path)[1]
    put(file, file.read_bytes()[:-1] + b"\xff")
    unpacked = list[Tensor]()
    for name in ("check", "unpack", "unpack_with_torch"):
        real = getattr(units, name)
        monkeypatch.setattr(units, name, lambda *args, real=real: (unpacked.append(args[0]), real(*args))[1])
    with process_uses(reading), pytest.raises(SessionError, match=f"{file.name}: its checksum differs"):
        restore(path, PACKED)
    assert len(unpacked) == 2 * 2 * LAYERS  # of the first page: each was checked, then unpacked


MADE_UP: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (lambda record: record.update(format=1), "page 0.packed is not known"),
    (lambda record: record["pages"][2].pop("packed"), "page 2.packed is missing"),
    *(
        (
            lambda record, value=value: record["pages"][1].update(packed=value),
            "it must be 1 or 0 for each block",
        )
        for value in (None, True, 1111, ["1"] * 4, "0000", "111", "11111", "1112", "111\n", "１111", "1" * 10**6)
    ),
    (lambda record: record["pages"][1].update(packed=""), f"it has {ALL_PACKED.nbytes} bytes, this page has"),
    (lambda record: record["pages"][1].update(packed="1011"), f"it has {ALL_PACKED.nbytes} bytes, this page has"),
]


@pytest.mark.parametrize(("change", "words"), MADE_UP, ids=lambda value: value if isinstance(value, str) else "")
def test_a_made_up_field_is_refused_by_name(path: Path, change: Callable[[dict[str, Any]], object], words: str) -> None:
    save(path, TOKENS, identity=PACKED)
    edit(path, change)
    with pytest.raises(SessionError) as caught:
        restore(path, PACKED)
    assert words in str(caught.value)


def test_a_page_that_is_packed_elsewhere_is_refused_by_its_header(path: Path) -> None:
    """As many bytes, other blocks."""
    rows = Rows.of(PACKED, range(SIZE))
    scattered(rows.page(1, 0)[0])
    save_rows(path, rows)
    assert flags(path) == ["1101"]
    edit(path, lambda record: record["pages"][0].update(packed="1110"))
    with pytest.raises(SessionError, match="its header is not that of a page of this session"):
        restore(path, PACKED)


@settings(suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_whatever_is_made_up_is_refused_or_is_a_session(path: Path, data: st.DataObject) -> None:
    """A forged manifest with a valid checksum never changes the rows that are loaded."""
    if not path.exists():
        save(path, TOKENS, identity=PACKED)
    whole = (path / MANIFEST_FILE).read_bytes()
    record = record_of(path)
    for _ in range(data.draw(st.integers(1, 3))):
        record = mutate(record, data)
    put(path / MANIFEST_FILE, seal(json.dumps(record)))
    expected = Rows.of(PACKED, TOKENS)
    for layer in range(LAYERS):
        expected.page(layer, 2)[:, :, 16:] = 0
    try:
        tokens, rows = restore(path, PACKED)
        expected.length = len(tokens)
        assert rows == bits(expected)
    except SessionError:
        pass
    finally:
        put(path / MANIFEST_FILE, whole)


def forge(path: Path, change: Callable[[bytearray], object]) -> None:
    """Change the blocks of the first page's file, and say that they are right."""
    file = page_files(path)[0]
    content, header = bytearray(file.read_bytes()), len(ALL_PACKED.header)
    data = content[header:]
    change(data)
    content[header:] = data
    put(file, bytes(content))
    edit(path, lambda record: record["pages"][0].update(checksum=checksum(bytes(content))))


def put_head(data: bytearray, value: int, block: int = 3, group: int = 2) -> None:
    place = block * PACKING.nbytes + PACKING.heads + 4 * group
    data[place : place + 4] = value.to_bytes(4, "little")


@pytest.mark.parametrize("reading", OPERATORS)
@pytest.mark.parametrize("start", [PACKING.room + 1, 1 << 16, (1 << 23) - 1, 1 << 23, (1 << 24) - 1])
def test_places_of_escapes_that_are_not_there_are_refused(path: Path, start: int, reading: str) -> None:
    """Their checksum is right: somebody made them up."""
    save(path, TOKENS, identity=PACKED)
    forge(path, lambda data: put_head(data, start << 8 | 127))
    with (
        process_uses(reading),
        pytest.raises(
            SessionError, match=r"page-00000-\w+\.safetensors: its packed numbers name escapes beyond the 16"
        ),
    ):
        restore(path, PACKED)


def test_escapes_beyond_the_room_are_zeros_and_nobody_elses_memory(path: Path) -> None:
    """The worst that is not refused: all numbers of the last group are escapes, of which there is no room for one."""
    save(path, TOKENS[:SIZE], identity=PACKED)

    def all_escape(data: bytearray) -> None:
        put_head(data, PACKING.room << 8 | 127, group=3)
        place = 3 * PACKING.nbytes + PACKING.numbers + 3 * PACKING.group // 2
        data[place : place + PACKING.group // 2] = b"\xff" * (PACKING.group // 2)

    forge(path, all_escape)
    found = set()
    for reading in OPERATORS:
        with process_uses(reading), Store.open(path, PACKED, read_only=True) as store:
            rows = Rows.of(PACKED, range(9))
            store.load(Kept(rows), SIZE)
            group = rows.page(1, 0)[1, 1, 16:].flatten()
            assert (group.view(torch.int16) >> 7 & 255).count_nonzero() == 0
            found.add(bits(rows))
    assert len(found) == 1


def test_forged_blocks_are_refused_or_read_alike(path: Path, num_cases: Callable[[int], int]) -> None:
    save(path, TOKENS[:SIZE], identity=PACKED)
    chance, outcomes = random.Random(7), list[bool]()
    whole = [(file, file.read_bytes()) for file in (page_files(path)[0], path / MANIFEST_FILE)]
    parts = [range(PACKING.numbers), range(PACKING.numbers, PACKING.heads), range(PACKING.escapes, PACKING.nbytes)]
    parts += [range(PACKING.heads, PACKING.escapes)] * 3

    def scribble(data: bytearray) -> None:
        start = chance.randrange(2 * LAYERS) * PACKING.nbytes + chance.choice(chance.choice(parts))
        for place in range(start, min(start + chance.choice((1, 1, 4, 300)), len(data))):
            data[place] = chance.choice((0, 1, 16, 127, 255, chance.randrange(256)))

    for _ in range(num_cases(1500)):
        forge(path, scribble)
        found = list[object]()
        for reading in OPERATORS:
            with process_uses(reading):
                try:
                    found.append(restore(path, PACKED))
                except SessionError as error:
                    found.append(str(error))
        assert found[0] == found[1]
        outcomes.append(isinstance(found[0], str))
        for file, content in whole:
            put(file, content)
    assert 0.1 < sum(outcomes) / len(outcomes) < 0.9


def test_a_save_that_fails_at_any_step_leaves_a_whole_session(tmp_path: Path) -> None:
    def full(name: str, real: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    seen = set()
    for number in range(40):
        path = tmp_path / f"failed at {number}"
        save(path, TOKENS[:40], identity=PACKED)
        with Store.open(path, PACKED) as store:
            with at_step(number, full) as calls, suppress(SessionError):
                store.save(Kept(Rows.of(PACKED, TOKENS)), TOKENS, capacity=0, extra={}, unchanged=40)
            seen.add(len(store.tokens))
            assert restore(path, PACKED) == saved(TOKENS[: len(store.tokens)], PACKED)
            assert store.nbytes == sum((path / page.file).stat().st_size for page in inspect(path).parts["rows"])
        if len(calls) <= number:
            break
    assert seen == {40, 80}
