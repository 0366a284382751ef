"""The removal of stored models: which files a name stands for, and their end."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from offload.config.gguf_header import SUFFIX, models_in, part_names
from offload.errors import ModelError, unreadable
from offload.hub.labels import with_label
from offload.hub.library import LOCK, STAGING, stored_ids
from offload.hub.names import id_of, model_folder, models_folder, short_name, tagged

_GOING = ".removed-"  # begins the name of a folder that is being removed: no model's name does


@dataclass(frozen=True)
class Stored:
    """A stored model by its name in lists. file: one of several GGUF files, None: the whole folder."""

    name: str
    folder: Path
    file: Path | None = None

    @property
    def files(self) -> list[Path]:
        """The files that are there: of a file in parts some may be gone, by a removal that was broken off."""
        named = [] if self.file is None else [self.file.with_name(part) for part in part_names(self.file.name)]
        found = named or self.folder.rglob("*")
        return [path for path in found if path.is_file()]

    @property
    def num_bytes(self) -> int:
        return sum(path.lstat().st_size for path in self.files)


def find_stored(name: str) -> Stored:
    """The model in the folder of models that `name` stands for: an alias, OWNER/NAME, or one of several GGUF files as
    lists name it or by its label. Raises ModelError for anything else, a folder elsewhere too."""
    model_id = id_of(name)
    if model_id is None and (name.endswith(SUFFIX) or tagged(name)):
        model, _, file = name.rpartition("/")
        model_id, label = tagged(name) or (id_of(model), "")
        found = [] if model_id is None or not _is_stored(model_id) else models_in(model_folder(model_id))
        names = with_label([path.name for path in found], label) if label else [file]
        if model_id is not None and len(named := [path for path in found if path.name in names]) == 1:
            listed = f"{short_name(model_id)}/{named[0].name}"
            return Stored(listed, model_folder(model_id), named[0] if len(found) > 1 else None)
    elif model_id is not None and _is_stored(model_id):
        return Stored(short_name(model_id), model_folder(model_id))
    stored = ", ".join(map(short_name, stored_ids())) or "none"
    raise ModelError(f"{name} is no model in {models_folder()}; there are: {stored}")


def remove(model: Stored) -> int:
    """Remove a model, whole or broken off, and return the number of bytes freed. What is left of it after a crash is
    never taken for a model. Raises ModelError if it is being pulled, is a link, or the system refuses."""
    if model.folder.is_symlink() or model.folder.parent.is_symlink():
        raise ModelError(f"{model.folder} is a link; remove it yourself")
    try:
        with _not_being_pulled(model.folder):
            num_bytes = model.num_bytes
            _remove_files(model)
    except OSError as error:
        raise ModelError(f"{model.folder} cannot be removed ({error.strerror}); check its permissions") from error
    return num_bytes


def _remove_files(model: Stored) -> None:
    if model.file is not None:
        for path in reversed(model.files):  # the first part names the others
            path.unlink()
        return
    going = models_folder() / f"{_GOING}{secrets.token_hex(8)}"
    os.rename(model.folder, going)
    with contextlib.suppress(OSError):  # usually not empty
        model.folder.parent.rmdir()
    for left in models_folder().glob(f"{_GOING}*"):  # by this removal, or by one that was killed
        shutil.rmtree(left)


def _is_stored(model_id: str) -> bool:
    try:
        return model_folder(model_id).is_dir()
    except OSError as error:
        raise unreadable(model_folder(model_id), error) from error


@contextmanager
def _not_being_pulled(folder: Path) -> Iterator[None]:
    """Hold the lock of pulls into `folder`, if one has begun. Raises ModelError if another process holds it."""
    lock = folder / STAGING / LOCK
    if not lock.exists():
        yield
        return
    with lock.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ModelError(f"another process is pulling into {folder}; wait until it is done") from error
        yield
