"""The files of the prefix store: their names, their sizes, and their removal.

Each folder of the store has the pages of one set of conditions, about.json with the model's name, and for each prompt
with documents a file with their names and the links of its pages.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offload.errors import ModelError
from offload.fields import TEXT, Fields, list_of
from offload.files import user_folder, write_whole
from offload.speed.rates import FOLDER_VARIABLE
from offload.strict_json import read_json

_OLD_SECONDS = 3600.0  # since a page was begun that is not finished: its writer is gone
_FOLDER = re.compile(r"[0-9a-f]{32}", re.ASCII)
_PAGE = re.compile(r"([0-9a-f]{32})-([a-z_]+)-([0-9a-f]{32})-([0-9a-f]{0,1024})\.safetensors", re.ASCII)
_UNFINISHED = re.compile(r"((about|[0-9a-f]{32})\.json)?[0-9a-f]{16}\.tmp", re.ASCII)  # a page, or one of `write_whole`
_RECORD = re.compile(r"[0-9a-f]{32}\.json", re.ASCII)
_ABOUT, _MODEL, _DTYPE = "about.json", "model", "dtype"
_DOCUMENTS, _LINKS = "documents", "links"


@dataclass(frozen=True)
class PageName:
    """The name of a unit's file. link: digest of what its bits depend on, up to the end of the page with its last
    token. kind: the part's name. checksum: of the file. packed: of a page `PageFile.packed` as a binary number in
    hexadecimal digits; else the unit's own numbers."""

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
    of the last use, in seconds since the epoch. documents: names of those in its prompts."""

    model_name: str
    dtype: str
    num_pages: int
    nbytes: int
    used: float
    documents: tuple[str, ...] = ()


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


def note_documents(folder: Path, documents: Sequence[str], links: Sequence[str]) -> None:
    """Note that a prompt with these documents has pages with these links. OSError."""
    if documents:
        record = folder / f"{links[-1]}.json"
        names = dict.fromkeys((*_record(record)[0], *documents))
        write_whole(record, json.dumps({_DOCUMENTS: list(names), _LINKS: list(links)}), mode=0o600)


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
    if removed:
        _forget(root)
    return removed


def clear(root: Path) -> int:
    """Remove all of the store at `root`. Returns the number of bytes removed. Other files stay, and pages that are
    being written."""
    removed = shrink(root, -1)
    _tidy(root)
    return removed


def pages_of(root: Path, name: str) -> dict[Path, int]:
    """The pages of all prompts to the model `name`, and of those with a document of this name, and their bytes."""
    found: dict[Path, int] = {}
    for folder in _folders(root):
        of_document = {link for names, links in _records(folder).values() if name in names for link in links}
        is_model = _about(folder).get(_MODEL) == name
        files = [file for file in _files_of(folder) if file.is_page]
        found |= {file.path: file.nbytes for file in files if is_model or _link(file.path) in of_document}
    return found


def remove(root: Path, pages: Iterable[Path]) -> None:
    """Remove pages of the store at `root`."""
    for page in pages:
        page.unlink(missing_ok=True)  # another process may remove it, too
    _tidy(root)


def _tidy(root: Path) -> None:
    """Remove folders without pages, and all that is in them."""
    _forget(root)
    for folder in _folders(root):
        with contextlib.suppress(OSError):  # a page is being written, or was just now
            if os.listdir(folder) == [_ABOUT]:
                (folder / _ABOUT).unlink()
            folder.rmdir()
    with contextlib.suppress(OSError):
        root.rmdir()


def summaries(root: Path) -> list[Summary]:
    """Summaries of the store at `root`, one for each model and set of conditions, the last used first."""
    found = []
    for folder in _folders(root):
        files = [file for file in _files_of(folder) if file.is_page]
        if not files:
            continue
        about = _about(folder)
        name, dtype = (str(about.get(key, "")) for key in (_MODEL, _DTYPE))
        links = {_link(file.path) for file in files}
        used = max(file.used for file in files)
        documents = sorted({document for names, _ in _records(folder).values() for document in names})
        found.append(Summary(name, dtype, len(links), sum(file.nbytes for file in files), used, tuple(documents)))
    return sorted(found, key=lambda summary: -summary.used)


def _forget(root: Path) -> None:
    """Remove the names of documents whose pages have gone."""
    for folder in _folders(root):
        links = {_link(file.path) for file in _files_of(folder) if file.is_page}
        for record, (_, linked) in _records(folder).items():
            if links.isdisjoint(linked):
                with contextlib.suppress(OSError):
                    record.unlink()


def _link(page: Path) -> str:
    return page.name.partition("-")[0]


def _about(folder: Path) -> dict[str, Any]:
    try:
        return read_json(folder / _ABOUT)
    except ModelError:
        return {}


def _records(folder: Path) -> dict[Path, tuple[list[str], list[str]]]:
    """(names of documents, links of pages) of each prompt with documents, by its file."""
    try:
        return {folder / name: _record(folder / name) for name in os.listdir(folder) if _RECORD.fullmatch(name)}
    except OSError:
        return {}


def _record(file: Path) -> tuple[list[str], list[str]]:
    """(names of documents, links of pages); none of a missing or damaged file."""
    try:
        fields = Fields(read_json(file), str(file))
        return fields.get(_DOCUMENTS, list_of(TEXT)), fields.get(_LINKS, list_of(TEXT))
    except ModelError:
        return [], []


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
