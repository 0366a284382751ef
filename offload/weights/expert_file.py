"""The experts of a layer in their model's file, from where each is read when it is wanted."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from offload.config.model import ModelConfig
from offload.errors import ModelError
from offload.formats.encodings import ENCODINGS
from offload.formats.stored import StoredMatrix
from offload.plan.shards import Shard
from offload.transfer.direct_file import DirectFile
from offload.transfer.disk import Disk, Reader
from offload.transfer.link import Event
from offload.weights.checkpoint import Checkpoint
from offload.weights.file_rows import FileRows
from offload.weights.fp16 import check_range
from offload.weights.layout import LayerLayout
from offload.weights.tensors import expert_sources


@dataclass(frozen=True)
class LayerExperts:
    """The experts of layer `index` of the model `whole` in its checkpoint. layout: of a shard of one of them."""

    checkpoint: Checkpoint
    whole: ModelConfig
    layout: LayerLayout
    index: int
    shard: Shard
    dtype: torch.dtype

    @property
    def count(self) -> int:
        experts = self.whole.blocks[self.index].experts
        assert experts is not None
        return experts.count

    def parts(self, number: int) -> Iterator[_Part]:
        """The parts of an expert, in the order of its layout."""
        own, layer = self.whole.layer(self.index), self.whole.layer_name(self.index)
        for view in self.layout.views:
            row = 0
            for source in expert_sources(own, self.shard, number, view.replace(".stored", ".weight")):
                rows = range(row, row := row + len(source.rows))
                yield _Part(layer + source.name, source.rows, source.columns, view, slice(rows.start, rows.stop))

    def rows(self, part: _Part) -> FileRows | None:
        """The place of a part in the file; None if it has to be read through the checkpoint."""
        return self.checkpoint.rows_in_file(part.tensor, part.rows, part.columns)

    def read(self, number: int, buffer: Tensor) -> None:
        """Read an expert through the checkpoint into `buffer`, uint8 [layout.num_bytes]. What no tensor has stays."""
        for part in self.parts(number):
            read = self.checkpoint.read_stored if part.view in self.layout.stored else self.checkpoint.read_into
            read(part.tensor, self._target(part, buffer), rows=part.rows, columns=part.columns)

    def read_all(self, content: Tensor) -> None:
        """Read all experts into `content`, uint8 [experts, layout.num_bytes], which is zeroed, and check them."""
        for number, buffer in enumerate(content):
            self.read(number, buffer)
            self.check(number, buffer)

    def read_rows(self, rows: FileRows, part: _Part, file: DirectFile, reader: Reader, buffer: Tensor) -> None:
        """Read a part whose rows are `rows` into `buffer`, as `read` does."""
        target = self._target(part, buffer)
        for first, some in reader.rows(file, rows.start, rows.count, rows.row_bytes):
            made = rows.made(some, torch.arange(first, first + len(some)))
            _copy(target[first : first + len(made)], made)

    def check(self, number: int, buffer: Tensor) -> None:
        """Raise ModelError for an expert beyond the range of its dtype."""
        for name, view in self.layout.views.items():
            held, kind = view.of(buffer), self.layout.stored.get(name)
            owner = f"expert {number} of layer {self.index}"
            check_range(StoredMatrix(held, ENCODINGS[kind]) if kind else held, owner, self.dtype)

    def _target(self, part: _Part, buffer: Tensor) -> Tensor:
        return self.layout.views[part.view].of(buffer)[part.target]


@dataclass(frozen=True)
class _Part:
    """Rows and columns of a tensor of the checkpoint, and the rows of a view of an expert's layout that they become."""

    tensor: str
    rows: range
    columns: range | None
    view: str
    target: slice


class ModelFiles:
    """The files of a model whose experts are read from them by `disk` while it runs, open until that is closed.
    checkpoint: for experts that are converted as they are read."""

    def __init__(self, checkpoint: Checkpoint, disk: Disk) -> None:
        """Takes over the files of `checkpoint`. ModelError where one was replaced since they were opened."""
        self.disk, self._opened = disk, dict[Path, DirectFile]()
        self.checkpoint = disk.files.enter_context(checkpoint.kept())
        for path, state in checkpoint.states().items():
            self._opened[path] = file = DirectFile(path, state)
            disk.files.callback(file.close)

    def __getitem__(self, path: Path) -> DirectFile:
        return self._opened[path]

    def check(self, paths: Collection[Path] = ()) -> None:
        """Raise ModelError unless the files, by default all, are as they were opened."""
        for path in paths or self._opened:
            self._opened[path].check()


class ExpertFile:
    """The experts of a layer in their model's file.

    An expert whose tensors lie in the file as rows that follow each other is read directly. Others, of matrices that
    are made of several tensors or transposed as they are read, are read through the checkpoint, one at a time. Each is
    checked by a checksum of its first reading and by the file's state, so that none is computed with in part.
    """

    def __init__(self, inside: LayerExperts, files: ModelFiles) -> None:
        """Raises ModelError where tensors cannot be read in such shards."""
        experts = replace(inside, checkpoint=files.checkpoint)
        self._experts, self._files = experts, files
        self._sums: dict[int, int] = {}  # by number: of experts that were read before
        found = [[(part, experts.rows(part)) for part in experts.parts(number)] for number in range(experts.count)]
        self._rows = [[(part, rows) for part, rows in parts if rows is not None] for parts in found]
        self.is_direct = all(rows is not None for parts in found for _, rows in parts)

    def __len__(self) -> int:
        return self._experts.count

    @property
    def num_bytes(self) -> int:
        """Bytes of an expert in a place."""
        return self._experts.layout.num_bytes

    def begin(self, number: int, place: Tensor) -> Event:
        """Begin to read an expert into `place`, uint8 [num_bytes], which nobody reads meanwhile. Whoever waits for the
        event gets a ModelError if the file cannot be read, or has changed."""
        read = self._read_directly if self.is_direct else self._read_converted
        return self._files.disk.begin(partial(read, number, place), alone=not self.is_direct)

    def _read_directly(self, number: int, place: Tensor, reader: Reader) -> int:
        parts = self._rows[number]
        for part, rows in parts:
            self._experts.read_rows(rows, part, self._files[rows.path], reader, place)
        self._check(number, place, {rows.path for _, rows in parts})
        return sum(rows.nbytes for _, rows in parts)

    def _read_converted(self, number: int, place: Tensor, reader: Reader) -> int:
        self._files.check()  # a mapping of a file that was cut off ends the process
        self._experts.read(number, place)
        self._check(number, place)
        return place.nbytes

    def _check(self, number: int, place: Tensor, paths: Collection[Path] = ()) -> None:
        """Check an expert that was read, from some files or any. ModelError."""
        self._files.check(paths)
        found = zlib.crc32(place.numpy().data)
        if number not in self._sums:
            self._experts.check(number, place)
            self._sums[number] = found
        if self._sums[number] != found:
            raise ModelError(
                f"{self._experts.checkpoint.folder}: expert {number} of layer {self._experts.index} has other bytes "
                "than when it was read first; the file was changed or the disk fails: check it, and start again"
            )


def _copy(target: Tensor, made: Tensor) -> None:
    """Copy on this thread alone where nothing is to be converted: torch would split it over the threads that
    compute."""
    if target.dtype == made.dtype:
        width = torch.int16 if made.element_size() == 2 else made.dtype  # numpy has no bfloat16
        target.view(width).numpy()[...] = made.view(width).numpy()
    else:
        target.copy_(made)
