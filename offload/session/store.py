"""A session on the disk: `manifest.json`, and a file for each page of tokens with all layers.

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

from offload.errors import DoesNotFit, SessionError
from offload.progress import OnBytes
from offload.session import manifest as manifests
from offload.session.folder import READERS, WRITER, Folder, Lock, owner
from offload.session.identity import Identity, differences
from offload.session.layout import PageFile
from offload.session.leftovers import discard, foreign, sweep, temporary_file
from offload.session.manifest import MANIFEST_FILE, Manifest, Page, page_file
from offload.session.names import remedy
from offload.session.page import PagedRows, format_of, read_page, write_page
from offload.units import size

_NO_CHECKSUM = "0" * 32  # stands for that of a page that is not written yet


def _ignore(num_bytes: int, fewer: int = 0, /) -> None:
    return None


class Store:
    """An open session, and a context manager: `close` releases its locks.

    There is one writer at a time. `read_only` writes nothing and keeps no writer out, but pages that a writer replaces
    stay on the disk until the readers have closed, so close it once everything is loaded.
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
        self._held, self._writer, self._closed = held, writer, False

    @classmethod
    def open(cls, path: Path, identity: Identity, *, read_only: bool = False, writer: str = "") -> Store:
        """Open the session in the folder `path`, or a new one. writer: the program's version, stored in the manifest.

        Raises SessionError if it is damaged, another model's (the message says what differs), in use, or missing with
        `read_only`, or if the system refuses.
        """
        with ExitStack() as held, _translated_errors(path, read_only):
            folder = _open_to_read(path, held) if read_only else _open_to_write(path, held)
            manifest = manifests.read(folder)
            if manifest is not None:
                _check_identity(path, manifest.identity, identity)
            elif read_only:  # removed since its folder was opened
                raise _no_session(path)
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
        """Bytes of the pages on the disk."""
        return self.bytes_to_read(len(self.tokens))

    def bytes_to_read(self, num_tokens: int) -> int:
        """Bytes of the pages that `load` reads for the first `num_tokens` saved tokens."""
        pages = self._manifest.pages[: self._format.count(num_tokens)] if self._manifest else ()
        counts = Counter(page.packed for page in pages)
        return sum(PageFile(self._format, packed).nbytes * count for packed, count in counts.items())

    def load(self, rows: PagedRows, num_tokens: int, *, on_bytes: OnBytes = _ignore) -> None:
        """Replace the contents of `rows` by the first `num_tokens` saved tokens.

        Whole pages are read, directly into the cache's memory. Raises SessionError if a page is damaged; then `rows` is
        empty. on_bytes: called with the number of bytes read.
        """
        self._check_rows(rows)
        if not 0 <= num_tokens <= len(self.tokens):
            raise ValueError(f"{num_tokens} tokens of {len(self.tokens)}")
        rows.restored(0)
        rows.wait_home()  # an interrupted forward may still be copying rows to their pages
        rows.reserve(num_tokens)
        pages = self._manifest.pages if self._manifest else ()
        for number in range(self._format.count(num_tokens)):
            layers = rows.page_to_fill(number)
            read_page(self._folder, pages[number], self._format, layers, on_bytes)
            rows.filled(number, layers)
        rows.restored(num_tokens)

    def bytes_to_write(self, num_tokens: int, unchanged: int) -> int:
        """The most bytes of pages that `save` would write for these arguments: pages that can be packed take less."""
        return (self._format.count(num_tokens) - self._num_kept(num_tokens, unchanged)) * self._format.nbytes

    def save(
        self,
        rows: PagedRows,
        tokens: Sequence[int],
        *,
        capacity: int,
        extra: Mapping[str, object],
        unchanged: int,
        on_bytes: OnBytes = _ignore,
    ) -> None:
        """Replace the saved session by `tokens`, which are the first tokens of `rows`.

        unchanged: number of first tokens whose rows are, bit for bit, those last loaded from here or saved; pages that
        hold only these are not written again. capacity, extra (plain JSON): stored for the caller. Raises DoesNotFit
        before anything is written if the disk has no room, SessionError if writing fails. After any error the session
        is either the old one or the new one; `tokens` tells which. on_bytes: called with numbers of bytes, and with
        how many fewer than `bytes_to_write` they will be.
        """
        self._check_rows(rows)
        if self.read_only:
            raise RuntimeError("this session was opened read-only")
        if len(tokens) > rows.length:
            raise ValueError(f"{len(tokens)} tokens, and rows of {rows.length}")
        if not 0 <= unchanged <= len(tokens) or tuple(tokens[:unchanged]) != self.tokens[:unchanged]:
            raise ValueError(f"the first {unchanged} tokens are not those that were saved")
        planned = self._planned_manifest(tokens, capacity, extra, unchanged)
        needed = self.bytes_to_write(len(tokens), unchanged) + len(manifests.encode(planned))
        self._check_space(needed)
        rows.wait_home()
        try:
            self._manifest = self._publish(self._write_pages(planned, rows, on_bytes))
        except BaseException as error:
            self._recover()
            if not isinstance(error, OSError):
                raise
            raise SessionError(
                f"{self._folder.path}: saving failed ({error.strerror}): up to {size(needed)} were to be "
                f"written, {size(self._folder.free_bytes())} are free; the last save is complete: make room "
                "('triforce sessions prune') and save again"
            ) from error
        sweep(self._folder, self._manifest)

    def close(self) -> None:
        """Release the locks. Idempotent. A new session that was never saved is removed."""
        with self._held:
            if self.read_only or self._closed:
                return
            self._closed = True
            self._recover()
            if self._manifest is None:
                with contextlib.suppress(OSError):  # the folder may hold files of others
                    discard(self._folder)

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _num_kept(self, num_tokens: int, unchanged: int) -> int:
        """Number of first pages that need not be written. The partly used last page counts only if nothing is added."""
        if unchanged == num_tokens == len(self.tokens):
            return self._format.count(num_tokens)
        return unchanged // self._format.page_tokens

    def _planned_manifest(
        self, tokens: Sequence[int], capacity: int, extra: Mapping[str, object], unchanged: int
    ) -> Manifest:
        """The manifest of the coming save, as long as it may become. Its new pages are named but not written."""
        now, tag, old = time.time(), secrets.token_hex(8), self._manifest
        kept = old.pages[: self._num_kept(len(tokens), unchanged)] if old else ()
        new = range(len(kept), self._format.count(len(tokens)))
        pages = (*kept, *(Page(page_file(number, tag), _NO_CHECKSUM, self._format.most_packed) for number in new))
        created = old.created if old else now
        return Manifest(self.identity, tuple(tokens), pages, capacity, dict(extra), created, now, self._writer)

    def _check_space(self, needed: int) -> None:
        free = self._folder.free_bytes()
        if needed > free:
            raise DoesNotFit(
                f"saving this session takes up to {size(needed)} more in {self._folder.path}, {size(free)} are free; "
                "make room ('triforce sessions prune'), or have TRIFORCE_SESSIONS_DIR name a folder on a larger disk"
            )

    def _write_pages(self, planned: Manifest, rows: PagedRows, on_bytes: OnBytes) -> Manifest:
        pages = list(planned.pages)
        for number, page in enumerate(pages):
            if page.checksum == _NO_CHECKSUM:
                used = len(planned.tokens) - number * self._format.page_tokens
                layers = rows.page_of_all(number)
                pages[number] = write_page(self._folder, page.file, self._format, layers, used, on_bytes)
        return replace(planned, pages=tuple(pages))

    def _publish(self, manifest: Manifest) -> Manifest:
        temporary = temporary_file(secrets.token_hex(8))
        self._folder.write(temporary, manifests.encode(manifest))
        self._folder.replace(temporary, MANIFEST_FILE)
        return manifest

    def _recover(self) -> None:
        """Read the manifest that is on the disk, wherever a save ended, and remove the files that it does not name."""
        self._manifest = manifests.read(self._folder)
        sweep(self._folder, self._manifest)

    def _check_rows(self, rows: PagedRows) -> None:
        if format_of(rows) != self._format:
            raise ValueError(f"rows are {format_of(rows)}, the session is for {self._format}")


def _open_to_read(path: Path, held: ExitStack) -> Folder:
    """Open an existing session and share the readers' lock. Creates no file if there is no session. SessionError."""
    if not path.is_dir():
        raise _no_session(path)
    folder = held.enter_context(Folder(path))
    if not folder.has(MANIFEST_FILE):
        raise _no_session(path)
    lock = Lock.take(folder, READERS, shared=True, wait=True)
    assert lock is not None
    held.enter_context(lock)
    return folder


def _open_to_write(path: Path, held: ExitStack) -> Folder:
    if path.is_file():
        raise SessionError(f"{path} is a file, and a session is a folder; name another one")
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = held.enter_context(Folder(path))
    if not folder.has(MANIFEST_FILE) and (others := foreign(folder)):
        raise SessionError(f"{path} is not a session's folder, it holds {others[0]}; name a new or an empty folder")
    lock = Lock.take(folder, WRITER)
    if lock is None:
        raise SessionError(
            f"{path} is in use by {owner(folder)}; wait until that ends, open it with --read-only, or take another name"
        )
    held.enter_context(lock).sign()
    return folder


def _check_identity(path: Path, saved: Identity, now: Identity) -> None:
    if differ := differences(saved, now):
        raise SessionError(
            f"{path} was saved under other conditions, its keys and values cannot be used here: {'; '.join(differ)}; "
            f"run under those conditions, or {remedy(path)}"
        )


def _no_session(path: Path) -> SessionError:
    return SessionError(f"there is no session in {path}; leave out --read-only to start one, or name another")


@contextlib.contextmanager
def _translated_errors(path: Path, read_only: bool) -> Iterator[None]:
    """Raise OSErrors as SessionErrors."""
    try:
        yield
    except OSError as error:
        remedies = "name another folder" if read_only else "name another folder, or only read it with --read-only"
        raise SessionError(f"{path} cannot be opened as a session ({error.strerror}); {remedies}") from error
