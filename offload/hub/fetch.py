"""Fetch one file from the hub, or some bytes of it. An interrupted fetch of a file is resumed; it gets its name only
once its hash is right.

huggingface_hub's own downloads drop a partial file when they fail, so only its single request (`http_get`) is used.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from offload.errors import ModelError, TriforceError
from offload.hub.remote import ANSWER_SECONDS, RemoteFile, transport_error
from offload.interrupts import poll, waiting

Count = Callable[[int], None]  # called with the number of new bytes
_BLOCK_BYTES = 1 << 20
_PARTIAL = 206  # the status of an answer with the bytes that were asked for


class Hash(Protocol):
    def update(self, data: bytes | memoryview, /) -> None: ...

    def hexdigest(self) -> str: ...


def fetch(url: str, file: RemoteFile, folder: Path, *, count: Count) -> None:
    """Fetch `file` into `folder`. An interrupted or failed fetch keeps the bytes that arrived, for the next one.

    Raises ModelError if length or hash are wrong, and errors of huggingface_hub, the network and the disk.
    """
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.file_download import http_get

    headers = _headers()
    partial = partial_path(file, folder)
    with PartialFile(partial, file, count) as received:
        while received.tell() < file.num_bytes:
            start = received.tell()
            try:
                with _quiet(), waiting():
                    http_get(url, received, resume_size=start, headers=headers, displayed_filename=file.name)
                break
            except HfHubHTTPError:
                raise
            except transport_error():
                if received.tell() <= start:  # retry only after a connection that delivered bytes
                    raise
        received.check()
        os.fsync(received.fileno())
    os.replace(partial, folder / file.name)


def fetch_range(url: str, file: RemoteFile, start: int, stop: int) -> bytes:
    """Fetch the bytes from `start` to `stop` of `file`. They are not checked against its hash.

    Raises TriforceError if the hub does not send them, and errors of huggingface_hub and the network.
    """
    from huggingface_hub.utils import hf_raise_for_status, http_stream_backoff  # type: ignore[attr-defined]

    headers, received = {**_headers(), "Range": f"bytes={start}-{stop - 1}"}, bytearray()
    with (
        _quiet(),
        waiting(),
        http_stream_backoff("GET", url, headers=headers, timeout=ANSWER_SECONDS) as response,
    ):
        hf_raise_for_status(response)
        if response.status_code == _PARTIAL or not start:
            for piece in response.iter_bytes():
                received += piece
                if len(received) >= stop - start:
                    break
    if len(received) < stop - start:
        raise TriforceError(
            f"of bytes {start} to {stop} of {file.name} the hub sent {len(received)}; try again, or name a file"
        )
    return bytes(received[: stop - start])


def _headers() -> dict[str, str]:
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # exported lazily

    return {**build_hf_headers(library_name="triforce"), "Accept-Encoding": "identity"}


def partial_path(file: RemoteFile, folder: Path) -> Path:
    """The file of the bytes that arrived so far. Its name contains the hash, so two versions are never mixed."""
    return folder / f"{file.name}.{file.digest[:16]}.part"


def is_whole(path: Path, file: RemoteFile, *, count: Count) -> bool:
    """Tell whether `path` has the length and the hash of `file`. Reads all of it if the length is right."""
    if not path.is_file() or path.stat().st_size != file.num_bytes:
        return False
    return _hash_of(path, file, count).hexdigest() == file.digest


class PartialFile(io.FileIO):
    """The bytes of a file that arrived so far, hashed as it grows. Raises ModelError once it exceeds its length."""

    def __init__(self, path: Path, file: RemoteFile, count: Count) -> None:
        if path.exists() and path.stat().st_size > file.num_bytes:
            path.unlink()
        super().__init__(path, "ab")
        self._path, self._file, self._count = path, file, count
        self._hash = _hash_of(path, file, lambda num_bytes: None)

    def write(self, data: Any, /) -> int:
        """Write all of `data`; a raw file may take less in one call."""
        view = memoryview(data).cast("B")
        if self.tell() + len(view) > self._file.num_bytes:
            self._wrong("more bytes came")
        written = 0
        while written < len(view):
            written += super().write(view[written:]) or 0
        self._hash.update(view)
        self._count(written)
        return written

    def truncate(self, size: int | None = None, /) -> int:
        """Called by `http_get` when the hub sends the file from its beginning instead of resuming."""
        length = super().truncate(size)
        self._hash = _hash_of(self._path, self._file, lambda num_bytes: None)
        return length

    def check(self) -> None:
        """Check length and hash against the hub's listing. Removes the file and raises ModelError if they differ."""
        if self.tell() != self._file.num_bytes:
            self._wrong(f"{self.tell()} bytes came")
        if self._hash.hexdigest() != self._file.digest:
            self._wrong("other bytes came")

    def _wrong(self, what: str) -> None:
        self._path.unlink()
        raise ModelError(
            f"{self._file.name}: {what} than the hub lists ({self._file.num_bytes} bytes, hash "
            f"{self._file.digest[:12]}); pull again"
        )


def _hash_of(path: Path, file: RemoteFile, count: Count) -> Hash:
    """Hash the bytes in `path`: sha256, or sha1 as git hashes a blob, which begins with the whole file's length."""
    if len(file.digest) == 64:
        hash_: Hash = hashlib.sha256()
    else:
        hash_ = hashlib.sha1(b"blob %d\0" % file.num_bytes, usedforsecurity=False)
    with path.open("rb") as source:
        while block := source.read(_BLOCK_BYTES):
            poll()
            hash_.update(block)
            count(len(block))
    return hash_


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence huggingface_hub's progress bars and warnings about retries."""
    from huggingface_hub.utils import logging
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    shown, level = not are_progress_bars_disabled(), logging.get_verbosity()
    disable_progress_bars()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shown:
            enable_progress_bars()
