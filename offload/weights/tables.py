"""Tables of which a pass reads a few rows: in memory, or in the files of a checkpoint, where threads read single rows
as soon as they are chosen."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from offload.config.matrices import Matrix
from offload.errors import ModelError
from offload.formats.encodings import ENCODINGS
from offload.formats.stored import StoredMatrix
from offload.metrics import TableStats
from offload.transfer.direct_file import DirectFile
from offload.transfer.disk import Disk, Reader
from offload.transfer.link import Event
from offload.transfer.memory import Memory, Tier, sent
from offload.weights.checkpoint import Checkpoint
from offload.weights.embedding import Embedding
from offload.weights.file_rows import FileRows
from offload.weights.fp16 import check_range
from offload.weights.linear import numbers
from offload.weights.row_cache import RowCache

NUM_READERS = 16  # threads: a solid-state disk answers as many small reads at once in the time of one
_LEAST = 4  # rows of a thread


class Table(Protocol):
    """A table [rows, numbers of a row]."""

    def begin(self, rows: Tensor) -> Callable[[], Tensor]:
        """Begin to read rows: int64 [...]. Returns a function, to be called once, that waits for them -> [..., numbers
        of a row] on the device. It raises ModelError where a file cannot be read, or is another one by now."""
        ...


@dataclass(frozen=True)
class HeldTable:
    """A table in the device's memory or the host's."""

    table: Embedding

    def begin(self, rows: Tensor) -> Callable[[], Tensor]:
        return lambda: self.table.rows(rows.flatten().to(self.table.device)).view(*rows.shape, -1)


@dataclass(frozen=True)
class Shards:
    """The shards of a table, one below the other, in a checkpoint's files. encoding: of its rows; "": plain numbers.
    Bytes of a row are the same in all."""

    name: str  # of the table, for messages
    shards: tuple[FileRows, ...]
    encoding: str

    @classmethod
    def of(cls, checkpoint: Checkpoint, names: Sequence[str]) -> Shards:
        """The shards `names` of a table, in order. ModelError where no single rows can be read, or shards are stored
        differently."""
        found = tuple(map(checkpoint.table_in_file, names))
        kinds = {(rows.row_bytes, checkpoint.encoding(name)) for name, rows in zip(names, found, strict=True)}
        if len(kinds) > 1:
            listed = " and ".join(f"{count} bytes{f' of {kind}' if kind else ''}" for count, kind in sorted(kinds))
            raise ModelError(
                f"{checkpoint.folder}: the shards of {names[0]} have rows of {listed}; fetch all shards of one version"
            )
        return cls(names[0], found, checkpoint.encoding(names[0]))

    @property
    def row_bytes(self) -> int:
        return self.shards[0].row_bytes

    @property
    def first_rows(self) -> list[int]:
        """The number of each shard's first row, and of all rows."""
        return list(accumulate((shard.count for shard in self.shards), initial=0))


def load_table(
    checkpoint: Checkpoint,
    names: Sequence[str],
    matrix: Matrix,
    memory: Memory,
    *,
    tier: Tier,
    dtype: torch.dtype,
    purpose: str,
) -> HeldTable:
    """Load the shards `names` of a table, one below the other, to the device's memory or the host's. ModelError,
    DoesNotFit."""
    kind = ENCODINGS[matrix.encoding] if matrix.encoding else None
    size, stored = (matrix.inputs, dtype) if kind is None else (kind.row_bytes(matrix.inputs), torch.uint8)
    rows, first = memory.allocate((matrix.outputs, size), stored, tier=tier, purpose=purpose), 0
    for name in names:
        place = rows[first : first + checkpoint.shape(name)[0]]
        (checkpoint.read_into if kind is None else checkpoint.read_stored)(name, place)
        first += len(place)
    table = rows if kind is None else StoredMatrix(rows, kind)
    check_range(table, names[0], dtype)
    return HeldTable(Embedding(table, memory.device, dtype))


class TableFile:
    """A table in its files. Rows that were read lately are in host memory. Begin and wait on one thread."""

    def __init__(self, inside: Shards, disk: Disk, held: Tensor, *, dtype: torch.dtype, device: torch.device) -> None:
        """disk: of NUM_READERS threads, which read nothing else; it closes the files. held: memory on the host for
        rows, uint8 [places, inside.row_bytes]. dtype: of rows. ModelError for a file that was replaced."""
        self._inside, self._disk, self._dtype, self._device = inside, disk, dtype, device
        self._first_rows, self._cache = inside.first_rows, RowCache(held)
        self._files = dict[Path, DirectFile]()
        for shard in inside.shards:
            if shard.path not in self._files:
                self._files[shard.path] = file = DirectFile(shard.path, shard.state)
                disk.files.callback(file.close)
        self.stats = TableStats()

    def begin(self, rows: Tensor) -> Callable[[], Tensor]:
        """Begin to read rows, each once: see `Table`."""
        chosen, places = rows.cpu().unique(return_inverse=True)
        assert 0 <= int(chosen[0]) <= int(chosen[-1]) < self._first_rows[-1]
        content = torch.empty(len(chosen), self._inside.row_bytes, dtype=torch.uint8)
        wanted: list[int] = chosen.tolist()
        missing = self._cache.read(wanted, content)
        self.stats += TableStats(len(wanted) - len(missing), len(missing))
        step = max(-(-len(missing) // NUM_READERS), _LEAST)
        parts = [missing[first : first + step] for first in range(0, len(missing), step)]
        events = [self._disk.begin(partial(self._read, wanted, part, content)) for part in parts]
        return partial(self._arrived, events, chosen, places, content, missing)

    def _arrived(
        self, events: Sequence[Event], chosen: Tensor, places: Tensor, content: Tensor, missing: Sequence[int]
    ) -> Tensor:
        for event in events:
            event.synchronize()
        self._cache.write(chosen[missing].tolist(), content[missing])
        return sent(self._numbers(chosen, content)[places], self._device)

    def _read(self, wanted: Sequence[int], missing: Sequence[int], content: Tensor, reader: Reader) -> int:
        """Read the rows wanted[at] to content[at], for each `at` that is missing."""
        size, view = self._inside.row_bytes, memoryview(content.numpy().data).cast("B")
        by_shard = dict[int, list[int]]()
        for at in missing:
            by_shard.setdefault(self._shard_of(wanted[at]), []).append(at)
        for number, own in by_shard.items():
            shard, first = self._inside.shards[number], self._first_rows[number]
            starts = [shard.start + (wanted[at] - first) * size for at in own]
            file = self._files[shard.path]
            reader.scattered(file, starts, size, (view[at * size : (at + 1) * size] for at in own))
            file.check()
        return size * len(missing)

    def _numbers(self, chosen: Tensor, content: Tensor) -> Tensor:
        """The numbers of rows, ascending: content uint8 [n, bytes] -> [n, numbers of a row] in the dtype."""
        parts, stops = list[Tensor](), torch.searchsorted(chosen, torch.tensor(self._first_rows)).tolist()
        for shard, first, begin, end in zip(self._inside.shards, self._first_rows, stops, stops[1:], strict=False):
            if end > begin:
                parts.append(shard.made(content[begin:end], chosen[begin:end] - first))
        made, kind = torch.cat(parts), self._inside.encoding
        found = numbers(StoredMatrix(made, ENCODINGS[kind]), self._dtype) if kind else made.to(self._dtype)
        check_range(found, self._inside.name, self._dtype)
        return found

    def _shard_of(self, row: int) -> int:
        return bisect_right(self._first_rows, row) - 1
