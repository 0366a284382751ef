"""The prefix store: rows of prompts on the disk, page by page, for every later prompt that begins alike.

A page's file has the sessions' format, and so has one of states after the last token of a page. A file's name is the
digest of everything on which its bits depend (`Conditions`), with its own checksum, so the store has no index. Files
are written under another name and then renamed: a writer that dies leaves a file that nobody reads. What is missing or
damaged is computed again.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from offload.errors import SessionError
from offload.kv.kept import Kept
from offload.kv.parts import Part, Unit
from offload.machine import machine_name
from offload.progress import OnBytes, OnProgress, bytes_of
from offload.session.conditions import Conditions
from offload.session.folder import Folder
from offload.session.manifest import Saved
from offload.session.needs import Needs
from offload.session.store_files import PageName, make_folder, nbytes, note_documents, shrink, unfinished
from offload.session.units import format_of, most_nbytes, read_unit, write_unit
from offload.speed.rates import change_records, read_records
from offload.units import size

MOST_BYTES, FREE_SHARE = 20 * 10**9, 10  # of the store: at most so much, and this part of what the disk has free
_USUAL_RATE, _TELLING_BYTES = 0.5e9, 32 << 20  # bytes a second of an SSD; bytes whose reading tells the rate
NOT_KEPT = "what the model has read is not kept"
_RATE = "store_read"  # key of the measured rate, bytes a second

Key = tuple[str, int]  # the name of a part, and the page with the last token of a unit
Found = tuple[str, str, str]  # the name of a part, a link, and the numbers of a unit that is no page, see `_numbers`
AnyPart = TypeVar("AnyPart", Part, Needs)
OnNote = Callable[[str], None]


@dataclass(frozen=True)
class Stored:
    """The stored pages of a prompt's first `num_tokens` tokens: all that a sequence needs to go on from there."""

    num_tokens: int
    pages: Mapping[Key, Saved]
    nbytes: int


class PrefixStore:
    """The rows under one set of conditions in the store at `root`, which the first `keep` makes.

    limit: bytes of the whole store; None: MOST_BYTES, or the share of the disk. on_note: called with a line about rows
    that could not be used or kept.
    """

    def __init__(self, root: Path, conditions: Conditions, *, limit: int | None = None, on_note: OnNote) -> None:
        self.root, self.path = root, root / conditions.digest
        self._conditions, self._limit, self._on_note = conditions, limit, on_note
        self._page_tokens = conditions.identity.page_tokens
        self._damaged = set[str]()  # files
        self._has_told = False  # that a prompt could not be kept

    def stored(self, parts: Sequence[AnyPart], tokens: Sequence[int]) -> Stored:
        """The longest beginning of `tokens`, a prompt's, with which a sequence of such parts can begin from the
        store."""
        most = len(tokens) - max(part.num_computed for part in parts)
        return self._longest(parts, self._conditions.links(tokens), most)

    def _longest(self, parts: Sequence[AnyPart], links: Sequence[str], most: int) -> Stored:
        """The longest stored beginning, of at most `most` tokens, of the text of these pages."""
        found = self._found(parts)
        for count in range(min(len(links), most // self._page_tokens), 0, -1):
            wanted = _needed(parts, count * self._page_tokens)
            saved = {
                (part.name, self._page_of(unit)): replace(file, unit=unit)
                for part, unit in wanted
                if (file := found.get(self._key(part, unit, links))) is not None
            }
            if len(saved) == len(wanted):
                return Stored(count * self._page_tokens, saved, self._nbytes(saved.values()))
        return Stored(0, {}, 0)

    def read_seconds(self, stored: Stored) -> float:
        """The seconds that `load` is expected to take."""
        rate = read_records(machine_name()).get(_RATE)
        return stored.nbytes / (rate if type(rate) is float and rate > 0 else _USUAL_RATE)

    def load(self, kept: Kept, tokens: Sequence[int], held: int, on_progress: OnProgress) -> int:
        """Fill `kept`, which has the first `held` tokens, in whole pages, with the longest stored beginning of
        `tokens`, a prompt's. Returns the number of tokens that it has then: `held` if no more are stored, perhaps fewer
        after a damaged page."""
        while (stored := self.stored(kept.parts, tokens)).num_tokens > held:
            if self._fill(kept, stored, on_progress):
                self._touch(kept, self._conditions.links(tokens[: stored.num_tokens]))
                return stored.num_tokens
            held = kept.reachable(held)  # a ring has lost its rows
            kept.each("truncate", held)
        return held

    def keep(self, kept: Kept, tokens: Sequence[int], on_progress: OnProgress, documents: Sequence[str] = ()) -> int:
        """Write the missing units of whole pages of `tokens`, the first ones of `kept`, which one prefill has computed.
        Nothing is written where a window has lost rows that a sequence needs to go on from there, or where there are no
        states at ends of pages. documents: names of the prompt's, by which its pages can be removed. Returns the number
        of tokens with which a sequence can begin from the store then. If there is no room for all of them, a note says
        so, once."""
        links = self._conditions.links(tokens)
        length = len(links) * self._page_tokens
        shared = {part.name: part.shared(length, self._page_tokens) for part in kept.parts}
        if not (length := kept.reach(shared, length)):
            return 0
        needed, why = most_nbytes(kept, _needed(kept.parts, length)), ""
        try:
            identity = self._conditions.identity
            make_folder(self.root, self.path, model_name=identity.model_name, dtype=identity.dtype)
            with Folder(self.path) as folder:
                found = self._found(kept.parts)
                fitting = self._with_room(kept, shared, length)
                missing = [each for each in fitting if self._key(*each, links) not in found]
                report = bytes_of("save", most_nbytes(kept, missing), on_progress)
                kept.each("wait_home")
                for part, unit in missing:
                    self._write(folder, kept, part, unit, links[self._page_of(unit)], report)
            stored = self._longest(kept.parts, links, len(tokens))
            self._touch(kept, links[: stored.num_tokens // self._page_tokens])
            shrink(self.root, most := self._most_bytes())
            if needed > most:
                why = f"the store may take {size(most)}; --store-size GB sets another limit"
        except OSError as error:
            why = f"{self.path}: {error.strerror}"
        count = self._longest(kept.parts, links, len(tokens)).num_tokens
        if count:
            with contextlib.suppress(OSError):
                note_documents(self.path, documents, links[: count // self._page_tokens])
        if why:
            self._tell_once(count, f"{size(needed)} are needed, and {why}")
        return count

    def _tell_once(self, kept: int, why: str) -> None:
        """Note that all but the first `kept` tokens of a prompt could not be kept."""
        if not self._has_told:
            some = f"only the first {kept:,} tokens of what the model has read are kept" if kept else NOT_KEPT
            self._on_note(f"{some}: {why}")
            self._has_told = True

    def _with_room(self, kept: Kept, shared: Mapping[str, Sequence[Unit]], length: int) -> list[tuple[Part, Unit]]:
        """The units among `shared` that the store has room for: those of the longest beginning up to `length` that
        fits, then others of it, the last ones first."""
        room = self._most_bytes()
        while length and most_nbytes(kept, _needed(kept.parts, length)) > room:
            length = kept.reach(shared, length - self._page_tokens)
        present = {(part, unit) for part in kept.parts for unit in shared[part.name] if unit[0] <= length}
        needed = [each for each in _needed(kept.parts, length) if each in present]
        room -= most_nbytes(kept, needed)
        others = list[tuple[Part, Unit]]()
        for each in sorted(present.difference(needed), key=lambda each: (-each[1][0], each[0].name)):
            if (num_bytes := most_nbytes(kept, [each])) <= room:
                room -= num_bytes
                others.append(each)
        return needed + others

    def _page_of(self, unit: Unit) -> int:
        """The page with the last token of a unit."""
        return (unit[0] - 1) // self._page_tokens

    def _key(self, part: AnyPart, unit: Unit, links: Sequence[str]) -> Found:
        return part.name, links[self._page_of(unit)], "" if part.in_place else _numbers(unit)

    def _found(self, parts: Sequence[AnyPart]) -> dict[Found, Saved]:
        """The stored units of such parts. The folder need not exist."""
        try:
            names = map(PageName.of, set(os.listdir(self.path)) - self._damaged)
        except OSError:
            return {}
        in_place = {part.name: part.in_place for part in parts}
        return {
            (name.kind, name.link, "" if in_place[name.kind] else name.packed): Saved(
                (), str(name), name.checksum, name.packed
            )
            for name in names
            if name is not None and name.kind in in_place
        }

    def _nbytes(self, files: Iterable[Saved]) -> int:
        """Bytes of stored files."""
        with contextlib.suppress(OSError), Folder(self.path) as folder:
            return folder.nbytes(saved.file for saved in files)
        return 0

    def _fill(self, kept: Kept, stored: Stored, on_progress: OnProgress) -> bool:
        """Read the units that `kept` lacks. Returns False where one is missing or damaged, which then no longer counts;
        then parts that are not filled in place are as they were. Peak host memory: units of those."""
        kept.each("wait_home")
        kept.each("reserve", stored.num_tokens)
        files = [(kept[name], saved) for (name, _), saved in stored.pages.items()]
        missing = [(part, _flags(kept, part, saved)) for part, saved in files if saved.unit[0] > part.length]
        began, total = time.perf_counter(), self._nbytes(saved for _, saved in missing)
        report = bytes_of("restore", total, on_progress)
        read = []
        for part, saved in missing:
            try:
                with Folder(self.path) as folder:
                    read.append((part, saved.unit, read_unit(folder, saved, kept, part, report)))
            except (OSError, SessionError) as error:
                self._spoilt(saved, error)
                return False
        for part, unit, tensors in read:
            if not part.in_place:
                kept.filled(part, unit, tensors)
        kept.each("restored", stored.num_tokens)
        _remember(total, time.perf_counter() - began)
        return True

    def _spoilt(self, saved: Saved, error: Exception) -> None:
        self._damaged.add(saved.file)
        with contextlib.suppress(OSError):
            os.unlink(self.path / saved.file)
        self._on_note(f"a stored page is left out, and computed again: {str(error).partition('; ')[0]}")

    def _touch(self, kept: Kept, links: Sequence[str]) -> None:
        """Note the use of the units of these pages, of the first ones last: a page is of no use without those before
        it."""
        now, numbers = time.time(), {link: number for number, link in enumerate(links)}
        for (_, link, _), saved in self._found(kept.parts).items():
            if link in numbers:
                with contextlib.suppress(OSError):
                    os.utime(self.path / saved.file, (now, now - numbers[link] / 1e3))

    def _write(self, folder: Folder, kept: Kept, part: Part, unit: Unit, link: str, on_bytes: OnBytes) -> None:
        """Write a unit under a name that says that it is not finished, then give it its own. OSError."""
        temporary = unfinished()
        try:
            checksum, packed = write_unit(folder, temporary, kept, part, unit, on_bytes, lasting=False)
            flags = f"{int(packed, 2):x}" if packed else ""
            name = str(PageName(link, part.name, checksum, flags if part.in_place else _numbers(unit)))
            folder.rename(temporary, name)
            self._damaged.discard(name)
        except BaseException:
            with contextlib.suppress(OSError):
                folder.remove(temporary)
            raise

    def _most_bytes(self) -> int:
        return most_bytes(self.root, self._limit)


def most_bytes(root: Path, limit: int | None) -> int:
    """The bytes that the store at `root` may take. limit: that was set. OSError if there is no store."""
    if limit is not None:
        return limit
    with Folder(root) as folder:
        return min(MOST_BYTES, (folder.free_bytes() + nbytes(root)) // FREE_SHARE)


def _needed(parts: Sequence[AnyPart], length: int) -> list[tuple[AnyPart, Unit]]:
    """The units with which a text can go on after `length` tokens: rows last, which are of no use without the
    others."""
    return [(part, unit) for part in reversed(parts) for unit in part.needed(length)]


def _flags(kept: Kept, part: Part, saved: Saved) -> Saved:
    """The file with the flags of its packed blocks, which its name has as a number."""
    num_blocks = len(format_of(kept, part, saved.unit).most_packed)
    return replace(saved, packed=f"{int(saved.packed, 16):0{num_blocks}b}" if part.in_place and saved.packed else "")


def _numbers(unit: Unit) -> str:
    """The numbers of a unit beside its tokens, for its file's name."""
    return "".join(f"{number:x}" for number in unit[1:])


def _remember(num_bytes: int, seconds: float) -> None:
    """Record the rate of reading, the geometric mean of the last ones: files that were just written are still in
    memory."""
    if num_bytes < _TELLING_BYTES:
        return
    rate = num_bytes / max(seconds, 1e-6)

    def changed(records: dict[str, Any]) -> dict[str, Any]:
        known = records.get(_RATE)
        return records | {_RATE: math.sqrt(known * rate) if type(known) is float and known > 0 else rate}

    with contextlib.suppress(OSError):
        change_records(machine_name(), changed)
