"""Tables of which a pass reads a few rows: from files as from memory, in every encoding, bit by bit."""

from __future__ import annotations

import json
import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from kit.stored import made_up
from offload.config.gguf_header import TensorInfo
from offload.config.matrices import Matrix
from offload.config.schemes import Scheme
from offload.errors import ModelError
from offload.kernels.ngrams import chosen_rows
from offload.metrics import TableStats
from offload.transfer.disk import Disk
from offload.transfer.memory import Memory
from offload.weights import row_cache, tables
from offload.weights.checkpoint import Checkpoint
from offload.weights.entry import Entry
from offload.weights.gguf_file import PLAIN_DTYPES, MappedFile
from offload.weights.quantised_folder import _Reader
from offload.weights.tables import NUM_READERS, Shards, TableFile, load_table
from test_delta import with_a_bug
from test_ngrams import config, embedding, of_config, text

SIZE, ROWS = 160, (70, 70, 33, 70)  # of the shards
NAMES = [f"t.shard_{number}" for number in range(len(ROWS))]
OFTEN = torch.tensor([0, 69, 70, 139, 140, 172, 173, 242, 20, 200])  # ends of shards among them
CPU = torch.device("cpu")
Make = Callable[[Path], Checkpoint]


def normal(rows: int, seed: int) -> Tensor:
    return torch.randn(rows, SIZE, generator=torch.Generator().manual_seed(seed))


def folder(dtype: torch.dtype) -> Make:
    """Two files: rows of one that begin anywhere in a page of the disk."""

    def made(path: Path) -> Checkpoint:
        files: dict[str, dict[str, Tensor]] = {"a.safetensors": {"other": torch.ones(7)}, "b.safetensors": {}}
        for number, (name, rows) in enumerate(zip(NAMES, ROWS, strict=True)):
            files["ab"[number % 2] + ".safetensors"][name] = normal(rows, number).to(dtype)
        for name, tensors in files.items():
            save_file(tensors, path / name)
        index = {name: file for file, tensors in files.items() for name in tensors}
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
        return Checkpoint.open(path)

    return made


def gguf_file(kind: str) -> Make:
    """Tensors of a mapped file."""

    def made(path: Path) -> Checkpoint:
        content, infos = b"x" * 96, dict[str, TensorInfo]()
        for number, (name, rows) in enumerate(zip(NAMES, ROWS, strict=True)):
            if kind in PLAIN_DTYPES:
                data = normal(rows, number).to(PLAIN_DTYPES[kind])
            else:
                data = made_up(kind, rows, SIZE, number).rows
            stored = data.contiguous().view(torch.uint8).numpy().tobytes()
            infos[name] = TensorInfo(name, path / "file", (rows, SIZE), kind, len(content), len(stored))
            content += stored
        (path / "file").write_bytes(content)
        file = MappedFile(path / "file", infos)
        entries = {name: Entry(file, info.path, file.state, name, info.shape, kind) for name, info in infos.items()}
        return Checkpoint(path, entries, ExitStack())

    return made


def quantised(outputs: int, inputs: int) -> Make:
    """FP8 with a scale for so many outputs and inputs."""

    def made(path: Path) -> Checkpoint:
        tensors, scheme = dict[str, Tensor](), Scheme("bytes", 8, inputs, outputs, "F32", widens=True, is_float=True)
        for number, (name, rows) in enumerate(zip(NAMES, ROWS, strict=True)):
            tensors[f"{name}.weight"] = normal(rows, number).to(torch.float8_e4m3fn)
            grid = -(-rows // outputs), -(-SIZE // (inputs or SIZE))
            tensors[f"{name}.weight_scale"] = torch.rand(grid, generator=torch.Generator().manual_seed(number)) + 0.1
        save_file(tensors, path / "model.safetensors")
        plain = Checkpoint.open(path)
        entries = {
            name: _Reader.entry(
                name, scheme, Matrix(rows, SIZE),
                {part: plain._entry(f"{name}.{part}") for part in ("weight", "weight_scale")}, path,
            )
            for name, rows in zip(NAMES, ROWS, strict=True)
        }  # fmt: skip
        return Checkpoint(path, entries, plain._files)

    return made


MADE: dict[str, Make] = {
    **{f"folder, {dtype}": folder(dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16)},
    **{f"file, {kind}": gguf_file(kind) for kind in ("F32", "BF16", "IQ4_NL", "Q4_0", "Q8_0")},
    "FP8 with scales of blocks": quantised(32, 32),
    "FP8 with scales of rows": quantised(1, 0),
    "FP8 with one scale": quantised(1 << 20, 0),
}


def decoded(checkpoint: Checkpoint, dtype: torch.dtype) -> Tensor:
    """The whole table, as it is read to memory."""
    found = [torch.empty(rows, SIZE, dtype=dtype) for rows in ROWS]
    for name, shard in zip(NAMES, found, strict=True):
        checkpoint.read_into(name, shard)
    return torch.cat(found)


@contextmanager
def opened(
    checkpoint: Checkpoint, *, places: int = 50, dtype: torch.dtype = torch.float32, disk: Disk | None = None,
    names: Sequence[str] = NAMES, module: ModuleType = tables,
) -> Iterator[TableFile]:  # fmt: skip
    """The table in its files, whose checkpoint is closed, as after a start."""
    disk = disk or Disk(num_threads=NUM_READERS)
    try:
        inside = module.Shards.of(checkpoint, names)
        held = torch.zeros(places, inside.row_bytes, dtype=torch.uint8)
        made = module.TableFile(inside, disk, held, dtype=dtype, device=CPU)
        checkpoint.close()
        yield made
    finally:
        disk.close()


def choices(seed: int, count: int = 40) -> Iterator[Tensor]:
    """Rows of passes, [T, heads]; some again and again."""
    draw = torch.Generator().manual_seed(seed)
    for _ in range(count):
        rows = int(torch.randint(1, 9, (), generator=draw)), 4
        anywhere = torch.randint(sum(ROWS), rows, generator=draw)
        yield torch.where(torch.rand(rows, generator=draw) < 0.5, OFTEN[anywhere % len(OFTEN)], anywhere)


def check(module: ModuleType, checkpoint: Checkpoint, dtype: torch.dtype, places: int) -> None:
    """Passes one after the other, and three under way at once."""
    table = decoded(checkpoint, dtype)
    with opened(checkpoint, places=places, dtype=dtype, module=module) as file:
        under_way = list[tuple[Tensor, Callable[[], Tensor]]]()
        for number, rows in enumerate(choices(places)):
            under_way.append((rows, file.begin(rows)))
            if number % 4 and len(under_way) < 3:
                continue
            for chosen, wait in under_way:
                found = wait()
                assert found.dtype == dtype
                assert torch.equal(found, table[chosen])
            under_way.clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", MADE)
def test_rows_of_files_are_those_of_the_decoded_table(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    check(tables, MADE[name](tmp_path), dtype, places=50)


@pytest.mark.parametrize("places", [0, 1, 7, 1000])
def test_with_any_room_for_rows(tmp_path: Path, places: int) -> None:
    check(tables, MADE["file, IQ4_NL"](tmp_path), torch.bfloat16, places)


@pytest.mark.parametrize("name", ["folder, torch.bfloat16", "file, Q4_0", "FP8 with scales of blocks"])
def test_a_table_in_memory_has_the_same_rows(tmp_path: Path, name: str) -> None:
    checkpoint, dtype, memory = MADE[name](tmp_path), torch.bfloat16, Memory(CPU)
    matrix, rows = Matrix(sum(ROWS), SIZE, checkpoint.encoding(NAMES[0])), next(choices(3))
    table = load_table(checkpoint, NAMES, matrix, memory, tier="host", dtype=dtype, purpose="table")
    assert torch.equal(table.begin(rows)(), decoded(checkpoint, dtype)[rows])
    row_bytes = Shards.of(checkpoint, NAMES).row_bytes if name != "FP8 with scales of blocks" else SIZE // 32 * 36
    assert memory.allocated()["host"] == {"table": sum(ROWS) * row_bytes}


def test_rows_are_read_once_and_counted(tmp_path: Path) -> None:
    disk = Disk(num_threads=NUM_READERS)
    with opened(MADE["folder, torch.bfloat16"](tmp_path), disk=disk) as file:
        file.begin(torch.tensor([[5, 200, 5], [5, 71, 200]]))()
        assert (file.stats, disk.stats.num_bytes) == (TableStats(0, 3), 3 * SIZE * 2)
        file.begin(torch.tensor([71, 6, 71]))()
        assert (file.stats, disk.stats.num_bytes) == (TableStats(1, 4), 4 * SIZE * 2)


def test_a_pass_does_not_wait_until_it_wants_its_rows(tmp_path: Path) -> None:
    let = threading.Event()

    def delay() -> float:
        assert let.wait(60)
        return 0.0

    checkpoint = MADE["folder, torch.bfloat16"](tmp_path)
    table = decoded(checkpoint, torch.float32)
    with opened(checkpoint, disk=Disk(num_threads=NUM_READERS, delay=delay)) as file:
        waits = [file.begin(rows) for rows in (torch.arange(9), torch.arange(5, 20))]
        let.set()
        assert torch.equal(torch.cat([wait() for wait in waits]), table[[*range(9), *range(5, 20)]])


def test_embeddings_of_tokens_are_transformers_own(tmp_path: Path) -> None:
    """Of a table in four shards, as its checkpoints have it."""
    theirs, ids = embedding(), text(30, 1)
    own, names = of_config(config(ple_embed_dim=8)), [f"shard_{number}.weight" for number in range(4)]
    shards = theirs.ngram_embedding.weight.detach().chunk(4)
    save_file(
        {name: part.contiguous() for name, part in zip(names, shards, strict=True)}, tmp_path / "model.safetensors"
    )
    with opened(Checkpoint.open(tmp_path), dtype=torch.float32, names=names) as file:
        found = file.begin(chosen_rows(own, torch.cat([torch.full((own.context,), own.eos), ids])))().flatten(1)
    assert torch.equal(found.double(), theirs(ids[None], None)[0])


# What goes wrong.


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 3)


def _touch(path: Path) -> None:
    os.utime(path, (1, 1))


@pytest.mark.parametrize(("harm", "words"), [(_cut, "it ends at byte|is no longer the file"), (_touch, "no longer")])
@pytest.mark.parametrize("name", ["folder, torch.bfloat16", "FP8 with scales of blocks"])
def test_a_file_that_changes_ends_a_pass(tmp_path: Path, name: str, harm: Callable[[Path], None], words: str) -> None:
    with opened(MADE[name](tmp_path)) as file:
        file.begin(torch.arange(3))()
        for path in tmp_path.glob("*.safetensors"):
            harm(path)
        wait = file.begin(torch.arange(200, 240))
        with pytest.raises(ModelError, match=words):
            wait()


def test_a_disk_that_fails_ends_a_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> int:
        raise OSError(5, "Input/output error")

    with opened(MADE["file, Q8_0"](tmp_path)) as file:
        monkeypatch.setattr(os, "preadv", fails)
        wait = file.begin(torch.arange(30))
        with pytest.raises(ModelError, match="Input/output error"):
            wait()


def test_a_file_that_was_replaced_before_it_is_read_is_refused(tmp_path: Path) -> None:
    checkpoint = MADE["folder, torch.bfloat16"](tmp_path)
    _touch(tmp_path / "b.safetensors")
    with pytest.raises(ModelError, match="no longer the file"), opened(checkpoint):
        pass


def test_shards_that_are_stored_differently_are_refused(tmp_path: Path) -> None:
    tensors = {NAMES[0]: normal(9, 1), NAMES[1]: normal(9, 2).half()}
    save_file(tensors, tmp_path / "model.safetensors")
    with Checkpoint.open(tmp_path) as checkpoint, pytest.raises(ModelError, match="rows of 320 bytes and 640 bytes"):
        Shards.of(checkpoint, NAMES[:2])


def test_a_format_without_single_rows_is_refused(tmp_path: Path) -> None:
    scheme, tensors = Scheme("gptq", 4, 32, has_zeros=True), {
        "qweight": torch.zeros(SIZE // 8, 64, dtype=torch.int32),
        "qzeros": torch.zeros(SIZE // 32, 8, dtype=torch.int32),
        "scales": torch.ones(SIZE // 32, 64, dtype=torch.float16),
    }  # fmt: skip
    save_file(tensors, tmp_path / "model.safetensors")
    plain = Checkpoint.open(tmp_path)
    parts = {name: plain._entry(name) for name in tensors}
    entry = _Reader.entry("t", scheme, Matrix(64, SIZE), parts, tmp_path)
    with pytest.raises(ModelError, match="of which no rows can be read alone"):
        Shards.of(Checkpoint(tmp_path, {"t": entry}, plain._files), ["t"])


def test_a_row_beyond_fp16_is_refused_as_it_is_read(tmp_path: Path) -> None:
    table = normal(20, 1).bfloat16()
    table[7] = 1e5
    save_file({"t": table}, tmp_path / "model.safetensors")
    with opened(Checkpoint.open(tmp_path), dtype=torch.float16, names=["t"]) as file:
        file.begin(torch.tensor([6, 8]))()
        with pytest.raises(ModelError, match="beyond fp16"):
            file.begin(torch.tensor([6, 7]))()


# Rows in memory.


def fill(module: ModuleType, places: int, seed: int) -> None:
    """What is read is what was written of that row, and what is written fits."""
    draw, cache = random.Random(seed), module.RowCache(torch.zeros(places, 5, dtype=torch.uint8))
    for _ in range(100):
        rows = torch.tensor(sorted(draw.sample(range(40), draw.randint(1, 12))))
        content, out = rows[:, None].repeat(1, 5).to(torch.uint8), torch.full((len(rows), 5), 99, dtype=torch.uint8)
        missing = cache.read(rows, out)
        assert missing.tolist() == sorted(missing.tolist())
        hits = [at for at in range(len(rows)) if at not in missing.tolist()]
        assert torch.equal(out[hits], content[hits])
        assert len(hits) <= places
        if draw.random() < 0.8:
            cache.write(rows[missing], content[missing])
        if draw.random() < 0.3:  # of a pass that was under way as well
            cache.write(rows, content)


def keep(module: ModuleType) -> None:
    """A row that is read again stays where new ones come and go, but not for ever; without new ones all stay."""

    def write(*rows: int) -> None:
        cache.write(torch.tensor(rows), torch.zeros(len(rows), 1, dtype=torch.uint8))

    def held(rows: Sequence[int]) -> list[int]:
        out = torch.zeros(len(rows), 1, dtype=torch.uint8)
        return [rows[at] for at in range(len(rows)) if at not in cache.read(torch.tensor(rows), out).tolist()]

    cache = module.RowCache(torch.zeros(24, 1, dtype=torch.uint8))  # three sets of eight
    write(*range(24))
    assert held([*range(0, 24, 5)]) == [*range(0, 24, 5)]
    for number in range(30, 90, 10):
        write(*range(number, number + 10))
    assert held([*range(24)]) == [*range(0, 24, 5)]
    cache = module.RowCache(torch.zeros(2, 1, dtype=torch.uint8))
    write(2)
    write(1)
    write(1)
    assert held([1, 2]) == [1, 2]
    cache = module.RowCache(torch.zeros(2, 1, dtype=torch.uint8))
    write(1, 2)
    assert held([1]) == [1]
    for _ in range(module._OUTLIVES):
        assert held([9]) == []
    write(3)
    write(4)
    assert held([1, 2, 3, 4]) == [3, 4]


def check_cache(module: ModuleType) -> None:
    keep(module)
    for places in (0, 1, 5, 19, 40):
        fill(module, places, seed=places)


def test_rows_in_memory_are_those_that_were_written() -> None:
    check_cache(row_cache)


CACHE_BUGS = {
    "a row that went is found": (
        "self._rows.view(-1)[places] = rows[own]",
        "self._rows.view(-1)[places] = rows[own[0]]",
    ),
    "rows at places of others": ("self._held[places] = content[own]", "self._held[places] = content[own.flip(0)]"),
    "several of a set at once": ("sets[1:] != sets[:-1]", "sets[1:] >= 0"),
    "rows of other sets": ("+ same.int().argmax(1)", "+ same.int().argmax(1) * 0"),
    "the newest goes": (".argmin(1)", ".argmax(1)"),
    "reads do not count": ("self._used.view(-1)[hits] = self._now", "pass"),
    "new rows count as read again": ("self._now - _OUTLIVES\n", "self._now\n"),
    "rows stay for ever": ("self._now - _OUTLIVES\n", "-_OUTLIVES\n"),
    "a row twice": ("waiting = (~is_held).nonzero()[:, 0] if", "waiting = torch.arange(len(rows)) if"),
}


@pytest.mark.parametrize("bug", CACHE_BUGS)
def test_mistakes_in_what_is_held_are_found(bug: str) -> None:
    broken = with_a_bug(row_cache, *CACHE_BUGS[bug])
    with pytest.raises((AssertionError, IndexError)):
        check_cache(broken)


TABLE_BUGS = {
    "a shard too early": ("self._first_rows, rows, right=True) - 1", "self._first_rows, rows) - 1"),
    "rows of the file and not of its tensor": ("self._starts[shards] + (rows", "(rows"),
    "numbers from the table's first row": ("(rows - self._first_rows[shards]) * size", "rows * size"),
    "scales of other rows": ("chosen[begin:end] - first)", "chosen[begin:end] - first + 1)"),
    "in the order of the file": ("content)[places]", "content)"),
    "nobody waits": ("event.synchronize()", "pass"),
    "what is held is of other rows": ("write(chosen[missing], ", "write(chosen[: len(missing)], "),
}


@pytest.mark.parametrize("bug", TABLE_BUGS)
def test_mistakes_in_reading_are_found(tmp_path: Path, bug: str) -> None:
    broken = with_a_bug(tables, *TABLE_BUGS[bug])
    checkpoint = MADE["FP8 with scales of rows"](tmp_path)
    with pytest.raises((AssertionError, IndexError, RuntimeError, ModelError)):
        read_all(broken, checkpoint)


def test_without_a_mistake_none_is_found(tmp_path: Path) -> None:
    read_all(tables, MADE["FP8 with scales of rows"](tmp_path))


def read_all(module: ModuleType, checkpoint: Checkpoint) -> None:
    """From a slow disk."""
    table, disk = decoded(checkpoint, torch.float32), Disk(num_threads=NUM_READERS, delay=lambda: 0.01)
    with opened(checkpoint, disk=disk, module=module) as file:
        for rows in choices(1, 12):
            found = file.begin(rows)()
            assert found.shape == (*rows.shape, SIZE)
            assert torch.equal(found, table[rows])
