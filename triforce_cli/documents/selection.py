"""The files to read among named files, patterns and folders, and the files' names in headings."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

from offload.errors import UsageError, shell_line
from offload.interrupts import poll
from offload.units import size
from triforce_cli.documents.kinds import Kind, kind_of
from triforce_cli.documents.walk import AGAIN, OUTWARD, UNREADABLE, Pattern, Walk
from triforce_cli.ground.inputs import Note
from triforce_cli.ground.text import counted, line_text, path_text
from triforce_cli.screen.utf8 import PIPED, STDIN, user_path

MOST_FILES = 10_000
MOST_BYTES = 1 << 30
NOT = "!"  # begins a pattern of files to leave out

_PLURAL = {  # of the words after "that"
    "is no file": "are no files",
    "leads outside": "lead outside",
    "leads to what is left out": "lead to what is left out",
    "repeats what is read": "repeat what is read",
}
_WILD = re.compile(r"[*?\[]")


@dataclass(frozen=True)
class Named:
    """Paths that a person names. include: patterns that select files in folders and among matches of patterns."""

    paths: tuple[Path, ...] = ()
    include: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.paths)

    def __str__(self) -> str:
        return ", ".join(PIPED if path == STDIN else path_text(path) for path in self.paths)


@dataclass(frozen=True)
class Source:
    """A file to read. name: as in its heading. kind: None for a pipe, which can be read only once, and for a missing
    file. is_found: found in a folder or by a pattern, not named itself."""

    path: Path
    name: str
    kind: Kind | None = None
    num_bytes: int = 0
    is_found: bool = False


def select(named: Named, *, note: Note) -> tuple[Source, ...]:
    """The files to read, each once: in the order of the named paths, and by path within a folder or pattern. Notes say
    how many files a folder or pattern has, their size, and what is left out. Raises UsageError."""
    sources: dict[str, Source] = {}
    for path in named.paths:
        for source in _sources(path, named.include, note):
            sources.setdefault(os.path.realpath(source.path) if source.path != STDIN else "-", source)
    _check_size(str(named), sum(source.num_bytes for source in sources.values()))
    return _told_apart(tuple(sources.values()))


def _sources(path: Path, include: Sequence[str], note: Note) -> Sequence[Source]:
    if path == STDIN:
        return [Source(STDIN, PIPED)]
    there = path if os.path.lexists(path) else user_path(str(path))
    if there.is_dir():
        return _found(there, there, Pattern(), include, note)
    if os.path.lexists(there) or not _WILD.search(str(path)):
        return [_named_file(there)]
    fixed = next(number for number, part in enumerate(there.parts) if _WILD.search(part))
    return _found(there, Path(*there.parts[:fixed]), Pattern(there.parts[fixed:]), include, note)


def _named_file(path: Path) -> Source:
    """The file at a named path; symbolic links are followed."""
    name = path_text(Path(path.name))
    if not path.is_file():  # a pipe, or missing: reading it raises the error
        return Source(path, name)
    try:
        _check_size(path_text(path), num_bytes := path.stat().st_size)
        return Source(path, name, kind_of(path), num_bytes)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error


def _found(asked: Path, root: Path, pattern: Pattern, include: Sequence[str], note: Note) -> list[Source]:
    """The files to read in a folder, or among a pattern's matches, by their paths."""
    left_out: Counter[str] = Counter()
    found: dict[Path, tuple[Path, Source]] = {}
    for entry in Walk(root, pattern, asked=asked).entries():
        poll()
        name = path_text(entry.path.relative_to(root))
        why = entry.why or ("" if _is_included(name, include) else "file that no --include names")
        real = Path(os.path.realpath(entry.real))
        source = None if why or real in found else _source(entry.real, name)
        if source is None:
            left_out[why or AGAIN] += 1
        elif source.kind == "binary" or not source.num_bytes:
            left_out["binary file" if source.num_bytes else "empty file"] += 1
        else:
            found[real] = entry.path, source
    sources = [source for _, source in sorted(found.values(), key=lambda pair: pair[0].parts)]
    _check(asked, sources, left_out, include)
    note(_summary(asked, sources, left_out), urgent=UNREADABLE in left_out)
    return sources


def _is_included(name: str, include: Sequence[str]) -> bool:
    """True if the patterns include the file. Patterns with a slash match the path below the folder, others the file's
    name."""
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
    """The remedy that leaves one of several files out."""
    return f"{shell_line('--include', f'{NOT}{name}')} leaves it out"


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


def _check_size(what: str, num_bytes: int) -> None:
    if num_bytes > MOST_BYTES:
        raise UsageError(f"{what} has {size(num_bytes)}, read are at most {size(MOST_BYTES)}; split it")


def _summary(asked: Path, sources: Sequence[Source], left_out: Counter[str]) -> str:
    total = size(sum(source.num_bytes for source in sources))
    rest = f" (left out: {_counts(left_out)})" if left_out else ""
    return f"{line_text(path_text(asked))}: {counted(len(sources), 'file')}, {total}{rest}"


def _counts(left_out: Counter[str]) -> str:
    """The numbers of entries left out: "2 binary files, 1 hidden folder"."""
    counts = ", ".join(
        f"{number:,} {what if number == 1 else _plural(what)}" for what, number in sorted(left_out.items())
    )
    return f"{counts}; name a link to read what it leads to" if OUTWARD in left_out else counts


def _plural(what: str) -> str:
    noun, that, rest = what.partition(" that ")
    plural = "entries" if noun == "entry" else f"{noun}s"
    return f"{plural}{that}{_PLURAL.get(rest, rest)}"


def _told_apart(sources: tuple[Source, ...]) -> tuple[Source, ...]:
    """The sources, with paths as names for files that share a name."""
    times = Counter(source.name for source in sources)
    return tuple(
        source if times[source.name] == 1 else replace(source, name=path_text(source.path)) for source in sources
    )
