"""Pull a model from the hub into the folder of models: first config.json, which tells whether it can run, then weights.

Files are fetched into OWNER/NAME/.pull, pickled shards are converted there one by one, and the complete model is moved
into place. An interrupted pull leaves .pull behind, and the next pull resumes it. A pull removes only files that an
earlier pull put into OWNER/NAME.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from offload.config.reading import read_config
from offload.errors import ModelError
from offload.files import write_whole
from offload.hub import files as model_files
from offload.hub import remote
from offload.hub.disk import check_room
from offload.hub.fetch import fetch, is_whole, partial_path
from offload.hub.files import GgufModel
from offload.hub.library import LOCK, MOVING, STAGING, Origin
from offload.hub.names import FOLDER_VARIABLE, model_folder
from offload.hub.pickles import check_torch, convert_shard, source_of, weight_map
from offload.hub.remote import Listing, RemoteFile
from offload.weights.checkpoint import Checkpoint, check_model
from offload.weights.safetensors_folder import INDEX_FILE

Report = Callable[[str, int, int], None]  # stage, bytes done, bytes in all


@dataclass(frozen=True, kw_only=True)
class PullPlan:
    """The work of one pull. files: all files of the model; missing_bytes: their bytes that are still to be fetched."""

    listing: Listing
    folder: Path
    files: tuple[RemoteFile, ...]
    missing_bytes: int

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)

    @property
    def converts(self) -> bool:
        return any(model_files.is_pickled(file.name) for file in self.files)


def pull(
    listing: Listing,
    *,
    on_plan: Callable[[PullPlan], None],
    report: Report,
    config_only: bool = False,
    gguf: GgufModel | None = None,
) -> PullPlan:
    """Make the folder of OWNER/NAME equal to the hub's listing; only files that differ are fetched. gguf: a model in
    GGUF files, which are added to the folder instead.

    on_plan: called before the weights are fetched. Memory: little; one shard while shards in torch's old format are
    converted. Raises TriforceError.
    """
    folder = model_folder(listing.repository)
    named = {} if gguf is None else gguf.named
    with (
        remote.translated_errors(listing.repository, listing.revision, folder, **named),
        _staging(folder) as staging,
    ):
        transfer = _Transfer(listing, folder, staging, report, gguf)
        plan = transfer.prepare(config_only=config_only)
        on_plan(plan)
        transfer.fetch_all(plan.missing_bytes)
        transfer.install(config_only=config_only)
    if not config_only:
        model = folder / plan.files[0].name if gguf else folder
        with Checkpoint.open(model) as checkpoint:
            check_model(checkpoint, read_config(model))
    return plan


class _Transfer:
    """One pull in progress. A file of the model is in `staging` if this pull fetched it, otherwise in `folder`."""

    def __init__(self, listing: Listing, folder: Path, staging: Path, report: Report, gguf: GgufModel | None) -> None:
        """gguf: the model to pull; None: the repository's own."""
        self._gguf = gguf
        self._listing, self._folder, self._staging, self._report = listing, folder, staging, report
        self._files: list[RemoteFile] = []
        self._missing: list[RemoteFile] = []
        self._unconverted: set[RemoteFile] = set()  # missing files that are fetched but not converted

    def prepare(self, *, config_only: bool) -> PullPlan:
        """Fetch config.json and the index, which determine the other files to fetch."""
        if self._gguf is not None:
            self._files = [*self._gguf.parts]
            return self._plan(self._files)
        first = model_files.needed_first(self._listing, config_only=config_only)
        for file in first:
            if not is_whole(self._staging / file.name, file, count=_ignore):
                self._fetch(file, _ignore)
        self._check_config()
        self._files = model_files.needed(self._listing, self._staging, config_only=config_only)
        return self._plan([file for file in self._files if file not in first])

    def _plan(self, files: Sequence[RemoteFile]) -> PullPlan:
        """The plan of this pull. files: files that may be missing."""
        self._find_missing(files)
        for name in filter(model_files.is_pickled, (file.name for file in self._missing)):
            check_torch(name)  # before gigabytes are fetched
        num_bytes = sum(file.num_bytes - self._num_fetched(file) for file in self._missing)
        return PullPlan(listing=self._listing, folder=self._folder, files=tuple(self._files), missing_bytes=num_bytes)

    def fetch_all(self, total: int) -> None:
        """Fetch the missing files, `total` bytes, and convert each pickled one once it is fetched."""
        self._check_room(total)
        done = 0
        if total:
            self._report("fetch", 0, total)

        def count(num_bytes: int) -> None:
            nonlocal done
            done += num_bytes
            self._report("fetch", min(done, total), total)

        for file in self._missing:
            if file not in self._unconverted:
                self._fetch(file, count)
            if model_files.is_pickled(file.name):
                self._convert(file)
        if self._gguf is not None:
            self._check_gguf()

    def install(self, *, config_only: bool) -> None:
        """Move the files into place and remove those of an earlier pull that the model no longer has.

        config_only: keep weights that are in place, and the staged parts of a pull of weights.
        """
        names = self._final_names()
        before = Origin.read(self._folder)
        old = set(before.files if before else ())
        moving = self._staging / MOVING
        moving.touch()
        for name in sorted(names):
            if (self._staging / name).exists():
                os.replace(self._staging / name, self._folder / name)
        if config_only or self._gguf is not None:
            names |= old
        for name in old - names:
            (self._folder / Path(name).name).unlink(missing_ok=True)
        source, commit, license_ = self._listing.repository, self._listing.commit, self._listing.license
        Origin(source=source, commit=commit, license=license_, files=tuple(sorted(names))).write(self._folder)
        moving.unlink()
        if not config_only:
            shutil.rmtree(self._staging)

    def _final_names(self) -> set[str]:
        """Names of the installed model's files. Writes the index of converted shards."""
        names = {self._final_name(file) for file in self._files if file.name != model_files.BIN_INDEX_FILE}
        converted = sorted({self._final_name(file) for file in self._files if model_files.is_pickled(file.name)})
        if len(converted) < 2:
            return names
        write_index(self._staging, [self._path_of(name) for name in converted])
        return names | {INDEX_FILE}

    def _fetch(self, file: RemoteFile, count: Callable[[int], None]) -> None:
        fetch(remote.file_url(self._listing, file), file, self._staging, count=count)

    def _convert(self, file: RemoteFile) -> None:
        self._report("convert", 0, file.num_bytes)
        shard, tied = self._staging / file.name, read_config(self._staging).tie_embeddings
        convert_shard(shard, self._staging / self._final_name(file), source=file.digest, tied=tied)
        shard.unlink()
        self._report("convert", file.num_bytes, file.num_bytes)

    def _check_config(self) -> None:
        """Refuse a model that cannot run before its weights are fetched, and keep nothing of it. ModelError."""
        try:
            read_config(self._staging)
        except ModelError as error:
            shutil.rmtree(self._staging)
            raise ModelError(f"{self._listing.repository} was not pulled: {error}") from error

    def _check_gguf(self) -> None:
        """Refuse a file that cannot run before it is put into place, and keep nothing of it. ModelError."""
        if all((self._staging / file.name).exists() for file in self._files):
            try:
                read_config(self._staging / self._files[0].name)
            except ModelError as error:
                shutil.rmtree(self._staging)
                raise ModelError(f"{self._listing.repository} was not pulled: {error}") from error

    def _find_missing(self, files: Sequence[RemoteFile]) -> None:
        """Find the `files` that are neither staged nor in place, by hash. Removes staged files of other versions."""
        paths = [folder / file.name for folder in (self._staging, self._folder) for file in files]
        total = sum(path.stat().st_size for path in paths if path.is_file())
        done = 0

        def count(num_bytes: int) -> None:
            nonlocal done
            done += num_bytes
            self._report("check", min(done, total), total)

        for file in files:
            staged = is_whole(self._staging / file.name, file, count=count)
            if not staged:
                (self._staging / file.name).unlink(missing_ok=True)
            if model_files.is_pickled(file.name):
                present = self._is_converted(file)
            else:
                present = staged or is_whole(self._folder / file.name, file, count=count)
            if not present:
                self._missing.append(file)
                self._unconverted |= {file} if staged else set()

    def _is_converted(self, file: RemoteFile) -> bool:
        name = self._final_name(file)
        if source_of(self._staging / name) == file.digest:
            return True
        (self._staging / name).unlink(missing_ok=True)
        return source_of(self._folder / name) == file.digest

    def _num_fetched(self, file: RemoteFile) -> int:
        """Bytes of a missing file that are fetched already."""
        partial = partial_path(file, self._staging)
        if file in self._unconverted:
            return file.num_bytes
        return min(partial.stat().st_size, file.num_bytes) if partial.is_file() else 0

    def _check_room(self, num_bytes: int) -> None:
        """Raises DoesNotFit. A pickled shard and its converted file exist side by side until the latter is verified."""
        shards = [file.num_bytes for file in self._missing if model_files.is_pickled(file.name)]
        remedy = f"name a folder on another disk with {FOLDER_VARIABLE}"
        check_room(self._folder, num_bytes + max(shards, default=0), remedy)

    def _final_name(self, file: RemoteFile) -> str:
        """The name of a file, or of the file that it is converted to."""
        if not model_files.is_pickled(file.name):
            return file.name
        names = sorted(other.name for other in self._files if model_files.is_pickled(other.name))
        return model_files.converted_name(file.name, names)

    def _path_of(self, name: str) -> Path:
        return self._staging / name if (self._staging / name).exists() else self._folder / name


def write_index(folder: Path, paths: Sequence[Path]) -> None:
    """Write the index of the safetensors files `paths`, as transformers does. Raises ModelError, OSError."""
    total = sum(path.stat().st_size for path in paths)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map(paths).items()))}
    write_whole(folder / INDEX_FILE, json.dumps(index, indent=1) + "\n")


@contextmanager
def _staging(folder: Path) -> Iterator[Path]:
    """The folder that files are fetched into, locked meanwhile. After an interrupted pull it stays unless it is empty.

    Raises ModelError if another process holds it.
    """
    staging = folder / STAGING
    staging.mkdir(parents=True, exist_ok=True)
    with (staging / LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ModelError(f"another process is pulling into {folder}; wait until it is done") from error
        try:
            yield staging
        finally:
            _remove_empty(folder, staging)


def _remove_empty(folder: Path, staging: Path) -> None:
    for partial in staging.glob("*.part"):
        if not partial.stat().st_size:
            partial.unlink()
    if staging.exists() and os.listdir(staging) == [LOCK]:
        shutil.rmtree(staging)
    if not staging.exists():
        with contextlib.suppress(OSError):  # usually not empty
            folder.rmdir()
            folder.parent.rmdir()


def _ignore(num_bytes: int) -> None:
    return None
