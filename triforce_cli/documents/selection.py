"""Which files are read where a person names files, patterns and folders, and by which names."""

from __future__ import annotations

import glob
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

from offload.errors import UsageError
from offload.units import size
from triforce_cli.documents.kinds import Kind, kind_of
from triforce_cli.prompt import STDIN, Note, user_path
from triforce_cli.render.text import counted, line_text, path_text

MOST_FILES = 10_000
MOST_ENTRIES = 200_000  # of a folder and all below it, that are looked at
MOST_BYTES = 1 << 30
PASSED_OVER = frozenset(("node_modules", "__pycache__"))
NOT = "!"  # begins a pattern of what is left out

_WILD = re.compile(r"[*?\[]")


@dataclass(frozen=True)
class Named:
    """What a person names. include: patterns of the files that are read of a folder, or of what a pattern matches."""

    paths: tuple[Path, ...] = ()
    include: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.paths)

    def __str__(self) -> str:
        return ", ".join("standard input" if path == STDIN else path_text(path) for path in self.paths)


@dataclass(frozen=True)
class Source:
    """A file that is read. name: what its heading says. kind: None for what can be read only once, a pipe, and for
    what is not there. is_found: nobody named it; a folder or a pattern did."""

    path: Path
    name: str
    kind: Kind | None = None
    num_bytes: int = 0
    is_found: bool = False


def select(named: Named, *, note: Note) -> tuple[Source, ...]:
    """The files in the order in which they are named, those of a folder or a pattern by their paths; each once. Says
    how many a folder or a pattern has, how large they are and what is left out. Raises UsageError."""
    sources: dict[str, Source] = {}
    for path in named.paths:
        for source in _sources(path, named.include, note):
            sources.setdefault(os.path.realpath(source.path) if source.path != STDIN else "-", source)
    return _told_apart(tuple(sources.values()))


def _sources(path: Path, include: Sequence[str], note: Note) -> Sequence[Source]:
    if path == STDIN:
        return [Source(STDIN, "standard input")]
    there = path if os.path.lexists(path) else user_path(str(path))
    if there.is_dir():
        return _found(there, _below(there), there, include, note)
    if os.path.lexists(there) or not _WILD.search(str(path)):
        return [_named_file(there)]
    root = _root(there)
    matched = (Path(match) for match in sorted(glob.iglob(str(there), recursive=True)))
    return _found(there, ((match, _passed_over(match.relative_to(root))) for match in matched), root, include, note)


def _named_file(path: Path) -> Source:
    if not path.is_file():  # a pipe, or nothing: whoever reads it says so
        return Source(path, path_text(Path(path.name)))
    try:
        return Source(path, path_text(Path(path.name)), kind_of(path), path.stat().st_size)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error


def _root(pattern: Path) -> Path:
    """The folder above the first part that is a pattern."""
    parts = pattern.parts
    return Path(*parts[: next(number for number, part in enumerate(parts) if _WILD.search(part))])


def _passed_over(path: Path) -> str:
    """Why what a pattern matches is left out, "" if it is not."""
    return next((f"file in {part}" for part in path.parts[:-1] if part in PASSED_OVER), "")


def _below(folder: Path) -> Iterator[tuple[Path, str]]:
    """(path, why it is left out, "" if it is not) of everything in a folder, without what is in folders left out."""

    def refuse(error: OSError) -> None:
        raise UsageError(f"{error.filename} cannot be read: {error.strerror}; leave it out with --include") from error

    for parent, folders, files in os.walk(folder, onerror=refuse):
        for name in files:
            yield Path(parent, name), "hidden file" if name.startswith(".") else ""
        for name in [name for name in folders if name.startswith(".") or name in PASSED_OVER]:
            folders.remove(name)
            yield Path(parent, name), "hidden folder" if name.startswith(".") else f"{name} folder"


def _found(
    asked: Path, entries: Iterator[tuple[Path, str]], root: Path, include: Sequence[str], note: Note
) -> list[Source]:
    """Of what a folder holds or a pattern matches, the files that are read, by their paths."""
    left_out: Counter[str] = Counter()
    sources: list[Source] = []
    for number, (path, why) in enumerate(entries):
        if number >= MOST_ENTRIES:
            raise UsageError(f"{path_text(asked)} has over {MOST_ENTRIES:,} entries; name a folder further down")
        name = path_text(path.relative_to(root) if path.is_relative_to(root) else path)
        why = why or _why_left_out(path, name, include)
        source = None if why else _source(path, name)
        if source is None or source.kind == "binary" or not source.num_bytes:
            left_out[why or ("empty file" if source and not source.num_bytes else "binary file")] += 1
        else:
            sources.append(source)
    _check(asked, sources, left_out, include)
    note(_summary(asked, sources, left_out))
    return sorted(sources, key=lambda source: source.path.parts)


def _why_left_out(path: Path, name: str, include: Sequence[str]) -> str:
    if path.is_dir():
        return "folder"
    if not path.is_file():
        return "entry that is no file"
    return "" if _is_included(name, include) else "file that no --include names"


def _is_included(name: str, include: Sequence[str]) -> bool:
    """Patterns with a slash are of the path from the folder on, others of the file's name alone."""
    wanted = [pattern for pattern in include if not pattern.startswith(NOT)]
    unwanted = [pattern.removeprefix(NOT) for pattern in include if pattern.startswith(NOT)]

    def matches(pattern: str) -> bool:
        return fnmatchcase(name if "/" in pattern else name.rpartition("/")[2], pattern)

    return (not wanted or any(map(matches, wanted))) and not any(map(matches, unwanted))


def _source(path: Path, name: str) -> Source:
    try:
        return Source(path, name, kind_of(path), path.stat().st_size, is_found=True)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}; {without(name)}") from error
    except UsageError as error:
        raise UsageError(f"{error}; {without(name)}") from error


def without(name: str) -> str:
    """How one of several files is left out."""
    return f"--include '{NOT}{name}' leaves it out"


def _check(asked: Path, sources: Sequence[Source], left_out: Counter[str], include: Sequence[str]) -> None:
    what, total = path_text(asked), sum(source.num_bytes for source in sources)
    if not sources:
        found = f"; left out: {_counts(left_out)}" if left_out else ""
        patterns = f" and matches --include {' '.join(include)}" if include else ""
        raise UsageError(f"{what} has no document that can be read{patterns}{found}; name another folder or pattern")
    if len(sources) > MOST_FILES or total > MOST_BYTES:
        raise UsageError(
            f"{what} has {counted(len(sources), 'file')} of {size(total)}, read are at most {MOST_FILES:,} of "
            f"{size(MOST_BYTES)}; choose some with --include '*.md'"
        )


def _summary(asked: Path, sources: Sequence[Source], left_out: Counter[str]) -> str:
    total = size(sum(source.num_bytes for source in sources))
    rest = f" (left out: {_counts(left_out)})" if left_out else ""
    return f"{line_text(path_text(asked))}: {counted(len(sources), 'file')}, {total}{rest}"


def _counts(left_out: Counter[str]) -> str:
    """ "2 binary files, 1 hidden folder"."""
    return ", ".join(f"{number:,} {what if number == 1 else _plural(what)}" for what, number in left_out.items())


def _plural(what: str) -> str:
    if what.startswith("entry"):
        return "entries that are no files"
    return what.replace("file ", "files ", 1) if what.startswith("file ") else f"{what}s"


def _told_apart(sources: tuple[Source, ...]) -> tuple[Source, ...]:
    """Files of one name get their paths as names."""
    times = Counter(source.name for source in sources)
    return tuple(
        source if times[source.name] == 1 else replace(source, name=path_text(source.path)) for source in sources
    )
