"""The store of a session on disk: `manifest.json`, and a file for each unit of what the sequence keeps.

A save writes changed units to new files, then replaces the manifest, then removes the files that it no longer names. If
the writer dies at any point, the folder holds the complete old or new session, and perhaps files that the next writer
removes.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from offload.errors import DoesNotFit, SessionError
from offload.kv.kept import Kept
from offload.kv.parts import Part, Unit
from offload.progress import OnBytes
from offload.session import manifest as manifests
from offload.session.folder import Folder
from offload.session.identity import Identity
from offload.session.layout import NO_TENSORS
from offload.session.leftovers import discard, sweep, temporary_file
from offload.session.manifest import MANIFEST_FILE, NO_CHECKSUM, Manifest, Saved, file_name
from offload.session.opening import check_identity, no_session, open_to_read, open_to_write, translated_errors
from offload.session.units import format_of, most_nbytes, read_unit, write_unit
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
        self.identity, self.read_only, self._folder, self._manifest = identity, read_only, folder, manifest
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
        """Bytes of the files of all parts on the disk."""
        return self._folder.nbytes(self._manifest.files) if self._manifest else 0

    def bytes_to_read(self, kept: Kept, num_tokens: int) -> int:
        """The bytes of the files that `load` reads for the first `num_tokens` saved tokens."""
        return self._folder.nbytes(saved.file for _, saved in self._wanted(kept, num_tokens))

    def num_loadable(self, kept: Kept, num_tokens: int) -> int:
        """How many of the first `num_tokens` saved tokens `load` can restore so that a sequence can continue: none if a
        window needs tokens that were not saved; where layers have a state, those before the last one that was."""
        return kept.reach({part.name: [*self._saved(part.name)] for part in kept.parts}, num_tokens)

    def load(self, kept: Kept, num_tokens: int, *, on_bytes: OnBytes = _ignore) -> None:
        """Replace the contents of `kept` by the first `num_tokens` saved tokens, which must be loadable.

        Whole pages are read, directly into the caches' memory. Raises SessionError if a file is damaged; then the
        caches are empty. on_bytes: called with the number of bytes read. Peak host memory: a unit that is no page.
        """
        self._check(kept)
        if not 0 <= num_tokens <= len(self.tokens) or self.num_loadable(kept, num_tokens) < num_tokens:
            raise ValueError(f"{num_tokens} tokens of {len(self.tokens)}")
        kept.clear()
        kept.each("reserve", num_tokens)
        try:
            for part, saved in self._wanted(kept, num_tokens):
                tensors = read_unit(self._folder, saved, kept, part, on_bytes)
                if not part.in_place:
                    kept.filled(part, saved.unit, tensors)
        except BaseException:
            kept.each("restored", 0)
            raise
        kept.each("restored", num_tokens)

    def bytes_to_write(self, num_tokens: int, unchanged: int, kept: Kept) -> int:
        """The most bytes of files that `save` would write for these arguments: pages that can be packed take less."""
        planned = self._planned(kept, num_tokens, unchanged, "").items()
        new = ((kept[name], each.unit) for name, files in planned for each in files if not _is_written(each))
        return most_nbytes(kept, new)

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

        unchanged: number of first tokens whose rows are bit for bit the last loaded or saved ones; units that hold only
        such tokens are not written again. capacity, extra (plain JSON): stored for the caller.
        Raises DoesNotFit before anything is written if the disk has no room, SessionError if writing fails. After any
        error the session is either the old one or the new one; `tokens` tells which. on_bytes: called with numbers of
        bytes, and with the shrinkage of the total from `bytes_to_write`.
        """
        self._check(kept)
        if self.read_only:
            raise RuntimeError("this session was opened read-only")
        if len(tokens) > (length := kept.length):
            raise ValueError(f"{len(tokens)} tokens, and rows of {length}")
        if not 0 <= unchanged <= len(tokens) or tuple(tokens[:unchanged]) != self.tokens[:unchanged]:
            raise ValueError(f"the first {unchanged} tokens are not those that were saved")
        old, now = self._manifest, time.time()
        created, parts = old.created if old else now, self._planned(kept, len(tokens), unchanged, secrets.token_hex(8))
        planned = Manifest(self.identity, tuple(tokens), parts, capacity, dict(extra), created, now, self._writer)
        needed = self.bytes_to_write(len(tokens), unchanged, kept) + len(manifests.encode(planned))
        self._check_space(needed)
        kept.each("wait_home")
        with self._recovered(needed):
            self._manifest = self._publish(replace(planned, parts=self._written(kept, parts, on_bytes)))
        sweep(self._folder, self._manifest)

    def keep(self, extra: Mapping[str, object]) -> None:
        """Replace `extra`, the caller's data, without changing the saved rows. Raises the errors of `save`."""
        if self.read_only:
            raise RuntimeError("this session was opened read-only")
        old, now = self._manifest, time.time()
        known = old or Manifest(self.identity, (), {}, 0, {}, now, now)
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

    def _saved(self, part: str) -> Mapping[Unit, Saved]:
        """The saved files of a part, by unit."""
        return {saved.unit: saved for saved in self._manifest.parts.get(part, ())} if self._manifest else {}

    def _wanted(self, kept: Kept, num_tokens: int) -> list[tuple[Part, Saved]]:
        """The files that `load` reads."""
        saved = {part: self._saved(part.name) for part in kept.parts}
        return [(part, own[unit]) for part, own in saved.items() for unit in part.wanted([*own], num_tokens)]

    def _planned(self, kept: Kept, num_tokens: int, unchanged: int, tag: str) -> dict[str, tuple[Saved, ...]]:
        """The files of the coming save by part, at their longest: new ones are named but not yet written. The partly
        used last page stays only if nothing was added, since then it is named by other tokens."""
        found = {}
        for part in kept.parts:
            known = {unit: saved for unit, saved in self._saved(part.name).items() if unit[0] <= unchanged}
            found[part.name] = tuple(
                known.get(unit) or self._new(kept, part, unit, tag) for unit in part.units(num_tokens)
            )
        return {name: files for name, files in found.items() if files}

    def _new(self, kept: Kept, part: Part, unit: Unit, tag: str) -> Saved:
        name = file_name(part.name, unit, self.identity.page_tokens, tag)
        return Saved(unit, name, NO_CHECKSUM, format_of(kept, part, unit).most_packed)

    def _check_space(self, needed: int) -> None:
        free = self._folder.free_bytes()
        if needed > free:
            raise DoesNotFit(
                f"saving this session takes up to {size(needed)} more in {self._folder.path}, {size(free)} are free; "
                "make room ('triforce sessions prune'), or have TRIFORCE_SESSIONS_DIR name a folder on a larger disk"
            )

    def _written(
        self, kept: Kept, planned: Mapping[str, tuple[Saved, ...]], on_bytes: OnBytes
    ) -> dict[str, tuple[Saved, ...]]:
        """Write the new ones of the `planned` files."""

        def written(part: Part, saved: Saved) -> Saved:
            if _is_written(saved):
                return saved
            checksum, packed = write_unit(self._folder, saved.file, kept, part, saved.unit, on_bytes)
            return replace(saved, checksum=checksum, packed=packed)

        return {name: tuple(written(kept[name], saved) for saved in files) for name, files in planned.items()}

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
        for name, form in self.identity.formats.items():
            part = kept.get(name)
            if (own := NO_TENSORS if part is None else format_of(kept, part)) != form:
                raise ValueError(f"{name} are {own}, the session is for {form}")


def _is_written(saved: Saved) -> bool:
    return saved.checksum != NO_CHECKSUM
