"""The headers of a repository's GGUF files, fetched without the rest of the files: their kinds, and configs to plan by.

A header is parsed by the reader of whole files, from a file that has its full length and no bytes but the header's.
Most of a header are the lists of its tokenizer, whose texts tell one after the other where they end: 5.9 MB for 152,000
tokens and their merges. The files of a repository have the same ones, so they are fetched once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from tempfile import TemporaryDirectory

from offload.config.gguf import PLAIN, gguf_config
from offload.config.gguf_header import MAX_HEADER_BYTES, Header, Items, Unfetched, read_file, read_header
from offload.config.gguf_names import LONG_FACTORS, ROPE_FACTORS, SHORT_FACTORS
from offload.config.kinds import Kind, kinds_of_header
from offload.config.model import ModelConfig
from offload.config.next_token import head_of
from offload.errors import ModelError
from offload.hub.fetch import fetch_range
from offload.hub.files import GgufModel
from offload.hub.remote import Listing, RemoteFile, file_url, translated_errors
from offload.units import size

FIRST_BYTES = 1 << 17  # before the tokenizer, and behind it the descriptions of a thousand tensors
LONG_BYTES = 1 << 16  # of a list that is not fetched twice
MOST_BYTES = 1 << 28  # of all headers of a repository
_MOST_STEP = 1 << 21
_COMPARED_BYTES = 1 << 12  # at the end of lists
_READ_TENSORS = (ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS)  # whose numbers belong to the config


@dataclass(frozen=True)
class Described:
    """A GGUF model of a repository by its header: a candidate of offers (offload/hub/offers.py)."""

    gguf: GgufModel
    kinds: tuple[Kind, ...]
    config: ModelConfig

    @property
    def name(self) -> str:
        return self.gguf.label or self.gguf.path

    @property
    def form(self) -> str:
        return ", ".join(kind.name for kind in self.kinds)

    @property
    def num_bytes(self) -> int:
        return self.gguf.num_bytes

    @property
    def model(self) -> str:
        return self.gguf.model

    @property
    def pull(self) -> tuple[str, ...]:
        return self.gguf.pull

    @property
    def draft(self) -> ModelConfig | None:
        return head_of(self.config)

    @property
    def is_plain(self) -> bool:
        """Whether most numbers are plain: they take twice the bytes of 8 bits, and a text hardly shows it."""
        numbers = sum(kind.num_numbers for kind in self.kinds)
        return 2 * sum(kind.num_numbers for kind in self.kinds if kind.name in PLAIN) > numbers


@dataclass(frozen=True)
class Refused:
    """A GGUF model of a repository that cannot run. kinds: () if its header cannot be read."""

    gguf: GgufModel
    kinds: tuple[Kind, ...]
    problem: str


def describe(
    listing: Listing, models: Sequence[GgufModel], *, report: Callable[[int], None]
) -> Iterator[Described | Refused]:
    """Describe the models by their headers. report: called with the number that is done. Raises TriforceError."""
    with translated_errors(listing.repository, listing.revision), TemporaryDirectory(prefix="triforce-") as folder:
        headers = _Headers(listing, Path(folder))
        for number, model in enumerate(models):
            report(number)
            if headers.num_bytes < MOST_BYTES:
                yield headers.describe(model)
            else:
                yield Refused(model, (), f"not looked at: the headers of the others took {size(headers.num_bytes)}")
        report(len(models))


class _Headers:
    """The fetched headers of a repository. num_bytes: of them, fetched so far."""

    def __init__(self, listing: Listing, folder: Path) -> None:
        self.num_bytes = 0
        self._listing, self._folder = listing, folder
        self._lists: _Lists | None = None  # of the first header that was read

    def describe(self, model: GgufModel) -> Described | Refused:
        kinds: tuple[Kind, ...] = ()
        paths = [self._folder / part.name for part in model.parts]
        try:
            for part, path in zip(model.parts, paths, strict=True):
                self._fetch(part, path)
            header = read_header(paths[0])
            kinds = tuple(kinds_of_header(header))
            return Described(model, kinds, gguf_config(header))
        except ModelError as error:
            return Refused(model, kinds, str(error).replace(f"{self._folder}/", ""))
        finally:
            for path in paths:
                path.unlink(missing_ok=True)

    def _fetch(self, part: RemoteFile, path: Path) -> None:
        """Fetch the header of a file, and the numbers of tensors that belong to the config."""
        with path.open("wb", buffering=0) as file:
            file.truncate(part.num_bytes)
            beginning = _Beginning(file, part, file_url(self._listing, part))
            beginning.fetch(FIRST_BYTES)
            if self._lists is not None:
                self._lists.spare(beginning, path)
            while (header := _header(path, beginning.num_bytes)) is None:
                beginning.fetch(min(beginning.num_bytes, _MOST_STEP))
            for tensor in filter(None, map(header.tensors.get, _READ_TENSORS)):
                beginning.fetch_at(tensor.start, tensor.start + min(tensor.nbytes, LONG_BYTES))
            self._lists = self._lists or _Lists.of(header)
            self.num_bytes += beginning.num_fetched


class _Beginning:
    """A file of its full length, of which the first bytes are there. num_bytes: how many; num_fetched: those that came
    from the hub."""

    def __init__(self, file: FileIO, part: RemoteFile, url: str) -> None:
        self.num_bytes = self.num_fetched = 0
        self._file, self._part, self._url = file, part, url

    def fetch(self, num_bytes: int) -> None:
        """Fetch the next bytes, no more than a header may have."""
        self.fetch_at(self.num_bytes, min(self.num_bytes + num_bytes, MAX_HEADER_BYTES))

    def fetch_at(self, start: int, stop: int) -> bytes:
        """Fetch the bytes from `start` to `stop`, or to the file's end."""
        stop = min(stop, self._part.num_bytes)
        data = fetch_range(self._url, self._part, start, stop) if stop > start else b""
        self.num_fetched += len(data)
        self.put(start, data)
        return data

    def put(self, start: int, data: bytes) -> None:
        """Write bytes to their place."""
        self._file.seek(start)
        self._file.write(data)
        if start <= self.num_bytes:
            self.num_bytes = max(self.num_bytes, start + len(data))


@dataclass(frozen=True)
class _Lists:
    """The long lists of a header, and all between them. opening: the bytes before them, with their first key."""

    opening: bytes
    data: bytes

    @classmethod
    def of(cls, header: Header) -> _Lists | None:
        """The lists of a header whose bytes are there; None if none is long."""
        every = ((key, value) for key, value in header.values.items() if isinstance(value, Items))
        found = [(value.start, value.stop, key) for key, value in every if value.stop - value.start >= LONG_BYTES]
        if not found:
            return None
        start, _, key = min(found)
        opening = 8 + len(key.encode()) + 4 + 4 + 8  # the key with its length; types of the value and of texts; a count
        with header.path.open("rb") as file:
            file.seek(start - opening)
            data = file.read(max(stop for _, stop, _ in found) - start + opening)
        return cls(data[:opening], data[opening:])

    def spare(self, beginning: _Beginning, path: Path) -> None:
        """Put the lists into a file that begins them with the same key and ends them with the same bytes. What follows
        them is fetched."""
        with path.open("rb") as file:
            at = file.read(beginning.num_bytes).find(self.opening)
        start = at + len(self.opening)
        stop = start + len(self.data)
        if at < 0 or stop <= beginning.num_bytes:
            return
        compared = self.data[-_COMPARED_BYTES:]
        behind = beginning.fetch_at(stop - len(compared), stop + FIRST_BYTES)
        if behind.startswith(compared):
            beginning.put(start, self.data)
            beginning.put(stop - len(compared), behind)


def _header(path: Path, num_bytes: int) -> Header | None:
    """The header of a file of which so many bytes are there; None if it goes on behind them."""
    try:
        return read_file(path, num_bytes)
    except Unfetched:
        return None
