"""The store of a session on disk: `manifest.json`, one file per page of tokens, over all layers, states, hidden rows.

A save writes changed pages to new files, then replaces the manifest, then removes the files that it no longer names.
If the writer dies at any point, the folder holds the complete old or new session, and perhaps files that the next
writer removes.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch

from offload.errors import DoesNotFit, SessionError
from offload.progress import OnBytes
from offload.session import manifest as manifests
from offload.session.folder import Folder
from offload.session.hidden import HiddenRows, planned_hidden, read_hidden, write_hidden
from offload.session.identity import Identity
from offload.session.kept import Kept
from offload.session.layout import HiddenFormat, PageFile, PageFormat
from offload.session.leftovers import discard, sweep, temporary_file
from offload.session.manifest import MANIFEST_FILE, NO_CHECKSUM, Hidden, Manifest, Page, State, page_file
from offload.session.opening import check_identity, no_session, open_to_read, open_to_write, translated_errors
from offload.session.page import PagedRows, WindowRows, format_of, read_page, write_page
from offload.session.states import StateRows, planned, read_states, state_format_of, write_state
from offload.units import size


def _ignore(num_bytes: int, fewer: int = 0, /) -> None:
    return None


class Store:
    """An open session, and a context manager: `close` releases its locks.

    There is one writer at a time. A `read_only` store writes nothing and does not block a writer, but pages that a
    writer replaces stay on the disk until all readers have closed, so close it once everything is loaded.
    """

    def __init__(
        self,
        folder: Folder,
        identity: Identity,
        manifest: Manifest | None,
        held: ExitStack,
        *,
        read_only: bool,
        writer: str,
    ) -> None:
        self.identity, self.read_only = identity, read_only
        self._folder, self._format, self._manifest = folder, identity.page_format, manifest
        self._window_format, self._state_format = identity.window_format, identity.state_format
        self._held, self._writer, self._closed = held, writer, False

    @classmethod
    def open(cls, path: Path, identity: Identity, *, read_only: bool = False, writer: str = "") -> Store:
        """Open the session in the folder `path`, or a new one. writer: the program's version, stored in the manifest.

        Raises SessionError if it is damaged, another model's (the message lists the differences), in use, or missing
        with `read_only`, or if the system refuses.
        """
        with ExitStack() as held, translated_errors(path, read_only):
            folder = open_to_read(path, held) if read_only else open_to_write(path, held)
            manifest = manifests.read(folder)
            if manifest is not None:
                check_identity(path, manifest.identity, identity)
            elif read_only:  # removed since its folder was opened
                raise no_session(path)
            if not read_only:
                sweep(folder, manifest)
            return cls(folder, identity, manifest, held.pop_all(), read_only=read_only, writer=writer)

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens whose keys and values are saved."""
        return self._manifest.tokens if self._manifest else ()

    @property
    def capacity(self) -> int:
        return self._manifest.capacity if self._manifest else 0

    @property
    def extra(self) -> Mapping[str, object]:
        return self._manifest.extra if self._manifest else {}

    @property
    def nbytes(self) -> int:
        """Bytes of the pages, states and hidden rows on the disk."""
        return self.bytes_to_read(len(self.tokens))

    def bytes_to_read(self, num_tokens: int) -> int:
        """The most bytes of pages, states and hidden rows that `load` reads for the first `num_tokens` saved tokens."""
        if self._manifest is None:
            return 0
        windows = self._manifest.windows_by_number.items()
        return (
            _bytes_of(self._format, self._manifest.pages[: self._format.count(num_tokens)])
            + _bytes_of(
                self._window_format,
                [page for number, page in windows if number < self._window_format.count(num_tokens)],
            )
            + self._bytes_of_states(sum(state.place <= num_tokens for state in self._manifest.states))
            + self._bytes_of_hidden(self._manifest.hidden, len(self.tokens))
        )

    def num_loadable(self, num_tokens: int, windows: WindowRows | None = None) -> int:
        """How many of the first `num_tokens` saved tokens `load` can restore so that a sequence can continue: none if a
        window needs tokens that were not saved; where layers have a state, those before the last one that was."""
        if self._manifest is None:
            return num_tokens
        counts = [num_tokens]
        if self._state_format is not None:
            counts = [state.place for state in self._manifest.states if state.place <= num_tokens]
        first = self._manifest.first_window_page
        return max((count for count in counts if windows is None or first <= windows.first_seen(count)), default=0)

    def load(
        self,
        kept: Kept,
        num_tokens: int,
        *,
        on_bytes: OnBytes = _ignore,
    ) -> None:
        """Replace the contents of `kept` by the first `num_tokens` saved tokens, which must be loadable.

        Whole pages are read, directly into the caches' memory. Raises SessionError if a file is damaged; then the
        caches are empty. on_bytes: called with the number of bytes read.
        """
        self._check(kept)
        rows, windows, states, hidden = kept.rows, kept.windows, kept.states, kept.hidden
        if not 0 <= num_tokens <= len(self.tokens) or self.num_loadable(num_tokens, windows) < num_tokens:
            raise ValueError(f"{num_tokens} tokens of {len(self.tokens)}")
        kept.clear()
        rows.reserve(num_tokens)
        pages = self._manifest.pages if self._manifest else ()
        for number in range(self._format.count(num_tokens)):
            self._read(rows, number, pages[number], self._format, on_bytes)
        if windows is not None and self._manifest is not None:
            saved = self._manifest.windows_by_number
            first = max(windows.first_kept(num_tokens), self._manifest.first_window_page)
            for number in range(first, self._window_format.count(num_tokens)):
                self._read(windows, number, saved[number], self._window_format, on_bytes)
        if states is not None and self._manifest is not None and self._state_format is not None:
            read_states(self._folder, self._manifest.states, self._state_format, states, num_tokens, on_bytes)
        if hidden is not None and self._manifest is not None and (saved_rows := self._manifest.hidden) is not None:
            form = replace(self._hidden_format(saved_rows, len(self.tokens)), size=hidden.shape[0])
            found = read_hidden(self._folder, saved_rows.file, saved_rows.checksum, form, on_bytes)
            hidden.fill(found[: saved_rows.num_first], saved_rows.start, found[saved_rows.num_first :])
            hidden.truncate(num_tokens)
        for part in kept.paged.values():
            part.restored(num_tokens)

    def _read(self, rows: PagedRows, number: int, page: Page, form: PageFormat, on_bytes: OnBytes) -> None:
        layers = rows.page_to_fill(number)
        read_page(self._folder, page, form, layers, on_bytes)
        rows.filled(number, layers)

    def bytes_to_write(self, num_tokens: int, unchanged: int, kept: Kept) -> int:
        """The most bytes of files that `save` would write for these arguments: pages that can be packed take less."""
        same, windows = self._num_same(num_tokens, unchanged), kept.windows
        new = max(self._format.count(num_tokens) - same, 0) * self._format.nbytes
        states = self._planned_states(kept.states, num_tokens, unchanged, "")
        new += self._bytes_of_states(sum(state.checksum == NO_CHECKSUM for state in states))
        hidden = self._planned_hidden(kept.hidden, num_tokens, unchanged, "")
        new += self._bytes_of_hidden(hidden, num_tokens) if hidden and hidden.checksum == NO_CHECKSUM else 0
        if windows is None:
            return new
        num_windows = self._window_format.count(num_tokens) - windows.first_page
        return new + (num_windows - len(self._same_windows(same, windows))) * self._window_format.nbytes

    def save(
        self,
        kept: Kept,
        tokens: Sequence[int],
        *,
        capacity: int,
        extra: Mapping[str, object],
        unchanged: int,
        on_bytes: OnBytes = _ignore,
    ) -> None:
        """Replace the saved session by `tokens`, which are the first tokens of `kept`.

        unchanged: number of first tokens whose rows are bit for bit the last loaded or saved ones; pages that hold only
        such tokens, and states among them, are not written again. capacity, extra (plain JSON): stored for the caller.
        Raises DoesNotFit before anything is written if the disk has no room, SessionError if writing fails. After any
        error the session is either the old one or the new one; `tokens` tells which. on_bytes: called with numbers of
        bytes, and with the shrinkage of the total from `bytes_to_write`.
        """
        self._check(kept)
        if self.read_only:
            raise RuntimeError("this session was opened read-only")
        if len(tokens) > kept.rows.length:
            raise ValueError(f"{len(tokens)} tokens, and rows of {kept.rows.length}")
        if not 0 <= unchanged <= len(tokens) or tuple(tokens[:unchanged]) != self.tokens[:unchanged]:
            raise ValueError(f"the first {unchanged} tokens are not those that were saved")
        planned = self._planned_manifest(tokens, capacity, extra, unchanged, kept)
        needed = self.bytes_to_write(len(tokens), unchanged, kept) + len(manifests.encode(planned))
        self._check_space(needed)
        kept.rows.wait_home()
        with self._recovered(needed):
            written = self._write_pages(planned, kept, on_bytes)
            written = self._write_states(written, kept.states, on_bytes)
            self._manifest = self._publish(self._write_hidden(written, kept.hidden, on_bytes))
        sweep(self._folder, self._manifest)

    def keep(self, extra: Mapping[str, object]) -> None:
        """Replace `extra`, the caller's data, without changing the saved rows. Raises the errors of `save`."""
        if self.read_only:
            raise RuntimeError("this session was opened read-only")
        old, now = self._manifest, time.time()
        known = old or Manifest(self.identity, (), (), 0, {}, now, now)
        planned = replace(known, extra=dict(extra), updated=now, writer=self._writer)
        self._check_space(needed := len(manifests.encode(planned)))
        with self._recovered(needed):
            self._manifest = self._publish(planned)

    def close(self) -> None:
        """Release the locks. Idempotent. A new session that was never saved is removed."""
        with self._held:
            if self.read_only or self._closed:
                return
            self._closed = True
            self._recover()
            if self._manifest is None:
                with contextlib.suppress(OSError):  # the folder may hold foreign files
                    discard(self._folder)

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _num_same(self, num_tokens: int, unchanged: int) -> int:
        """Number of first pages that need not be written. The partly used last page counts only if nothing is added."""
        page = self._format.page_tokens
        return -(-num_tokens // page) if unchanged == num_tokens == len(self.tokens) else unchanged // page

    def _same_windows(self, num_same: int, windows: WindowRows) -> dict[int, Page]:
        """The pages of layers with a window that need not be written. num_same: number of first pages that stay."""
        saved = self._manifest.windows_by_number if self._manifest else {}
        return {number: page for number, page in saved.items() if windows.first_page <= number < num_same}

    def _planned_manifest(
        self,
        tokens: Sequence[int],
        capacity: int,
        extra: Mapping[str, object],
        unchanged: int,
        kept: Kept,
    ) -> Manifest:
        """The manifest of the coming save, at its longest. Its new pages and states are named but not yet written."""
        now, tag, old, windows = time.time(), secrets.token_hex(8), self._manifest, kept.windows
        num_same = self._num_same(len(tokens), unchanged)
        same = old.pages[:num_same] if old else ()
        new = range(len(same), self._format.count(len(tokens)))
        pages = (*same, *(Page(page_file(number, tag), NO_CHECKSUM, self._format.most_packed) for number in new))
        created = old.created if old else now
        planned = Manifest(self.identity, tuple(tokens), pages, capacity, dict(extra), created, now, self._writer)
        planned = replace(
            planned,
            states=self._planned_states(kept.states, len(tokens), unchanged, tag),
            hidden=self._planned_hidden(kept.hidden, len(tokens), unchanged, tag),
        )
        if windows is None:
            return planned
        known, most = self._same_windows(num_same, windows), self._window_format.most_packed
        numbers = range(windows.first_page, self._window_format.count(len(tokens)))
        of_windows = (
            known.get(number) or Page(page_file(number, tag, "window"), NO_CHECKSUM, most) for number in numbers
        )
        return replace(planned, window_pages=tuple(of_windows), first_window_page=numbers.start)

    def _planned_states(self, states: StateRows | None, num_tokens: int, unchanged: int, tag: str) -> tuple[State, ...]:
        saved = self._manifest.states if self._manifest else ()
        return () if states is None else planned(states, saved, num_tokens, unchanged, tag)

    def _planned_hidden(self, hidden: HiddenRows | None, num_tokens: int, unchanged: int, tag: str) -> Hidden | None:
        saved = self._manifest.hidden if self._manifest else None
        is_same = unchanged == num_tokens == len(self.tokens)
        return planned_hidden(hidden, saved, num_tokens, is_same=is_same, tag=tag)

    def _hidden_format(self, hidden: Hidden, num_tokens: int) -> HiddenFormat:
        return HiddenFormat(hidden.num_rows(num_tokens), hidden.size, self.identity.dtype)

    def _bytes_of_hidden(self, hidden: Hidden | None, num_tokens: int) -> int:
        return self._hidden_format(hidden, num_tokens).nbytes if hidden else 0

    def _bytes_of_states(self, count: int) -> int:
        return count * self._state_format.nbytes if self._state_format else 0

    def _check_space(self, needed: int) -> None:
        free = self._folder.free_bytes()
        if needed > free:
            raise DoesNotFit(
                f"saving this session takes up to {size(needed)} more in {self._folder.path}, {size(free)} are free; "
                "make room ('triforce sessions prune'), or have TRIFORCE_SESSIONS_DIR name a folder on a larger disk"
            )

    def _write_pages(self, planned: Manifest, kept: Kept, on_bytes: OnBytes) -> Manifest:
        def written(rows: PagedRows, number: int, page: Page, form: PageFormat) -> Page:
            if page.checksum != NO_CHECKSUM:
                return page
            used = len(planned.tokens) - number * form.page_tokens
            return write_page(self._folder, page.file, form, rows.page_of_all(number), used, on_bytes)

        pages = tuple(written(kept.rows, number, page, self._format) for number, page in enumerate(planned.pages))
        if (windows := kept.windows) is None:
            return replace(planned, pages=pages)
        of_windows = planned.windows_by_number.items()
        own = tuple(written(windows, number, page, self._window_format) for number, page in of_windows)
        return replace(planned, pages=pages, window_pages=own)

    def _write_states(self, planned: Manifest, states: StateRows | None, on_bytes: OnBytes) -> Manifest:
        def written(state: State) -> State:
            if states is None or self._state_format is None or state.checksum != NO_CHECKSUM:
                return state
            found = states.checkpoint(state.place)
            checksum = write_state(self._folder, state.file, self._state_format, found, on_bytes)
            return replace(state, checksum=checksum)

        return replace(planned, states=tuple(map(written, planned.states)))

    def _write_hidden(self, planned: Manifest, hidden: HiddenRows | None, on_bytes: OnBytes) -> Manifest:
        new = planned.hidden
        if hidden is None or new is None or new.checksum != NO_CHECKSUM:
            return planned
        rows = torch.cat([hidden.first_rows, hidden.read(new.start, len(planned.tokens))])
        form = self._hidden_format(new, len(planned.tokens))
        checksum = write_hidden(self._folder, new.file, form, rows, on_bytes)
        return replace(planned, hidden=replace(new, checksum=checksum))

    def _publish(self, manifest: Manifest) -> Manifest:
        temporary = temporary_file(secrets.token_hex(8))
        self._folder.write(temporary, manifests.encode(manifest))
        self._folder.replace(temporary, MANIFEST_FILE)
        return manifest

    @contextlib.contextmanager
    def _recovered(self, needed: int) -> Iterator[None]:
        """A context for a save of up to `needed` bytes: after any failure the session is reread from the disk."""
        try:
            yield
        except BaseException as error:
            self._recover()
            if not isinstance(error, OSError):
                raise
            raise SessionError(
                f"{self._folder.path}: saving failed ({error.strerror}): up to {size(needed)} were to be "
                f"written, {size(self._folder.free_bytes())} are free; the last save is complete: make room "
                "('triforce sessions prune') and save again"
            ) from error

    def _recover(self) -> None:
        """Read the manifest on the disk after a failed save, and remove the files that it does not name."""
        self._manifest = manifests.read(self._folder)
        sweep(self._folder, self._manifest)

    def _check(self, kept: Kept) -> None:
        """Raises ValueError where `kept` has other parts than the session is for."""
        rows, windows, states = kept.rows, kept.windows, kept.states
        if format_of(rows) != self._format:
            raise ValueError(f"rows are {format_of(rows)}, the session is for {self._format}")
        if (windows is not None) != bool(self._window_format.num_layers):
            raise ValueError(f"the session is for {self._window_format.num_layers} layers with a window")
        if windows is not None and format_of(windows) != self._window_format:
            raise ValueError(f"windows are {format_of(windows)}, the session is for {self._window_format}")
        own = None if states is None else state_format_of(states)
        if own != self._state_format:
            raise ValueError(f"states are {own}, the session is for {self._state_format}")


def _bytes_of(form: PageFormat, pages: Sequence[Page]) -> int:
    """Bytes of the files of `pages`."""
    counts = Counter(page.packed for page in pages)
    return sum(PageFile(form, packed).nbytes * count for packed, count in counts.items())
