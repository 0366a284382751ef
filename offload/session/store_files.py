"""The files of the prefix store: their names, their sizes, and their removal.

Each folder of the store has the pages of one set of conditions, and about.json with the model's name.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from offload.errors import ModelError
from offload.files import user_folder, write_whole
from offload.plan.rates import FOLDER_VARIABLE
from offload.strict_json import read_json

_OLD_SECONDS = 3600.0  # since a page was begun that is not finished: its writer is gone
_FOLDER = re.compile(r"[0-9a-f]{32}", re.ASCII)
_PAGE = re.compile(
    r"([0-9a-f]{32})-(rows|windows|states|hidden)-([0-9a-f]{32})-([0-9a-f]{0,1024})\.safetensors", re.ASCII
)
_UNFINISHED = re.compile(r"[0-9a-f]{16}\.tmp", re.ASCII)
_ABOUT, _MODEL, _DTYPE = "about.json", "model", "dtype"


@dataclass(frozen=True)
class PageName:
    """The name of a page's file. link: digest of what its bits depend on. kind: "rows" of the growing layers, "windows"
    of those with a window, "states" of the others after the page's last token, or "hidden" rows of a text's first
    tokens. checksum: of the file. packed: `PageFile.packed` as a binary number in hexadecimal digits; of hidden rows
    their number."""

    link: str
    kind: str
    checksum: str
    packed: str

    def __str__(self) -> str:
        return f"{self.link}-{self.kind}-{self.checksum}-{self.packed}.safetensors"

    @classmethod
    def of(cls, name: str) -> PageName | None:
        """The parts of a file's name; None if the file is not a page."""
        match = _PAGE.fullmatch(name)
        return None if match is None else cls(*match.groups())


def store_folder() -> Path:
    """The folder of the store: in the user's cache folder, or in the one that TRIFORCE_CACHE_DIR names."""
    return user_folder("cache", variable=FOLDER_VARIABLE) / "store"


@dataclass(frozen=True)
class Summary:
    """The rows that the store has of one model under one set of conditions. num_pages: pages of tokens. used: the time
    of the last use, in seconds since the epoch."""

    model_name: str
    dtype: str
    num_pages: int
    nbytes: int
    used: float


@dataclass(frozen=True)
class _File:
    path: Path
    nbytes: int
    used: float
    is_page: bool


def unfinished() -> str:
    """A new name for a page while it is written."""
    return f"{secrets.token_hex(8)}.tmp"


def make_folder(root: Path, folder: Path, *, model_name: str, dtype: str) -> None:
    """Make the store at `root` and one of its folders, for the user alone, where they are missing. OSError."""
    for each in (root, folder):
        each.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not (about := folder / _ABOUT).exists():
        write_whole(about, json.dumps({_MODEL: model_name, _DTYPE: dtype}))


def nbytes(root: Path) -> int:
    """Bytes of all pages."""
    return sum(file.nbytes for file in _files(root))


def shrink(root: Path, limit: int) -> int:
    """Remove the pages that were not used for the longest time until the store at `root` has at most `limit` bytes, and
    files whose writer is gone. Returns the number of bytes removed."""
    files = sorted(_files(root), key=lambda file: file.used)
    total, removed = sum(file.nbytes for file in files), 0
    for file in files:
        is_left = not file.is_page and time.time() - file.used > _OLD_SECONDS
        if is_left or (file.is_page and total - removed > limit):
            with contextlib.suppress(OSError):  # another process removes it, too
                file.path.unlink()
            removed += file.nbytes
    return removed


def clear(root: Path) -> int:
    """Remove all of the store at `root`. Returns the number of bytes removed. Other files stay, and pages that are
    being written."""
    removed = shrink(root, -1)
    for folder in _folders(root):
        with contextlib.suppress(OSError):  # a page is being written, or was just now
            if os.listdir(folder) == [_ABOUT]:
                (folder / _ABOUT).unlink()
            folder.rmdir()
    with contextlib.suppress(OSError):
        root.rmdir()
    return removed


def summaries(root: Path) -> list[Summary]:
    """What the store at `root` has, the last used first."""
    found = []
    for folder in _folders(root):
        files = [file for file in _files_of(folder) if file.is_page]
        if not files:
            continue
        try:
            about = read_json(folder / _ABOUT)
        except ModelError:
            about = {}
        name, dtype = (str(about.get(key, "")) for key in (_MODEL, _DTYPE))
        links = {file.path.name.partition("-")[0] for file in files}
        used = max(file.used for file in files)
        found.append(Summary(name, dtype, len(links), sum(file.nbytes for file in files), used))
    return sorted(found, key=lambda summary: -summary.used)


def _folders(root: Path) -> list[Path]:
    try:
        return [root / name for name in os.listdir(root) if _FOLDER.fullmatch(name) and not (root / name).is_symlink()]
    except OSError:
        return []


def _files(root: Path) -> Iterator[_File]:
    """The store's own files: pages, and those that are not finished."""
    for folder in _folders(root):
        yield from _files_of(folder)


def _files_of(folder: Path) -> Iterator[_File]:
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            is_page = PageName.of(name) is not None
            if is_page or _UNFINISHED.fullmatch(name):
                with contextlib.suppress(FileNotFoundError):  # removed meanwhile by another process
                    status = os.lstat(folder / name)
                    yield _File(folder / name, status.st_size, status.st_mtime, is_page)
