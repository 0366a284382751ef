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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from offload.errors import SessionError
from offload.kv.checkpoints import Checkpoint
from offload.machine import machine_name
from offload.progress import OnBytes, OnProgress, bytes_of
from offload.session.conditions import Conditions
from offload.session.folder import Folder
from offload.session.hidden import HiddenRows, read_hidden, write_hidden
from offload.session.kept import Kept
from offload.session.layout import PageFile
from offload.session.manifest import Page
from offload.session.page import PagedRows, read_page, write_page
from offload.session.states import StateRows, read_state, write_state
from offload.session.store_files import PageName, make_folder, nbytes, note_documents, shrink, unfinished
from offload.speed.rates import change_records, read_records
from offload.units import size

MOST_BYTES, FREE_SHARE = 20 * 10**9, 10  # of the store: at most so much, and this part of what the disk has free
_USUAL_RATE, _TELLING_BYTES = 0.5e9, 32 << 20  # bytes a second of an SSD; bytes whose reading tells the rate
NOT_KEPT = "what the model has read is not kept"
_RATE = "store_read"  # key of the measured rate, bytes a second

Key = tuple[str, int]  # the kind of a file, see `PageName`, and the number of a page
OnNote = Callable[[str], None]


@dataclass(frozen=True)
class Stored:
    """The stored pages of a prompt's first `num_tokens` tokens: all that a sequence needs to go on from there."""

    num_tokens: int
    pages: Mapping[Key, Page]
    nbytes: int


class PrefixStore:
    """The rows under one set of conditions in the store at `root`, which the first `keep` makes.

    limit: bytes of the whole store; None: MOST_BYTES, or the share of the disk. on_note: called with a line about rows
    that could not be used or kept.
    """

    def __init__(self, root: Path, conditions: Conditions, *, limit: int | None = None, on_note: OnNote) -> None:
        self.root, self.path = root, root / conditions.digest
        self._conditions, self._limit, self._on_note = conditions, limit, on_note
        identity = conditions.identity
        self._page_tokens = identity.page_tokens
        self._formats = {"rows": identity.page_format, "windows": identity.window_format}
        self._state_format, self._hidden_format = identity.state_format, conditions.hidden
        self._damaged = set[str]()  # files
        self._has_told = False  # that a prompt could not be kept

    def stored(self, tokens: Sequence[int]) -> Stored:
        """The longest beginning of `tokens`, a prompt's, with which a sequence can begin from the store."""
        return self._longest(self._conditions.links(tokens), self._conditions.most_stored(len(tokens)))

    def _longest(self, links: Sequence[str], most: int) -> Stored:
        """The longest stored beginning, of at most `most` tokens, of the text of these pages."""
        found = self._pages()
        for count in range(min(len(links), most // self._page_tokens), 0, -1):
            wanted = self._wanted(count, self._conditions.first_seen(count * self._page_tokens))
            wanted += [("states", count - 1)] if self._state_format is not None else []
            wanted += self._hidden_keys
            pages = {
                key: page
                for key in wanted
                if key[1] < len(links) and (page := found.get((key[0], links[key[1]]))) is not None
            }
            if len(pages) == len(wanted):
                return Stored(count * self._page_tokens, pages, self._nbytes(pages))
        return Stored(0, {}, 0)

    def read_seconds(self, stored: Stored) -> float:
        """The seconds that `load` is expected to take."""
        rate = read_records(machine_name()).get(_RATE)
        return stored.nbytes / (rate if type(rate) is float and rate > 0 else _USUAL_RATE)

    def load(self, kept: Kept, tokens: Sequence[int], held: int, on_progress: OnProgress) -> int:
        """Fill `kept`, which has the first `held` tokens, in whole pages, with the longest stored beginning of
        `tokens`, a prompt's. Returns the number of tokens that it has then: `held` if no more are stored, perhaps fewer
        after a damaged page."""
        while (stored := self.stored(tokens)).num_tokens > held:
            if self._fill(kept, stored, held, on_progress):
                self._touch(stored, tokens)
                return stored.num_tokens
            held = held if kept.windows is None else 0  # a ring has lost its rows
            for part in kept.paged.values():
                part.restored(held)
        return held

    def keep(self, kept: Kept, tokens: Sequence[int], on_progress: OnProgress, documents: Sequence[str] = ()) -> int:
        """Write the missing whole pages of `tokens`, the first ones of `kept`, which one prefill has computed, states
        at ends of pages, up to the last of them, and the first hidden rows. Nothing is written where a window has lost
        rows that a sequence needs to go on from there, or where there are no such states. documents: names of the
        prompt's, by which its pages can be removed. Returns the number of tokens with which a sequence can begin from
        the store then. If there is no room for all of them, a note says so, once."""
        rows, windows, states, hidden = kept.rows, kept.windows, kept.states, kept.hidden
        links = self._conditions.links(tokens)
        ends: Sequence[int] = ()
        if states is not None:
            ends = [place // self._page_tokens for place in states.places if place % self._page_tokens == 0]
            links = links[: max((end for end in ends if end <= len(links)), default=0)]
            if not links:
                return 0
        stop, first = len(links) * self._page_tokens, 0 if windows is None else windows.first_page
        if windows is not None and first > self._conditions.first_seen(stop):
            return 0
        needed, why = self._needed(len(links), first), ""
        try:
            identity = self._conditions.identity
            make_folder(self.root, self.path, model_name=identity.model_name, dtype=identity.dtype)
            with Folder(self.path) as folder:
                if states is not None:
                    ends = self._with_room([end for end in ends if end <= len(links)])
                    links = links[: max(ends, default=0)]
                missing = self._missing(links, first, ends, [] if hidden is None else self._hidden_keys)
                report = bytes_of("save", sum(self._most_nbytes(kind) for kind, _ in missing), on_progress)
                rows.wait_home()
                for kind, number in missing:
                    if kind == "states" and states is not None:
                        self._write_state(folder, states, number, links[number], report)
                        continue
                    if kind == "hidden" and hidden is not None:
                        self._write_hidden(folder, hidden, links[number], report)
                        continue
                    cache = rows if windows is None or kind == "rows" else windows
                    self._write(folder, cache, kind, number, links[number], report)
            self._touch(self._longest(self._conditions.links(tokens), len(tokens)), tokens)
            shrink(self.root, most := self._most_bytes())
            if needed > most:
                why = f"the store may take {size(most)}; --store-size GB sets another limit"
        except OSError as error:
            why = f"{self.path}: {error.strerror}"
        count = self._longest(self._conditions.links(tokens), len(tokens)).num_tokens
        if count:
            with contextlib.suppress(OSError):
                note_documents(self.path, documents, self._conditions.links(tokens[:count]))
        if why:
            self._tell_once(count, f"{size(needed)} are needed, and {why}")
        return count

    def _needed(self, count: int, first: int) -> int:
        """The most bytes of the files with which a sequence can begin after `count` pages, windows' from `first` on."""
        kinds = [kind for kind, _ in self._wanted(count, first)]
        return sum(map(self._most_nbytes, (*kinds, "states", "hidden")))

    def _tell_once(self, kept: int, why: str) -> None:
        """Note that all but the first `kept` tokens of a prompt could not be kept."""
        if not self._has_told:
            some = f"only the first {kept:,} tokens of what the model has read are kept" if kept else NOT_KEPT
            self._on_note(f"{some}: {why}")
            self._has_told = True

    def _wanted(self, count: int, first: int) -> list[Key]:
        """The pages of `count` pages of tokens, in layers with a window from page `first` on."""
        firsts = {"rows": 0, "windows": first}
        kinds = [kind for kind, form in self._formats.items() if form.num_layers]
        return [(kind, number) for kind in kinds for number in range(firsts[kind], count)]

    def _with_room(self, ends: Sequence[int]) -> Sequence[int]:
        """The ends among `ends` that the store has room for. The last one is the latest end that fits with its states
        and all pages before it; the others are the ends just before it, as many as the remaining room has states for.
        ends: numbers of first pages after which there are states, ascending."""
        room, per_state = self._most_bytes(), self._most_nbytes("states")
        per_page = sum(form.nbytes for form in self._formats.values() if form.num_layers)
        for count in range(len(ends), 0, -1):
            if (left := room - ends[count - 1] * per_page) >= per_state:
                return ends[max(count - left // per_state, 0) : count]
        return ()

    @property
    def _hidden_keys(self) -> list[Key]:
        """The file of hidden rows, by the page with the last of them; none without a next-token head."""
        form = self._hidden_format
        return [] if form is None or not form.num_rows else [("hidden", (form.num_rows - 1) // self._page_tokens)]

    def _missing(self, links: Sequence[str], first: int, ends: Sequence[int], hidden: Sequence[Key]) -> list[Key]:
        """The pages that the store lacks and has room for, those of rows last: without the others they are of no use.
        ends: numbers of first pages after which states are kept. hidden: files of hidden rows."""
        found, room = self._pages(), self._most_bytes()
        missing = []
        wanted = [*self._wanted(len(links), first), *(("states", end - 1) for end in ends)]
        wanted += [key for key in hidden if key[1] < len(links)]
        for key in sorted(wanted, key=lambda key: key[0] == "rows"):
            room -= self._most_nbytes(key[0])
            if (key[0], links[key[1]]) not in found and room >= 0:
                missing.append(key)
        return missing

    def _pages(self) -> dict[tuple[str, str], Page]:
        """The stored pages by kind and link. The folder need not exist."""
        try:
            names = set(os.listdir(self.path)) - self._damaged
        except OSError:
            return {}
        found = {}
        for name in filter(None, map(PageName.of, names)):
            if name.kind == "states":
                if self._state_format is not None and not name.packed:
                    found[name.kind, name.link] = Page(str(name), name.checksum)
                continue
            if name.kind == "hidden":
                if self._hidden_format is not None and name.packed == f"{self._hidden_format.num_rows:x}":
                    found[name.kind, name.link] = Page(str(name), name.checksum)
                continue
            form = self._formats[name.kind]
            packed = f"{int(name.packed, 16):0{len(form.most_packed)}b}" if name.packed else ""
            if form.allows(packed):
                found[name.kind, name.link] = Page(str(name), name.checksum, packed)
        return found

    def _nbytes(self, pages: Mapping[Key, Page]) -> int:
        return sum(
            PageFile(self._formats[kind], page.packed).nbytes if kind in self._formats else self._most_nbytes(kind)
            for (kind, _), page in pages.items()
        )

    def _most_nbytes(self, kind: str) -> int:
        """The most bytes of a file."""
        others = {"states": self._state_format, "hidden": self._hidden_format}
        form = others[kind] if kind in others else self._formats[kind]
        return form.nbytes if form is not None else 0

    def _fill(self, kept: Kept, stored: Stored, held: int, on_progress: OnProgress) -> bool:
        """Read the pages that the caches lack. Returns False where one is missing or damaged, which then no longer
        counts; then states and hidden rows are as they were. Peak host memory: states of one place."""
        first = held // self._page_tokens
        missing = {key: page for key, page in stored.pages.items() if key[0] == "windows" or key[1] >= first}
        began, total = time.perf_counter(), self._nbytes(missing)
        report = bytes_of("restore", total, on_progress)
        paged = kept.paged
        for cache in paged.values():
            cache.wait_home()
            cache.reserve(stored.num_tokens)
        if kept.windows is not None:
            kept.windows.restored(0)
        whole = dict[str, Checkpoint | Tensor]()  # of each kind that is no page
        for (kind, number), page in missing.items():
            if kind not in paged:
                if (found := self._read(kind, page, report)) is None:
                    return False
                whole[kind] = found
                continue
            layers = paged[kind].page_to_fill(number)
            try:
                with Folder(self.path) as folder:
                    read_page(folder, page, self._formats[kind], layers, report)
            except (OSError, SessionError) as error:
                self._spoilt(page, error)
                return False
            finally:
                paged[kind].filled(number, layers)
        for cache in paged.values():
            cache.restored(stored.num_tokens)
        if kept.states is not None and isinstance(state := whole.get("states"), Checkpoint):
            kept.states.fill(stored.num_tokens, state)
            kept.states.restored(stored.num_tokens)
        if kept.hidden is not None and isinstance(rows := whole.get("hidden"), Tensor):
            kept.hidden.fill(rows, len(rows), rows[:0])
        _remember(total, time.perf_counter() - began)
        return True

    def _spoilt(self, page: Page, error: Exception) -> None:
        self._damaged.add(page.file)
        with contextlib.suppress(OSError):
            os.unlink(self.path / page.file)
        self._on_note(f"a stored page is left out, and computed again: {str(error).partition('; ')[0]}")

    def _read(self, kind: str, page: Page, on_bytes: OnBytes) -> Checkpoint | Tensor | None:
        """The states or the hidden rows in a file; None if it is missing or damaged, and then no longer counts."""
        try:
            with Folder(self.path) as folder:
                if kind == "states" and self._state_format is not None:
                    return read_state(folder, page.file, page.checksum, self._state_format, on_bytes)
                assert self._hidden_format is not None, "only next-token heads read them"
                return read_hidden(folder, page.file, page.checksum, self._hidden_format, on_bytes)
        except (OSError, SessionError) as error:
            self._spoilt(page, error)
            return None

    def _touch(self, stored: Stored, tokens: Sequence[int]) -> None:
        """Note the use of pages, of the first ones last: a page is of no use without those before it. So are states
        after each of them."""
        now, used = time.time(), dict(stored.pages)
        if self._state_format is not None:
            found, links = self._pages(), self._conditions.links(tokens[: stored.num_tokens])
            used |= {
                ("states", number): page
                for number, link in enumerate(links)
                if (page := found.get(("states", link))) is not None
            }
        for (_, number), page in used.items():
            with contextlib.suppress(OSError):
                os.utime(self.path / page.file, (now, now - number / 1e3))

    def _write(self, folder: Folder, cache: PagedRows, kind: str, number: int, link: str, on_bytes: OnBytes) -> None:
        """Write a page under a name that says that it is not finished, then give it its own. OSError."""
        form = self._formats[kind]

        def write(temporary: str) -> PageName:
            layers = cache.page_of_all(number)
            page = write_page(folder, temporary, form, layers, form.page_tokens, on_bytes, lasting=False)
            return PageName(link, kind, page.checksum, f"{int(page.packed, 2):x}" if page.packed else "")

        self._named(folder, write)

    def _write_state(self, folder: Folder, states: StateRows, number: int, link: str, on_bytes: OnBytes) -> None:
        """Write the states after page `number`, see `_write`."""
        form = self._state_format
        assert form is not None, "only models with states keep them"

        def write(temporary: str) -> PageName:
            found = states.checkpoint((number + 1) * self._page_tokens)
            checksum = write_state(folder, temporary, form, found, on_bytes, lasting=False)
            return PageName(link, "states", checksum, "")

        self._named(folder, write)

    def _write_hidden(self, folder: Folder, hidden: HiddenRows, link: str, on_bytes: OnBytes) -> None:
        """Write the hidden rows of a text's first tokens, see `_write`."""
        form = self._hidden_format
        assert form is not None, "only next-token heads read them"

        def write(temporary: str) -> PageName:
            checksum = write_hidden(folder, temporary, form, hidden.first_rows, on_bytes, lasting=False)
            return PageName(link, "hidden", checksum, f"{form.num_rows:x}")

        self._named(folder, write)

    def _named(self, folder: Folder, write: Callable[[str], PageName]) -> None:
        """Have a file written under a temporary name, then give it its own. OSError."""
        temporary = unfinished()
        try:
            name = str(write(temporary))
            folder.rename(temporary, name)
            self._damaged.discard(name)
        except BaseException:
            with contextlib.suppress(OSError):
                folder.remove(temporary)
            raise

    def _most_bytes(self) -> int:
        if self._limit is not None:
            return self._limit
        with Folder(self.root) as folder:
            return min(MOST_BYTES, (folder.free_bytes() + nbytes(self.root)) // FREE_SHARE)


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
