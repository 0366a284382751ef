"""One file from the hub: fetched from where an earlier try ended, and under its name only when every byte is right.

The library's own downloads throw away what has come when they fail; only its single request (`http_get`) is used here.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from offload.errors import ModelError
from offload.hub.remote import RemoteFile, transport_error

Count = Callable[[int], None]  # is told of every so many bytes
_BLOCK = 1 << 20


class Hash(Protocol):
    def update(self, data: bytes | memoryview, /) -> None: ...

    def hexdigest(self) -> str: ...


def fetch(url: str, file: RemoteFile, folder: Path, *, count: Count) -> None:
    """Make `folder`/name, with the bytes that `file` speaks of. Stopped or failed, it keeps what has come.

    Raises ModelError where the bytes are others, and errors of huggingface_hub, the network and the disk.
    """
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # exported when asked for

    headers = {**build_hf_headers(library_name="triforce"), "Accept-Encoding": "identity"}
    partial = partial_path(file, folder)
    with Incoming(partial, file, count) as incoming:
        while incoming.tell() < file.num_bytes:
            come = incoming.tell()
            try:
                with _quiet():
                    http_get(url, incoming, resume_size=come, headers=headers, displayed_filename=file.name)
                break
            except HfHubHTTPError:
                raise
            except transport_error():
                if incoming.tell() <= come:  # else the connection has broken, and the next one goes on
                    raise
        incoming.check()
        os.fsync(incoming.fileno())
    os.replace(partial, folder / file.name)


def partial_path(file: RemoteFile, folder: Path) -> Path:
    """What has come of `file`. Another content has another name, so that no two are mixed."""
    return folder / f"{file.name}.{file.digest[:16]}.part"


def is_whole(path: Path, file: RemoteFile, *, count: Count) -> bool:
    """Does `path` hold what `file` speaks of? Reads all of it where the length is right."""
    if not path.is_file() or path.stat().st_size != file.num_bytes:
        return False
    return _digest(path, file, count) == file.digest


class Incoming(io.FileIO):
    """What has come of a file so far, hashed as it grows. ModelError at once where more comes than there should be."""

    def __init__(self, path: Path, file: RemoteFile, count: Count) -> None:
        if path.exists() and path.stat().st_size > file.num_bytes:
            path.unlink()
        super().__init__(path, "ab")
        self._path, self._file, self._count = path, file, count
        self._hash = _hash_of(path, file, lambda num_bytes: None)

    def write(self, data: Any, /) -> int:
        """All of `data`: a raw file may take less at once."""
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
        """Where the hub begins anew."""
        length = super().truncate(size)
        self._hash = _hash_of(self._path, self._file, lambda num_bytes: None)
        return length

    def check(self) -> None:
        """Raises ModelError, and drops what has come, unless it is what the hub says."""
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


def _digest(path: Path, file: RemoteFile, count: Count) -> str:
    return _hash_of(path, file, count).hexdigest()


def _hash_of(path: Path, file: RemoteFile, count: Count) -> Hash:
    """Of the bytes in `path` so far: sha256, or what git calls a blob, whose hash begins with its whole length."""
    if len(file.digest) == 64:
        hash_: Hash = hashlib.sha256()
    else:
        hash_ = hashlib.sha1(b"blob %d\0" % file.num_bytes, usedforsecurity=False)
    with path.open("rb") as source:
        while block := source.read(_BLOCK):
            hash_.update(block)
            count(len(block))
    return hash_


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the library's own bars and warnings about retries; we show progress, and errors as they are raised."""
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
