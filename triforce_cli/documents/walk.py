"""A walk through the files below a folder that match a pattern: each real folder once, and symbolic links only if they
stay inside."""

from __future__ import annotations

import os
import stat
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from offload.errors import UsageError
from offload.interrupts import poll
from triforce_cli.ground.text import counted, path_text

MOST_ENTRIES = 200_000  # to examine below a folder
PASSED_OVER = frozenset(("node_modules", "__pycache__"))
OUTWARD = "link that leads outside"
UNREADABLE = "folder that cannot be read"
AGAIN = "link that repeats what is read"
Places = frozenset[int]


@dataclass(frozen=True)
class Entry:
    """A file or folder in a walk. path: below the named folder. real: the same path without symbolic links below that
    folder, the one to open. why: the reason to leave it out; "" for a file to read."""

    path: Path
    real: Path
    why: str = ""


class Pattern:
    """A pattern of paths below a folder, part by part; `**` is any number of folders. Hidden names match only parts
    that begin with a dot.

    A path is matched name by name. The state of a partial match is a set of places: indices of the parts that may come
    next.
    """

    def __init__(self, parts: Sequence[str] = ("**",)) -> None:
        self._parts = tuple(parts)
        self.start = self._closed({0})

    def after(self, places: Places, name: str, *, hidden: bool = False) -> Places:
        """The places after `name`. hidden: hidden names match like others."""
        hides = name.startswith(".") and not hidden
        found = set[int]()
        for place in places - {len(self._parts)}:
            part = self._parts[place]
            if part == "**" and not hides:
                found.add(place)
            elif part != "**" and fnmatchcase(name, part) and (part.startswith(".") or not hides):
                found.add(place + 1)
        return self._closed(found)

    def is_whole(self, places: Places) -> bool:
        """True if the names so far match the whole pattern."""
        return len(self._parts) in places

    def goes_on(self, places: Places) -> bool:
        """True if an entry further below can match."""
        return bool(places - {len(self._parts)})

    def _closed(self, places: set[int]) -> Places:
        """The places, with the one after each `**`, which may match no folder at all."""
        for place, part in enumerate(self._parts):
            if place in places and part == "**":
                places.add(place + 1)
        return frozenset(places)


class Walk:
    """A walk through the entries below `root`. asked: the path that the person named, for errors."""

    def __init__(self, root: Path, pattern: Pattern, *, asked: Path) -> None:
        self._pattern, self._real_root, self._asked = pattern, Path(os.path.realpath(root)), asked
        self._num_entries = 0
        self._visited = set[tuple[int, int, Places]]()
        self._folders = [(root, root, pattern.start)]  # path, the same without symbolic links, places
        self._links = deque[tuple[Path, Places]]()

    def entries(self) -> Iterator[Entry]:
        """The matching entries, also those left out; entries behind symbolic links come last. Raises UsageError past
        the limit of entries."""
        while self._folders or self._links:
            poll()
            if self._folders:
                yield from self._below(*self._folders.pop())
            else:
                yield from self._followed(*self._links.popleft())

    def _below(self, folder: Path, real: Path, places: Places) -> Iterator[Entry]:
        try:
            listed = self._listed(real, places)
        except OSError as error:
            if not isinstance(error, FileNotFoundError | NotADirectoryError):  # those were removed during the walk
                yield Entry(folder, real, UNREADABLE)
            return
        for found in listed:
            path, after = folder / found.name, self._pattern.after(places, found.name)
            is_folder = found.is_dir(follow_symlinks=False)
            if not after:
                if self._concerns(self._pattern.after(places, found.name, hidden=True), is_folder):
                    yield Entry(path, path, f"hidden {'folder' if is_folder else 'file'}")
            elif found.is_symlink():
                self._links.append((path, after))
            elif is_folder:
                yield from self._folder(path, real / found.name, after)
            elif self._pattern.is_whole(after):
                yield _file(path, real / found.name, is_file=found.is_file(follow_symlinks=False))

    def _folder(self, path: Path, real: Path, places: Places) -> Iterator[Entry]:
        """Add a folder to the walk, or yield it with the reason to leave it out."""
        why = ""
        if not self._pattern.goes_on(places):
            why = "folder"
        elif path.name in PASSED_OVER:
            why = f"{path.name} folder"
        if not why:
            self._folders.append((path, real, places))
        elif self._concerns(places, is_folder=True):
            yield Entry(path, real, why)

    def _followed(self, link: Path, places: Places) -> Iterator[Entry]:
        """The target of a symbolic link, if it is inside."""
        real = Path(os.path.realpath(link))
        try:
            found = link.stat()
        except OSError:
            yield Entry(link, link, "link that cannot be followed")
            return
        is_folder = stat.S_ISDIR(found.st_mode)
        if not self._concerns(places, is_folder):
            return
        if not real.is_relative_to(self._real_root):
            yield Entry(link, link, OUTWARD)
        elif any(map(_is_left_out, real.relative_to(self._real_root).parts)):
            yield Entry(link, link, "link that leads to what is left out")
        elif not is_folder:
            yield _file(link, real, is_file=stat.S_ISREG(found.st_mode))
        elif (found.st_dev, found.st_ino, places) in self._visited:
            yield Entry(link, link, AGAIN)
        else:
            yield from self._folder(link, real, places)

    def _concerns(self, places: Places, is_folder: bool) -> bool:
        """True if the pattern matches the entry, or may match an entry below it."""
        return self._pattern.is_whole(places) or (is_folder and self._pattern.goes_on(places))

    def _listed(self, folder: Path, places: Places) -> Sequence[os.DirEntry[str]]:
        """The entries of a folder, by name; none if it was visited with the same places. Raises OSError."""
        status = folder.stat()
        key = (status.st_dev, status.st_ino, places)
        if key in self._visited:
            return []
        self._visited.add(key)
        found: list[os.DirEntry[str]] = []
        with os.scandir(folder) as entries:
            for entry in entries:
                self._count()
                found.append(entry)
        return sorted(found, key=lambda entry: entry.name)

    def _count(self) -> None:
        self._num_entries += 1
        if self._num_entries > MOST_ENTRIES:
            raise UsageError(
                f"{path_text(self._asked)} has over {MOST_ENTRIES:,} entries to look at, the most that are "
                f"({counted(len(self._visited), 'folder')} so far); name a folder further down"
            )


def _file(path: Path, real: Path, *, is_file: bool) -> Entry:
    return Entry(path, real, "" if is_file else "entry that is no file")


def _is_left_out(name: str) -> bool:
    return name.startswith(".") or name in PASSED_OVER
