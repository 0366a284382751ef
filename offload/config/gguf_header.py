"""The header of a GGUF file: metadata and tensor offsets. Format: ggml's docs/gguf.md, versions 2 and 3.

The file is not trusted: a header has at most MAX_HEADER_BYTES, all counted items must be inside it, and tensors must be
inside the file without overlap. Lists are read from the file on demand: a plan reads only the texts of the tokens.
Memory: the tensors' descriptions, at most 32 bytes for each byte of theirs. A header that is being fetched is read as
far as it is there (offload/hub/headers.py).
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NoReturn

from offload.config.gguf_types import TYPES, other_type
from offload.errors import ModelError, unreadable

SUFFIX = ".gguf"
MAGIC = b"GGUF"
MAX_HEADER_BYTES = 1 << 26  # of one file; the largest published ones are a fourth of this
_VERSIONS = (2, 3)
_ALIGNMENT, _MOST_ALIGNMENT = 32, 1 << 16  # bytes: default and maximum
_MOST_DIMENSIONS, _MOST_NESTED = 4, 4
_STRING, _ARRAY = 8, 9
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_SMALLEST = {_STRING: 8, _ARRAY: 12}  # bytes of one value
_REMEDY = "download it again"
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)


@dataclass(frozen=True, repr=False)
class Items:
    """A list in the file `path`: `count` values of ggml's type `kind`, in its bytes from `start` to `stop`."""

    path: Path
    key: str
    kind: int
    count: int
    start: int
    stop: int

    def __repr__(self) -> str:
        """The list as shown in messages."""
        return f"a list of {self.count}"

    def read(self) -> list[Value]:
        """The values. ModelError, also where a string is not UTF-8."""
        reader = _Reader(self.path, self.content(), self.start)
        if self.kind in _NUMBERS:
            return [*reader.numbers(self.kind, self.count, self.key)]
        if self.kind == _STRING:
            return [*reader.strings(self.count, self.key)]
        return [reader.value(self.kind, self.key) for _ in range(self.count)]

    def content(self) -> bytes:
        """The raw bytes of the list. ModelError."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.start)
                data = file.read(self.stop - self.start)
        except OSError as error:
            raise unreadable(self.path, error) from error
        if len(data) < self.stop - self.start:
            _refuse(self.path, f"{self.key} ends after {len(data)} of {self.stop - self.start} bytes")
        return data


Value = bool | int | float | str | Items


class Unfetched(Exception):
    """The header goes on behind the bytes of a file that are there."""


@dataclass(frozen=True)
class TensorInfo:
    """The description of a tensor in the file `path`. shape: a matrix' outputs come first. kind: its type, such as
    Q4_K. start: offset of its bytes in the file."""

    name: str
    path: Path
    shape: tuple[int, ...]
    kind: str
    start: int
    nbytes: int


@dataclass(frozen=True)
class Header:
    """The header of a model in the file `path`, or in several files of which `path` is the first. values: its
    metadata."""

    path: Path
    values: Mapping[str, Value]
    tensors: Mapping[str, TensorInfo]
    files: tuple[Path, ...]

    def items(self, key: str) -> list[Value] | None:
        """The list under `key`, None if there is none. ModelError."""
        value = self.values.get(key)
        return value.read() if isinstance(value, Items) else None


def is_gguf(path: Path) -> bool:
    """Whether a path is a GGUF file, by name: a file that ends in SUFFIX."""
    return path.suffix == SUFFIX and not path.is_dir()


def read_header(path: Path) -> Header:
    """The header of the model in one file or several, of which `path` is any. Raises ModelError."""
    first, *others = parts(path)
    header = read_file(first)
    count = header.values.get("split.count", 1)
    if count != 1 + len(others) and not (count == 0 and not others):
        _refuse(
            first, f"it is one of {count} files, and its name says {1 + len(others)}", "give files their names back"
        )
    tensors = dict(header.tensors)
    for number, other in enumerate(others, start=1):
        part = read_file(other)
        if (part.values.get("split.no"), part.values.get("split.count")) != (number, count):
            what = f"it says it is part {part.values.get('split.no')} of {part.values.get('split.count')}"
            _refuse(other, f"{what}, not {number} of {count}", "fetch all parts again, of one version")
        if twice := tensors.keys() & part.tensors.keys():
            _refuse(other, f"it has {min(twice)}, which an earlier part has as well")
        tensors |= part.tensors
    total = header.values.get("split.tensors.count", len(tensors))
    if total != len(tensors):
        _refuse(first, f"it says there are {total} tensors, its files have {len(tensors)}")
    return Header(first, header.values, tensors, (first, *others))


def parts(path: Path) -> list[Path]:
    """The files of the model that `path` belongs to, first to last. Raises ModelError if one is missing."""
    if not path.is_file():
        raise ModelError(f"there is no file {path}; give the path of a GGUF file or of a model's folder")
    names = part_names(path.name)
    if path.name not in names:
        _refuse(path, f"its name says it is no part of {len(names)}", "give it its name back")
    found = []
    for name in names:  # stops at the first that is missing
        part = path.with_name(name)
        if not part.is_file():
            raise ModelError(f"{path}: part {name} is missing; fetch it into the same folder")
        found.append(part)
    return found


def part_names(name: str) -> list[str]:
    """The file names of the model that has a file `name`, first to last."""
    named = _PART.fullmatch(name)
    if not named:
        return [name]
    return [f"{named[1]}-{number:05d}-of-{named[3]}{SUFFIX}" for number in range(1, int(named[3]) + 1)]


def models_in(folder: Path) -> list[Path]:
    """The GGUF files of a folder, sorted; only the first file of a model in several. OSError."""
    return sorted(path for path in folder.glob(f"*{SUFFIX}") if part_names(path.name)[:1] == [path.name])


def read_file(path: Path, fetched: int | None = None) -> Header:
    """The header of one file alone. fetched: how many of its first bytes are there, if it has its full length already
    and not all of them. Raises ModelError, and Unfetched where those are too few."""
    try:
        found = path.stat()
        return _read_version(path, (found.st_ino, found.st_size, found.st_mtime_ns), fetched)
    except OSError as error:
        raise unreadable(path, error) from error


@lru_cache(maxsize=16)  # a start asks eight times, and a long list of tokens takes .1 s to pass over
def _read_version(path: Path, version: tuple[int, int, int], fetched: int | None) -> Header:
    """The header of a file in one version: of an inode, size and time of change."""
    with path.open("rb") as file:
        num_bytes = file.seek(0, 2)
        if num_bytes < 24:
            _refuse(path, f"it has {num_bytes} bytes, and no header is so short")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            return _parse(path, mapped, num_bytes, fetched)


def _parse(path: Path, data: mmap.mmap, num_bytes: int, fetched: int | None) -> Header:
    reader = _Reader(path, data, stop=min(num_bytes, MAX_HEADER_BYTES), fetched=fetched)
    num_tensors, num_values = _read_counts(reader)
    values: dict[str, Value] = {}
    for _ in range(num_values):
        key = reader.string("the name of a value")
        if key in values:
            _refuse(path, f"{key} is there twice")
        values[key] = reader.value(reader.integer("I", f"the type of {key}"), key)
    alignment = values.get("general.alignment", _ALIGNMENT)
    if type(alignment) is not int or not 1 <= alignment <= _MOST_ALIGNMENT or alignment & (alignment - 1):
        _refuse(path, f"general.alignment is {alignment}, not a power of two up to {_MOST_ALIGNMENT}")
    tensors: dict[str, TensorInfo] = {}
    for _ in range(num_tensors):
        tensor = _read_tensor(reader)
        if tensor.name in tensors:
            _refuse(path, f"tensor {tensor.name} is there twice")
        if tensor.start % alignment:
            _refuse(path, f"tensor {tensor.name} begins at {tensor.start}, no multiple of {alignment}")
        tensors[tensor.name] = tensor
    first = -(-reader.at // alignment) * alignment
    return Header(path, values, _placed(path, tensors, first, num_bytes), (path,))


def _read_counts(reader: _Reader) -> tuple[int, int]:
    """The numbers of tensors and of metadata values."""
    if reader.take(4, "its first bytes") != MAGIC:
        _refuse(reader.path, f"it does not begin with {MAGIC.decode()}", "give a GGUF file, or download it again")
    version = reader.integer("I", "the version")
    if version not in _VERSIONS:
        big = version >> 24 in _VERSIONS and not version & 0xFFFFFF
        what = "it is big-endian" if big else f"its version is {version}, known are 2 and 3"
        _refuse(reader.path, what, "fetch one that a llama.cpp of today wrote for this kind of machine")
    return reader.integer("Q", "the number of tensors"), reader.integer("Q", "the number of values")


def _read_tensor(reader: _Reader) -> TensorInfo:
    """The next tensor's description. Its start is relative to the tensor data."""
    name = reader.string("the name of a tensor")
    num_dimensions = reader.integer("I", f"the dimensions of {name}")
    if not 1 <= num_dimensions <= _MOST_DIMENSIONS:
        _refuse(reader.path, f"{name} has {num_dimensions} dimensions, not 1 to {_MOST_DIMENSIONS}")
    sizes = [reader.integer("Q", f"the sizes of {name}") for _ in range(num_dimensions)]
    number, start = reader.integer("I", f"the type of {name}"), reader.integer("Q", f"the place of {name}")
    if number not in TYPES and (other := other_type(number)):
        raise ModelError(f"{reader.path}: {name} is in {other}, not this program; fetch it in another quantisation")
    if number not in TYPES:
        _refuse(reader.path, f"{name} is of type {number}, which is not known", "fetch it in another quantisation")
    kind, block, nbytes = TYPES[number]
    if min(sizes) < 1 or math.prod(sizes) >= 1 << 62:
        _refuse(reader.path, f"{name} has sizes {sizes}")
    if sizes[0] % block:
        _refuse(reader.path, f"{name} has rows of {sizes[0]} numbers, and {kind} has blocks of {block}")
    return TensorInfo(name, reader.path, tuple(reversed(sizes)), kind, start, math.prod(sizes) // block * nbytes)


def _placed(path: Path, tensors: Mapping[str, TensorInfo], first: int, num_bytes: int) -> dict[str, TensorInfo]:
    """The tensors with absolute offsets. Raises ModelError unless they are inside the file and do not overlap."""
    placed = {
        name: TensorInfo(name, path, each.shape, each.kind, first + each.start, each.nbytes)
        for name, each in tensors.items()
    }
    end, before = first, "the header"
    for each in sorted(placed.values(), key=lambda each: (each.start, each.nbytes)):
        if each.start < end:
            _refuse(path, f"{each.name} begins at byte {each.start}, and {before} ends at {end}")
        end, before = each.start + each.nbytes, each.name
        if end > num_bytes:
            _refuse(path, f"{each.name} ends at byte {end}, and the file has {num_bytes}; it is truncated")
    return placed


class _Reader:
    """A cursor over the bytes of a header; reading past their end is a ModelError. offset: of the bytes in the file.
    fetched: the number of those that are there, all by default; reading past it is Unfetched."""

    def __init__(
        self,
        path: Path,
        data: bytes | mmap.mmap,
        offset: int = 0,
        stop: int | None = None,
        fetched: int | None = None,
    ) -> None:
        self.path, self.at = path, 0
        self._data, self._offset, self._limit = data, offset, len(data) if stop is None else stop
        self._stop = self._limit if fetched is None else min(self._limit, fetched)

    def take(self, num_bytes: int, what: str) -> bytes:
        start, self.at = self.at, self._end(num_bytes, what)
        return self._data[start : self.at]

    def integer(self, kind: str, what: str) -> int:
        """The next integer. kind: its `struct` format."""
        (value,) = struct.unpack("<" + kind, self.take(struct.calcsize("<" + kind), what))
        return int(value)

    def string(self, what: str) -> str:
        data = self.take(self.integer("Q", what), what)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            _refuse(self.path, f"{what} is not UTF-8: {data[:40]!r}")

    def strings(self, count: int, what: str) -> list[str]:
        """The next `count` strings. Vocabularies are long, so there is no call per string."""
        start, ends = self.at, self._ends(count, what)
        data, found = self._data, []
        try:
            for end in ends:
                found.append(data[start + 8 : end].decode("utf-8"))
                start = end
        except UnicodeDecodeError:
            _refuse(self.path, f"{what}, value {len(found)}, is not UTF-8: {data[start + 8 : start + 48]!r}")
        return found

    def numbers(self, kind: int, count: int, what: str) -> tuple[bool | int | float, ...]:
        letter = _NUMBERS[kind]
        data = self.take(count * struct.calcsize("<" + letter), what)
        values = struct.unpack(f"<{count}{letter}", data)
        return tuple(map(shortest, values)) if letter == "f" else values

    def value(self, kind: int, key: str) -> Value:
        if kind == _STRING:
            return self.string(key)
        if kind == _ARRAY:
            return self._items(key, 1)
        if kind not in _NUMBERS:
            _refuse(self.path, f"{key} is of type {kind}, which is not known")
        return self.numbers(kind, 1, key)[0]

    def _items(self, key: str, depth: int) -> Items:
        kind, count = self.integer("I", key), self.integer("Q", key)
        size = struct.calcsize("<" + _NUMBERS[kind]) if kind in _NUMBERS else _SMALLEST.get(kind)
        if size is None or depth > _MOST_NESTED:
            deep = f"lists in lists, {depth} deep" if size else f"a list of type {kind}"
            _refuse(self.path, f"{key} is {deep}, which is not known")
        start, least = self.at, self._end(count * size, f"{key}, a list of {count} values,")
        if kind == _STRING:
            self._ends(count, key)
        elif kind == _ARRAY:
            for _ in range(count):
                self._items(key, depth + 1)
        else:
            self.at = least
        return Items(self.path, key, kind, count, self._offset + start, self._offset + self.at)

    def _ends(self, count: int, key: str) -> Iterator[int]:
        """The end offsets of the next `count` strings, which are skipped."""
        data, at, last, length_at, ends = (
            self._data,
            self.at,
            self._stop - 8,
            struct.Struct("<Q").unpack_from,
            array("q"),
        )
        for number in range(count):
            if at > last:
                self.at = at
                self._end(8, f"{key}, in value {number} of {count},")
            at += 8 + length_at(data, at)[0]
            if at > self._stop:
                self.at = 0
                self._end(at, f"{key}, value {number} of {count},")
            ends.append(at)
        self.at = at
        return iter(ends)

    def _end(self, num_bytes: int, what: str) -> int:
        """The end offset of the next `num_bytes` bytes."""
        end = self.at + num_bytes
        if end > self._limit:
            limit = f"over the limit of {MAX_HEADER_BYTES}" if self._limit == MAX_HEADER_BYTES else "past its end"
            _refuse(self.path, f"{what} would end at byte {self._offset + end} of the header, {limit}")
        if end > self._stop:
            raise Unfetched
        return end


def shortest(value: float) -> float:
    """The number with the fewest digits that is `value` in fp32: 1e-05, not 9.999999747378752e-06."""
    if not math.isfinite(value):
        return value
    stored = struct.pack("<f", value)
    for digits in range(1, 9):
        short = float(f"{value:.{digits}g}")
        if abs(short) < 3.4e38 and struct.pack("<f", short) == stored:
            return short
    return value


def _refuse(path: Path, what: str, remedy: str = _REMEDY) -> NoReturn:
    raise ModelError(f"{path} is not a whole GGUF file: {what}; {remedy}")
