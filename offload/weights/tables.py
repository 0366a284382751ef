"""Tables of which a pass reads a few rows: in memory, or in the files of a checkpoint, where threads read single rows
as soon as they are chosen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, groupby
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
from offload.weights.file_rows import FileRows
from offload.weights.fp16 import check_range
from offload.weights.linear import numbers
from offload.weights.row_cache import RowCache

NUM_READERS = 16  # threads: a solid-state disk answers as many small reads at once in the time of one
_LEAST = 4  # rows of a thread


class Table(Protocol):
    """A table [rows, numbers of a row]. stats: of rows that are in a file."""

    @property
    def stats(self) -> TableStats: ...

    def begin(self, rows: Tensor) -> Callable[[], Tensor]:
        """Begin to read rows: int64 [...]. Returns a function, to be called once, that waits for them -> [..., numbers
        of a row] on the device. It raises ModelError where a file cannot be read, or is another one by now."""
        ...


@dataclass(frozen=True)
class HeldTable:
    """A table in the device's memory or the host's, as numbers of `dtype` or in the checkpoint's encoding."""

    table: Tensor | StoredMatrix
    device: torch.device
    dtype: torch.dtype

    @property
    def stats(self) -> TableStats:
        """Nothing: no row is read from a file."""
        return TableStats()

    def begin(self, rows: Tensor) -> Callable[[], Tensor]:
        """Gather the rows where the table is: see `Table`. On a GPU nothing waits for what runs there."""
        if isinstance(self.table, StoredMatrix):
            own = self.table.rows[sent(rows.flatten().cpu(), self.table.rows.device)]
            found = numbers(StoredMatrix(own, self.table.encoding), self.dtype)
        else:
            found = self.table.index_select(0, sent(rows.flatten().cpu(), self.table.device))
        found = found if found.device.type == self.device.type else sent(found, self.device)
        return lambda: found.view(*rows.shape, -1)


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
    return HeldTable(table, memory.device, dtype)


class TableFile:
    """A table in its files. Rows that were read lately are in host memory. Begin and wait on one thread."""

    def __init__(self, inside: Shards, disk: Disk, held: Tensor, *, dtype: torch.dtype, device: torch.device) -> None:
        """disk: of NUM_READERS threads, which read nothing else; it closes the files. held: memory on the host for
        rows, uint8 [places, inside.row_bytes]. dtype: of rows. ModelError for a file that was replaced."""
        self._inside, self._disk, self._dtype, self._device = inside, disk, dtype, device
        self._first_rows, self._cache = torch.tensor(inside.first_rows), RowCache(held)
        self._starts = torch.tensor([shard.start for shard in inside.shards])  # byte of each shard's first row
        opened = dict[Path, DirectFile]()
        for shard in inside.shards:
            if shard.path not in opened:
                opened[shard.path] = file = DirectFile(shard.path, shard.state)
                disk.files.callback(file.close)
        self._files = [opened[shard.path] for shard in inside.shards]
        self.stats = TableStats()

    def begin(self, rows: Tensor) -> Callable[[], Tensor]:
        """Begin to read rows, each once: see `Table`."""
        chosen, places = rows.cpu().unique(return_inverse=True)
        assert 0 <= int(chosen[0]) <= int(chosen[-1]) < int(self._first_rows[-1])
        content = torch.empty(len(chosen), self._inside.row_bytes, dtype=torch.uint8)
        missing = self._cache.read(chosen, content)
        self.stats += TableStats(len(chosen) - len(missing), len(missing))
        parts = missing.split(max(-(-len(missing) // NUM_READERS), _LEAST)) if len(missing) else ()
        events = [self._disk.begin(partial(self._read, chosen[part], part, content)) for part in parts]
        return partial(self._arrived, events, chosen, places, content, missing)

    def _arrived(
        self, events: Sequence[Event], chosen: Tensor, places: Tensor, content: Tensor, missing: Tensor
    ) -> Tensor:
        for event in events:
            event.synchronize()
        self._cache.write(chosen[missing], content[missing])
        return sent(self._numbers(chosen, content)[places], self._device)

    def _read(self, rows: Tensor, places: Tensor, content: Tensor, reader: Reader) -> int:
        """Read rows to their places in `content`."""
        size, view = self._inside.row_bytes, memoryview(content.numpy().data).cast("B")
        shards = torch.searchsorted(self._first_rows, rows, right=True) - 1
        starts = self._starts[shards] + (rows - self._first_rows[shards]) * size
        targets = (view[place * size : (place + 1) * size] for place in places.tolist())
        wanted = zip(shards.tolist(), starts.tolist(), targets, strict=True)
        for file, own in groupby(wanted, key=lambda each: self._files[each[0]]):
            _, begins, into = zip(*own, strict=True)
            reader.scattered(file, begins, size, into)
            file.check()
        return size * len(rows)

    def _numbers(self, chosen: Tensor, content: Tensor) -> Tensor:
        """The numbers of rows, ascending: content uint8 [n, bytes] -> [n, numbers of a row] in the dtype."""
        parts, stops = list[Tensor](), torch.searchsorted(chosen, self._first_rows).tolist()
        firsts = self._first_rows.tolist()
        for shard, first, begin, end in zip(self._inside.shards, firsts, stops, stops[1:], strict=False):
            if end > begin:
                parts.append(shard.made(content[begin:end], chosen[begin:end] - first))
        made, kind = torch.cat(parts), self._inside.encoding
        found = numbers(StoredMatrix(made, ENCODINGS[kind]), self._dtype) if kind else made.to(self._dtype)
        check_range(found, self._inside.name, self._dtype)
        return found
